"""The functions and records of the public package, under one name: see ``gopt.steps``."""

from gopt.analysis.role_map import RoleMap as RoleMap
from gopt.analysis.stored_roles import load_stored_source as load_stored_source
from gopt.analysis.stored_roles import roles_text as roles_text
from gopt.analysis.stored_roles import stored_roles as stored_roles
from gopt.analysis.stored_roles import with_stored_roles as with_stored_roles
from gopt.steps.shard_options import ShardOptions as ShardOptions
from gopt.steps.sharded import Sharded as Sharded
from gopt.steps.sharded import shard as shard
from gopt.steps.source import Source as Source
from gopt.steps.source import alone as alone
from gopt.steps.source import as_source as as_source
from gopt.steps.source import find_roles as find_roles
from gopt.steps.source import load as load
from gopt.steps.source import on_mesh as on_mesh
from gopt.steps.source import read_roles as read_roles
from gopt.steps.source import with_schema_roles as with_schema_roles
from gopt.steps.split import Split as Split
from gopt.steps.split import split as split
