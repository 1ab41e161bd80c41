"""What endpoints promise, on threads; ``test_messages_mpi`` holds processes to the same."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from gopt.errors import InvariantError, RunError
from gopt.runtime.messages.failures import Awaited, LateError, LostError
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.roster import Roster, Settings
from gopt.runtime.messages.threads import ThreadHub, run_threads

NAMES = ["trainer 0", "trainer 1", "server 0"]
SHORT = 0.05


def hub(names=NAMES, **settings):
    return ThreadHub(Roster.of(names), Settings(**{"deadline": 60.0, **settings}))


def test_order_per_pair_and_any_source():
    def work(endpoint):
        if endpoint.number < 2:
            for number in range(200):
                endpoint.send(2, endpoint.message(Kind.PUSH, number, 0, [np.full(number % 5, number)]))
            return None
        found = [endpoint.receive() for _ in range(400)]
        for source in (0, 1):
            mine = [each for each in found if each.source == source]
            assert [each.key for each in mine] == list(range(200))
            assert all(each.arrays[0].tolist() == [each.key] * (each.key % 5) for each in mine)
        return [each.source for each in found]

    *_, sources = run_threads(hub(messages=4), work)
    assert sorted(sources) == [0] * 200 + [1] * 200


def test_every_type_and_no_arrays():
    given = [
        [], [np.zeros((0, 3), np.float16)], [np.array(3, ml_dtypes.bfloat16), np.array([True, False])],
        [np.arange(12).reshape(3, 4).T],
    ]  # fmt: skip

    def work(endpoint):
        if endpoint.number == 0:
            for arrays in given:
                endpoint.send(2, endpoint.message(Kind.PUSH, arrays=arrays, note=len(arrays)))
        elif endpoint.number == 2:
            for arrays in given:
                message = endpoint.receive()
                assert message.note == len(arrays)
                for mine, theirs in zip(message.arrays, arrays, strict=True):
                    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
                    assert mine.tobytes() == theirs.tobytes() and not np.shares_memory(mine, theirs)

    run_threads(hub(), work)


def test_arrays_are_given_away_or_copied():
    two = hub()
    sender, receiver, array = two.endpoint(0), two.endpoint(2), np.zeros(4)
    sender.send(2, sender.message(Kind.PUSH, arrays=[array]))
    array[:] = 1
    assert not receiver.receive().arrays[0].any()
    sender.send(2, sender.message(Kind.PUSH, arrays=[array]), owned=True)
    assert receiver.receive().arrays[0] is array


def test_arrays_come_into_the_memory_that_waits_for_them():
    two, target = hub(), np.zeros((2, 2), np.float32)
    sender, receiver = two.endpoint(0), two.endpoint(2)
    receiver.allocate = lambda header: [target] if header.key == 1 else None
    for key in (0, 1):
        for owned in (False, True):
            array = np.full((2, 2), key + owned, np.float32)
            sender.send(2, sender.message(Kind.PUSH, key, 0, [array]), owned=owned)
            assert (receiver.receive().arrays[0] is target) == (key == 1)
    assert (target == 2).all()
    receiver.allocate = lambda header: [target.T[:1]]
    sender.isend(2, sender.message(Kind.PUSH, 0, 0, [target]))
    with pytest.raises(RunError, match=r"server 0 .* failed: .*brings float32\[2, 2\]; the memory .* float32\[1, 2\]"):
        sender.receive()


@pytest.mark.parametrize("settings", [{"messages": 2}, {"bytes": 150}])
def test_flow_control_blocks(settings):
    """The third message waits until one is received; nothing is lost."""
    two = hub(**settings)
    sender, receiver, array = two.endpoint(0), two.endpoint(2), np.ones(100, np.uint8)
    for number in range(2):
        sender.send(2, sender.message(Kind.PUSH, number, 0, [array]))
    third = sender.isend(2, sender.message(Kind.PUSH, 2, 7, [array]))
    assert not third.done
    with pytest.raises(LateError) as late:
        third.wait(SHORT)
    assert str(late.value) == (
        f"after {SHORT} s, trainer 0 (endpoint 0, process 0) still waits for server 0 (endpoint 2, process 2) "
        "to take PUSH of key 2 in round 7"
    )
    assert receiver.receive().key == 0 and third.done
    blocked = threading.Thread(target=sender.send, args=(2, sender.message(Kind.PUSH, 3, 0, [array])), daemon=True)
    blocked.start()
    blocked.join(SHORT)
    assert blocked.is_alive()
    assert [receiver.receive().key for _ in range(3)] == [1, 2, 3]
    blocked.join()


def test_a_late_message_is_named():
    one = hub().endpoint(0)
    with pytest.raises(LateError, match=r"for trainer 1 \(.*\), server 0 \(.*\) to send a message"):
        one.receive(SHORT)
    missing = Awaited((2,), "send VALUES of key 3 in round 5")
    with pytest.raises(LateError, match=r"waits for server 0 \(.*\) to send VALUES of key 3 in round 5") as late:
        one.receive(SHORT, lambda: missing)
    assert late.value.awaited == missing and late.value.exit_code == 5


def test_gather_and_who_did_not_come():
    def work(endpoint):
        found = endpoint.gather({"hash": endpoint.number})
        endpoint.barrier()
        if endpoint.number != 1:
            with pytest.raises(LateError, match=r"waits for trainer 1 \(endpoint 1, process 1\) to come to the start"):
                endpoint.gather(None, SHORT, "the start")
        return found

    assert run_threads(hub(), work) == [[{"hash": number} for number in range(3)]] * 3


def test_a_failure_after_all_have_come_names_nobody_awaited():
    three = hub()
    for number in (1, 2):
        three._offer(number, None)
    three.fail(1, ValueError("no data"))
    with pytest.raises(RunError) as caught:
        three.endpoint(0).barrier()
    assert caught.value.message == ("stopped, because trainer 1 (endpoint 1, process 1) failed: ValueError: no data")


def test_a_failure_ends_all_others():
    def work(endpoint):
        if endpoint.number == 1:
            raise ValueError("no data")
        endpoint.receive(awaited=lambda: Awaited((2,), "send VALUES of key 3 in round 5"))

    three = hub()
    with pytest.raises(ValueError, match="no data") as found:
        run_threads(three, work)
    assert found.value.__notes__ == ["in trainer 1"]
    message = (
        r"stopped, because trainer 1 \(endpoint 1, process 1\) failed: ValueError: no data; trainer 0 \(.*\) waited "
        r"for server 0 \(endpoint 2, process 2\) to send VALUES of key 3 in round 5"
    )
    with pytest.raises(RunError, match=message):
        work(three.endpoint(0))
    with pytest.raises(RunError, match="stopped, because trainer 1"):
        three.endpoint(0).send(2, three.endpoint(0).message(Kind.BYE))


def test_the_others_go_on_without_a_lost_one():
    def work(endpoint):
        if endpoint.number == 1:
            endpoint.send(2, endpoint.message(Kind.PUSH, 1))
            raise ValueError("no data")
        if endpoint.number == 0:  # waits for the server alone: the loss is no matter
            return endpoint.receive(awaited=lambda: Awaited((2,), "send VALUES")).kind
        assert endpoint.receive().key == 1  # what has come is received
        with pytest.raises(LostError, match=r"trainer 1 .* is lost: ValueError: no data; server 0 .* waited") as lost:
            endpoint.receive()
        endpoint.drop(lost.value.number)
        endpoint.send(1, endpoint.message(Kind.VALUES))  # reaches nobody
        endpoint.send(0, endpoint.message(Kind.VALUES))
        with pytest.raises(LateError, match=r"for trainer 0 \(endpoint 0, process 0\) to send a message"):
            endpoint.receive(SHORT)
        return lost.value.number

    assert run_threads(hub(), work, may_end=lambda number: number == 1) == [Kind.VALUES, None, 1]


def test_close_waits_for_the_others_and_not_for_lost_ones():
    def work(endpoint):
        if endpoint.number == 1:
            raise ValueError("no data")
        endpoint.isend(2 - endpoint.number, endpoint.message(Kind.BYE))
        if endpoint.number == 2:
            endpoint.receive()
        endpoint.close()
        return True

    assert run_threads(hub(messages=1), work, may_end=lambda number: number == 1) == [True, None, True]
    lonely = hub().endpoint(0)
    with pytest.raises(LateError, match=r"for trainer 1 \(.*\), server 0 \(.*\) to come to the end"):
        lonely.close(SHORT)


def test_nobody_sends_for_another():
    one = hub().endpoint(0)
    for to, source in ((2, 1), (3, 0), (-1, 0)):
        with pytest.raises(InvariantError, match="sends as"):
            one.isend(to, hub().endpoint(source).message(Kind.PUSH))
