"""Golden cases: a file that holds a small step as text, a pipeline, and what its last pass must make of it.

    title = "what the case shows"          a header in TOML, the fields of ``Header``
    pipeline = "hoist-casts,shard{stage=1}"

    === source                             text of onnx.parser; ``OPSETS`` stands before it unless it has its own
    === after                              the graph and the states behind the pass, or
    === diff                               how they differ from those before it, or
    === nothing to do                      the pass left both as they were: its note, or
    === refused                            the exit code, the message, the hints
    === facts                              what the pass reports, where it reports something

All from the section behind the source is written by the tests themselves, see ``docs/adding-a-pass.md``.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx.parser

from gopt import api
from gopt.errors import GoptError
from gopt.offline.text import canonical_text, ref, sharding_notes
from gopt.passes.pipeline import build_pipeline, parse_pipeline
from gopt.passes.preflight import check_passes
from gopt.records.mesh import Mesh
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import Accumulator, BucketSlice, ShardedState, SpmdProgram

HOME = Path(__file__).parent
OPSETS = '<ir_version: 10, opset_import: ["" : 20]>\n'
AFTER, DIFF, NOTHING, REFUSED = "after", "diff", "nothing to do", "refused"
WIDTH = 100
"""A fact is written on one line up to here."""
_SECTION = re.compile(r"^=== (.*)\n", re.M)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a case asks for. ``show``: the whole text behind the last pass, or the ``diff`` to that before it.
    ``complete``: the pipeline is refused where it lacks a pass, as on the command line; else it may end anywhere."""

    title: str
    pipeline: str
    mesh: str = "shard=2"
    accumulate: int = 1
    show: str = DIFF
    complete: bool = False


@dataclass(frozen=True)
class Case:
    """A file: ``given`` is its text down to the end of the source, ``expected`` the rest."""

    header: Header
    source: str
    given: str
    expected: str


@dataclass(frozen=True)
class Ran:
    """The texts before and behind the last pass, and what it says."""

    before: str
    after: str
    result: PassResult


def paths() -> list[Path]:
    """The files of all cases."""
    return sorted(HOME.glob("*/*.txt"))


def read(path: Path) -> Case:
    """The case in a file."""
    text = path.read_text(encoding="utf-8")
    first, *later = _SECTION.finditer(text)
    assert first[1] == "source", f"{path}: the first section is {first[1]!r}, not the source"
    end = later[0].start() if later else len(text)
    header = Header(**tomllib.loads(text[: first.start()]))
    return Case(header, text[first.end() : end], text[:end].rstrip() + "\n\n", text[end:])


def outcome(case: Case, folder: Path) -> str:
    """What the last pass makes of a case's source, as the sections that its file must end with."""
    try:
        ran = _run(case, folder)
    except GoptError as error:
        lines = [f"exit {error.exit_code}", error.message, *(f"hint: {hint}" for hint in error.hints)]
        return _section(REFUSED, "\n".join(lines))
    if ran.before == ran.after:
        text = _section(NOTHING, ran.result.note or "(no note)")
    elif case.header.show == DIFF:
        text = _section(DIFF, "\n".join(_diff(ran)))
    else:
        text = _section(AFTER, ran.after)
    facts = dict(ran.result.figures) | _removed(ran.result)
    facts |= {"note": ran.result.note} if ran.result.note and ran.before != ran.after else {}
    return text + ("\n" + _section("facts", "\n".join(_facts(facts))) if facts else "")


def check(path: Path, folder: Path) -> None:
    """Fail unless a file is what its case gives."""
    case = read(path)
    assert case.given + case.expected == case.given + outcome(case, folder)


