"""The stories: each treats a name as one kind of thing, and yields nothing for another kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from gopt.analysis.training import StateKind
from gopt.artifact.manifest_entries import LocalState, SourceState
from gopt.artifact.pass_facts import BucketFacts
from gopt.artifact.report_groups import AddedVarFact, LocalShape, OpFact, RemovedVarFact
from gopt.ir.graph import Node
from gopt.ir.node_kinds import control_flow
from gopt.offline.explain.folder_index import FolderIndex
from gopt.offline.explain.split_stories import key_story, table_story
from gopt.offline.explain.story import Fact
from gopt.offline.explain.wiring import Wiring
from gopt.text.amounts import format_bytes, group_ranks, rank_ranges
from gopt.text.sanitize import listed

_MOST = 6
"""Names, and ranges of ranks, that a line or a story lists."""


def state_story(index: FolderIndex, name: str) -> Iterator[Fact]:
    """A state of the source, by input or by the output with the new value."""
    state = index.states.get(name) or index.updated.get(name)
    if state is None:
        return
    kind, type = state.kind.value.replace("_", " "), state.type
    of = f" of {state.of}" if state.of else ""
    replaced = f"input {state.tensor}, replaced by {state.updated} after the step"
    yield Fact(kind, f"{type}, {format_bytes(type.nbytes)}{of}; {replaced}", (state.tensor, state.updated))
    yield from _holders(index, state)
    parameter = index.parameter(state.tensor)
    if parameter is state:
        statistics = [entry.tensor for entry in index.manifest.states if entry.of == state.tensor]
        if statistics:
            yield Fact("optimizer", f"its states are {listed(statistics, _MOST)}", tuple(statistics))
    if state.kind is StateKind.STATISTIC:
        yield Fact("combined", _rule(index, state.tensor))
    if parameter is not None and (gradient := index.gradients.get(parameter.tensor)) is not None:
        if parameter is state:
            yield Fact("gradient", gradient, (gradient,))
        yield from _bucket(index, parameter.tensor)
        if parameter is state:
            yield from _calls(index, gradient, parameter)
            yield from _update(index, parameter.tensor)


def _rule(index: FolderIndex, statistic: str) -> str:
    """The rule that joins the ranks' values of a statistic."""
    manifest = index.manifest
    named = next((reduction for reduction in manifest.reductions if reduction.tensor == statistic), None)
    rule = manifest.statistics if named is None else named.rule
    if named is not None and named.points:
        return f"over ranks by {rule} of {listed([point.value for point in named.points], _MOST)}"
    words = {"root": "every rank takes the first rank's value", "local": "not: each rank keeps its own value"}
    return words.get(rule, f"over ranks by {rule}")


def _holders(index: FolderIndex, state: SourceState) -> Iterator[Fact]:
    """List the elements of a state on each rank."""
    total = state.type.elements
    for local in index.manifest.common.state:
        if any(piece.tensor == state.tensor for piece in local.pieces):
            part = _part(local, state, total) + _memory(index, local)
            yield Fact("held", f"{part} on every rank, as {local.input}", (local.input,))
    rows = [
        (rank.rank, (_part(local, state, total) + _memory(index, local), local.input))
        for rank in index.manifest.ranks
        for local in rank.state
        if any(piece.tensor == state.tensor for piece in local.pieces)
    ]
    groups = group_ranks(rows)
    for ranks, (part, name) in groups[:_MOST]:
        yield Fact("held", f"{part} on {_on(rank_ranges(ranks))}, as {name}", (name,))
    if len(groups) > _MOST:
        yield Fact("held", f"{len(groups) - _MOST} more parts, in manifest.json")


def _memory(index: FolderIndex, local: LocalState) -> str:
    return " (in the memory of the host)" if local.input in index.manifest.host.states else ""


