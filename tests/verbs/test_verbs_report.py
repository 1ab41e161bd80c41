"""``gopt.report``: a page of a folder or an object, with a proof as a file or an object."""

from __future__ import annotations

import json

import pytest
from gopt.cli.main import main
from helpers import source

import gopt
from gopt.errors import InputError, OptionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "ranks"
    gopt.shard(source("mlp_sgd"), 2).write(folder)
    return folder


def test_the_page_of_the_command(folder, tmp_path, capsys):
    page = gopt.report(folder, tmp_path / "python.html")
    assert main(["report", str(folder), "--html", str(tmp_path / "command.html")]) == 0
    assert (tmp_path / "command.html").read_bytes() == (tmp_path / "python.html").read_bytes()
    assert f"written to {tmp_path / 'command.html'} (" in capsys.readouterr().out
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(page.to_json()))


def test_a_proof_as_an_object_and_as_a_file(folder, tmp_path, capsys):
    proof = gopt.verify(folder, steps=1)
    assert main(["verify", str(folder), "--steps", "1", "--json"]) == 0
    (tmp_path / "proof.json").write_text(capsys.readouterr().out)
    page = gopt.report(folder, verification=proof)
    assert page.proof == gopt.report(folder, verification=tmp_path / "proof.json").proof
    assert page.proof is not None and page.proof.confirmed == page.proof.gradients > 0
    with pytest.raises(InputError, match="the verification is of another folder: it is of 2 ranks"):
        gopt.report(gopt.shard(source("mlp_sgd"), 3), verification=proof)


def test_only_force_replaces_a_page(folder, tmp_path):
    gopt.report(folder, tmp_path / "page.html")
    with pytest.raises(OptionError, match="exists already"):
        gopt.report(folder, tmp_path / "page.html")
    gopt.report(gopt.shard(source("mlp_sgd"), 3), tmp_path / "page.html", force=True)
    assert b'"ranks":3' in (tmp_path / "page.html").read_bytes().replace(b" ", b"")
