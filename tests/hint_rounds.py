"""Follows the hints of refusals: what each says is done to the step or told to gopt, and must change what gopt says."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
from onnx import ModelProto, numpy_helper

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import GoptError, InvariantError

_WORD = r"(?:'[^']*'|[^\s,;]+(?:,[^\s,;]+)*)"
_OPTION = re.compile(rf"--(states|batch|params|loss|statistics) ({_WORD})")
_LEAVE = re.compile(r"\bleave (?!it\b|the\b|its\b|out\b)(\S+(?:, \S+)*) out of the step")
_OWN = re.compile(r"\bgopt\.(?!toml\b)[a-z_]+\.")
PLACEHOLDERS = frozenset({"INPUT", "OUTPUT", "VALUE", "PARAMETER"})


NOTHING = RoleMap()


@dataclass(frozen=True)
class Step:
    """A model, and what gopt is told of it."""

    model: ModelProto
    roles: RoleMap = NOTHING
    mesh: str = ""

    def refusal(self, folder: Path) -> GoptError | None:
        """The refusal of ``gopt.load``, and of ``gopt.shard`` where a mesh is given; None where they take the step."""
        path = folder / "step.onnx"
        path.write_bytes(self.model.SerializeToString())
        try:
            source = gopt.load(path, roles=self.roles)
            if self.mesh:
                gopt.shard(source, self.mesh)
        except InvariantError:
            raise
        except GoptError as error:
            return error
        return None


def ways(step: Step, error: GoptError) -> Iterator[Step]:
    """The step as each way in a hint has it; all pairs of the hints that continue one another are one way."""
    pairs: dict[str, str] = {}
    for hint in error.hints:
        if hint.startswith("behind that stands"):  # what follows is to be said beside the pairs
            step = _told(step, "states", ",".join(f"{old}={new}" for old, new in pairs.items()))
        if hint.startswith(("name the pair", "and --states")):
            for option, value in _options(hint):
                assert option == "states", hint
                pairs |= dict(each.split("=") for each in value.split(","))
            continue
        if "gopt.toml" in hint:
            before, _, line = hint.partition("]: ")
            table = tomllib.loads(line)
            if table.get("params"):
                continue  # as the option beside it says
            table = table["states"] if before.endswith("[roles") else table
            if hint.startswith("or in"):
                assert table == pairs or (before.endswith("[roles.states") and table.items() <= pairs.items()), hint
            else:
                pairs |= table
            continue
        options = list(_options(hint))
        if [option for option, _ in options] == ["batch", "states"]:  # to be said together
            yield functools.reduce(lambda told, each: _told(told, *each), options, step)
            continue
        yield from (_told(step, option, value) for option, value in options)
        for found in _LEAVE.finditer(hint):
            yield replace(step, model=without(step.model, found[1].split(", ")))
    if pairs:
        yield _told(step, "states", ",".join(f"{old}={new}" for old, new in pairs.items()))


def _options(hint: str) -> Iterator[tuple[str, str]]:
    for found in _OPTION.finditer(hint):
        (value,) = shlex.split(found[2])
        value = value.removesuffix(":")
        if PLACEHOLDERS.isdisjoint(re.split("[,=]", value)):
            yield found[1], value


def _told(step: Step, option: str, value: str) -> Step:
    roles = step.roles
    if option == "loss":
        return replace(step, roles=replace(roles, loss=value))
    if option == "batch":
        return replace(step, roles=replace(roles, batch=(*roles.batch, *value.split(","))))
    table = dict(each.partition("=")[::2] for each in value.split(","))
    if option in ("params", "statistics"):
        return replace(step, roles=replace(roles, **{option: {**getattr(roles, option), **table}}))
    return replace(step, roles=replace(roles, states={**roles.states, **table}))


def without(model: ModelProto, outputs: list[str]) -> ModelProto:
    """The model without some of its outputs."""
    copy = ModelProto()
    copy.CopyFrom(model)
    kept = [each for each in copy.graph.output if each.name not in outputs]
    assert len(kept) < len(copy.graph.output), outputs
    del copy.graph.output[:]
    copy.graph.output.extend(kept)
    return copy


def faults(step: Step, folder: Path) -> list[str]:
    """What is wrong with the hints of a refusal of the step: one that changes nothing, a second round of pairs, a name
    of gopt's own, a list of one candidate. Nothing where the step is taken."""
    error = step.refusal(folder)
    if error is None:
        return []
    said = " | ".join((error.message, *error.hints))
    found = []
    if _OWN.search(said):
        found.append(f"a name of gopt's own: {said}")
    if re.search(r"any of '[^']*': ", said):
        found.append(f"one candidate: {said}")
    for way in ways(step, error):
        after = way.refusal(folder)
        if after is None:
            continue
        if after.message == error.message:
            found.append(f"a hint changes nothing: {said} ({way.roles})")
        beside = way.roles.params == step.roles.params  # else another refusal stands between the rounds
        if beside and way.roles.states.keys() - step.roles.states and "--states" in " ".join(after.hints):
            found.append(f"a second round of pairs: {said} || {after.message} | {after.hints}")
    return found


def rounds(step: Step, meant: Mapping[str, str], folder: Path) -> int:
    """How often gopt refuses a step to one who knows it: each time all pairs that a refusal names are told as they are
    meant, and the outputs left out that it names and that replace nothing."""
    count = 0
    while (error := step.refusal(folder)) is not None:
        count += 1
        said = set(re.split(r"[^\w.]+", " ".join((error.message, *error.hints))))
        told = {old: new for old, new in meant.items() if said & {old, new}}
        outputs = {each.name for each in step.model.graph.output}
        shown = [name for name in outputs - set(meant.values()) if name in said and name != "loss"]
        if told.items() <= step.roles.states.items() and not shown:
            return count  # a final refusal
        roles = replace(step.roles, states={**step.roles.states, **told})
        step = Step(without(step.model, shown) if shown else step.model, roles)
    return count


def scrambled(model: ModelProto, draw: Random) -> ModelProto:
    """The model with names of outputs that say nothing, without some outputs or stored values, or with others."""
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    if draw.random() < 0.6:
        names = {output.name: f"o{place}" for place, output in enumerate(graph.output)}
        for node in graph.node:
            for values in (node.input, node.output):
                values[:] = [names.get(name, name) for name in values]
        for info in (*graph.output, *graph.value_info):
            info.name = names.get(info.name, info.name)
    if draw.random() < 0.5:
        inputs = {each.name for each in graph.input}
        share = draw.choice([0.1, 0.3, 1.0])
        kept = [each for each in graph.initializer if each.name not in inputs or draw.random() > share]
        del graph.initializer[:]
        graph.initializer.extend(kept)
    if draw.random() < 0.3:
        held = {each.name for each in graph.initializer}
        for info in graph.input:
            type = info.type.tensor_type
            if info.name not in held and draw.random() < 0.3 and type.elem_type == 1 and not type.shape.dim:
                graph.initializer.append(numpy_helper.from_array(np.float32(0.1), info.name))
    if draw.random() < 0.3 and len(graph.output) > 2:
        del graph.output[draw.randrange(1, len(graph.output))]
    return copy