def _part(local: LocalState, state: SourceState, total: int) -> str:
    parts = []
    for piece in local.pieces:
        if piece.tensor == state.tensor:
            whole = piece.box is None and piece.every is None and (piece.start, piece.stop) == (0, total)
            text = "whole" if whole else f"elements {piece.start} to {piece.stop - 1} of {total}"
            if piece.box is not None:
                text = f"rows and columns [{', '.join(f'{low}:{high}' for low, high in piece.box)}]"
                text += "" if piece.start == 0 else f", elements {piece.start} to {piece.stop - 1} of it"
            if piece.every is not None:
                text = f"rows {piece.every[0]}, {sum(piece.every)}, …"
            parts.append(text)
    return ", ".join(parts) + (" (a copy)" if local.copy else "")


def _bucket(index: FolderIndex, parameter: str) -> Iterator[Fact]:
    bucket = index.bucket_of.get(parameter)
    if bucket is None:
        return
    position = bucket.tensors.index(parameter)
    beside = [*bucket.tensors[max(position - 1, 0) : position], *bucket.tensors[position + 1 : position + 2]]
    near = f", beside {' and '.join(beside)}" if beside else ""
    text = f"{bucket.name}: tensor {position + 1} of {len(bucket.tensors)}, {format_bytes(bucket.nbytes)}{near}"
    yield Fact("bucket", text, (bucket.name, *beside))


def _calls(index: FolderIndex, gradient: str, parameter: SourceState) -> Iterator[Fact]:
    """The calls with a parameter and its gradient, on the first rank."""
    copies = [
        local.input
        for local in (*index.manifest.common.state, *index.manifest.ranks[0].state)
        if local.copy and any(piece.tensor == parameter.tensor for piece in local.pieces)
    ]
    for wiring in index.wiring(index.first_rank()):
        for node in wiring.sent_by(gradient):
            yield _call("sent", node, gradient)
        for name in (parameter.updated, parameter.tensor, *copies):
            for node in wiring.brought_by(name):
                yield _call("received", node, name)


def _call(about: str, node: Node, name: str) -> Fact:
    group = node.attributes.get("group")
    over = f" over {group}" if group else ""
    count = max(len(node.inputs), len(node.outputs))
    among = f", which sends {count} values" if count > 1 else ""
    return Fact(about, f"{name} by {node.op_type}{over}, in call {node.label}{among}", (node.label,))


def _update(index: FolderIndex, parameter: str) -> Iterator[Fact]:
    """Explain what the passes did to the operators of a parameter's update."""
    rows: dict[tuple[str, str], list[OpFact]] = {}
    for fact in chain.from_iterable(index.removed_ops.values()):
        if fact.of == parameter:
            rows.setdefault((fact.reason, fact.ranks), []).append(fact)
    for (reason, ranks), facts in rows.items():
        now = [name for fact in facts for name in fact.replaced_by]
        as_now = f"; now {now[0]} to {now[-1]}" if len(now) > 1 else f"; now {now[0]}" if now else ""
        plural = "" if len(facts) == 1 else "s"
        text = f"{len(facts)} operator{plural} removed from {_on(ranks)}: {reason}{as_now}"
        yield Fact("update", text, tuple(now[:1] + now[-1:]))


def bucket_story(index: FolderIndex, name: str) -> Iterator[Fact]:
    """A bucket, by name."""
    bucket = index.buckets.get(name)
    if bucket is None:
        return
    size = f"{format_bytes(bucket.nbytes)} of {bucket.dtype} gradients in {len(bucket.tensors)} tensors"
    yield Fact(
        "bucket", f"{size}; update {bucket.sharing(index.report.mesh.mesh().data_ranks)}; {bucket.closed_because}"
    )
    yield Fact("tensors", listed(bucket.tensors, _MOST), tuple(bucket.tensors[:_MOST]))
    yield from (Fact("reason", why) for why in bucket.reasons)
    for about, node in _bucket_calls(index, bucket):
        what = f"{node.op_type} over {node.attributes['group']}" if "group" in node.attributes else node.op_type
        yield Fact(about, f"by {what}: {node.label}", (node.label,))
    added = [fact for facts in index.added_vars.values() for fact in facts if fact.of == name and fact.role == "state"]
    for fact in added[:_MOST]:
        yield Fact("state", f"{fact.name} {fact.dtype}, {_sizes(fact.per_rank)}", (fact.name,))
    count = sum(fact.reason.startswith(f"{name}: ") for facts in index.removed_ops.values() for fact in facts)
    if count:
        yield Fact("removed", f"{count} operators of the updates of its parameters")


