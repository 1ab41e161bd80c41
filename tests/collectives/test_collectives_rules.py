"""What the records refuse, and with which error."""

from __future__ import annotations

from typing import Any

import pytest

from gopt.collectives.table import COLLECTIVES
from gopt.errors import GoptError, InputError, UnsupportedError

X = ("float32", (4, 3))
GROUP = {"group": "shard"}
SPLIT = {"split_axis": 1, "concat_axis": 0, "split_sizes": [2, 1], "concat_sizes": [4, 4]}
AXIS = {"axis": 0, "sizes": [2, 2]}


def broadcast(**changes: Any) -> dict[str, Any]:
    return {"root": 0, "dtype": "float32", "shapes": ["4,3"], **changes}


REFUSED: list[tuple[str, dict[str, Any], list[Any], type[GoptError], str]] = [
    ("AllReduce", {"colour": 1}, [X], InputError, "no attribute 'colour'"),
    ("AllReduce", {"reduce": "prod"}, [X], InputError, "'prod'"),
    ("AllReduce", {"reduce": 1}, [X], InputError, "not of type STRING"),
    ("AllReduce", {"group": "dp+"}, [X], InputError, "not a group"),
    ("AllReduce", {}, [], InputError, "0 inputs"),
    ("AllReduce", {}, [X, ("float16", (1,))], InputError, "float16 and float32"),
    ("AllReduce", {"reduce": "mean"}, [("int64", ())], UnsupportedError, "no mean of int64"),
    ("AllReduce", {}, [("bool", ())], UnsupportedError, "no sum of bool"),
    ("AllReduce", {}, [("float8e5m2", (1,))], UnsupportedError, "no sum of float8e5m2"),
    ("AllReduce", {}, [("string", (1,))], UnsupportedError, "string"),
    ("Reduce", {}, [X], InputError, "needs the attribute 'root'"),
    ("Reduce", {"root": 2}, [X], InputError, "root 2"),
    ("Reduce", {"root": -1}, [X], InputError, "root -1"),
    ("Broadcast", broadcast(), [], InputError, "the root"),
    ("Broadcast", broadcast(root=1), [X], InputError, "the root"),
    ("Broadcast", broadcast(shapes=["3,4"]), [X], InputError, "shapes says"),
    ("Broadcast", broadcast(shapes=["4,3", ""]), [X], InputError, "1 inputs for 2 shapes"),
    ("Broadcast", broadcast(shapes=[]), [X], InputError, "empty"),
    ("Broadcast", broadcast(shapes="4,3"), [X], InputError, "not of type STRINGS"),
    ("Broadcast", broadcast(shapes=["4,-3"]), [X], InputError, "as a shape"),
    ("Broadcast", broadcast(dtype="float16"), [X], InputError, "one type"),
    ("ReduceScatter", {}, [X], InputError, "none of them"),
    ("ReduceScatter", {"cuts": [0, 6, 12], **AXIS}, [X], InputError, "axis and sizes"),
    ("ReduceScatter", {"axis": 0}, [X], InputError, "axis and sizes"),
    ("ReduceScatter", {"cuts": [0, 12]}, [X], InputError, "2 cuts for 2 members"),
    ("ReduceScatter", {"cuts": []}, [X], InputError, "0 cuts"),
    ("ReduceScatter", {"cuts": [1, 6, 12]}, [X], InputError, "start at 0"),
    ("ReduceScatter", {"cuts": [0, 13, 12]}, [X], InputError, "never fall"),
    ("ReduceScatter", {"cuts": [0, 6, 11]}, [X], InputError, "cuts end at 11, the bucket at 12"),
    ("ReduceScatter", {"cuts": [0, 6.0, 12]}, [X], InputError, "not of type INTS"),
    ("ReduceScatter", AXIS, [X, X], InputError, "one input"),
    ("ReduceScatter", {"axis": 2, "sizes": [2, 2]}, [X], InputError, "no axis 2"),
    ("ReduceScatter", {"axis": -1, "sizes": [2, 2]}, [X], InputError, "no axis -1"),
    ("ReduceScatter", {"axis": 0, "sizes": [2, 1]}, [X], InputError, "the sizes say 3"),
    ("ReduceScatter", {"axis": 0, "sizes": [5, -1]}, [X], InputError, "negative"),
    ("ReduceScatter", {"axis": 0, "sizes": [4]}, [X], InputError, "1 sizes for 2 members"),
    ("AllGather", {"cuts": [0, 4, 6]}, [("float32", (4,))], InputError, "cuts and shapes"),
    ("AllGather", {"cuts": [0, 4, 6], "shapes": ["5"]}, [("float32", (4,))], InputError, "the shapes hold 5"),
    ("AllGather", {"cuts": [0, 4, 6], "shapes": ["6"]}, [("float32", (2,))], InputError, "the shard of member 0"),
    ("AllGather", {"cuts": [0, 4, 6], "shapes": ["6"]}, [("float32", (2, 2))], InputError, "the shard of member 0"),
    ("AllGather", {"axis": 0, "sizes": [3, 2]}, [X], InputError, "the sizes say 3"),
    ("AllGather", {"axis": 0, "sizes": []}, [X], InputError, "0 sizes"),
    ("AllGather", AXIS, [X, X], InputError, "2 inputs"),
    ("AllToAll", SPLIT | {"split_axis": 0}, [X], UnsupportedError, "both 0"),
    ("AllToAll", SPLIT | {"split_sizes": [2, 2]}, [X], InputError, "the sizes say 4"),
    ("AllToAll", SPLIT | {"concat_sizes": [3, 4]}, [X], InputError, "the sizes say 3"),
    ("AllToAll", SPLIT | {"concat_sizes": [4]}, [X], InputError, "1 concat_sizes"),
    ("Send", {"peer": -1, "tag": 0}, [X], InputError, "not a rank"),
    ("Send", {"peer": 1}, [X], InputError, "'tag'"),
    ("Recv", {"peer": 1, "tag": 0, **broadcast()}, [], InputError, "no attribute 'root'"),
]


@pytest.mark.parametrize("op, attributes, inputs, error, words", REFUSED)
def test_refused(op: str, attributes: dict[str, Any], inputs: list[Any], error: type[GoptError], words: str) -> None:
    record = COLLECTIVES[op]
    for ask in (record.outputs, record.bytes_sent):
        with pytest.raises(error) as raised:
            ask(GROUP | attributes, inputs, 2, 0)
        assert words in raised.value.message


def test_sizes_must_agree_even_where_the_group_is_unknown() -> None:
    with pytest.raises(InputError, match="equal length"):
        COLLECTIVES["AllToAll"].infer(GROUP | SPLIT | {"concat_sizes": [4, 4, 4]}, [X])
