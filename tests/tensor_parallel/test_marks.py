"""What a user says of gradients: it agrees with the step, adds a mean, or is refused; it never makes another step."""

from __future__ import annotations

import re

import pytest
from helpers import source

import gopt
from gopt.api import Sharded
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import COMM
from gopt.passes.base import build_options
from gopt.passes.pipeline import build_pipeline
from gopt.passes.tensor_parallel import PASS
from gopt.records.mesh import Mesh
from gopt.tensor_parallel.marks import parse_marks
from gopt.verification.verify import Verifier


def marked(gradients: str, mesh: str = "dp=2,tp=2", name: str = "gpt_adamw", **options: object) -> Sharded:
    given = {"shard": {"stage": 0}, "tensor-parallel": {"gradients": gradients, **options}}
    return gopt.shard(source(name), Mesh.parse(mesh), pipeline=build_pipeline(defaults=given))


def warnings(made: Sharded) -> list[str]:
    return [note for note in made.report().to_json()["notes"] if "is marked" in note]


def calls(made: Sharded) -> list[tuple[object, ...]]:
    nodes = [node for node in made.program.graph.nodes if node.domain == COMM]
    return [(n.op_type, n.attributes["group"], n.attributes.get("reduce"), tuple(n.outputs)) for n in nodes]


@pytest.mark.parametrize(
    ("gradients", "name", "sequence"),
    [
        ("*.ln1.weight:tp;ln_f.*:tp;*.qkv.*:none", "gpt_adamw", True),
        ("*.ln1.weight:none;wte.weight:none", "gpt_adamw", False),
        # Summed in float32 and cast behind the sum.
        ("*.proj.bias:tp", "gpt_adamw_clip_sched_fp16", True),
    ],
)
def test_a_mark_that_agrees_changes_nothing(gradients, name, sequence):
    made = marked(gradients, name=name, sequence=sequence)
    assert calls(made) == calls(marked("", name=name, sequence=sequence)) and warnings(made) == []


def test_gradients_that_are_equal_on_all_members_get_a_mean_and_a_warning():
    made = marked("*.ln1.weight:tp")
    means = [call for call in calls(made) if call[:3] == ("AllReduce", "tp", "mean")]
    assert [len(outputs) for *_, outputs in means] == [2], "both in one call"
    said = warnings(made)
    assert len(said) == 2 and "'blocks.0.ln1.weight' is marked as shared over tp, but" in said[0]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=3"])
def test_the_mean_changes_no_value(mesh, tmp_path):
    made = marked("fc2.bias:tp", mesh, "mlp_sgd")
    assert len(warnings(made)) == 1
    made.write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


@pytest.mark.parametrize(
    ("gradients", "sequence", "said"),
    [
        ("*.ln1.weight:none", True, "0.ln1.weight' is marked as not shared over tp, and is a partial sum along tp"),
        ("*.qkv.weight:tp", False, "0.qkv.weight' is marked as shared over tp, and is sharded along dimension 0"),
    ],
)  # fmt: skip
def test_a_mark_that_would_make_another_step_is_refused(gradients, sequence, said):
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        marked(gradients, sequence=sequence)


def test_a_sum_behind_which_a_gradient_is_cast_counts():
    with pytest.raises(UnsupportedError, match=r"proj.bias' is marked as not shared over tp"):
        marked("*.proj.bias:none", name="gpt_adamw_clip_sched_fp16", sequence=True)


@pytest.mark.slow
def test_a_composite_group(tmp_path):
    """Along cp all gradients are partial sums, along tp those of norms are equal."""
    with pytest.raises(UnsupportedError, match="marked as not shared over cp, and is a partial sum along cp"):
        marked("ln_f.weight:tp", "cp=2,tp=2")
    assert warnings(marked("ln_f.weight:cp;*.qkv.weight:cp", "cp=2,tp=2")) == []
    made = marked("ln_f.weight:cp+tp", "cp=2,tp=2")
    assert len(warnings(made)) == 1
    made.write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=1, confirm=False).equal


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ("ln_f.weight", "cannot read 'ln_f.weight'"), ("ln_f.weight:tp+", "cannot read"), (":tp", "cannot read"),
        ("ln_f.weight:dp+tp", "names dp, along which ranks see samples of their own"),
        ("ln_f.weight:cp", "names no axis of the mesh"), ("nosuch*:tp", "matches no parameter"),
    ],
)  # fmt: skip
def test_marks_that_say_nothing_are_refused(gradients, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        marked(gradients)


def test_a_group_of_one_leaves_nothing():
    made = marked("ln_f.weight:tp+cp", "dp=2,tp=2,cp=1", sequence=True)
    assert calls(made) == calls(marked("", "dp=2,tp=2,cp=1", sequence=True)) and warnings(made) == []


def test_a_table_of_a_configuration_is_read():
    options = build_options(PASS, {"gradients": {"*.norm.weight": "tp", "head": "none"}})
    assert [(each.glob, each.word) for each in parse_marks(options.gradients)] == [
        ("*.norm.weight", "tp"),
        ("head", "none"),
    ]