def _bucket_calls(index: FolderIndex, bucket: BucketFacts) -> Iterator[tuple[str, Node]]:
    """The calls of a bucket: for gradients and for parameters."""
    visited: set[int] = set()
    for tensor in bucket.tensors:
        state = index.states.get(tensor)
        for wiring in index.wiring(index.first_rank()):
            sent = [("gradients", node) for node in wiring.sent_by(index.gradients.get(tensor, ""))]
            names = () if state is None else (state.updated, tensor)
            sent += [("parameters", node) for name in names for node in wiring.brought_by(name)]
            for about, node in sent:
                if id(node) not in visited:
                    visited.add(id(node))
                    yield about, node


def added_story(index: FolderIndex, name: str) -> Iterator[Fact]:
    """An operator or a value added by a pass."""
    if name in index.states:  # trainers give what they pulled the source's name
        return
    ops, variables = index.added_ops.get(name, []), index.added_vars.get(name, [])
    for fact in ops:
        yield Fact("added", f"operator {fact.op_type} on {_on(fact.ranks)} by {fact.pass_name}: {fact.reason}")
    for value in variables:
        text = f"value {value.dtype} by {value.pass_name}: {value.reason}; {_sizes(value.per_rank)}"
        yield Fact("added", text)
    facts: Sequence[OpFact | AddedVarFact] = [*ops, *variables]
    if not facts:
        return
    if facts[0].of in index.buckets:
        yield Fact("bucket", facts[0].of, (facts[0].of,))
    if stands := index.stands_for.get(name):
        yield Fact("stands for", f"{len(stands)} of the source: {listed(stands, _MOST)}", tuple(stands[:_MOST]))
    ranks = ops[0].ranks if ops else variables[0].per_rank[0].ranks
    for wiring in index.wiring(index.first_rank(ranks)):
        yield from _neighbours(wiring, name)


def source_story(index: FolderIndex, name: str) -> Iterator[Fact]:
    """An operator or a value of the source: its origin, and its fate."""
    wiring = index.source
    node = wiring.labels.get(name)
    is_value = name in wiring.producers or name in wiring.graph.inputs
    gone: list[OpFact | RemovedVarFact] = [*index.removed_ops.get(name, ()), *index.removed_vars.get(name, ())]
    if node is None and not is_value and not gone:
        return
    if name in index.states and not gone:
        yield from _neighbours(wiring, name)
        return
    if node is not None:
        yield Fact("operator", f"{node.op_type} of the source; reads {listed(node.reads, _MOST) or 'nothing'}")
    elif is_value:
        maker = wiring.producers.get(name)
        how = f"made by {maker.op_type} {maker.label}" if maker is not None else "an input of the step"
        type = wiring.graph.types.get(name)
        yield Fact(
            "value", f"{'' if type is None else f'{type} '}of the source; {how}", (maker.label,) if maker else ()
        )
    if name in index.manifest.host.activations:
        yield Fact("host", "moved to the memory of the host behind a reader, and back for the backward")
    for parameter in index.of_gradient.get(name, ()):
        yield Fact("gradient", f"of parameter {parameter}", (parameter,))
        yield from _bucket(index, parameter)
        for rank_wiring in index.wiring(index.first_rank()):
            yield from (_call("sent", call, name) for call in rank_wiring.sent_by(name))
    yield from _neighbours(wiring, name)
    if gone:
        yield from _removed(index, gone)
    elif node is not None or name in wiring.producers:
        yield Fact("now", "every rank has it" if node is None else _run_by_all(index, node))


