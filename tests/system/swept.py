"""Commands that write, small enough to be swept at every point."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import every
import numpy as np
import onnx
from gopt.cli.main import main
from recipes import Recipe, build
from sweep import Case

import gopt
import gopt.offline.merge as merging
import gopt.runtime.training.checkpoint_folder as home

LIMIT = 16
"""Bytes beyond which values lie in a file of their own: the steps here are tiny."""
merging.EMBED = merging.INLINE = home.INLINE = LIMIT
home.new_identity = lambda: "0" * 32
_STEP = Recipe(widths=(3, 4, 2), direction=("momentum",), frozen=0, lr_input=True)
_RUN = [
    "run",
    "in.ranks",
    "--data",
    "data.npz",
    "--set",
    "lr=0.01",
    "--checkpoint",
    "ck",
    "--keep",
    "1",
    "--every",
    "1",
]
_CUT = ["--mesh", "pp=2", "--micro-batches", "2"]
_BEST = ["--eval", "e.onnx", "--eval-data", "data.npz", "--eval-every", "1", "--keep-best", "loss"]


def _do(*command: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        if code := main(list(command)):
            raise RuntimeError(f"{command}: {code}: {said.getvalue()}")


def warm() -> None:
    """Import all that the commands import, once for all forks; not what compiles, it is slow."""
    sys.modules["llvmlite"] = None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as text:
        _old_model(Path(text))
        _do("reshard", str(Path(text, "in.ranks")), "--ranks", "1", "-o", str(Path(text, "out")))
    for name in ("gopt.cli.run", "gopt.cli.run_report", "gopt.cli.render_run", "gopt.runtime.engines.mpi",
                 "gopt.runtime.engines.launch", "gopt.runtime.training.stop_signal", "rich.live", "rich.progress",
                 "rich.ansi", "onnxruntime", *(["torch.export", "torch.onnx"] if TORCH else ())):  # fmt: skip
        import_module(name)
    gc.collect()
    gc.freeze()


def _step(folder: Path) -> None:
    (folder / "step.onnx").write_bytes(build(_STEP).SerializeToString(deterministic=True))


def _beside(folder: Path) -> None:
    """A step, and names of other people's files that look like drafts of the output."""
    _step(folder)
    for name in ("out.new", ".out.gopt", ".out.gopt-0123456789abcde.new", ".out.gopt-new"):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    (folder / ".out.gopt-0123456789abcdef").write_text("mine")


def _ranks(folder: Path) -> None:
    _step(folder)
    _do("shard", str(folder / "step.onnx"), "--ranks", "2", "-o", str(folder / "in.ranks"))
    (folder / "step.onnx").unlink()


def _stages(folder: Path) -> None:
    """Ranks that are pipeline stages, and samples for them."""
    _step(folder)
    _do("shard", str(folder / "step.onnx"), *_CUT, "-o", str(folder / "in.ranks"))
    (folder / "step.onnx").unlink()
    _samples(folder)


def _old_folder(folder: Path, make: str) -> None:
    {"shard": _step, "split": _step, "reshard": _ranks}[make](folder)
    source = folder / "step.onnx"
    source.write_bytes(build(_STEP).SerializeToString(deterministic=True))
    if make == "split":
        _do("split", str(source), "--trainers", "2", "--servers", "3", "-o", str(folder / "out"))
    else:
        _do("shard", str(source), "--ranks", "3", "--stage", "1", "-o", str(folder / "out"))
    if make == "reshard":
        source.unlink()


def _old_model(folder: Path) -> None:
    """An older pair under the name: the same step with other values."""
    _ranks(folder)
    stored = folder / "in.ranks" / "states.bin"
    kept = stored.read_bytes()
    stored.write_bytes((np.frombuffer(kept, "<f4") + 1).astype("<f4").tobytes())
    _do("merge", str(folder / "in.ranks"), "-o", str(folder / "m.onnx"), "--unchecked")
    stored.write_bytes(kept)


def _goldens(folder: Path) -> None:
    """An older set: one golden changes, one comes, one goes."""
    (folder / "g").mkdir()
    _step(folder / "g")
    case = '[case.{}]\nmodel = "step.onnx"\noptions = ["--ranks", "{}"]\n'
    for cases in ((("a", 2), ("c", 2)), (("a", 3), ("b", 2))):
        (folder / "g" / "gopt-golden.toml").write_text("".join(case.format(*each) for each in cases))
        if cases[1][0] == "c":
            _do("golden", "update", str(folder / "g"))


