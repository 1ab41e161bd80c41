"""Facts of passes as records; their keys are compared with the schema in ``test_report_record.py``."""

from __future__ import annotations

from helpers import FIXTURES

import gopt
from gopt.artifact.pass_facts import bucket_cap, buckets, operators


def test_facts_of_passes_as_records():
    passes = gopt.shard(gopt.load(FIXTURES / "mlp_ort_adamw.onnx"), 2, stage=1, bucket_mb=0.005).report().pipeline
    tensors = {name for bucket in buckets(passes) for name in bucket.tensors}
    parameters = gopt.load(FIXTURES / "mlp_ort_adamw.onnx").training.parameters
    assert tensors == {state.tensor for state in parameters}
    assert bucket_cap(passes) == int(0.005 * (1 << 20))
    for each in operators(passes):
        assert each.kept + len(each.merged) + sum(len(group.weights) for group in each.expanded) > 0
    assert {each.operator for each in operators(passes)}


def test_a_step_without_passes_has_no_facts():
    assert buckets(()) == operators(()) == [] and bucket_cap(()) is None
