"""A recipe after an eager step, on its way to a model: traced, with any number of samples, converted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import torch

from gopt.documents.draws import Draw
from gopt.documents.roles import RolesRecord
from gopt.documents.torch_record import KEY
from gopt.errors import GoptError, UnsupportedError
from gopt.frontends.functional_step import LOSS, UPDATED, add_roles
from gopt.frontends.pytorch.autocasts import no_foreign_autocast
from gopt.frontends.pytorch.batch_sizes import join_sizes, pairs_of_sizes
from gopt.frontends.pytorch.branches import PATHS
from gopt.frontends.pytorch.check import FedOptions, compare
from gopt.frontends.pytorch.convert import (
    quiet,
    to_onnx,
    unread_inputs,
    without_inputs,
)
from gopt.frontends.pytorch.eager import EagerTraining
from gopt.frontends.pytorch.eager_code import on_attention_math
from gopt.frontends.pytorch.eager_steps import EagerSteps, eager_steps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.first_steps import first_steps_apart
from gopt.frontends.pytorch.onnx_forms import FormlessError
from gopt.frontends.pytorch.optimizer_runs import LateStates, OptimizerTracing, chooses_lists
from gopt.frontends.pytorch.options import Draws, ExportOptions
from gopt.frontends.pytorch.randomness import DrawnInput, RecordedDraws, named, no_draws_of_python
from gopt.frontends.pytorch.rates import LR
from gopt.frontends.pytorch.reads import line_of
from gopt.frontends.pytorch.samples import Sampled, dimensions, resized, samples_of
from gopt.frontends.pytorch.schedules import in_graph
from gopt.frontends.pytorch.shapes import mode_of, one_step
from gopt.frontends.pytorch.shared_memory import refuse_shared_memory
from gopt.frontends.pytorch.size_branches import SizeUses, inputs_with_samples, refuse_branches
from gopt.frontends.pytorch.states import find_places
from gopt.frontends.pytorch.surroundings import tensors_around
from gopt.frontends.pytorch.tracing import TracedStep, trace
from gopt.frontends.pytorch.value_shapes import EXPERTS
from gopt.ir.graph import Graph
from gopt.text.sanitize import show

_CALLS = (
    "the loss is called as loss(module, batch) where the batch is a dict or one tensor, as loss(module(*inputs), "
    "target) where it is a tuple"
)

OTHER_SIZES = (2, 67)
"""Numbers of samples that a step of any number is compared at, beside the example's."""


