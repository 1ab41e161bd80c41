"""Verbs of output folders: ``gopt.explain``, ``merge``, ``provenance``, ``save_state_dict``, ``reshard``, ``diff`` and
``seal``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from gopt.offline import merge as merging
from gopt.offline import state_values
from gopt.offline.diff import Diff, Tolerance
from gopt.offline.diff import diff as compare
from gopt.offline.explain import Story
from gopt.offline.explain import explain as tell
from gopt.offline.provenance import Provenance
from gopt.offline.provenance import provenance as list_bytes
from gopt.offline.seal import Sealed
from gopt.offline.seal import seal as seal_folder
from gopt.offline.state_values import DCP_FILE, TORCH_FILES, Loaded, StateDict
from gopt.options.types import checked
from gopt.records.mesh import Mesh
from gopt.steps.sharded import Sharded
from gopt.steps.split import Split
from gopt.verbs.export import needs_torch
from gopt.verbs.on_disk import Folder, TemporaryFolder, keep_alive, on_disk
from gopt.verbs.shard import prove_files


@checked
def explain(folder: Folder, name: str | None = None) -> Story:
    """Show what became of an operator, value, state, parameter or bucket, where, why, and its replacement; without a
    name, the choice of --auto, and what each pass did.

    Raises InputError for a broken folder, OptionError for an unknown name.

    >>> gopt.explain(gopt.shard("fixtures/mlp_sgd.onnx", 2), "fc1.weight").name
    'fc1.weight'
    """
    with on_disk(folder) as path:
        return tell(path, name)


@checked
def merge(what: Folder, model: str | os.PathLike[str], *, force: bool = False) -> merging.Merged:
    """Write the original step as a model, with the values of a folder, checkpoint or run.

    Raises OptionError when the model exists and ``force`` is not given, InputError for incomplete ranks, RunError for a
    failed write.

    >>> gopt.merge(gopt.shard("fixtures/mlp_sgd.onnx", 2), "merged.onnx").missing
    ()
    """
    with on_disk(what) as path:
        return merging.merge(path, model, force=force)


@checked
def provenance(what: Folder) -> Provenance:
    """List the bytes of files behind every state of a folder, checkpoint or run: the pieces for ``merge``.

    Every file is compared with the digest first. Raises InputError for an edited file, RunError for a damaged
    checkpoint.

    >>> gopt.provenance(gopt.shard("fixtures/mlp_sgd.onnx", 2)).pieces[0].file
    'states.bin'
    """
    with on_disk(what) as path:
        return list_bytes(path)


@checked
def save_state_dict(
    what: Folder, output: str | os.PathLike[str], *, all_states: bool = False, force: bool = False
) -> StateDict:
    """Write the state dict for ``module.load_state_dict``, of a folder, checkpoint, run or step, as a .safetensors
    file, or as a .pt file for ``torch.load``.

    ``all_states``: states of optimizers too. A .pt file is then a dict: ``model``, ``optimizer``, ``step``, and the
    step's ``scheduler``, ``scaler``, ``ema`` and ``loss``, if any. Raises OptionError where the file exists and
    ``force`` is not given, or PyTorch is missing, InputError for incomplete ranks, RunError for a failed write.

    >>> gopt.save_state_dict(gopt.shard("fixtures/mlp_sgd.onnx", 2), "trained.safetensors").missing
    ()
    """
    with on_disk(what) as path:
        if not os.fsdecode(output).endswith(TORCH_FILES):
            return state_values.save_state_dict(path, output, all_states=all_states, force=force)
        with needs_torch(f"a {os.path.splitext(os.fsdecode(output))[1]} file"):
            from gopt.frontends.pytorch.state_file import save_torch
        return save_torch(path, output, all_states=all_states, force=force)


@checked
def load_values(
    model: str | os.PathLike[str], state: str | os.PathLike[str], output: str | os.PathLike[str], *,
    ignore_unknown: bool = False, force: bool = False,
) -> Loaded:  # fmt: skip
    """``state_values.load_values`` of any kind of file, PyTorch's files too; raises OptionError without PyTorch."""
    write = functools.partial(
        state_values.load_values, model, state, output, ignore_unknown=ignore_unknown, force=force
    )
    if os.path.isfile(os.path.join(state, DCP_FILE)):
        with needs_torch("a folder of torch.distributed.checkpoint"):
            from gopt.frontends.pytorch.dcp_folder import read_dcp
        return write(read=read_dcp)
    if not os.fsdecode(state).endswith((*TORCH_FILES, ".bin")):
        return write()
    with needs_torch(f"a {os.path.splitext(os.fsdecode(state))[1]} file"):
        from gopt.frontends.pytorch.saved_values import read_torch
    return write(read=read_torch)


@checked
def save_dcp(what: Folder, output: str | os.PathLike[str], *, all_states: bool = False) -> StateDict:
    """Write the state dict of a module as a new folder of ``torch.distributed.checkpoint``, with ``all_states`` the
    optimizers' states too; raises as ``save_state_dict``."""
    with on_disk(what) as path:
        with needs_torch("a folder of torch.distributed.checkpoint"):
            from gopt.frontends.pytorch.dcp_folder import save_dcp as save
        return save(path, output, all_states=all_states)


@checked
def reshard(
    what: Folder,
    mesh: Mesh | int | str,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    accumulate: int | None = None,
    prove: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Sharded:
    """The ranks of another mesh with the values of a folder, checkpoint or run; nothing is written.

    ``options``, by pass, and ``accumulate`` replace options of the folder's report; ``prove``: as of
    ``gopt.shard``; ``note`` is called for each option without effect. Raises InputError, OptionError and
    UnsupportedError.

    >>> gopt.reshard(gopt.shard("fixtures/mlp_sgd.onnx", 2), "shard=3").program.mesh.ranks
    3
    """
    owner: object = what
    if isinstance(what, Sharded | Split):
        owner = home = TemporaryFolder()
        what = home.write(what)
    with on_disk(what) as path:
        sharded = merging.reshard(path, Mesh.of(mesh), options=options, accumulate=accumulate, note=note)
    sharded.prover = prove_files if prove else None
    keep_alive(sharded, owner)
    return sharded


@checked
def seal(folder: str | os.PathLike[str]) -> Sealed:
    """Accept the files of an output folder, a folder of checkpoints or a step: write new digests.

    Raises InputError for a damaged manifest or index, RunError for a failed write, or while a job writes there.

    >>> report = gopt.shard("fixtures/mlp_sgd.onnx", 2).write("sealed.ranks")
    >>> gopt.seal("sealed.ranks").changed
    ()
    """
    return seal_folder(folder)


@checked
def diff(a: Folder, b: Folder, *, rtol: float = 0.0, atol: float = 0.0) -> Diff:
    """Compare two models, two output folders or two checkpoints: operators, wiring, attributes, values, bytes.

    Values of states are equal where |a - b| <= ``atol`` + ``rtol`` |b|. Raises InputError for an unreadable side,
    OptionError for sides of different kinds.

    >>> gopt.diff(gopt.shard("fixtures/mlp_sgd.onnx", 2), gopt.shard("fixtures/mlp_sgd.onnx", 3)).equal
    False
    """
    with on_disk(a) as old, on_disk(b) as second:
        return compare(old, second, Tolerance(rtol, atol))
