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
from gopt.spmd.pass_records import format_bytes
from gopt.text.sanitize import listed

from .render import console, print_left, table

FEW = 8
"""Names in a line."""
MOST = 24
"""Rows of a table; --json has them all."""


def render_found(found: Any, path: Path) -> None:
    """Show what describes ``path``."""
    if isinstance(found, SplitInspection):
        from .render_split import render_split

        render_split(found, path, written=False)
        return
    _RENDERERS[type(found)](found)


def _step(found: Inspection) -> None:
    from .render_inspect import render_inspection

    render_inspection(found)


def _folder(found: FolderInspection) -> None:
    from .render_inspect import render_folder

    render_folder(found)


def _role(found: RoleInspection) -> None:
    from .render_split import render_role

    render_role(found)


def _inference(found: InferenceInspection) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in found.opsets.items())
    by = f", made by {found.producer}" if found.producer else ""
    _head(found.file, f"an inference model: {format_bytes(found.file_bytes)}, opset {opsets}{by}")
    weights = found.weights
    kinds = f" ({', '.join(f'{count} {dtype}' for dtype, count in weights.dtypes.items())})" if weights.tensors else ""
    _line(f"{found.nodes} nodes: {_counted(found.operators)}")
    _line(f"weights: {weights.tensors} tensors{kinds}, {weights.elements} elements, {format_bytes(weights.bytes)}")
    _line(f"inputs: {_values(found.inputs)}")
    _line(f"outputs: {_values(found.outputs)}")
    if found.functions:
        _line(f"functions of its own: {listed(found.functions, FEW)}")
    if found.carried:
        _line(f"carried from call to call: {listed([f'{name} -> {new}' for name, new in found.carried.items()], FEW)}")
    _line(f"not a training step: {found.refusal.removeprefix('this is not a training step: ')}")
    _end(found.notes, found.next)


def _training_info(found: TrainingInfoInspection) -> None:
    _head(found.file, f"a model with training_info: {format_bytes(found.file_bytes)}")
    _line(f"inference graph: {found.nodes} nodes, {found.initializers} initializers")
    for number, step in enumerate(found.steps):
        _line(f"step {number}: {step.nodes} nodes: {_counted(step.operators)}")
        updates = [f"{name} <- {value}" for name, value in step.updates.items()]
        _line(f"  replaces {len(updates)} initializers: {listed(updates, FEW)}")
        if step.initialized:
            _line(f"  initializes {len(step.initialized)}: {listed(step.initialized, FEW)}")
        if step.differentiates:
            _line(f"  Gradient with respect to {listed(step.differentiates, FEW)}")
    if not found.refusal:
        _line(f"a training step: {found.parameters} parameters, loss {found.loss}")
    _end(found.notes, found.next)


def _ort_training(found: OrtTrainingInspection) -> None:
    _head(found.file, f"a training graph of ONNX Runtime: {format_bytes(found.file_bytes)}, loss {found.loss}")
    _line(
        f"{found.forward} nodes of the forward, {found.backward} of the backward, {found.accumulators} accumulators of "
        "gradients"
    )
    _line(f"operators: {_counted(found.operators)}")
    _tensors("Trained parameters", found.parameters)
    _line(f"batch, and parameters that are frozen: {_values(found.inputs)}")
    _end((), found.next)


def _ort_optimizer(found: OrtOptimizerInspection) -> None:
    _head(found.file, f"an optimizer graph of ONNX Runtime: {format_bytes(found.file_bytes)}")
    constants = ", ".join(f"{name} {value:g}" for name, value in found.constants.items())
    _line(f"optimizer: {found.optimizer}; {constants}")
    if found.max_norm is not None:
        _line(f"global-norm clip: max norm {found.max_norm:g}")
    _line(f"inputs: {', '.join(found.inputs)}")
    _end((), found.next)


def _ort_checkpoint(found: OrtCheckpointInspection) -> None:
    _head(
        found.file, f"a training checkpoint of ONNX Runtime: {format_bytes(found.file_bytes)}, version {found.version}"
    )
    if found.nominal:
        _line("it names tensors without values (nominal)")
    if found.external:
        _line("values are in a file beside it")
    _tensors("Trained parameters", found.trainable)
    if found.frozen:
        _tensors("Frozen parameters", found.frozen)
    for group in found.groups:
        _line(
            f"optimizer group {group.name}: step {group.step}, learning rate {group.learning_rate:g}, {group.states} "
            f"states of each of {group.parameters} parameters, {format_bytes(group.bytes)}"
        )
    if found.properties:
        _line("properties: " + ", ".join(f"{name} = {value}" for name, value in found.properties.items()))
    _end((), found.next)


