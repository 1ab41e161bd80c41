"""A file of values that is truncated while a command runs: the command ends as if nothing had happened, or with the
name of the file; never by a signal, as it did where the file was mapped."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import FIXTURES
from products import part

SEED = random.SystemRandom().randrange(1 << 30)
"""Other moments in every run; a failure shows it."""
MODEL, DATA = "mlp_adamw_external.onnx", "mlp_adamw_external.bin"
STEP = "kept/step_00000001"
COMMANDS = {
    "merge": ("out/states.bin", "merge out -o new.onnx"),
    "shard": (DATA, f"shard {MODEL} --ranks 2 -o new"),
    "diff": ("out/states.bin", "diff out out"),
    "reshard": ("out/states.bin", "reshard out --mesh tp=2 -o new"),
    "split": (DATA, f"split {MODEL} --trainers 2 --servers 2 -o new"),
    "verify": ("out/states.bin", "verify out --steps 1 --no-confirm"),
    "text": (DATA, f"inspect {MODEL} --text"),
    "import": ("artifacts/checkpoint", "import artifacts -o new.onnx"),
    "derive": ("forward.bin", "derive forward.onnx --loss mse --optimizer adam -o new.onnx"),
    "load-state": ("values.safetensors", f"load-state {MODEL} values.safetensors -o new.onnx"),
    "state": ("values.safetensors", f"shard {MODEL} --state values.safetensors --ranks 2 -o new"),
    "step": (f"{STEP}/rank_0001.safetensors", f"merge {STEP} -o new.onnx"),
    "state-dict": (f"{STEP}/rank_0000.safetensors", f"merge {STEP} --state-dict new.safetensors"),
    "run": ("out/states.bin", "run out --data samples.npz --steps 1 --set lr=1e-3"),
    "resume": (
        f"{STEP}/rank_0001.safetensors",
        "run out --data samples.npz --steps 2 --set lr=1e-3 --checkpoint kept --resume",
    ),
}
MOMENTS = 3
"""Of each command, drawn."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np
    import onnx
    from gopt.cli.main import main
    from helpers import Builder

    home = tmp_path_factory.mktemp("truncated")
    for name in (MODEL, DATA):
        shutil.copy(FIXTURES / name, home)
    shutil.copytree(FIXTURES / "ort" / "gpt", home / "artifacts")
    random = np.random.default_rng(0)
    np.savez(home / "samples.npz", x=random.standard_normal((64, 32), dtype=np.float32), y=random.integers(0, 10, 64))
    b = Builder()
    x, w = b.input("x", (4, 300)), b.parameter("w", (300, 8))
    b.output("y", b.op("MatMul", x, w), (4, 8))
    onnx.save(b.model(), home / "forward.onnx", save_as_external_data=True, location="forward.bin", size_threshold=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["shard", MODEL, "--ranks", "2", "--stage", "0", "-o", "out"]) == 0
        run = ["run", "out", "--data", "samples.npz", "--steps", "1", "--set", "lr=1e-3"]
        assert main([*run, "--checkpoint", "kept"]) == 0
        assert main(["merge", "out", "--state-dict", "values.safetensors"]) == 0
    return home


def ended(made: Path, home: Path, file: str, at: int, command: str) -> tuple[int, str]:
    """The exit code of a command during which a file is truncated, and what it says."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(made, home)
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("truncated.py"), file, str(at), *command.split()],
        cwd=home, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    return child.returncode, child.stderr


@pytest.mark.parametrize("name", part(COMMANDS, keep=1))
def test_a_file_that_is_truncated_meanwhile_is_named(made: Path, tmp_path: Path, name: str) -> None:
    file, command = COMMANDS[name]
    code, said = ended(made, tmp_path / "home", file, 0, command)
    assert code == 0, said
    found = re.search(r"events (\d+) opened \[([\d, ]+)\]", said)
    assert found is not None, said
    opened = [int(each) for each in found[2].split(",")]
    draw = random.Random(f"{SEED} {name}")
    near = draw.choice(opened[-3:]) + draw.randrange(1, 3)
    moments = [near, *(draw.randrange(1, int(found[1]) + 1) for _ in range(MOMENTS - 1))]
    for at in moments[: 1 if name in ("merge", "shard") else None]:
        code, said = ended(made, tmp_path / "home", file, at, command)
        assert code in (0, 3, 5), (SEED, at, code, said)
        assert not code or Path(file).name in said, (SEED, at, code, said)
