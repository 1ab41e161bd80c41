"""The goldens a ``gopt-golden.toml`` asks for, made anew: its cases are command lines."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gopt.errors import OptionError
from gopt.offline.goldens.golden_files import GoldenCase, GoldenCheck, check_goldens, read_cases, update_goldens
from gopt.offline.goldens.golden_text import golden_text
from gopt.options.types import checked
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress

from . import shard, split
from .shard_request import ShardRequest
from .split import SplitRequest

_REFUSED = ("output", "dry_run", "force", "as_json", "explain", "print_after", "print_dir", "auto", "only_ranks")
"""Options that say where and how much to write, or whose result is not a text that stays the same."""


@checked
def golden_update(folder: str | Path, *, advance: ProgressCallback = no_progress) -> list[str]:
    """Write the goldens that ``gopt-golden.toml`` in a folder asks for; returns what changed, a line each.

    All goldens are written in one step, or no golden is. Raises what ``gopt shard`` and ``gopt split`` raise, and
    InputError where the folder has no ``gopt-golden.toml``.

    >>> from pathlib import Path
    >>> case = 'model = "fixtures/mlp_sgd.onnx"\\noptions = ["--ranks", "2"]\\n'
    >>> _ = Path("gopt-golden.toml").write_text(f"[case.two]\\n{case}")
    >>> gopt.golden_update(".")
    ['added golden/two.txt']
    """
    return update_goldens(Path(folder), _texts(Path(folder), advance))


@checked
def golden_check(folder: str | Path, *, advance: ProgressCallback = no_progress) -> GoldenCheck:
    """Compare the goldens of a folder with what gopt makes now; raises as ``golden_update``. Nothing is written.

    >>> from pathlib import Path
    >>> case = 'model = "fixtures/mlp_sgd.onnx"\\noptions = ["--ranks", "2"]\\n'
    >>> _ = Path("gopt-golden.toml").write_text(f"[case.two]\\n{case}")
    >>> gopt.golden_check(".").missing
    ('two.txt',)
    """
    return check_goldens(Path(folder), _texts(Path(folder), advance))


def _texts(folder: Path, advance: ProgressCallback) -> dict[str, str]:
    """Case -> golden. Nothing is written."""
    texts = {}
    with gc_paused():
        cases = read_cases(folder)
        for number, case in enumerate(cases, 1):
            advance("making goldens", number, len(cases))
            texts[case.name] = _text(case)
    return texts


def _text(case: GoldenCase) -> str:
    args = _given(case)
    model = args.pop("model")
    if case.asked.command == "shard":
        request = ShardRequest.of(model, args)
        sharded = request.make(request.load(no_progress), no_progress, prove=True)
        with TemporaryDirectory() as home:  # ranks that differ from the source are no golden
            report = sharded.write(Path(home, "ranks"))
        graphs = {"all ranks": sharded.program.graph}
        return golden_text(case.asked, sharded.source.training, sharded.manifest(), report, graphs, case.keep)
    if args["mode"] == "allreduce":
        raise OptionError("goldens of gopt split need servers", 'use command = "shard" with --mesh dp=T --stage 0')
    parted = SplitRequest.of(model, args)
    divided = parted.split_step(parted.load(no_progress), no_progress)
    step = divided.step
    graphs = {"trainers": step.trainer.graph, "servers": step.servers.graph}
    if step.sync is not None:
        graphs["sync of trainers"] = step.sync.graph
    return golden_text(case.asked, divided.source.training, divided.manifest(), divided.report(), graphs, case.keep)


def _given(case: GoldenCase) -> dict[str, Any]:
    """The options of a case, parsed as by its command. Raises OptionError for options without use for a golden."""
    of = {"shard": shard.command, "split": split.command}[case.asked.command]
    context = of.make_context(case.asked.command, [str(case.model), *case.asked.options])
    for name in _REFUSED:
        if context.params.get(name):
            option = name.replace("_", "-").replace("as-", "")
            raise OptionError(f"case {case.name}: --{option} has no effect on a golden", "leave it out")
    return dict(context.params)
