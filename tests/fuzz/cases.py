"""What is tried: a kind of file with faults drawn from a seed, and the commands that read it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gopt.cli.main import main
from helpers import FIXTURES, Builder, perceptron, sgd

from fuzz.bytes import damaged
from fuzz.child import in_child
from fuzz.models import mutated
from fuzz.texts import damaged_json, damaged_toml

Command = list[str]
_FIXTURES = ("mlp_sgd", "mlp_adamw", "mlp_adamw_fp16_scaler", "cnn_sgd", "mlp_ort_adamw", "emb_adamw", "mlp_muon")
_CONFIG = """accumulate = 2
[mesh]
dp = 2
shard = 2
[axes]
[pass.shard]
stage = 1
partition = "rows"
[pass.fuse-collectives]
cap-mb = 4
[roles]
loss = "loss"
batch = ["x", "y"]
[roles.states]
w0 = "w0_out"
"""


_GOLDEN = """[case.m]
model = "m.onnx"
options = ["--ranks", "2"]
"""
_RUN = ["--data", "data.npz", "--steps", "2"]
_MADE: tuple[Command, ...] = (
    ["split", "m.onnx", "--trainers", "2", "--servers", "1", "--minimum", "4", "-o", "sync"],
    ["split", "m.onnx", "--trainers", "2", "--servers", "2", "--mode", "async", "--minimum", "4", "-o", "async"],
    ["run", "sync", *_RUN, "--checkpoint", "sync.kept"], ["run", "async", *_RUN, "--checkpoint", "async.kept"],
    ["run", "async", *_RUN, "--record", "run.json"], ["run", "out", *_RUN, "--trace", "trace.json"],
    ["golden", "update", "."], ["merge", "out", "--state-dict", "values.safetensors"],
    ["shard", "m.onnx", "--mesh", "tp=7", "--reproducer", "failure.zip", "-o", "never"],
)  # fmt: skip


def _forward() -> Builder:
    b = Builder()
    x, w = b.input("x", (4, 3)), b.parameter("w", (3, 2))
    b.output("y", b.op("MatMul", x, w), (4, 2))
    return b


@dataclass(frozen=True)
class Corpus:
    """Whole files from which faulty ones are made: models by name, and folders in ``home``."""

    home: Path
    models: dict[str, bytes]

    @classmethod
    def make(cls, home: Path) -> Corpus:
        """Write the folders, by gopt itself."""
        models = {name: (FIXTURES / f"{name}.onnx").read_bytes() for name in _FIXTURES}
        for widths in ((3, 2), (3, 5, 2)):
            b = Builder()
            sgd(b, perceptron(b, widths))
            models[f"perceptron_{len(widths)}"] = b.model().SerializeToString(deterministic=True)
        (home / "m.onnx").write_bytes(models["perceptron_3"])
        generator = np.random.default_rng(0)
        arrays = {"x": generator.standard_normal((16, 3)), "y": generator.standard_normal((16, 2))}
        np.savez_compressed(home / "data.npz", **{name: each.astype("f4") for name, each in arrays.items()})
        (home / "gopt.toml").write_text(_CONFIG)
        train = ["run", "out", "--data", "data.npz", "--steps", "4", "--checkpoint", "ckpt", "--every", "2"]
        _forward().save(home / "forward.onnx")
        shutil.copytree(FIXTURES / "ort" / "mlp_sgd", home / "artifacts")
        (home / "gopt-golden.toml").write_text(_GOLDEN)
        for command in (["shard", "m.onnx", "--ranks", "2", "-o", "out"], train, *_MADE):
            ended = in_child(lambda command=command: main(command), home)
            assert ended.code == 0 or "--reproducer" in command, ended.said
        return cls(home, models)


def a_model(corpus: Corpus, folder: Path, dice: random.Random) -> list[Command]:
    """A mutated model, through all commands that take one."""
    name = dice.choice(sorted(corpus.models))
    (folder / "m.onnx").write_bytes(mutated(corpus.models[name], dice))
    first = dice.choice((["inspect", "m.onnx"], ["plan", "m.onnx", "--ranks", "4"], ["diff", "m.onnx", "m.onnx"]))
    stage = dice.choice("0123")
    shard = ["shard", "m.onnx", "--ranks", dice.choice("123"), "--stage", stage, "-o", "out"]
    return [
        shard, [*first, "--json"] if dice.random() < 0.3 else first,
        ["verify", "out", "--steps", "1", "--deadline", "10", *(["--no-confirm"] if dice.random() < 0.7 else [])],
        ["merge", "out", "-o", "whole.onnx"], ["reshard", "out", "--ranks", "2", "-o", "again"],
    ]  # fmt: skip


_READ: tuple[Command, ...] = (
    ["verify", "out", "--steps", "1", "--no-confirm", "--deadline", "10"], ["inspect", "out"], ["diff", "out", "out"],
    ["merge", "out", "-o", "whole.onnx"], ["reshard", "out", "--ranks", "3", "-o", "again"],
    ["run", "out", "--data", "data.npz", "--steps", "1"],
    ["shard", "m.onnx", "--ranks", "2", "-o", "out", "--force"],
)  # fmt: skip
_TRAINED: tuple[Command, ...] = (
    ["run", "out", "--data", "data.npz", "--steps", "6", "--checkpoint", "ckpt", "--resume"],
    ["merge", "ckpt/step_00000004", "-o", "whole.onnx"], ["inspect", "ckpt/step_00000004"],
    ["reshard", "ckpt/step_00000004", "--ranks", "3", "-o", "again"], ["diff", "ckpt/step_00000004", "out"],
)  # fmt: skip


def _copied(corpus: Corpus, folder: Path) -> None:
    for path in corpus.home.iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy(path, folder / path.name)


def an_output(corpus: Corpus, folder: Path, dice: random.Random) -> list[Command]:
    """An output folder, one file of which is at fault."""
    _copied(corpus, folder)
    _fault(folder, dice.choice(sorted((folder / "out").iterdir())), dice)
    return [list(each) for each in dice.sample(_READ, 3)]


def a_checkpoint(corpus: Corpus, folder: Path, dice: random.Random) -> list[Command]:
    """A folder of checkpoints, one file of which is at fault."""
    _copied(corpus, folder)
    _fault(folder, dice.choice(sorted(path for path in (folder / "ckpt").rglob("*") if path.is_file())), dice)
    return [list(each) for each in dice.sample(_TRAINED, 2)]


_SPLIT: tuple[Command, ...] = (
    ["verify", "KIND", "--steps", "1", "--deadline", "10"], ["verify", "async", "--replay", "run.json"],
    ["run", "KIND", *_RUN], ["run", "KIND", *_RUN[:-1], "4", "--checkpoint", "KIND.kept", "--resume"],
    ["run", "KIND", *_RUN[:-1], "4", "--checkpoint", "KIND.kept", "--resume", "--trainers", "3"],
    ["merge", "KIND", "-o", "whole.onnx"], ["merge", "KIND.kept/step_00000002", "-o", "whole.onnx"],
    ["reshard", "KIND", "--trainers", "3", "--servers", "2", "-o", "again"],
    ["reshard", "KIND.kept/step_00000002", "--ranks", "2", "-o", "again"], ["seal", "KIND"],
    ["seal", "KIND.kept/step_00000002"], ["inspect", "KIND"], ["inspect", "KIND/trainer.onnx"], ["inspect", "run.json"],
    ["explain", "KIND", "w0"], ["report", "KIND", "--html", "page.html"], ["diff", "KIND", "KIND"],
    ["diff", "KIND.kept/step_00000002", "KIND.kept/step_00000002"],
)  # fmt: skip


def a_split(corpus: Corpus, folder: Path, dice: random.Random) -> list[Command]:
    """A split, its checkpoints or its record, one file of which is at fault."""
    _copied(corpus, folder)
    kind = dice.choice(("sync", "async"))
    files = [path for place in (kind, f"{kind}.kept") for path in (folder / place).rglob("*") if path.is_file()]
    _fault(folder, dice.choice([*sorted(files), folder / "run.json"]), dice)
    return [[each.replace("KIND", kind) for each in command] for command in dice.sample(_SPLIT, 4)]


_OTHERS: dict[str, tuple[Command, ...]] = {
    "forward.onnx": (
        ["derive", "forward.onnx", "--loss", "mse", "--optimizer", "sgd", "-o", "step.onnx"],
        ["derive", "forward.onnx", "--loss", "y", "--optimizer", "adam", "-o", "step.onnx"],
        ["inspect", "forward.onnx"],
    ),
    "artifacts/training_model.onnx": (["import", "artifacts", "-o", "step.onnx"],),
    "artifacts/optimizer_model.onnx": (["import", "artifacts", "-o", "step.onnx"],),
    "artifacts/checkpoint": (["import", "artifacts", "-o", "step.onnx"], ["inspect", "artifacts"]),
    "gopt-golden.toml": (["golden", "check", "."], ["golden", "update", "."]),
    "golden/*": (["golden", "check", "."], ["golden", "update", "."]),
    "values.safetensors": (
        ["load-state", "m.onnx", "values.safetensors", "-o", "warm.onnx"], ["inspect", "values.safetensors"],
    ),
    "failure.zip": (
        ["reproduce", "failure.zip", "--deadline", "10"], ["reproduce", "failure.zip", "--extract", "there"],
        ["inspect", "failure.zip"], ["reduce", "failure.zip", "--tries", "1", "-o", "small.onnx"],
    ),
    "trace.json": (["report", "out", "--html", "page.html", "--trace", "trace.json"], ["inspect", "trace.json"]),
    "out/*": (
        ["report", "out", "--html", "page.html"], ["explain", "out", "w0"], ["seal", "out"],
        ["report", "out", "--json"],
        ["inspect", "out", "--text"], ["merge", "out", "--state-dict", "new.safetensors"],
    ),
    "m.onnx": (
        ["merge", "ckpt/step_00000004", "-o", "whole.onnx"],
        ["split", "m.onnx", "--trainers", "2", "--servers", "2", "-o", "s"],
        ["inspect", "m.onnx", "--text"], ["load-state", "m.onnx", "values.safetensors", "-o", "warm.onnx"],
        ["golden", "check", "."], ["run", "m.onnx", "--data", "data.npz", "--steps", "1"],
    ),
}  # fmt: skip


def another(corpus: Corpus, folder: Path, dice: random.Random) -> list[Command]:
    """A file that one of the other commands reads, at fault."""
    _copied(corpus, folder)
    name = dice.choice(sorted(_OTHERS))
    _fault(folder, dice.choice(sorted(folder.glob(name))), dice)
    return [list(each) for each in dice.sample(_OTHERS[name], min(2, len(_OTHERS[name])))]


def _fault(folder: Path, path: Path, dice: random.Random) -> None:
    if dice.random() < 0.1:
        path.unlink()
        what = dice.choice(("pipe", "folder", "link", "loop", "device", "none"))
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what != "none":
            path.symlink_to({"link": folder / "m.onnx", "loop": path, "device": Path("/dev/zero")}[what])
        return
    data = path.read_bytes()
    if path.suffix == ".json" and dice.random() < 0.8:
        path.write_text(damaged_json(json.loads(data), dice), errors="surrogatepass")
    elif path.suffix == ".onnx" and dice.random() < 0.8:
        path.write_bytes(mutated(data, dice))
    else:
        path.write_bytes(damaged(data, dice))


def some_data(corpus: Corpus, folder: Path, dice: random.Random) -> list[Command]:
    """Samples and states as files that are damaged, or hold other arrays."""
    _copied(corpus, folder)
    kind = dice.choice((".npz", ".safetensors"))
    path = folder / f"given{kind}"
    arrays = {name: _array(dice) for name in dice.sample(("x", "y", "w0", "b0", "loss", ""), 3)}
    arrays |= {name: np.zeros(shape, "f4") for name, shape in (("x", (8, 3)), ("y", (8, 2))) if dice.random() < 0.7}
    if kind == ".npz":
        np.savez(path, **{name or "empty": each for name, each in arrays.items()})
    else:
        _safetensors(path, arrays, dice)
    if dice.random() < 0.6:
        path.write_bytes(damaged(path.read_bytes(), dice))
    return [
        ["run", "out", "--data", path.name, "--steps", "2"],
        ["shard", "m.onnx", "--ranks", "2", "-o", "again", "--state", path.name],
        ["verify", "out", "--steps", "1", "--no-confirm", "--data", path.name],
    ]


def _array(dice: random.Random) -> np.ndarray:
    shape = dice.choice(((), (0,), (4,), (4, 3), (3, 2), (2, 4, 3), (2**12, 3)))
    return np.ones(shape, dice.choice(("f4", "f8", "f2", "i8", "u1", "?", ">f4", "c8", "S3", "M8[s]")))


def _safetensors(path: Path, arrays: dict[str, np.ndarray], dice: random.Random) -> None:
    header, body = {}, b""
    for name, each in arrays.items():
        data = each.tobytes()
        kind = {"f4": "F32", "f8": "F64", "f2": "F16", "i8": "I64"}.get(each.dtype.str[1:], "F32")
        header[name] = {"dtype": kind, "shape": list(each.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = (damaged_json(header, dice) if dice.random() < 0.5 else json.dumps(header)).encode(errors="surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def a_configuration(corpus: Corpus, folder: Path, dice: random.Random) -> list[Command]:
    """A gopt.toml with faults, and options that are none."""
    _copied(corpus, folder)
    (folder / "gopt.toml").write_text(damaged_toml(_CONFIG, dice), errors="surrogatepass")
    odd = dice.choice(
        ("", "0", "-1", "1e999", "nan", "9" * 60, "dp=2,dp=2", "shard=", "é", "shard{stage=9}", "x" * 3000)
    )
    option = dice.choice(("--mesh", "--ranks", "--bucket-mb", "--pipeline", "-O", "--states", "--loss", "--axis"))
    shard = ["shard", "m.onnx", "-o", "again", "--dry-run", "--config", "gopt.toml"]
    return [shard, ["shard", "m.onnx", "--ranks", "2", "--dry-run", option, odd], ["plan", "m.onnx", option, odd]]


Kind = Callable[[Corpus, Path, random.Random], list[Command]]
KINDS: dict[str, Kind] = {
    "models": a_model,
    "folders": an_output,
    "checkpoints": a_checkpoint,
    "data": some_data,
    "configurations": a_configuration,
    "splits": a_split,
    "others": another,
}
