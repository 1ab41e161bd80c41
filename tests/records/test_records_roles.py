"""Roles of ranks: the text and the manifest's form, every role on one rank, and what a launcher must have started."""

from __future__ import annotations

import random
import secrets

import pytest

from gopt.documents.records import from_document, to_document
from gopt.errors import OptionError
from gopt.records.roles import Role, RoleKind, Roles, RolesEntry


def t(number):
    return Role(RoleKind.TRAINER, number)


def s(number):
    return Role(RoleKind.SERVER, number)


@pytest.mark.parametrize(
    "text, of",
    [
        ("trainer:0-2;server:3,4", ((t(0),), (t(1),), (t(2),), (s(0),), (s(1),))),
        ("trainer:0-2,server:3-4", ((t(0),), (t(1),), (t(2),), (s(0),), (s(1),))),
        ("trainer:0,1;server:0,1", ((t(0), s(0)), (t(1), s(1)))),
        ("server:0,1;trainer:2", ((s(0),), (s(1),), (t(0),))),
        ("server: 0 , 1 ; trainer : 0 - 2", ((t(0), s(0)), (t(1), s(1)), (t(2),))),
        ("trainer:2,0;server:1", ((t(1),), (s(0),), (t(0),))),
        ("trainer:0;server:1;trainer:2", ((t(0),), (s(0),), (t(1),))),
        ("trainer:0", ((t(0),),)),
    ],
)
def test_roles_are_read(text, of):
    roles = Roles.parse(text)
    assert roles.of == of
    assert Roles.parse(str(roles)) == roles


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "cannot read ''"),
        ("trainer", "cannot read 'trainer'"),
        ("0-3", "cannot read '0-3'"),
        ("trainer:0;1", "cannot read '1'"),
        ("trainer:", "cannot read 'trainer:'"),
        ("trainer:0,,1", "cannot read ''"),
        ("trainer:-1", "cannot read 'trainer:-1'"),
        ("trainer:٣", "cannot read 'trainer:٣'"),
        ("trainer:0x1", "cannot read 'trainer:0x1'"),
        ("worker:0-3", "'worker' is not a role"),
        ("trainers:0-3", "'trainers' is not a role"),
        ("trainer:3-0", "ranks 3 to 0, in descending order"),
        ("trainer:0-999999999", "too many ranks"),
        ("trainer:999999999", "rank 999999999; ranks are 0 to 65535"),
        ("server:0-2", "name no trainer"),
        ("trainer:0,0;server:1", "rank 0 is trainer 0 and trainer 1"),
        ("trainer:0;server:1-2,1", "rank 1 is server 0 and server 2"),
        ("trainer:0,1;server:3", "rank 2 has no role"),
        ("trainer:1;server:2", "rank 0 has no role"),
    ],
)
def test_what_is_no_role_map_is_refused(text, message):
    with pytest.raises(OptionError, match=message):
        Roles.parse(text)


def test_a_word_nearby_is_named():
    with pytest.raises(OptionError) as refused:
        Roles.parse("Trainers:0")
    assert refused.value.hints[0] == "did you mean 'trainer'?"


def test_by_default_servers_stand_behind_trainers():
    roles = Roles.default(3, 2)
    assert str(roles) == "trainer:0-2;server:3-4"
    assert (roles.trainers, roles.servers, roles.ranks, roles.is_open) == (3, 2, 5, False)
    assert (roles.trainer_ranks, roles.server_ranks) == ((0, 1, 2), (3, 4))
    assert Roles.default(2, 0).of == ((t(0),), (t(1),))


def test_a_rank_is_asked_for_its_roles():
    roles = Roles.parse("trainer:2,0;server:1,0")
    assert [roles.roles_of(rank) for rank in range(3)] == [(t(1), s(1)), (s(0),), (t(0),)]
    for rank in (3, -1):
        with pytest.raises(OptionError, match=f"there is no rank {rank}: ranks are 0 to 2"):
            roles.roles_of(rank)


@pytest.mark.parametrize(
    "trainers, servers, of, message",
    [
        (1, 2, ((t(0),), (s(0),)), "no rank is server 1 of 2"),
        (2, 1, ((t(0),), (s(0),)), "no rank is trainer 1 of 2"),
        (1, 1, ((t(0),), (s(0),), (s(1),)), "rank 2 is server 1, but there is 1 server"),
        (1, 1, ((t(0),), (s(0),), (t(-1),)), "rank 2 is trainer -1"),
        (1, 1, ((t(0),), (s(0),), (s(0),)), "server 0 is on rank 1 and on rank 2"),
        (1, 1, ((t(0), t(0)), (s(0),)), "rank 0 is trainer 0 and trainer 0"),
        (1, 1, ((t(0),), (), (s(0),)), "rank 1 has no role"),
        (1, 1, (), "no rank is trainer 0"),
        (0, 1, ((s(0),),), "no trainer among them"),
        (-1, 1, (), "cannot be -1 trainers"),
        (1, -1, ((t(0),),), "-1 servers"),
    ],
)
def test_every_role_stands_on_one_rank(trainers, servers, of, message):
    with pytest.raises(OptionError, match=message):
        Roles(trainers, servers, of)


