"""Prints the results of ``gopt inspect`` and ``gopt diff``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from gopt.text.amounts import format_bytes, group_ranks, rank_ranges
from gopt.text.sanitize import listed

from .render import calls_text, console, host_lines, print_left, print_notes, print_ranks, table
from .render_before_after import render_before_after, set_options

if TYPE_CHECKING:
    from gopt.documents.draws import Draw
    from gopt.offline.inspect import Inspection, NamedValue, OptimizerEntry, Parameter
    from gopt.offline.inspect_folder import FolderInspection
    from gopt.offline.optimizer.clips import Clip
    from gopt.offline.optimizer.controls import Controls

MOST = 24
"""Rows of a table before it is cut short; --json has them all."""


def render_inspection(info: Inspection) -> None:
    """A training step."""
    out = console()
    opsets = ", ".join(f"{domain} {version}" for domain, version in info.opsets.items())
    head = f"{format_bytes(info.file_bytes)}, opset {opsets}, loss {', '.join([info.loss, *info.more_losses])}"
    out.print(Text.assemble((info.file, "bold"), f"  {head}"))
    rows: list[Sequence[Any]] = [
        (phase.phase, phase.nodes, ", ".join(f"{count} {op}" for op, count in list(phase.operators.items())[:6]))
        for phase in info.phases
    ]
    out.print(table("Phases", ("phase", "nodes", "most frequent"), rows, (1,)))
    for line in (*map(_optimizer, info.optimizers), *_controls(info.controls)):
        out.print(line)
    casts = info.casts
    if casts.parameters or casts.gradients:
        narrow = ", ".join(casts.dtypes)
        out.print(f"low precision: {casts.parameters} parameters cast to {narrow}, {casts.gradients} gradients back")
    rows = [_parameter(parameter) for parameter in info.parameters[:MOST]]
    out.print(table("Parameters", ("name", "type", "size", "gradient", "states", "update"), rows, (2,)))
    print_left(out, len(info.parameters) - MOST)
    for title, named in (("batch", info.batch), ("hyper-parameters", info.hyper), ("statistics", info.statistics),
                         ("scalars", info.scalars), ("metrics", info.metrics)):  # fmt: skip
        if named:
            out.print(f"{title}: {listed([*map(_named, named)], 8)}")
    _print_draws(out, info.draws)
    if info.defaults:
        texts = [f"{name} {value}" for name, value in info.defaults.items()]
        out.print(Text(f"values of hyper-parameters where a run sets none: {listed(texts, 8)}"))
    if info.mappings:
        rows = [(e.mapping, e.group, e.call, e.value, e.dual or "?", e.gradient) for e in info.mappings[:MOST]]
        heads = ("mapping", "over", "forward", "value", "backward", "gradient")
        out.print(table("Region mappings of the source", heads, rows, ()))
        print_left(out, len(info.mappings) - MOST)
    for config in info.configurations:
        stages = f", {config.stages} pipeline stages" if config.stages else ""
        text = f"device configuration {config.name}: {config.devices} devices, {config.specs} sharding specs{stages}"
        out.print(Text(text))
    sizes = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(n)}" for kind, n in info.bytes.items() if n)
    out.print(f"bytes: {sizes}")
    print_notes(out, info.notes, info.couplings)


def _print_draws(out: Console, draws: Mapping[str, Draw] | None) -> None:
    """Print what inputs of random numbers are drawn from."""
    if draws:
        texts = [f"{name} from {draw}" for name, draw in draws.items()]
        out.print(Text(f"drawn where the data does not give them: {listed(texts, 8)}"))


def _optimizer(optimizer: OptimizerEntry) -> Text:
    constants = [
        key.replace("_", " ") + ("" if value is True else f" {_value(value)}")
        for key, value in optimizer.hyper.items()
        if value is not False
    ]
    count = len(optimizer.parameters)
    text = (
        Text("optimizer: ").append(optimizer.name, "bold").append(f" for {count} parameter{'' if count == 1 else 's'}")
    )
    text.append(f"; {', '.join(constants)}" if constants else "")
    return text.append(f"; states: {', '.join(optimizer.states)}" if optimizer.states else "")


def _value(value: float | bool | None) -> str:
    return "not found" if value is None else f"{value:g}"


def _parameter(param: Parameter) -> Sequence[str]:
    shape = "?" if param.shape is None else ",".join(map(str, param.shape))
    gradient = "none" if param.gradient is None else f"{param.gradient} {param.gradient_dtype}"
    states = ", ".join(state.role or state.name for state in param.states)
    why = "" if param.mode == "split" else f": {param.why}"
    return param.name, f"{param.dtype}[{shape}]", format_bytes(param.bytes), gradient, states, f"{param.mode}{why}"


def _named(value: NamedValue) -> str:
    shape = "?" if value.shape is None else ",".join("?" if n is None else str(n) for n in value.shape)
    return f"{value.name} {value.dtype}[{shape}]"


def _controls(controls: Controls) -> Iterator[Text]:
    rate, check = controls.learning_rate, controls.finite_check
    scale, summed = controls.loss_scale, controls.accumulation
    if rate is None:
        yield Text("learning rate: not found")
    elif rate.schedule:
        states = f", following {', '.join(rate.follows)}" if rate.follows else ""
        yield Text(f"learning rate: {rate.input or 'a constant'}, scheduled in the graph as {rate.effective} "
                   f"({len(rate.schedule)} nodes{states})")  # fmt: skip
    else:
        yield Text(f"learning rate: {rate.input or f'the constant {_value(rate.value)}'}")
    for clip in controls.clips:
        yield _clip(clip)
    if check is not None:
        yield Text(f"finite check: {check.condition} holds {check.states} states back")
    if scale is not None:
        how = "static"
        if scale.dynamic:
            how = f"× {_value(scale.growth)} after {_value(scale.interval)} good steps"
            how += f", × {_value(scale.backoff)} after a bad one"
        yield Text(f"loss scale: {scale.input}, {how}")
    if summed is not None:
        yield Text(f"accumulation: {summed.accumulators} gradients summed over {_value(summed.every)} steps")


def _clip(clip: Clip) -> Text:
    covers = f"{clip.gradients} of {clip.of} gradients"
    if clip.kind == "value":
        return Text(f"clip by value: each element within ±{_value(clip.bound)}, {covers}")
    norm = f" ({clip.norm_type}-norm)" if clip.norm_type not in ("2", "") else ""
    more = f", coefficient {clip.coefficient}" if clip.coefficient else ""
    if clip.kind == "global norm":
        return Text(f"global-norm clip: max norm {_value(clip.bound)}{norm}, over {covers}, norm {clip.norm}{more}")
    return Text(
        f"clip of each parameter's norm: max norm {_value(clip.bound)}{norm}, {covers}, first {clip.norm}{more}"
    )


def render_folder(info: FolderInspection) -> None:
    """An output folder."""
    from gopt.offline.explain.folder_story import stage_lines

    out = console()
    out.print(Text.assemble((info.folder, "bold"), f"  {info.ranks} ranks"))
    render_before_after(out, info.source.file, info.mesh, info.pipeline, info.before_after)
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}{'s' * (count > 1)}" for kind, count in info.states.items())
    where = f"{info.sharded} sharded, {info.replicated} on every rank"
    out.print(f"states: {kinds}; {where}; values {format_bytes(info.values_bytes)}")
    _print_draws(out, info.draws)
    for title, names in (("states", info.host.states), ("values of the forward", info.host.activations)):
        if names:
            out.print(Text(f"on the host: {len(names)} {title}: {listed(names, 8)}"))
    rows: list[Sequence[Any]] = []
    for record in info.pipeline:
        rows.append((record.name, ", ".join(set_options(record)) or "defaults", record.note))
    out.print(table("Pipeline", ("pass", "options", "note"), rows))
    groups = {call.split(" ", 1)[-1] for rank in info.per_rank for call in rank.calls}
    ranks: list[tuple[int, tuple[str, ...]]] = []
    for rank in info.per_rank:
        named = {call.split(" ", 1)[0] if len(groups) == 1 else call: count for call, count in rank.calls.items()}
        calls = calls_text(named)
        sizes = [format_bytes(count) for count in (rank.parameters, rank.optimizer_states, rank.gradients)]
        ranks.append((rank.rank, (*sizes, calls, format_bytes(rank.bytes_sent))))
    grouped = group_ranks(ranks)
    columns = ("rank", "parameters", "states", "gradients", "calls", "sent/step", "file")
    files = {rank.rank: rank.file_bytes for rank in info.per_rank}
    rows = [(rank_ranges(members), *values, _between([files[rank] for rank in members])) for members, values in grouped]
    print_ranks(out, columns, rows, MOST)
    print_left(out, len(grouped) - MOST, "kinds of ranks")
    balance = ", ".join(f"{kind.replace('_', ' ')} {value:g}" for kind, value in info.balance.items())
    counts = f"{info.removed_ops} ops removed, {info.added_ops} added"
    out.print(f"balance (max / mean): {balance}; {counts}")
    for line in (*stage_lines(info.pipeline), *host_lines(info.pipeline)):
        out.print(line)
    print_notes(out, info.notes)


def _between(sizes: Sequence[int]) -> str:
    low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"
