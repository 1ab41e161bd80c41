"""Trace eager training code (module, loss, backward, clip, optimizer.step()) into one functional graph.

``make_fx`` runs the code over functional tensors, which turn in-place updates into values. Parameters, changed buffers
and optimizer states are replaced by traced tensors before the run and read back after it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from gopt.documents.default_values import DefaultValue
from gopt.documents.torch_record import NO_RECORD, TorchRecord
from gopt.errors import InputError
from gopt.frontends.functional_step import LOSS, UPDATED
from gopt.frontends.pytorch.branches import Branches
from gopt.frontends.pytorch.choices import with_choices_below
from gopt.frontends.pytorch.copies import copy_tensor_hooks, rebind_hooks, rebound
from gopt.frontends.pytorch.decompositions import table
from gopt.frontends.pytorch.eager import autocast, clip
from gopt.frontends.pytorch.eager_code import readable
from gopt.frontends.pytorch.eager_steps import EagerSteps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.hyper import Hyper, hyper_inputs
from gopt.frontends.pytorch.module_record import SCALE, TRACKER, torch_record
from gopt.frontends.pytorch.optimizer_runs import OptimizerTracing, chooses_lists, run_optimizers, started
from gopt.frontends.pytorch.options import DYNAMIC, ExportOptions
from gopt.frontends.pytorch.outputs import ModuleValues, returned
from gopt.frontends.pytorch.randomness import DrawnInput, ReplayedDraws, draw_names
from gopt.frontends.pytorch.rate_formulas import default_values
from gopt.frontends.pytorch.rates import OptionPlace
from gopt.frontends.pytorch.reads import assumptions, no_reads
from gopt.frontends.pytorch.recurrent import dropout_between_layers
from gopt.frontends.pytorch.schedules import closed_form
from gopt.frontends.pytorch.states import Place, StateForm
from gopt.frontends.pytorch.value_shapes import refuse_shapes_of_values
from gopt.frontends.pytorch.value_trees import fresh
from gopt.text.sanitize import show

EPOCH = "scheduler.step"
FIRST_SCALE, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
"""Defaults of ``torch.amp.GradScaler``."""


@dataclass(slots=True)
class TracedStep:
    """A step as an fx graph ``(*inputs, *states, *constants) -> (loss, *new states, *outputs, *hidden)``.

    ``inputs``: batch, draws and hyper-parameters by name with an example; ``states`` and ``constants``: values before
    the first step.
    """

    graph: torch.fx.GraphModule
    batch: dict[str, torch.Tensor]
    draws: dict[str, torch.Tensor]
    hyper: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor]
    outputs: list[str]
    """Names of what modules return, where that is kept."""
    defaults: dict[str, DefaultValue]
    """Hyper-parameters with what a run feeds where the user sets nothing."""
    rates: dict[str, OptionPlace]
    """Inputs that a schedule may move, such as learning rates, with the options that they are."""
    fixed: list[str]
    """Hyper-parameters that the code compared with a number: the graph follows the branch of their example."""
    assumed: list[str]
    """Lines of code that raises an error for some values."""
    record: TorchRecord = NO_RECORD
    """The names that PyTorch has for states and constants."""
    hidden: list[str] = field(default_factory=list)
    """Names of further results of the graph, values that are no outputs of the step: of what the module returns, and is
    called with."""
    copies: dict[str, str] = field(default_factory=dict)
    """Hidden results that are inputs or outputs of the step, with the names of those."""

    branches: dict[str, str] = field(default_factory=dict)
    """Hidden results that are conditions of branches, with their lines of code."""

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """All inputs of the graph in order."""
        return self.batch | self.draws | self.hyper | self.states | self.constants


def _extra_states(
    options: ExportOptions, cells: Sequence[Place], scheduler: Any, way: OptimizerTracing
) -> dict[str, torch.Tensor]:
    """States of the loss scaler, moving averages, scheduler and first steps, before the first step."""
    values = {started(index): torch.tensor(0) for index in sorted(way.apart)}
    if options.ema is not None:
        values |= {f"ema.{cell.name}": cell.value.clone() for cell in cells if cell.kind is StateForm.PARAMETER}
    if options.loss_scale == DYNAMIC:
        values |= {SCALE: torch.tensor(FIRST_SCALE), TRACKER: torch.tensor(0, dtype=torch.int32)}
    if scheduler is not None:
        values[EPOCH] = torch.tensor(scheduler.last_epoch)
    return values


def trace(
    recipe: Recipe, options: ExportOptions, cells: Sequence[Place], eager: EagerSteps, draws: Sequence[DrawnInput],
    scheduled: bool, way: OptimizerTracing,
) -> TracedStep:  # fmt: skip
    """Trace a step. ``scheduled``: whether the graph computes the scheduler's rate."""
    hyper = hyper_inputs(recipe, options, scheduled, _options_of(cells))
    extra = _extra_states(options, cells, recipe.scheduler if scheduled else None, way)
    generator = torch.Generator().manual_seed(options.seed)
    drawn = dict(zip(draw_names(len(draws)), (draw.values(generator) for draw in draws)))
    carried = [cell for cell in cells if cell.kind is not StateForm.CONSTANT]
    constant = [cell for cell in cells if cell.kind is StateForm.CONSTANT]
    states = {cell.name: cell.value.detach().clone() for cell in carried} | extra
    constants = {cell.name: cell.value.detach().clone() for cell in constant}
    kinds = (recipe.batch, drawn, hyper.values, {cell.name: cell.value for cell in carried}, extra, constants)
    _check_names([name for kind in kinds for name in kind], states)
    arguments = recipe.batch | drawn | hyper.values | states | constants
    names = list(arguments)

    fixed: set[str] = set()
    module_values: list[ModuleValues] = []
    lines: dict[str, str] = {}
    numbers = {name: float(value) for name, value in hyper.values.items()}
    absent = {cell.name for cell in carried if cell.read() is None}

    def run(*flat: Any) -> list[Any]:
        with exportable():
            values = dict(zip(names, (to_fun(value) for value in flat)))
            branches = Branches(way.paths)
            examples = {id(values[name]): (name, number) for name, number in numbers.items()}
            with (
                readable(examples, fixed, recipe.optimizers),
                ReplayedDraws([values[name] for name in drawn], draws) as replayed,
                returned(recipe, options, names) as own_values,
            ):
                with swapped(recipe, [*carried, *constant], values, hyper, scheduled, way):
                    loss, new = _step(
                        recipe, options, [*carried, *constant], eager, way, absent, values, branches, replayed
                    )
                if scheduled:
                    new[EPOCH] = values[EPOCH] + 1
            module_values[:] = [own_values]
            lines.update(
                {f"branch.{number}": branch.line for number, branch in enumerate(branches.conditions.values())}
            )
            outputs = [*(new[name] for name in states), *own_values.outputs.values(), *own_values.hidden.values()]
            outputs += [branch.value for branch in branches.conditions.values()]
            return [from_fun(value.detach()) for value in (loss, *outputs)]

    with assumptions() as assumed:
        graph = graph_of_code(run, arguments, constants, options, eager)
    if lines:
        graph = with_choices_below(graph)
    return TracedStep(
        graph, dict(recipe.batch), drawn, hyper.values, states, constants, list(module_values[0].outputs),
        default_values(recipe, hyper, scheduled, options.schedule_steps), hyper.rates, sorted(fixed), list(assumed),
        replace(
            torch_record(recipe, options, cells, way.apart),
            outputs=tuple(module_values[0].of_module), inputs=module_values[0].arguments or None,
        ),
        [*module_values[0].hidden, *lines], branches=lines,
    )  # fmt: skip


