"""Compiles elementwise nodes on long rows to one loop of machine code, by LLVM: one pass over the memory.

The compiler has the operators of ``numpy_kernels``, with results determined by IEEE 754, with the same bits: nothing is
contracted, reordered or approximated. ``numpy_kernels`` computes where llvmlite is missing, and for types other than
``_FLOATS``, ``_WHOLE`` and bool."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from gopt.ir.graph import Node
from gopt.ir.types import TensorType
from gopt.runtime.host_value import Value, address_of
from gopt.runtime.partition import Segment
from gopt.runtime.session import Array
from gopt.runtime.tuning.numpy_kernels import operation, unsigned

_FLOATS = {"float16": "HalfType", "float32": "FloatType", "float64": "DoubleType"}
_WHOLE = {"int8": 8, "int32": 32, "int64": 64}
_COMPARED = {"Equal": "==", "Greater": ">", "GreaterOrEqual": ">=", "Less": "<", "LessOrEqual": "<="}
_INTRINSICS = {"Abs": "llvm.fabs", "Sqrt": "llvm.sqrt"}
_NODES = 1024
"""Most nodes of a loop: compiling so many takes a tenth of a second, and the time grows faster than their number."""
_POINTERS = 1023
"""Most inputs and results of a loop: ctypes passes 1024 arguments, and the length is one."""


def is_supported(nodes: Sequence[Node], types: Mapping[str, TensorType], crossing: int = 0) -> bool:
    """Return whether these nodes can be one loop on this machine; ``crossing``: the number of inputs and results."""
    dtypes = {types[name].dtype for node in nodes for name in (*node.inputs, *node.outputs)}
    fits = dtypes <= {*_FLOATS, *_WHOLE, "bool"} and all(operation(node, types) is not None for node in nodes)
    if not fits or len(nodes) > _NODES or crossing > _POINTERS:
        return False
    machine = _machine()
    return machine is not None and ("float16" not in dtypes or machine.halves)


class LlvmKernel:
    """The nodes of a segment over rows of ``length`` elements. All nodes must be supported.

    ``rows``: the segment's inputs that are rows; all others are single values, with ``constants`` known. ``aliases``:
    result -> the overwritten row. An element is read from all rows before the write, so two rows may have the same
    memory; other overlaps are forbidden."""

    def __init__(
        self, segment: Segment, length: int, rows: Sequence[str], types: Mapping[str, TensorType],
        aliases: Mapping[str, str], constants: Mapping[str, Array],
    ) -> None:  # fmt: skip
        self.inputs = tuple(name for name in segment.inputs if name not in constants)
        self._made = [name for name in segment.outputs if name not in aliases]
        self._constants = list(constants.values())
        self._last = [*(address_of(value) for value in self._constants), length]
        numbers = {name: number for number, name in enumerate([*self.inputs, *self._made, *constants])}
        numbers |= {name: numbers[row] for name, row in aliases.items()}
        self._code = _code(_text(segment, frozenset(rows), types, numbers), len(segment.inputs) + len(self._made))

    def run(self, values: Mapping[str, Value], results: Mapping[str, Value]) -> None:
        """Compute all elements. A result that overwrites a row has the row's memory."""
        addresses = [results[name].address for name in self._made]
        self._code(*[values[name].address for name in self.inputs], *addresses, *self._last)


def _text(segment: Segment, rows: frozenset[str], types: Mapping[str, TensorType], numbers: Mapping[str, int]) -> str:
    """The loop in LLVM's textual form. ``numbers``: input or result -> index of the pointer."""
    from llvmlite import ir

    module = ir.Module()
    name_of = {number: name for name, number in numbers.items()}
    pointers = [_stored(ir, types[name_of[number]]).as_pointer() for number in range(len(name_of))]
    count = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*pointers, count]), "loop")
    for argument in function.args[:-1]:
        argument.add_attribute("noalias")
    start, body, end = (function.append_basic_block(name) for name in ("start", "body", "end"))
    into = ir.IRBuilder(start)
    loaded = {
        name: _load(ir, into, function.args[numbers[name]], types[name]) for name in segment.inputs if name not in rows
    }
    into.branch(body)  # rows are never empty
    into = ir.IRBuilder(body)
    index = into.phi(count)
    for name in segment.inputs:
        if name in rows:
            loaded[name] = _load(ir, into, into.gep(function.args[numbers[name]], [index]), types[name])
    for node in segment.nodes:
        loaded[node.outputs[0]] = _made(ir, into, node, [loaded[name] for name in node.inputs], types)
    for name in segment.outputs:
        value = into.zext(loaded[name], ir.IntType(8)) if types[name].dtype == "bool" else loaded[name]
        into.store(value, into.gep(function.args[numbers[name]], [index]))
    following = into.add(index, count(1))
    index.add_incoming(count(0), start)
    index.add_incoming(following, body)
    into.cbranch(into.icmp_unsigned("<", following, function.args[-1]), body, end)
    ir.IRBuilder(end).ret_void()
    return str(module)


