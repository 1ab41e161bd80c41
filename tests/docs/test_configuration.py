"""The examples of docs/configuration.md run."""

import json
import re
from pathlib import Path

from gopt.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_examples_run(tmp_path, capsys):
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    config, axes = re.findall(r"```toml\n(.*?)```", text, re.S)
    report = _report(config, tmp_path, capsys)
    assert report["mesh"] == {"axes": [["shard", 4]], "ranks": 4}
    shard = next(each for each in report["pipeline"] if each["name"] == "shard")
    assert shard["options"]["stage"] == 1
    assert shard["options"]["bucket_mb"] == 4.0
    assert _report(axes, tmp_path, capsys)["mesh"]["kinds"] == {"zone": "data"}


def _report(config, tmp_path, capsys):
    (tmp_path / "gopt.toml").write_text(config, encoding="utf-8")
    model = str(ROOT / "fixtures/mlp_adamw.onnx")
    assert main(["shard", model, "--config", str(tmp_path / "gopt.toml"), "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_nobody_reads_is_refused(tmp_path, capsys):
    (tmp_path / "gopt.toml").write_text("[meshh]\nshard = 2\n")
    assert main(["shard", "x.onnx", "--ranks", "2", "--config", str(tmp_path / "gopt.toml")]) == 3
    assert "meshh" in capsys.readouterr().err