@pytest.mark.parametrize("trainers, servers", [(0, 1), (-1, 1), (1, -1), (65536, 1), (10**30, 1)])
def test_counts_that_are_none_are_refused(trainers, servers):
    with pytest.raises(OptionError, match="there cannot be"):
        Roles.default(trainers, servers)


def test_the_order_of_a_ranks_roles_does_not_matter():
    assert Roles(1, 1, ((s(0), t(0)),)) == Roles.parse("trainer:0;server:0")


def test_the_number_of_trainers_may_be_open_until_a_start():
    roles = Roles.open(2)
    assert (roles.is_open, roles.servers, roles.of) == (True, 2, ())
    assert str(roles) == "any number of trainers and 2 servers"
    assert roles.with_trainers(3) == Roles.default(3, 2)
    with pytest.raises(OptionError, match="there cannot be 0 trainers"):
        roles.with_trainers(0)
    asked = [
        lambda: roles.ranks, lambda: roles.roles_of(0), lambda: roles.trainer_ranks,
        lambda: roles.server_ranks, lambda: roles.check_processes(3), lambda: roles.check_counts(1, 2),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(OptionError, match="number of trainers is not fixed"):
            ask()


def test_a_fixed_number_of_trainers_stays():
    roles = Roles.parse("server:0;trainer:1-2")
    assert roles.with_trainers(2) is roles
    with pytest.raises(OptionError, match="roles are for 2 trainers, not for 3"):
        roles.with_trainers(3)


def test_the_launcher_must_have_started_a_process_for_each_rank():
    roles = Roles.default(3, 2)
    roles.check_processes(5)
    Roles.parse("trainer:0,1;server:0,1").check_processes(2)
    with pytest.raises(OptionError) as refused:
        roles.check_processes(4)
    assert refused.value.message == (
        "the launcher started 4 processes; 3 trainers and 2 servers (trainer:0-2;server:3-4) need 5"
    )
    assert refused.value.hints == ("start 5 (mpiexec -n 5), or name ranks 0 to 3 in --roles",)
    with pytest.raises(OptionError, match=r"started 1 process; .* need 6"):
        Roles.default(4, 2).check_processes(1)


def test_a_role_map_must_be_of_the_split():
    Roles.default(3, 2).check_counts(3, 2)
    with pytest.raises(OptionError, match="name 2 servers, the split is for 1"):
        Roles.default(3, 2).check_counts(3, 1)
    with pytest.raises(OptionError, match="name 3 trainers, the split is for 4"):
        Roles.default(3, 2).check_counts(4, 2)


def test_the_manifests_form():
    document = {"trainers": 2, "servers": 1, "trainer_ranks": [0, 2], "server_ranks": [1]}
    roles = Roles.parse("trainer:0,2;server:1")
    assert to_document(RolesEntry.of(roles)) == document
    assert from_document(RolesEntry, document).roles() == roles
    opened = {"trainers": 0, "servers": 2}
    assert to_document(RolesEntry.of(Roles.open(2))) == opened
    assert from_document(RolesEntry, opened).roles() == Roles.open(2)


@pytest.mark.parametrize(
    "entry",
    [
        RolesEntry(2, 1, (0,), (1,)),
        RolesEntry(1, 1),
        RolesEntry(0, 1, (), (0,)),
        RolesEntry(1, 1, (0,), (10**18,)),
        RolesEntry(1, 1, (0,), (-1,)),
        RolesEntry(2, 1, (0, 0), (1,)),
        RolesEntry(0, -1),
    ],
)
def test_a_manifests_form_that_is_none_is_refused(entry):
    with pytest.raises(OptionError):
        entry.roles()


def test_any_roles_come_back_from_text_and_document():
    seed = secrets.randbits(32)
    r = random.Random(seed)
    for _ in range(100):
        ranks = r.randint(1, 9)
        trainers = r.sample(range(ranks), r.randint(1, ranks))
        servers = list(set(range(ranks)) - set(trainers)) + [rank for rank in trainers if r.random() < 0.3]
        r.shuffle(servers)
        roles = Roles.on_ranks(trainers, servers)
        case = (seed, trainers, servers)
        assert roles.trainer_ranks == tuple(trainers) and roles.server_ranks == tuple(servers), case
        assert Roles.parse(str(roles)) == roles == RolesEntry.of(roles).roles(), case
        order = [*map(t, range(len(trainers))), *map(s, range(len(servers)))]
        of = {role: rank for rank in range(ranks) for role in roles.roles_of(rank)}
        assert [of[role] for role in order] == trainers + servers, case