@dataclass(slots=True)
class RecordedStep:
    """A recipe after an eager step."""

    recipe: Recipe
    options: ExportOptions
    seen: EagerSteps
    draws: list[DrawnInput]
    scheduled: bool
    notes: list[str]
    parameters: int = 0
    sampled: Sampled = field(default_factory=dict)
    """Inputs with samples, if the number of samples is open."""
    way: OptimizerTracing = field(default_factory=OptimizerTracing)
    _uses: SizeUses | None = None

    def ways(self) -> list[OptimizerTracing]:
        """The ways to trace the optimizers, in order of trial."""
        generator = torch.Generator().manual_seed(self.options.seed)
        with quiet():
            apart = first_steps_apart(self.recipe, self.seen, [draw.values(generator) for draw in self.draws])
        if not any(map(chooses_lists, self.recipe.optimizers)):
            return [OptimizerTracing(apart)]
        # The work on lists may have no branches, where that on single tensors has one for each.
        return [OptimizerTracing(apart, lists, paths) for paths in (1, PATHS) for lists in (False, True)]

    @classmethod
    def of(cls, recipe: Recipe, options: ExportOptions) -> RecordedStep:
        """Run the recipe for a step. Raises InputError for failing eager code, UnsupportedError for code not
        exportable."""
        scheduled, why = in_graph(recipe, options.schedules)
        notes = [f"the schedule is not in the graph ({why})"] if why else []
        notes += [f"the schedule is in the graph: {LR} is its base"] if scheduled else []
        recorded = RecordedDraws(options.seed)

        def run(tried: Recipe, recorded: RecordedDraws) -> None:
            plain = replace(options, loss_scale=None)
            mode = mode_of(tried)
            if mode is not None:
                with on_attention_math(), mode, recorded:
                    one_step(tried, plain)
                return
            with on_attention_math(), recorded:
                EagerTraining(tried, plain).step(recipe.batch)

        try:
            with quiet(), no_draws_of_python(), no_foreign_autocast():
                eager = eager_steps(
                    recipe,
                    lambda tried: run(tried, recorded),
                    lambda tried: run(tried, RecordedDraws(options.seed)),
                )
        except GoptError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the eager step raised {type(error).__name__}: {_line(error)}{line_of(error)}", "--debug shows where",
                *([_CALLS] if recipe.loss is not None else []),
            ) from error  # fmt: skip
        around = {path: tensor for path, tensor in tensors_around(recipe).items() if path in eager.around}
        refuse_shared_memory(find_places(recipe, eager), around)
        return cls(recipe, options, eager, recorded.found, scheduled, notes)

    def converted(self, name: str, advance: Callable[[str], None]) -> tuple[TracedStep, onnx.ModelProto]:
        """The step as a graph, and as a model without values; raises UnsupportedError."""
        if self.options.dynamic is None:
            traced = self.trace()
            advance("converting")
            return traced, self.convert(traced, name)
        return self._at_any_size(name, advance)

    def compare_other_sizes(self, graph: Graph, hyper: FedOptions) -> None:
        """Compare with other numbers of samples, if open: with one sample too, if accepted by eager code."""
        for size in () if self.options.dynamic is None else (1, *OTHER_SIZES):
            try:
                sized = self._with_samples(size)
            except UnsupportedError as error:
                if size > 1:
                    raise
                self.notes.append(f"eager PyTorch takes no batch of one sample: {error.message}")
                continue
            try:
                compare(graph, sized.recipe, self.seen, replace(self.options, check=1), sized.draws, hyper)
            except UnsupportedError as error:
                raise UnsupportedError(f"with a batch of {size}, {error.message}", *error.hints) from error

    def _with_samples(self, size: int) -> RecordedStep:
        step = RecordedStep.of(replace(self.recipe, batch=resized(self.recipe.batch, size, self.sampled)), self.options)
        step.way = self.way
        return step

    def _at_any_size(self, name: str, advance: Callable[[str], None]) -> tuple[TracedStep, onnx.ModelProto]:
        """The step as a model of any number of samples, from models of the first two sizes with equal structure."""
        refusals = []
        if self._uses is None:  # forward and backward are the same in every way
            advance("looking for branches on the number of samples")
            with quiet():
                self._uses = self._uses_of_size()
        uses = self._uses
        for sizes in pairs_of_sizes(dimensions(self.recipe)):
            advance(f"tracing {sizes[0]} and {sizes[1]} samples")
            small, second = map(self._with_samples, sizes)
            _refuse_sized_draws(small.draws, second.draws)
            traced, large_traced = small.trace(), second.trace()
            models = small.convert(traced, name), second.convert(large_traced, name)
            try:
                model = join_sizes(models, sizes)
            except UnsupportedError as error:
                refusals.append(error)
                continue
            self.parameters, self.notes = small.parameters, [*small.notes, self._seen(sizes, uses)]
            return traced, model
        raise refusals[0]

    def _uses_of_size(self) -> SizeUses:
        self.sampled = inputs_with_samples(self.recipe, self.options)
        size = next(pairs_of_sizes(dimensions(self.recipe)))[0]
        compared = (samples_of(self.recipe.batch, self.sampled), *OTHER_SIZES)
        return refuse_branches(self.recipe, self.options, size, self.sampled, compared)

    def _seen(self, sizes: tuple[int, int], uses: SizeUses) -> str:
        """A note on the sizes not compared."""
        samples = samples_of(self.recipe.batch, self.sampled)
        behind = any(mark.axis for mark in self.sampled.values())
        text = "dimension 1 of the batch has the samples, and is open; " if behind else ""
        text += (
            f"traced with {sizes[0]} and {sizes[1]} samples, compared with {samples}, "
            f"{' and '.join(map(str, OTHER_SIZES))}: "
        )
        if uses.assumed:
            text += f"it holds for the sizes at which no error is raised {'; '.join(uses.assumed)}; "
        if uses.failed:
            return f"{text}code that changes at another size is not seen, for torch cannot follow it ({uses.failed})"
        if uses.numbers:
            lines = "; ".join(uses.numbers)
            return (
                f"{text}a branch on the size is not seen behind a number or text of Python that is made of it {lines}"
            )
        return f"{text}no code branches on the size"

    def trace(self) -> TracedStep:
        """The step as a graph; raises UnsupportedError for untraceable code."""
        try:
            return self._traced()
        except LateStates as late:
            self.seen.add_late(self.recipe, late.optimizer, late.spots)
            return self.trace()

    def _traced(self) -> TracedStep:
        cells = find_places(self.recipe, self.seen)
        self.parameters = sum(cell.kind.value == "parameter" for cell in cells)
        try:
            with quiet():
                return trace(self.recipe, self.options, cells, self.seen, self.draws, self.scheduled, self.way)
        except (GoptError, LateStates):
            raise
        except Exception as error:
            if isinstance(error.__cause__, GoptError):
                raise error.__cause__ from None
            if "tracing tensor" in str(error):
                raise UnsupportedError(
                    f"the step reads a value that the graph computes{line_of(error)}",
                    "its value in the traced step would be used in every step; lengths of packed sequences are such",
                ) from error
            raise UnsupportedError(
                f"the step cannot be traced: {type(error).__name__}: {_line(error)}{line_of(error)}",
                "code that looks at the values of tensors (item(), if x > 0) has no graph; --debug shows where",
            ) from error

    def convert(self, traced: TracedStep, name: str) -> onnx.ModelProto:
        """Convert to a model without values; raises UnsupportedError where an operator has no ONNX form."""
        for name, value in traced.arguments.items():
            if value.is_complex():
                raise UnsupportedError(
                    f"{show(name)} is complex, and ONNX Runtime computes no complex numbers",
                    "keep real and imaginary parts in a last dimension (torch.view_as_real), and compute with those",
                )
        try:
            model = to_onnx(traced, name)
        except torch.onnx.OnnxExporterError as error:
            raise no_form(error) from error
        dead = set(unread_inputs(model))
        unread = [name for name in (*traced.batch, *traced.draws, *traced.hyper) if name in dead]
        self.notes += [f"nothing reads {show(name)}: it is left out" for name in unread]
        entries_kept = traced.record.held
        without_inputs(
            model, [*unread, *(name for name in traced.constants if name in dead and name not in entries_kept)]
        )
        self.notes += [
            f"{name} is the rate of group {group} of optimizer {index}, which is no multiple of lr"
            for name, (index, group, option, _) in list(traced.rates.items())[1:]
            if option == LR
        ]
        self.notes += [
            f"gopt run feeds {name} in its first {len(value.table) or value.steps} steps as the scheduler does: {value}"
            for name, value in traced.defaults.items()
            if name not in unread and (value.table or value.steps)
        ]
        self.notes += [f"it holds for the values at which no error is raised {line}" for line in traced.assumed]
        self.notes += [
            f"the code compares {name} with a number: the step holds on the side of {float(traced.hyper[name]):g} alone"
            for name in traced.fixed
        ]
        _add_roles(model, traced, named(self.draws) if self.options.draws is Draws.INPUTS else {})
        return model


