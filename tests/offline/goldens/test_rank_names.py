"""What goldens call sets of ranks."""

from gopt.offline.goldens.rank_names import RankNames


def test_ranks_of_one_role():
    names = RankNames([(rank, "worker") for rank in range(4)])
    assert [names.of_ranges(text) for text in ("0-3", "0-1,3", "2")] == ["all ranks", "ranks 0-1,3", "rank 2"]


def test_another_number_of_trainers_renames_no_server():
    for trainers in (2, 5):
        roles = [(rank, "trainer") for rank in range(trainers)]
        names = RankNames([*roles, (trainers, "server"), (trainers + 1, "server")])
        assert names.of([trainers + 1]) == "server 1"
        assert names.of([*range(trainers), trainers]) == "all trainers, server 0"
        assert names.of_ranges(f"{trainers}-{trainers + 1}") == "all servers"