def write(path: Path, folder: Path) -> None:
    """Bring a file's expectation up to date."""
    case = read(path)
    path.write_text(case.given + outcome(case, folder), encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f"=== {title}\n{body.rstrip()}\n"


def _run(case: Case, folder: Path) -> Ran:
    """Raises GoptError, as ``gopt shard`` would end."""
    mesh = Mesh.parse(case.header.mesh)
    program = SpmdProgram.start(api.on_mesh(_load(case.source, folder), mesh), mesh, case.header.accumulate)
    texts = [_text(program)]
    pipeline = build_pipeline(
        parse_pipeline(case.header.pipeline),
        verify_each=True,
        after_each=lambda _, program: texts.append(_text(program)),
    )
    if case.header.complete:
        check_passes(program, [stage.spec.name for stage in pipeline.stages])
    ran = pipeline.run(program)
    return Ran(texts[-2], texts[-1], ran[-1].result)


def _load(source: str, folder: Path) -> api.Source:
    text = source.strip()
    model = onnx.parser.parse_model(text if text.startswith("<") else OPSETS + text)
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    return api.load(path)


# --- what ranks hold ------------------------------------------------------------------------------------------------


def _text(program: SpmdProgram) -> str:
    """The canonical text, and what it leaves out: how the ranks hold the states."""
    lines = ["", "states", *(_state(state, state.input in program.host.states) for state in program.states)]
    if program.host.activations:
        lines += ["", "on the host in between", *(f"  {ref(name)}" for name in program.host.activations)]
    if program.stages is not None:
        lines += ["", "stages", *(f"  {ref(name)} on {stage}" for name, stage in sorted(program.stages.states.items()))]
    if program.accumulators:
        lines += ["", "accumulators", *map(_accumulator, program.accumulators)]
    if program.loop_carried:
        lines += [
            "",
            "carried",
            *(f"  {ref(name)} is {ref(program.loop_carried[name])}" for name in sorted(program.loop_carried)),
        ]
    return canonical_text(program.graph) + "\n".join(lines) + "\n"


def _state(held: ShardedState, host: bool) -> str:
    parts = ", ".join(_part(held, part) for part in held.slices)
    notes = [*sharding_notes(held.sharding), *(["copy"] if held.copy else []), *(["local"] if held.local else [])]
    notes += ["on the host"] if host else []
    return f"  {ref(held.input)} -> {ref(held.output)} : {held.dtype}, {parts}{_noted(notes)}"


def _part(held: ShardedState, part: BucketSlice) -> str:
    if held.sharding.flat is None:
        return f"all of {ref(part.tensor)}"
    return f"{ref(part.tensor)} at {part.offset}"


def _accumulator(held: Accumulator) -> str:
    notes = [*sharding_notes(held.sharding), *(["reduced"] if held.reduced else [])]
    sums = f"{ref(held.input)} + gradient = {ref(held.added)}, zeroed as {ref(held.output)}"
    return f"  {sums} : {held.type}{_noted(notes)}"


def _noted(notes: list[str]) -> str:
    return f"  ; {', '.join(notes)}" if notes else ""


# --- what changed ---------------------------------------------------------------------------------------------------


def _diff(ran: Ran) -> Iterator[str]:
    """A unified diff without line numbers, which would change with every line above."""
    lines = difflib.unified_diff(ran.before.splitlines(), ran.after.splitlines(), n=1, lineterm="")
    for line in list(lines)[2:]:
        yield "@@" if line.startswith("@@") else line.rstrip()


def _removed(result: PassResult) -> dict[str, dict[str, list[str]]]:
    """The removed nodes by reason."""
    reasons: dict[str, list[str]] = {}
    for removal in result.removed:
        reasons.setdefault(removal.why, []).extend(node.first_output for node in removal.sources)
    return {"removed": {why: sorted(labels) for why, labels in reasons.items()}} if reasons else {}


def _facts(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key in sorted(facts):
        value, short = facts[key], _json(facts[key])
        if len(short) <= WIDTH or not isinstance(value, (dict, list)):
            yield f"{indent}{key}: {short}"
            continue
        yield f"{indent}{key}:"
        if isinstance(value, dict):
            yield from _facts(value, indent + "  ")
        else:
            yield from (f"{indent}  - {_json(each)}" for each in value)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