def _refuse_sized_draws(one: Sequence[DrawnInput], two: Sequence[DrawnInput]) -> None:
    """Raise UnsupportedError where integers are drawn below a number decided by the number of samples."""
    for name, draw, second_draw in zip(named(one), named(one).values(), named(two).values()):
        if draw != second_draw:
            raise UnsupportedError(
                f"--dynamic batch: {name} is drawn from {draw} or {second_draw}, as the number of samples is",
                "draw torch.rand, and compute the integers from it; torch.randperm holds for any size",
            )


def no_form(error: BaseException) -> UnsupportedError:
    """The refusal of a graph without an ONNX form in torch's exporter."""
    cause = _root(error)
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']*)'", cause)
    operator = str(error) if isinstance(error, FormlessError) else missing and missing[1]
    complexly = " of complex numbers" if "complex-valued" in cause else ""
    return UnsupportedError(
        f"the step has no ONNX form: {f'ONNX has none of {operator}{complexly}' if operator else cause}",
        EXPERTS
        if operator and "grouped_mm" in operator
        else "write it with other operators, or compute it outside of the step; --debug shows where",
    )


def _root(error: BaseException) -> str:
    """The cause of the exporter's error: the last exception in the chain with a message."""
    while error.__cause__ is not None and str(error.__cause__).strip():
        error = error.__cause__
    return _line(error)


def _line(error: BaseException) -> str:
    """The first non-empty line of a message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:400]


def _add_roles(model: onnx.ModelProto, traced: TracedStep, draws: Mapping[str, Draw]) -> None:
    """Write states, batch and draws as metadata, read first by gopt. ``draws``: inputs of random numbers."""
    inputs = {value.name for value in model.graph.input}
    states = {name: f"{name}{UPDATED}" for name in traced.states}
    drawn = {name: draw for name, draw in draws.items() if name in inputs}
    batch = tuple(name for name in (*traced.batch, *drawn) if name in inputs)
    hyper = {name: value for name, value in traced.defaults.items() if name in inputs}
    add_roles(model, RolesRecord(loss=LOSS, states=states, batch=batch, draws=drawn or None, hyper=hyper or None))
    values_known = inputs | {name for node in model.graph.node for name in node.output}
    called = {name: traced.copies.get(value, value) for name, value in (traced.record.inputs or {}).items()}
    returned = [traced.copies.get(name, name) for name in traced.record.outputs]
    record = replace(
        traced.record,
        outputs=tuple(name for name in returned if name in values_known),
        inputs={name: value for name, value in called.items() if value in values_known} or None,
    )
    model.metadata_props.add(key=KEY, value=record.text())
