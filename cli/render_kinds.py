"""Prints the result of ``gopt inspect`` for each kind of file and folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from gopt.offline.inspect import Inspection, NamedValue
from gopt.offline.inspect_folder import FolderInspection
from gopt.offline.inspect_role import RoleInspection
from gopt.offline.inspect_split import SplitInspection
from gopt.offline.kinds.gopt_files import CheckpointInspection, ManifestInspection, RecordInspection, ReportInspection
from gopt.offline.kinds.inference import InferenceInspection
from gopt.offline.kinds.ort_artifacts import OrtArtifactsInspection
from gopt.offline.kinds.ort_checkpoint import OrtCheckpointInspection
from gopt.offline.kinds.ort_models import OrtOptimizerInspection, OrtTrainingInspection
from gopt.offline.kinds.rank_file import RankFileInspection
from gopt.offline.kinds.training_info import TrainingInfoInspection
from gopt.offline.kinds.value_files import ValuesInspection
from gopt.records.mesh import format_axes
from gopt.text.amounts import format_bytes
from gopt.text.sanitize import listed

from .render import console, print_left, table

FEW = 8
"""Names in a line."""
MOST = 24
"""Rows of a table; --json has them all."""


def render_found(info: Any, path: Path) -> None:
    """Show what describes ``path``."""
    if isinstance(info, SplitInspection):
        from .render_split import render_split

        render_split(info, path, written=False)
        return
    _RENDERERS[type(info)](info)


def _step(info: Inspection) -> None:
    from .render_inspect import render_inspection

    render_inspection(info)


def _folder(info: FolderInspection) -> None:
    from .render_inspect import render_folder

    render_folder(info)


def _role(info: RoleInspection) -> None:
    from .render_split import render_role

    render_role(info)


def _inference(info: InferenceInspection) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in info.opsets.items())
    by = f", made by {info.producer}" if info.producer else ""
    _head(info.file, f"an inference model: {format_bytes(info.file_bytes)}, opset {opsets}{by}")
    weights = info.weights
    kinds = f" ({', '.join(f'{count} {dtype}' for dtype, count in weights.dtypes.items())})" if weights.tensors else ""
    _line(f"{info.nodes} nodes: {_counted(info.operators)}")
    _line(f"weights: {weights.tensors} tensors{kinds}, {weights.elements} elements, {format_bytes(weights.bytes)}")
    _line(f"inputs: {_values(info.inputs)}")
    _line(f"outputs: {_values(info.outputs)}")
    if info.functions:
        _line(f"functions of its own: {listed(info.functions, FEW)}")
    if info.carried:
        _line(f"carried from call to call: {listed([f'{name} -> {new}' for name, new in info.carried.items()], FEW)}")
    _line(f"not a training step: {info.refusal.removeprefix('this is not a training step: ')}")
    _end(info.notes, info.next)


def _training_info(info: TrainingInfoInspection) -> None:
    _head(info.file, f"a model with training_info: {format_bytes(info.file_bytes)}")
    _line(f"inference graph: {info.nodes} nodes, {info.initializers} initializers")
    for number, step in enumerate(info.steps):
        _line(f"step {number}: {step.nodes} nodes: {_counted(step.operators)}")
        updates = [f"{name} <- {value}" for name, value in step.updates.items()]
        _line(f"  replaces {len(updates)} initializers: {listed(updates, FEW)}")
        if step.initialized:
            _line(f"  initializes {len(step.initialized)}: {listed(step.initialized, FEW)}")
        if step.differentiates:
            _line(f"  Gradient with respect to {listed(step.differentiates, FEW)}")
    if not info.refusal:
        _line(f"a training step: {info.parameters} parameters, loss {info.loss}")
    _end(info.notes, info.next)


def _ort_training(info: OrtTrainingInspection) -> None:
    _head(info.file, f"a training graph of ONNX Runtime: {format_bytes(info.file_bytes)}, loss {info.loss}")
    _line(
        f"{info.forward} nodes of the forward, {info.backward} of the backward, {info.accumulators} accumulators of "
        "gradients"
    )
    _line(f"operators: {_counted(info.operators)}")
    _tensors("Trained parameters", info.parameters)
    _line(f"batch, and parameters that are frozen: {_values(info.inputs)}")
    _end((), info.next)


def _ort_optimizer(info: OrtOptimizerInspection) -> None:
    _head(info.file, f"an optimizer graph of ONNX Runtime: {format_bytes(info.file_bytes)}")
    constants = ", ".join(f"{name} {value:g}" for name, value in info.constants.items())
    _line(f"optimizer: {info.optimizer}; {constants}")
    if info.max_norm is not None:
        _line(f"global-norm clip: max norm {info.max_norm:g}")
    _line(f"inputs: {', '.join(info.inputs)}")
    _end((), info.next)


def _ort_checkpoint(info: OrtCheckpointInspection) -> None:
    _head(info.file, f"a training checkpoint of ONNX Runtime: {format_bytes(info.file_bytes)}, version {info.version}")
    if info.nominal:
        _line("it names tensors without values (nominal)")
    if info.external:
        _line("values are in a file beside it")
    _tensors("Trained parameters", info.trainable)
    if info.frozen:
        _tensors("Frozen parameters", info.frozen)
    for group in info.groups:
        _line(
            f"optimizer group {group.name}: step {group.step}, learning rate {group.learning_rate:g}, {group.states} "
            f"states of each of {group.parameters} parameters, {format_bytes(group.bytes)}"
        )
    if info.properties:
        _line("properties: " + ", ".join(f"{name} = {value}" for name, value in info.properties.items()))
    _end((), info.next)


def _ort_artifacts(info: OrtArtifactsInspection) -> None:
    _head(info.folder, "training artifacts of ONNX Runtime")
    if info.training is not None:
        _ort_training(info.training)
    if info.optimizer is not None:
        _ort_optimizer(info.optimizer)
    if info.checkpoint is not None:
        _ort_checkpoint(info.checkpoint)
    if info.others:
        _line(f"other models: {', '.join(info.others)}")
    if info.step is not None:
        _step(info.step)
    if info.refusal:
        _line(f"not a training step: {info.refusal}", "red")
    _end(info.notes, info.next)


def _rank_file(info: RankFileInspection) -> None:
    _head(info.file, f"rank {info.rank} of mesh {info.mesh}: {format_bytes(info.file_bytes)}")
    count = sum(info.made_by.values())
    _line(f"{info.nodes} nodes, {count} made by passes ({_counted(info.made_by)}): {_counted(info.operators)}")
    _line(f"calls: {_counted(info.calls) or 'none'}")
    stored = format_bytes(sum(info.stored.values()))
    _line(f"inputs: {len(info.inputs)}, {len(info.stored)} of them with a value ({stored}): {_values(info.inputs)}")
    _line(f"outputs: {_values(info.outputs)}")
    _end((), info.next)


def _manifest(info: ManifestInspection) -> None:
    _head(info.file, f"a manifest: mesh {format_axes(info.mesh)}, {info.ranks} ranks, loss {info.loss}")
    if len(info.roles) > 1:
        _line(f"roles: {_counted(info.roles)}")
    _line(f"states of the source: {_counted(info.states)}; batch: {', '.join(info.batch)}")
    _line(f"files of ranks: {info.files}, {info.present} of them beside it")
    _end((), info.next)


def _report(info: ReportInspection) -> None:
    _head(info.file, f"a report: {info.source} on mesh {format_axes(info.mesh)}")
    _line(f"passes: {', '.join(info.passes)}")
    _line(f"{info.removed_ops} nodes removed, {info.added_ops} added, {info.checks} checks")
    _end((), info.next)


def _record(info: RecordInspection) -> None:
    roles = f"{info.trainers} trainers and {info.servers} servers"
    _head(info.file, f"the record of a run: {roles}, {info.steps} steps, data {info.data}")
    _line(f"messages received: {_counted({f'by {name}': count for name, count in info.received.items()})}")
    _line(f"states at the end: {info.states} digests")
    _end((), info.next)


def _checkpoint(info: CheckpointInspection) -> None:
    steps = ", ".join(map(str, info.steps[-MOST:]))
    _head(info.folder, f"{len(info.steps)} checkpoint{'s' * (len(info.steps) != 1)} of gopt: after step {steps}")
    _line(f"step {info.step}: {info.files} files, {format_bytes(info.bytes)}")
    if info.damaged:
        _line(f"DAMAGED: {len(info.damaged)} files are missing or of another size: {listed(info.damaged, FEW)}", "red")
    _end((), *(() if info.damaged else info.next))


def _file_of_values(info: ValuesInspection) -> None:
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in info.dtypes.items())
    what = f"{len(info.tensors)} tensors ({kinds}), {format_bytes(info.bytes)}"
    _head(info.file, f"a {info.kind} file: {what}")
    _tensors("Tensors", info.tensors)
    if info.metadata:
        _line("metadata: " + listed([f"{name} = {value}" for name, value in info.metadata.items()], FEW))
    _end((), info.next)


_RENDERERS: dict[type, Callable[[Any], None]] = {
    Inspection: _step,
    FolderInspection: _folder,
    RoleInspection: _role,
    InferenceInspection: _inference,
    TrainingInfoInspection: _training_info,
    OrtTrainingInspection: _ort_training,
    OrtOptimizerInspection: _ort_optimizer,
    OrtCheckpointInspection: _ort_checkpoint,
    OrtArtifactsInspection: _ort_artifacts,
    RankFileInspection: _rank_file,
    ManifestInspection: _manifest,
    ReportInspection: _report,
    RecordInspection: _record,
    CheckpointInspection: _checkpoint,
    ValuesInspection: _file_of_values,
}


def _head(name: str, rest: str) -> None:
    console().print(Text.assemble((name, "bold"), f"  {rest}"))


def _line(text: str, style: str = "") -> None:
    console().print(Text(text, style))


def _end(notes: Sequence[str], *hints: str) -> None:
    for note in notes:
        _line(f"note: {note}")
    for hint in hints:
        if hint:
            _line(f"next: {hint}")


def _tensors(title: str, values: Sequence[NamedValue]) -> None:
    rows = [(value.name, value.dtype, _shape(value), format_bytes(value.bytes)) for value in values[:MOST]]
    total = format_bytes(sum(value.bytes for value in values))
    console().print(table(f"{title}: {len(values)}, {total}", ("name", "type", "shape", "size"), rows, (3,)))
    print_left(console(), len(values) - MOST)


def _shape(value: NamedValue) -> str:
    return "?" if value.shape is None else ",".join("?" if size is None else str(size) for size in value.shape)


def _values(values: Sequence[NamedValue], most: int = FEW) -> str:
    return listed([f"{value.name} {value.dtype}[{_shape(value)}]" for value in values], most)


def _counted(counts: Mapping[str, int], most: int = FEW) -> str:
    return listed([f"{count} {name}" for name, count in counts.items()], most)
