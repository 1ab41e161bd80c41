"""Autocast of another device: refused, and never silently float32. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402

XPU = str(torch.get_autocast_dtype("xpu")).removeprefix("torch.")
SCRIPT = """\
import torch
from torch import nn

class Net(nn.Linear):
    {before}
    def forward(self, x):
        with torch.autocast({arguments}):
            return super().forward(x)

def make():
    net = Net(4, 3)
    loss = nn.CrossEntropyLoss()
    return net, loss, torch.optim.SGD(net.parameters(), 0.1), (torch.randn(6, 4), torch.randint(0, 3, (6,)))
"""


def exported(tmp_path, arguments, before=""):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(arguments=arguments, before=before))
    return export(f"{path}:make", tmp_path / "step.onnx")


@pytest.mark.parametrize(
    ("arguments", "before", "dtype"),
    [
        ("'cuda'", "", "float16"), ("'cuda', dtype=torch.bfloat16", "", "bfloat16"), ("'xpu'", "", XPU),
        ("'cpu', enabled=False", "@torch.autocast('cuda')", "float16"),
    ],
)  # fmt: skip
def test_autocast_of_another_device_is_refused_with_its_line(arguments, before, dtype, tmp_path):
    with pytest.raises(UnsupportedError, match=r"in script\.py, line .*the step would be in float32") as raised:
        exported(tmp_path, arguments, before)
    assert f"dtype=torch.{dtype}" in raised.value.hints[0]
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".onnx"] == []


@pytest.mark.parametrize("arguments", ["'cuda', enabled=False", "x.device.type, dtype=torch.bfloat16"])
def test_one_that_is_off_and_one_of_the_batch_are_taken(arguments, tmp_path):
    import onnx

    found = exported(tmp_path, arguments)
    narrow = any(each.attribute and each.attribute[0].i == onnx.TensorProto.BFLOAT16
                 for each in onnx.load(found.model).graph.node if each.op_type == "Cast")  # fmt: skip
    assert narrow == ("bfloat16" in arguments)


def test_other_steps_see_no_patch():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        torch.autocast("cuda")
    assert F.relu(torch.ones(1)) == 1 and nn.Linear(1, 1)