def _state(folder: Path) -> None:
    """A step, other values for its states, and an older model and an older state dict under the names."""
    _ranks(folder)
    _step(folder)
    model = onnx.load(folder / "step.onnx")
    states = {each.tensor for each in gopt.load(folder / "step.onnx").training.states}
    values = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer if each.name in states}
    np.savez(folder / "w.npz", **{name: value * 2 for name, value in values.items()})
    _do("load-state", str(folder / "step.onnx"), str(folder / "w.npz"), "-o", str(folder / "x.onnx"))
    _do("shard", str(folder / "x.onnx"), "--ranks", "2", "-o", str(folder / "x.ranks"))
    _do("merge", str(folder / "x.ranks"), "--state-dict", str(folder / "v.safetensors"))
    _do("merge", str(folder / "in.ranks"), "-o", str(folder / "m.onnx"))


def _edited(folder: Path) -> None:
    """Ranks whose stored values are others than the manifest says."""
    _ranks(folder)
    stored = folder / "in.ranks" / "states.bin"
    stored.write_bytes((np.frombuffer(stored.read_bytes(), "<f4") + 1).astype("<f4").tobytes())


def _page(folder: Path) -> None:
    """An older page: of other ranks."""
    _ranks(folder)
    _do("report", str(folder / "in.ranks"), "--html", str(folder / "p.html"))
    page = folder / "p.html"
    page.write_text(page.read_text(encoding="utf-8").replace("in.ranks", "of.ranks"), encoding="utf-8")


def _failing(folder: Path) -> None:
    """A step, and an older reproducer of another failure under the name."""
    _step(folder)
    old = ["shard", str(folder / "step.onnx"), "--mesh", "ep=2", "--reproducer", str(folder / "f.zip")]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(old) == 4


def _small(folder: Path) -> None:
    """A model, and a program that takes none; an older result under the name."""
    _step(folder)
    (folder / "m.onnx").write_bytes((folder / "step.onnx").read_bytes() + b"\x12\x00")


def _module(folder: Path) -> None:
    """What is exported, and an older export under one of the names."""
    (folder / "model.py").write_text(every.MODEL)
    (folder / "m.onnx").write_bytes(build(_STEP).SerializeToString(deterministic=True))


def _data(folder: Path) -> None:
    _ranks(folder)
    _samples(folder)


