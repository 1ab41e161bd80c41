"""Run the passes: plan first, then pass by pass, each checked and recorded. A pipeline is data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gopt.errors import InvariantError, OptionError
from gopt.ir.def_use_check import check_graph
from gopt.passes import DEFAULT, find
from gopt.passes.base import Pass, build_options, show_options
from gopt.records.mesh import Mesh
from gopt.records.pass_facts import PassRecord
from gopt.spmd.bucket_order import check_bucket_order
from gopt.spmd.kept_nodes import check_kept_nodes
from gopt.spmd.pass_records import PassRun
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import infer_shardings
from gopt.system.progress import ProgressCallback, no_progress

_ITEM = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(?:\{([^{}]*)\})?\s*(,|$)")


@dataclass(frozen=True, slots=True)
class PassInstance:
    """One pass of a pipeline with settled options."""

    spec: Pass
    options: Any

    def has_use(self, mesh: Mesh) -> bool:
        """Return whether the mesh has the axis of the pass; raises OptionError for options of a pass without one."""
        axis = self.spec.axis
        if not axis or mesh.along(axis) > 1:
            return True
        if self.options != self.spec.options():
            raise OptionError(
                f"options are given for pass {self.spec.name}, and the mesh {mesh} has no axis {axis}",
                f"add {axis}=2 to --mesh, or leave its options out",
            )
        return False


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in order. Validated on construction, before any work."""

    stages: tuple[PassInstance, ...]
    verify_each: bool = False
    after_each: Callable[[str, SpmdProgram], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        names = [stage.spec.name for stage in self.stages]
        for position, stage in enumerate(self.stages):
            late = [name for name in stage.spec.after if name in names[position + 1 :]]
            if late:
                raise OptionError(
                    f"pass {stage.spec.name} cannot run before {late[0]}", f"put {late[0]} in front of it"
                )
            if names.index(stage.spec.name) != position:
                raise OptionError(f"pass {stage.spec.name} is in the pipeline twice", "name it once")

    def run(self, program: SpmdProgram, advance: ProgressCallback = no_progress) -> list[PassRun]:
        """Apply every pass to a program and its variants in place; the graphs are checked after each."""
        stages = [stage for stage in self.stages if stage.has_use(program.mesh)]
        for number, stage in enumerate(stages, 1):
            name = stage.spec.name
            advance(f"pass {name}", number, len(stages))
            pending = list(program.others)  # those that the pass itself makes are done
            try:
                result = stage.spec.apply(program, stage.options)
                for unfinished in pending:
                    stage.spec.apply(unfinished, stage.options)
                for variant in program.variants:
                    if self.verify_each or stage is stages[-1]:
                        check_graph(variant.graph)
                    if self.verify_each:
                        infer_shardings(variant)
                        check_bucket_order(variant)
                        check_kept_nodes(variant)
            except InvariantError as error:
                before = ", ".join(program.applied) or "none"
                raise InvariantError(f"pass {name}: {error.message}", f"passes already run: {before}") from error
            record = PassRecord(name, show_options(stage.options), result.figures, result.note)
            program.passes.append(PassRun(record, result))
            if self.after_each is not None:
                self.after_each(name, program)
        return program.passes


def parse_pipeline(text: str) -> list[tuple[str, dict[str, str]]]:
    """``"shard{stage=1,bucket-mb=4},statistics"`` -> names with options as text."""
    items: list[tuple[str, dict[str, str]]] = []
    position = 0
    while position < len(text):
        match = _ITEM.match(text, position)
        if match is None:
            raise OptionError(
                f"cannot read the pipeline at {text[position : position + 20]!r}", "write it as PASS{option=value},PASS"
            )
        options, key = dict[str, str](), ""
        for part in filter(None, (part.strip() for part in (match[2] or "").split(","))):
            option, equals, value = part.partition("=")
            if equals:
                key = option.strip()
                options[key] = value.strip()
            elif key:  # a list, such as what=states,activations
                options[key] += f",{part}"
            else:
                raise OptionError(f"cannot read {part!r} in the options of {match[1]}", "write option=value")
        items.append((match[1], options))
        position = match.end()
    if not items:
        raise OptionError("the pipeline is empty", "see gopt passes")
    return items


def build_pipeline(
    items: Sequence[tuple[str, Mapping[str, Any]]] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    verify_each: bool = False,
    after_each: Callable[[str, SpmdProgram], None] | None = None,
) -> Pipeline:
    """A pipeline from names and options; ``defaults`` holds option values by pass, overridden by ``items``.

    A default for a pass outside the pipeline is refused: no option is dropped silently."""
    chosen = [(name, {}) for name in DEFAULT] if items is None else list(items)
    defaults = dict(defaults or {})
    stages = []
    for name, texts in chosen:
        spec = find(name)
        stages.append(PassInstance(spec, build_options(spec, {**defaults.pop(name, {}), **texts})))
    for name, unused in defaults.items():
        find(name)
        if unused:
            raise OptionError(
                f"options are given for pass {name}, which is not in the pipeline: {', '.join(unused)}",
                "add the pass to --pipeline, or leave its options out",
            )
    return Pipeline(tuple(stages), verify_each, after_each)
