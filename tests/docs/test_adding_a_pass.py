"""The example pass of docs/adding-a-pass.md does what the page says."""

import re
from pathlib import Path

import gopt
from gopt.passes.pipeline import PassInstance, Pipeline, build_pipeline
from gopt.verification.verify import Verifier

ROOT = Path(__file__).parents[2]


def example() -> dict:
    text = (ROOT / "docs/adding-a-pass.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    scope: dict = {"__name__": "example"}
    exec(compile(code, "docs/adding-a-pass.md", "exec"), scope)
    return scope


def with_example(most: int = 1000) -> Pipeline:
    scope = example()
    stages = list(build_pipeline().stages)
    stages.insert(4, PassInstance(scope["PASS"], scope["Options"](most=most)))
    return Pipeline(tuple(stages), verify_each=True)


def test_it_removes_identities_and_the_ranks_stay_equal(tmp_path):
    source = gopt.load(ROOT / "fixtures/mlp_mom_clip_sched.onnx")
    sharded = gopt.shard(source, 3, pipeline=with_example())
    record = next(ran.record for ran in sharded.ran if ran.record.name == "drop-identities")
    assert record.facts["identities"] >= 1
    assert not any(
        node.is_a("Identity") and node.outputs[0] not in sharded.program.graph.outputs
        for node in sharded.program.graph.nodes
    )
    sharded.write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(confirm=False).equal


def test_it_says_when_there_is_nothing_to_do():
    sharded = gopt.shard(gopt.load(ROOT / "fixtures/mlp_sgd.onnx"), 2, pipeline=with_example(most=0))
    record = next(ran.record for ran in sharded.ran if ran.record.name == "drop-identities")
    assert record.note