def _options_of(cells: Iterable[Place]) -> set[tuple[int, int, str]]:
    """Options of groups that are states: optimizer, group and option."""
    slots = [(cell.owner, *slot) for cell in cells if cell.owner is not None for slot in cell.slots]
    return {(owner, home, str(keys[0])) for owner, home, keys in slots if isinstance(home, int)}


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Trace operators with an ONNX form alone, on tensors no operator changes in place."""
    with (
        FunctionalTensorMode(), enable_python_dispatcher(), sdpa_kernel(SDPBackend.MATH), dropout_between_layers(),
        torch.backends.mkldnn.flags(enabled=False),  # type: ignore[no-untyped-call]  # its kernels have no ONNX form
    ):  # fmt: skip
        yield


def graph_of_code(
    run: Callable[..., list[Any]], arguments: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor],
    options: ExportOptions, eager: EagerSteps,
) -> torch.fx.GraphModule:  # fmt: skip
    """The graph of code taking the arguments in order; raises UnsupportedError for shapes decided by values."""
    mode: dict[str, Any] = {} if options.values else {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    graph = make_fx(run, decomposition_table=table(), **mode)(*arguments.values())
    refuse_shapes_of_values(graph, [*arguments], constants, eager.selections)
    for node in reversed(graph.graph.nodes):
        if "profiler" in str(node.target):
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return torch.fx.GraphModule(graph, fx_graph_cse(graph.graph))


def _check_names(inputs: Sequence[str], states: Iterable[str]) -> None:
    """Raise InputError for two values of the step with the same name."""
    outputs = [LOSS, *(f"{name}{UPDATED}" for name in states)]
    twice = next((name for name, count in Counter([*inputs, *outputs]).items() if count > 1), None)
    if twice is not None:
        raise InputError(
            f"two values of the step have the name {show(twice)}: one of the module, and an input or output of gopt's",
            "rename it in the module",
        )


def _step(
    recipe: Recipe, options: ExportOptions, cells: Sequence[Place], eager: EagerSteps, way: OptimizerTracing,
    absent: set[str], values: Mapping[str, torch.Tensor], branches: Branches, draws: ReplayedDraws,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """The loss, and the new value of every state, on traced tensors."""
    old = {cell.name: values[cell.name].clone() for cell in cells if cell.owner is not None and options.scales_loss}
    fixed = [values[cell.name] for cell in cells if cell.kind is StateForm.CONSTANT and cell.name in values]
    with autocast(options), no_reads("the step", fixed):
        loss = recipe.loss_of({name: values[name] for name in recipe.batch})
    scale = values.get(SCALE, options.loss_scale)
    with no_reads("the backward of the step"):
        (loss if scale is None else loss * scale).backward()
    overflowed = [] if scale is None else [_unscale(optimizer, scale) for optimizer in recipe.optimizers]
    clip(recipe, options)
    new = run_optimizers(recipe, cells, eager, way, absent, values, branches, draws)
    for state in cells:
        if state.name in old and state.owner is not None:
            new[state.name] = torch.where(overflowed[state.owner], old[state.name].detach(), new[state.name])
    for index in sorted(way.apart):
        count = values[started(index)] + 1
        new[started(index)] = torch.where(overflowed[index], count - 1, count) if overflowed else count
    if options.ema is not None:
        new |= {
            f"ema.{cell.name}": values[f"ema.{cell.name}"] * options.ema + new[cell.name] * (1 - options.ema)
            for cell in cells
            if cell.kind is StateForm.PARAMETER
        }
    if options.loss_scale == DYNAMIC:
        new |= _new_scale(values[SCALE], values[TRACKER], torch.stack(overflowed).any())
    return loss, new


def _unscale(optimizer: torch.optim.Optimizer, scale: Any) -> torch.Tensor:
    """Divide the gradients of an optimizer by the scale; returns whether any is NaN or infinite."""
    inverse = torch.as_tensor(scale, dtype=torch.float32).double().reciprocal().float()
    finite = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                finite.append(torch.isfinite(parameter.grad).all())
                parameter.grad = parameter.grad * inverse
    return ~torch.stack(finite).all()


def _new_scale(scale: torch.Tensor, tracker: torch.Tensor, overflowed: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rule of ``torch._amp_update_scale_``."""
    successes = tracker + 1
    grows = successes == INTERVAL
    raised = torch.where(torch.isfinite(scale * GROWTH), scale * GROWTH, scale)
    return {
        SCALE: torch.where(overflowed, scale * BACKOFF, torch.where(grows, raised, scale)),
        TRACKER: torch.where(overflowed | grows, torch.zeros_like(tracker), successes),
    }