def _samples(folder: Path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((64, 3)).astype("f4"), generator.standard_normal((64, 2)).astype("f4")
    np.savez(folder / "data.npz", x=x, y=y)


def _checkpoints(folder: Path) -> None:
    """Two steps done; what they have in common is of another build of gopt, so that it is written anew."""
    _data(folder)
    given = [part if part not in ("in.ranks", "data.npz", "ck") else str(folder / part) for part in _RUN]
    _do(*given, "--steps", "2")
    home = folder / "ck"
    (home / "report.json").write_text('{"format": "gopt-report/1"}')
    (home / "source.onnx").write_bytes((home / "source.onnx").read_bytes() + b"\x12\x00")
    next(home.glob("source.*.bin")).rename(home / "source.bin")
    _do("seal", str(home))


def _best(folder: Path) -> None:
    """Two steps done, and the best of them."""
    _data(folder)
    _step(folder)
    _do("merge", str(folder / "step.onnx"), "--inference", "--output", "loss", "-o", str(folder / "e.onnx"))
    (folder / "step.onnx").unlink()
    paths = ("in.ranks", "data.npz", "ck", "e.onnx")
    _do(*(str(folder / part) if part in paths else part for part in (*_RUN, *_BEST)), "--steps", "2")


_CASES = (
    Case("shard", _step, ["shard", "step.onnx", "--ranks", "2", "-o", "out"], r"out(/|$)"),
    Case("shard-jobs", lambda folder: _old_folder(folder, "shard"),
         ["shard", "step.onnx", "--ranks", "2", "-o", "out", "--force", "--jobs", "3"], r"out(/|$)"),
    Case("shard-jobs-new", _beside, ["shard", "step.onnx", "--ranks", "4", "-o", "out", "--jobs", "2", "--stage", "3"],
         r"out(/|$)"),
    Case("shard-jobs-plain", lambda folder: _old_folder(folder, "shard"),
         ["shard", "step.onnx", "--ranks", "2", "-o", "out", "--force", "--jobs", "2"], r"out(/|$)", exchange=False),
    Case("split-jobs", lambda folder: _old_folder(folder, "split"),
         ["split", "step.onnx", "--trainers", "1", "--servers", "2", "--minimum", "2", "-o", "out", "--force",
          "--jobs", "3"], r"out(/|$)"),
    Case("shard-force", lambda folder: _old_folder(folder, "shard"),
         ["shard", "step.onnx", "--ranks", "2", "-o", "out", "--force"], r"out(/|$)"),
    Case("split-force", lambda folder: _old_folder(folder, "split"),
         ["split", "step.onnx", "--trainers", "1", "--servers", "2", "--minimum", "2", "-o", "out", "--force"],
         r"out(/|$)"),
    Case("golden", _goldens, ["golden", "update", "g"], r"g/golden(/|$)"),
    Case("merge", _ranks, ["merge", "in.ranks", "-o", "m.onnx"], r"m\.onnx"),
    Case("merge-force", _old_model, ["merge", "in.ranks", "-o", "m.onnx", "--force"], r"m\.onnx"),
    Case("reshard", _ranks, ["reshard", "in.ranks", "--ranks", "3", "-o", "out"], r"out(/|$)"),
    Case("reshard-force", lambda folder: _old_folder(folder, "reshard"),
         ["reshard", "in.ranks", "--ranks", "2", "-o", "out", "--force"], r"out(/|$)"),
    Case("run", _data, [*_RUN, "--steps", "1"], r"ck(/|$)", [*_RUN, "--steps", "1", "--resume"], added=True),
    Case("shard-stages", lambda folder: _old_folder(folder, "shard"),
         ["shard", "step.onnx", *_CUT, "-o", "out", "--force"], r"out(/|$)"),
    Case("reshard-stages", _stages, ["reshard", "in.ranks", "--ranks", "3", "-o", "out"], r"out(/|$)"),
    Case("merge-stages", _stages, ["merge", "in.ranks", "-o", "m.onnx"], r"m\.onnx"),
    Case("run-stages", _stages, [*_RUN, "--steps", "1"], r"ck(/|$)", [*_RUN, "--steps", "1", "--resume"], added=True),
    Case("resume", _checkpoints, [*_RUN, "--steps", "4", "--resume"], r"ck(/|$)", added=True),
    Case("best", _best, [*_RUN, *_BEST, "--steps", "4", "--resume"], r"ck(/|$)", added=True),
    Case("load-state", _state, ["load-state", "step.onnx", "w.npz", "-o", "n.onnx"], r"n\.onnx"),
    Case("load-state-force", _state, ["load-state", "step.onnx", "w.npz", "-o", "m.onnx", "--force"], r"m\.onnx"),
    Case("state-dict", _ranks, ["merge", "in.ranks", "--state-dict", "s.safetensors"], r"s\.safetensors"),
    Case("state-dict-force", _state, ["merge", "in.ranks", "--state-dict", "v.safetensors", "--force"],
         r"v\.safetensors"),
    Case("report", _ranks, ["report", "in.ranks", "--html", "p.html"], r"p\.html"),
    Case("report-force", _page, ["report", "in.ranks", "--html", "p.html", "--force"], r"p\.html"),
    Case("seal", _edited, ["seal", "in.ranks"], r"in\.ranks/manifest\.json"),
    Case("reproducer", _failing, ["shard", "step.onnx", "--mesh", "dp=2,ep=4", "--reproducer", "f.zip"], r"f\.zip",
         code=4),
    Case("reduce", _small, ["reduce", "step.onnx", "-o", "m.onnx", "--force", "--tries", "2", "--", "false", "{}"],
         r"m\.onnx"),
    Case("shard-force-plain", lambda folder: _old_folder(folder, "shard"),
         ["shard", "step.onnx", "--ranks", "2", "-o", "out", "--force"], r"out(/|$)", exchange=False),
    Case("merge-force-plain", _old_model, ["merge", "in.ranks", "-o", "m.onnx", "--force"], r"m\.onnx",
         exchange=False),
)  # fmt: skip
_EXPORTS = (
    Case("dcp", _ranks, ["merge", "in.ranks", "--dcp", "t.dcp"], r"t\.dcp(/|$)"),
    Case("export", _module, ["export", "model.py:make", "-o", "n.onnx"], r"n\.onnx"),
    Case("export-force", _module, ["export", "model.py:make", "-o", "m.onnx", "--force"], r"m\.onnx"),
)
TORCH = importlib.util.find_spec("torch") is not None
CASES = {case.name: case for case in (*_CASES, *(_EXPORTS if TORCH else ()))}
"""``-plain``: on a file system that cannot exchange names."""
