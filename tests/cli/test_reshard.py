"""``gopt reshard`` as a user meets it."""

from __future__ import annotations

from gopt.cli.main import main
from helpers import FIXTURES

import gopt
from gopt.offline.folder_contents import read_mesh
from gopt.verification.verify import Verifier


def test_reshard_from_the_command_line(tmp_path, capsys):
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2).write(tmp_path / "a")
    command = ["reshard", str(tmp_path / "a"), "--mesh", "dp=2,shard=2", "--stage", "3", "-o", str(tmp_path / "b")]
    assert main(command) == 0
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert read_mesh(tmp_path / "b").axes == (("dp", 2), ("shard", 2))
    assert Verifier(tmp_path / "b").run(steps=1, confirm=False).equal
    twice = [*command, "--force", "-O", "shard.stage=1"]
    assert main(twice) == 2
