"""Ranks that are alike as one, bars, balance and traffic."""

from __future__ import annotations

from gopt.artifact.report_record import CallEntry, RankBytes, RankUsage
from gopt.offline.html_report.rank_groups import BARS, alike, balance, bars, fullest, traffic


def usage(rank: int, states: int, sent: int = 8) -> RankUsage:
    return RankUsage(rank, RankBytes(100, states, 0), (CallEntry("AllReduce", "shard", 2, sent),))


def test_ranks_that_hold_and_send_the_same_are_one_group():
    found = alike([usage(0, 5), usage(1, 7), usage(2, 5), usage(3, 5, sent=9)], {})
    assert [(each.ranks, each.count, each.sent) for each in found] == [("0,2", 2, 8), ("1", 1, 8), ("3", 1, 9)]
    apart = alike([usage(0, 5), usage(1, 5)], {0: "trainer", 1: "server"})
    assert [(each.role, each.ranks) for each in apart] == [("trainer", "0"), ("server", "1")]


def test_a_bar_is_ranks_that_hold_the_same_whatever_they_send():
    found = bars([usage(rank, 5 + rank // 512, sent=rank) for rank in range(1024)], {})
    assert [each.label for each in found] == ["ranks 0-511", "ranks 512-1023"]
    assert [each.label for each in bars([usage(0, 5)], {0: "server"})] == ["server 0"]
    scattered = bars([usage(rank, rank % 2) for rank in range(20)], {})
    assert scattered[0].label == "ranks 0,2,4,… (10)"


def test_where_too_many_differ_a_bar_is_the_fullest_of_neighbours():
    usages = [usage(rank, 7 * rank % 1024) for rank in range(1024)]
    found = bars(usages, {})
    assert len(found) == BARS and found[0].label == "ranks 0-31, the fullest: 31"
    assert max(each.nbytes.optimizer_states for each in found) == 1023
    assert len(bars([usage(rank, rank) for rank in range(BARS)], {})) == BARS
    assert sum("fullest" in each.label for each in bars([usage(rank, rank) for rank in range(BARS + 1)], {})) > 0


def test_balance_names_the_first_rank_that_holds_most():
    rows = {each.kind: each for each in balance([usage(0, 1), usage(1, 3), usage(2, 3), usage(3, 1)], {})}
    states = rows["optimizer_states"]
    assert (states.smallest, states.mean, states.largest, states.rank, states.ratio) == (1, 2, 3, 1, 1.5)
    assert rows["gradients"].ratio == 1.0, "nothing is held: even"
    assert rows["sent"].mean == 8
    assert [each.role for each in balance([usage(0, 1), usage(1, 9)], {0: "trainer", 1: "server"})[::4]] == [
        "trainer",
        "server",
    ]


def test_traffic_is_the_mean_over_the_ranks_that_call():
    usages = [usage(0, 0, 10), usage(1, 0, 20), RankUsage(2, RankBytes(0, 0, 0), ())]
    [found] = traffic(usages)
    assert (found.group, found.op, found.ranks, found.calls, found.sent, found.largest) == (
        "shard", "AllReduce", 2, 2, 15, 20,
    )  # fmt: skip
    assert traffic([]) == () and fullest([]) is None and fullest(usages) is usages[0]