@contextlib.contextmanager
def swapped(
    recipe: Recipe, cells: Sequence[Place], values: Mapping[str, torch.Tensor], hyper: Hyper, scheduled: bool,
    way: OptimizerTracing,
) -> Iterator[None]:  # fmt: skip
    """Replace the tensor of every place by a traced one, and options of groups by inputs; everything is restored at
    the end."""
    settings = {name: values[name] for name in hyper.values}
    rates = closed_form(recipe.scheduler, values[EPOCH], hyper.base_rates(settings)) if scheduled else None
    reads = [cell.read() for cell in cells]
    owners = [*recipe.optimizers, *recipe.whole.modules()]
    attributes = [dict(vars(owner)) for owner in owners]
    optimizers = [
        (optimizer, optimizer.state, [dict(group) for group in optimizer.param_groups])
        for optimizer in recipe.optimizers
    ]
    for optimizer in recipe.optimizers:  # what the trace stores in its containers is not a part of the user's
        attributes_of = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
        vars(optimizer).update({key: fresh(value) for key, value in attributes_of.items()})
    tables = [
        entries
        for one in recipe.optimizers
        for entries in (*(state for state in one.state.values() if isinstance(state, dict)), one.state)
    ]
    entries_of: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(entries, dict(entries)) for entries in tables]
    for entries in (*tables, *(group for one in recipe.optimizers for group in one.param_groups)):
        entries.update({
            key: fresh(value) for key, value in entries.items() if key != "params" and isinstance(key, str)
        })  # fmt: skip
    kinds = [hooks for module in recipe.whole.modules() for key, hooks in vars(module).items() if "hook" in key]
    entries_of += [
        (hooks, dict(hooks)) for hooks in kinds if isinstance(hooks, dict)
    ]  # transformers adds some in a forward
    replaced: dict[int, torch.Tensor] = {}
    for cell in cells:
        value, original = values[cell.name], cell.read()
        if cell.is_scalar:
            value = value.double()
        if cell.kind is StateForm.PARAMETER:
            value = value.requires_grad_(True)
        if cell.kind is not StateForm.OPTIMIZER and original is not None:
            replaced[id(original)] = value
        cell.write(value)
    for cell, original in zip(cells, reads):
        if cell.kind is StateForm.PARAMETER and original is not None:
            copy_tensor_hooks(original, replaced[id(original)], replaced)
    loss = recipe.loss
    recipe.loss = rebound(loss, replaced)
    for owner in owners:
        rebind_hooks(owner, replaced)
    for module in recipe.whole.modules():  # a plain list of parameters
        vars(module).update(
            {key: rebound(parameters, replaced) for key, parameters in vars(module).items() if type(parameters) is list}
        )
    loops = [optimizer for optimizer in recipe.optimizers if not (way.lists and chooses_lists(optimizer))]
    for optimizer in loops:  # third-party ones have it beside the option of groups
        if vars(optimizer).get("foreach", False) is not False:
            vars(optimizer)["foreach"] = False
    for index, (optimizer, state, groups) in enumerate(optimizers):
        swapped_keys = {key: replaced.get(id(key)) if isinstance(key, torch.Tensor) else key for key in state}
        optimizer.state = defaultdict(
            dict, {swapped_keys[key]: inner for key, inner in state.items() if swapped_keys[key] is not None}
        )
        for position, (group, before) in enumerate(zip(optimizer.param_groups, groups)):
            group["params"] = [replaced.get(id(parameter), parameter) for parameter in before["params"]]
            hyper.apply(group, index, position, settings)
            if rates is not None:
                group["lr"] = rates[position]
            if "capturable" in group:  # no branch on the count of steps; Adam has none, and divides by the rate there
                group["capturable"] = not isinstance(optimizer, torch.optim.Adam)
            for fast in ("foreach", "fused") if optimizer in loops else ("fused",):
                if group.get(fast, False) is not False:  # None is a choice of the optimizer's own
                    group[fast] = False  # the same arithmetic, tensor by tensor
    try:
        yield
    finally:
        recipe.loss = loss
        for cell, value in zip(cells, reads):
            cell.write(value)
        for owner, attributes_of in zip(owners, attributes):
            vars(owner).clear()
            vars(owner).update(attributes_of)
        for attributes_of, entries in entries_of:
            attributes_of.clear()
            attributes_of.update(entries)
        for optimizer, state, groups in optimizers:
            optimizer.state = state
            for group, before in zip(optimizer.param_groups, groups):
                group.clear()
                group.update(before)