def _kind(ir: Any, type: TensorType) -> Any:
    """The LLVM type in which a value is computed: bool is one bit."""
    if type.dtype in _FLOATS:
        return getattr(ir, _FLOATS[type.dtype])()
    return ir.IntType(_WHOLE.get(type.dtype, 1))


def _stored(ir: Any, type: TensorType) -> Any:
    return ir.IntType(8) if type.dtype == "bool" else _kind(ir, type)


def _load(ir: Any, into: Any, pointer: Any, type: TensorType) -> Any:
    value = into.load(pointer)
    return into.icmp_unsigned("!=", value, ir.IntType(8)(0)) if type.dtype == "bool" else value


def _made(ir: Any, into: Any, node: Node, operands: list[Any], types: Mapping[str, TensorType]) -> Any:
    """The value of a node, from operands in the types of the computation."""
    read, result = types[node.inputs[0]], types[node.outputs[0]]
    kind = node.op_type
    if kind == "Identity":
        return operands[0]
    if kind == "Where":
        condition, *branches = operands
        if result.dtype in _FLOATS:
            branch = unsigned(*(types[name] for name in node.inputs))
            branches[branch] = into.fadd(branches[branch], _kind(ir, result)(0.0))
        return into.select(condition, *branches)
    if kind == "Cast":
        return _cast(ir, into, operands[0], read, result)
    if kind in _COMPARED:
        compare = into.fcmp_ordered if read.dtype in _FLOATS else into.icmp_signed
        return compare(_COMPARED[kind], *operands)
    if kind in _INTRINSICS:
        return into.call(into.module.declare_intrinsic(_INTRINSICS[kind], [_kind(ir, result)]), operands)
    plain = {
        "Add": into.fadd, "Sub": into.fsub, "Mul": into.fmul, "Div": into.fdiv, "Neg": into.fneg,
        "And": into.and_, "Or": into.or_, "Not": into.not_,
    }  # fmt: skip
    return plain[kind](*operands)


def _cast(ir: Any, into: Any, value: Any, read: TensorType, target_type: TensorType) -> Any:
    target = _kind(ir, target_type)
    if read.dtype == target_type.dtype:
        return value
    if read.dtype == "bool":
        return into.uitofp(value, target) if target_type.dtype in _FLOATS else into.zext(value, target)
    widths = list(_FLOATS)
    wider = widths.index(target_type.dtype) > widths.index(read.dtype)
    return into.fpext(value, target) if wider else into.fptrunc(value, target)


# --- this machine ---------------------------------------------------------------------------------------------------


class _Machine:
    """LLVM for this processor. ``halves``: whether the processor converts float16 with one rounding."""

    def __init__(self, llvm: Any) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        triple = llvm.get_process_triple()
        self.halves = bool(features.get("f16c")) or triple.startswith(("aarch64", "arm64"))
        self._llvm = llvm
        self._target = llvm.Target.from_triple(triple)
        self._features, self._name = features.flatten(), llvm.get_host_cpu_name()

    def compile(self, text: str) -> Any:
        """An engine with the compiled code, to be kept alive as long as the code runs."""
        module = self._llvm.parse_assembly(text)
        module.verify()
        target = self._target.create_target_machine(cpu=self._name, features=self._features, opt=3)
        how = self._llvm.create_pipeline_tuning_options(speed_level=3)
        how.loop_vectorization = how.loop_unrolling = True
        builder = self._llvm.create_pass_builder(target, how)
        builder.getModulePassManager().run(module, builder)
        engine = self._llvm.create_mcjit_compiler(module, target)
        engine.finalize_object()
        return engine


@functools.cache
def _machine() -> _Machine | None:
    try:
        from llvmlite import binding

        return _Machine(binding)
    except (ImportError, OSError, RuntimeError):  # not there, no library for this system, or no such processor
        return None


@functools.cache
def _code(text: str, pointers: int) -> Callable[..., None]:
    """The compiled text as a function of as many addresses and a length. The function releases the interpreter lock."""
    machine = _machine()
    assert machine is not None
    engine = machine.compile(text)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * pointers, ctypes.c_int64)
    function: Any = kind(engine.get_function_address("loop"))
    function.engine = engine
    return cast("Callable[..., None]", function)