def _ort_artifacts(found: OrtArtifactsInspection) -> None:
    _head(found.folder, "training artifacts of ONNX Runtime")
    if found.training is not None:
        _ort_training(found.training)
    if found.optimizer is not None:
        _ort_optimizer(found.optimizer)
    if found.checkpoint is not None:
        _ort_checkpoint(found.checkpoint)
    if found.others:
        _line(f"other models: {', '.join(found.others)}")
    if found.step is not None:
        _step(found.step)
    if found.refusal:
        _line(f"not a training step: {found.refusal}", "red")
    _end(found.notes, found.next)


def _rank_file(found: RankFileInspection) -> None:
    _head(found.file, f"rank {found.rank} of mesh {found.mesh}: {format_bytes(found.file_bytes)}")
    made = sum(found.made_by.values())
    _line(f"{found.nodes} nodes, {made} made by passes ({_counted(found.made_by)}): {_counted(found.operators)}")
    _line(f"calls: {_counted(found.calls) or 'none'}")
    stored = format_bytes(sum(found.stored.values()))
    _line(f"inputs: {len(found.inputs)}, {len(found.stored)} of them with a value ({stored}): {_values(found.inputs)}")
    _line(f"outputs: {_values(found.outputs)}")
    _end((), found.next)


def _manifest(found: ManifestInspection) -> None:
    mesh = ",".join(f"{axis}={size}" for axis, size in found.mesh)
    _head(found.file, f"a manifest: mesh {mesh}, {found.ranks} ranks, loss {found.loss}")
    if len(found.roles) > 1:
        _line(f"roles: {_counted(found.roles)}")
    _line(f"states of the source: {_counted(found.states)}; batch: {', '.join(found.batch)}")
    _line(f"files of ranks: {found.files}, {found.present} of them beside it")
    _end((), found.next)


def _report(found: ReportInspection) -> None:
    mesh = ",".join(f"{axis}={size}" for axis, size in found.mesh)
    _head(found.file, f"a report: {found.source} on mesh {mesh}")
    _line(f"passes: {', '.join(found.passes)}")
    _line(f"{found.removed_ops} nodes removed, {found.added_ops} added, {found.checks} checks")
    _end((), found.next)


def _record(found: RecordInspection) -> None:
    roles = f"{found.trainers} trainers and {found.servers} servers"
    _head(found.file, f"the record of a run: {roles}, {found.steps} steps, data {found.data}")
    _line(f"messages received: {_counted({f'by {name}': count for name, count in found.received.items()})}")
    _line(f"states at the end: {found.states} digests")
    _end((), found.next)


def _checkpoint(found: CheckpointInspection) -> None:
    steps = ", ".join(map(str, found.steps[-MOST:]))
    _head(found.folder, f"{len(found.steps)} checkpoint{'s' * (len(found.steps) != 1)} of gopt: after step {steps}")
    _line(f"step {found.step}: {found.files} files, {format_bytes(found.bytes)}")
    if found.damaged:
        _line(
            f"DAMAGED: {len(found.damaged)} files are missing or of another size: {listed(found.damaged, FEW)}", "red"
        )
    _end((), *(() if found.damaged else found.next))


def _file_of_values(found: ValuesInspection) -> None:
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
    what = f"{len(found.tensors)} tensors ({kinds}), {format_bytes(found.bytes)}"
    _head(found.file, f"a {found.kind} file: {what}")
    _tensors("Tensors", found.tensors)
    if found.metadata:
        _line("metadata: " + listed([f"{name} = {value}" for name, value in found.metadata.items()], FEW))
    _end((), found.next)


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
    rows = [(each.name, each.dtype, _shape(each), format_bytes(each.bytes)) for each in values[:MOST]]
    total = format_bytes(sum(each.bytes for each in values))
    console().print(table(f"{title}: {len(values)}, {total}", ("name", "type", "shape", "size"), rows, (3,)))
    print_left(console(), len(values) - MOST)


def _shape(value: NamedValue) -> str:
    return "?" if value.shape is None else ",".join("?" if size is None else str(size) for size in value.shape)


def _values(values: Sequence[NamedValue], most: int = FEW) -> str:
    return listed([f"{each.name} {each.dtype}[{_shape(each)}]" for each in values], most)


def _counted(counts: Mapping[str, int], most: int = FEW) -> str:
    return listed([f"{count} {name}" for name, count in counts.items()], most)
