"""Devices: known ones, and files of others."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from helpers import ROOT

from gopt.documents.records import to_document
from gopt.errors import InputError, OptionError
from gopt.offline.device import DEVICES, OF_CALLS, OF_SEGMENTS, device_of, link_of
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology

OWN = {"format": "gopt-device/1", "name": "mine", "flops": {"float32": 1e9}, "bandwidth": 1e8, "launch": 1e-6}


@pytest.mark.parametrize("name", DEVICES)
def test_a_known_device_is_a_file_too(name, tmp_path):
    document = to_document(DEVICES[name])
    jsonschema.validate(document, json.loads((ROOT / "gopt/schemas/device.schema.json").read_text()))
    path = tmp_path / "device.json"
    path.write_text(json.dumps(document))
    assert device_of(str(path)) == device_of(name) == DEVICES[name]
    Topology.parse(link_of(None, DEVICES[name]), Mesh.of("dp=2,shard=8"))


def test_toml_is_read_as_json_is(tmp_path):
    (tmp_path / "d.json").write_text(json.dumps(OWN))
    text = 'format = "gopt-device/1"\nname = "mine"\nbandwidth = 1e8\nlaunch = 1e-6\nflops = {float32 = 1e9}\n'
    (tmp_path / "d.toml").write_text(text)
    device = device_of(tmp_path / "d.toml")
    assert device == device_of(tmp_path / "d.json")
    assert device.overlaps and device.fuse_from is None and device.call == device.step == 0
    with pytest.raises(OptionError, match="device 'mine' does not say how ranks are linked"):
        link_of(None, device)
    assert link_of("1GB/s", device) == "1GB/s" and link_of(None, None) is None


def test_a_type_without_a_peak_goes_by_float32():
    device = replace(DEVICES["h100"], efficiency=0.5)
    assert device.peak("int8") == device.peak("float32") == 0.5 * 66.9e12 < device.peak("bfloat16")
    assert device.stream == 0.5 * 3.35e12


@pytest.mark.parametrize(("name", "hint"), [("h10", "did you mean 'h100'"), ("gaudi-2", "there are h100, a100, cpu")])
def test_an_unknown_device_is_refused(name, hint):
    with pytest.raises(OptionError, match=f"no device is called '?{name}") as caught:
        device_of(name)
    assert hint in " ".join(caught.value.hints)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth": 0}, "bandwidth is 0"), ({"flops": {"float32": 0}}, r"flops.float32 is 0"),
        ({"flops": {"float16": 1}}, "lacks float32"), ({"flops": {"float32": 1, "floaf16": 1}}, "flops has '?floaf16"),
        ({"launch": -1}, "launch"), ({"efficiency": 2}, "efficiency"), ({"speed": 1}, "speed"),
        ({"bandwidth": 1e-320}, "nothing would ever end"), ({"format": "gopt-device/2"}, "gopt-device/2"),
        ({"settled": {"flops": [1.0]}}, "settled has not the rows"),
        ({"settled": {name: [1.0] * 5 for name in OF_CALLS}}, "settled has not the rows"),
        ({"settled": {"speed": [1.0]}}, "settled has not the rows"), ({"adding": 0}, "adding is 0"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_device_is_refused(change, words, tmp_path):
    path = tmp_path / "device.json"
    path.write_text(json.dumps(OWN | change))
    with pytest.raises(InputError, match=words):
        device_of(path)


@pytest.mark.parametrize("groups", [(OF_SEGMENTS,), (OF_CALLS,), (OF_SEGMENTS, OF_CALLS)])
def test_a_file_says_how_firmly_segments_or_calls_settled_it(groups, tmp_path):
    settled = {name: [1.0] * len(group) for group in groups for name in group}
    (tmp_path / "device.json").write_text(json.dumps(OWN | {"settled": settled}))
    read = device_of(tmp_path / "device.json").settled
    assert {name: list(row) for name, row in read.items()} == settled
