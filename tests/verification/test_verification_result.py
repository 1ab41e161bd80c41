"""Every value that differs is named and counted."""

from __future__ import annotations

from gopt.cli.render_verify import FAILING, render_verification
from helpers import FIXTURES

import gopt
from gopt.verification.result import Difference, Verification
from gopt.verification.verify import Verifier


def test_every_failing_value_is_named(tmp_path, capsys, monkeypatch) -> None:
    """Ranks that read another rate than the source have other parameters, all of them."""
    monkeypatch.setenv("COLUMNS", "160")
    folder = tmp_path / "out"
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), gopt.Mesh((("shard", 2),))).write(folder)

    def tamper(rank, feeds):
        if "lr" in feeds:
            feeds["lr"] = feeds["lr"] * 3

    result = Verifier(folder).run(steps=2, tamper=tamper, confirm=False)
    record = result.to_json()
    names = {each["name"] for each in record["failing"]["worst_first"]}
    assert names == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"} and record["failing"]["values"] == 4
    errors = [each["error_over_tolerance"] for each in record["failing"]["worst_first"]]
    assert errors == sorted(errors, reverse=True) and all(error > 1 for error in errors)
    assert record["failing"]["comparisons"] == sum(each["comparisons"] for each in record["failing"]["worst_first"])
    render_verification(result)
    shown = capsys.readouterr().out
    assert "4 values differ, in" in shown and all(name in shown for name in names)


def test_the_worst_of_a_value_and_how_often() -> None:
    result = Verification(1e-4, 3, 2)
    for step, error in ((1, 2.0), (2, float("nan")), (3, 5.0)):
        result.note(Difference("plain", step, 0, "w", "parameter", error))
    result.note(Difference("plain", 1, 0, "b", "parameter", 0.5))
    result.note(Difference("plain", 1, 0, "v", "parameter", 9.0))
    failing = result.to_json()["failing"]
    assert (failing["values"], failing["comparisons"]) == (2, 4)
    assert [(each["name"], each["step"], each["comparisons"]) for each in failing["worst_first"]] == [
        ("w", 2, 3), ("v", 1, 1),
    ]  # fmt: skip


def test_many_are_named_too(capsys) -> None:
    result = Verification(1e-4, 1, 1)
    for number in range(FAILING + 3):
        result.note(Difference("plain", 1, 0, f"w{number}", "parameter", 2.0))
    render_verification(result)
    shown = capsys.readouterr().out
    assert all(f"w{number}" in shown for number in range(FAILING + 3))


def test_a_replica_that_differs_on_one_rank_alone_is_found(tmp_path) -> None:
    """Replicas that are equal bit by bit are judged once; one that is not is judged by itself."""
    folder = tmp_path / "out"
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), gopt.Mesh((("dp", 3),))).write(folder)

    def tamper(rank, feeds):
        if rank == 1:
            feeds["lr"] = feeds["lr"] * 3

    result = Verifier(folder).run(steps=1, tamper=tamper, confirm=False)
    record = result.to_json()["failing"]
    assert {each["rank"] for each in record["worst_first"]} == {1} and record["values"] == 4


def test_a_notebook_shows_how_many_values_failed() -> None:
    """A row of the record's items would read as if as many had failed."""
    result = Verification(1e-4, 1, 2)
    result.note(Difference("plain", 1, 0, "w", "parameter", 0.25))
    assert "<th>failing values</th><td>0</td>" in result._repr_html_()
    result.note(Difference("plain", 1, 0, "v", "parameter", 9.0))
    html = result._repr_html_()
    assert "<th>failing values</th><td>1</td>" in html and "v: 9 of the tolerance" in html