def _run_by_all(index: FolderIndex, node: Node) -> str:
    """Return how every rank runs an operator that no pass removed."""
    runs = [wiring.labels.get(node.label) for wiring in index.wiring(index.first_rank())]
    if control_flow(node) and not any(run is not None and control_flow(run) for run in runs):
        return "both branches are written out, and Where takes what the condition says"
    return "every rank runs it as it was"


def _removed(index: FolderIndex, facts: Sequence[OpFact | RemovedVarFact]) -> Iterator[Fact]:
    for fact in facts:
        of = f" of {fact.of}" if fact.of else ""
        role = fact.role.replace("_", " ")
        names = (fact.of,) if fact.of else ()
        yield Fact("removed", f"{role}{of}, from {_on(fact.ranks)} by {fact.pass_name}: {fact.reason}", names)
        if fact.of and fact.name not in index.states:
            yield from _bucket(index, fact.of)
        for name in fact.replaced_by:
            yield Fact("now", _described(index, name), (name,))
        if not fact.replaced_by:
            remaining = _left(index, fact.ranks)
            yield Fact("now", f"kept on {_on(remaining)}" if remaining else "removed without a replacement")


def _left(index: FolderIndex, ranks: str) -> str:
    """Return the ranks outside ``ranks``."""
    lost: set[int] = set()
    for part in ranks.split(","):
        start, _, last = part.partition("-")
        lost.update(range(int(start), int(last or start) + 1))
    return rank_ranges([rank.rank for rank in index.manifest.ranks if rank.rank not in lost])


def _described(index: FolderIndex, name: str) -> str:
    """Describe a replacement value, with its size on the ranks."""
    for fact in index.added_vars.get(name, ()):
        count = len(index.stands_for.get(name, ()))
        shared = f"; it stands for {count} of the source" if count > 1 else ""
        return f"{name} {fact.dtype}, {_sizes(fact.per_rank)}{shared}"
    return name


def _neighbours(wiring: Wiring, name: str) -> Iterator[Fact]:
    node = wiring.labels.get(name) or wiring.producers.get(name)
    values = [name] if name in wiring.graph.inputs or node is None else [output for output in node.outputs if output]
    readers = [reader for value in values for reader in wiring.users.get(value, ())]
    if node is not None:
        makers = [maker.label for value in node.reads if (maker := wiring.producers.get(value)) is not None]
        if makers:
            yield Fact("made from", listed([*dict.fromkeys(makers)], _MOST), tuple(dict.fromkeys(makers))[:_MOST])
    if readers:
        named = [f"{reader.op_type} {reader.label}" for reader in readers]
        yield Fact("read by", listed([*dict.fromkeys(named)], _MOST), tuple(reader.label for reader in readers[:_MOST]))


def _sizes(shapes: Sequence[LocalShape]) -> str:
    rows = [f"{_shape(shape)} ({format_bytes(shape.nbytes)}) on {_on(shape.ranks)}" for shape in shapes]
    return "; ".join(rows[:3]) + (f"; … {len(rows) - 3} more sizes" if len(rows) > 3 else "")


def _shape(shape: LocalShape) -> str:
    return "[?]" if shape.shape is None else f"[{','.join('?' if n is None else str(n) for n in shape.shape)}]"


def _on(ranks: str) -> str:
    return f"rank {ranks}" if ranks.isdigit() else f"ranks {ranks}"


STORIES: Sequence[Callable[[FolderIndex, str], Iterator[Fact]]] = (
    state_story, bucket_story, key_story, table_story, added_story, source_story,
)  # fmt: skip
