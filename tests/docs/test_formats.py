"""Every key of a format is described, every key that gopt writes is in its schema, docs/formats.md is what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from gopt.cli.main import main
from helpers import ROOT, script_of

import gopt
from gopt import documents
from gopt.errors import GoptError

PATHS = sorted((ROOT / "gopt/schemas").glob("*.schema.json"))
SCHEMAS = {path.name.partition(".")[0]: json.loads(path.read_text(encoding="utf-8")) for path in PATHS}
FIXTURES = sorted((ROOT / "fixtures").glob("*.onnx"))
KINDS = {each.schema: each for each in vars(documents).values() if isinstance(each, documents.DocumentKind)}
MAKES_ITS_OWN = "mlp_adamw_accum"
"""The fixture that accumulates gradients itself: --accumulate is refused."""


def parts(schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside a schema with its place, but for conditions."""
    yield place, schema
    for table in ("properties", "$defs"):
        for key, each in schema.get(table, {}).items():
            yield from parts(each, f"{place}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from parts(schema[key], f"{place}[{key}]")
    for number, each in enumerate(schema.get("prefixItems", ())):
        yield from parts(each, f"{place}[{number}]")
    for case in schema.get("allOf", ()):
        for key, each in case["then"]["properties"].items():
            yield from parts(each, f"{place}.{key} of {case['if']['properties']['name']['const']}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_key_is_without_a_description(name):
    said = {place: each.get("description", "") for place, each in parts(SCHEMAS[name]) if not place.endswith("]")}
    assert [place for place, text in said.items() if not re.fullmatch(r"(gopt|[A-Z]).*[^.]\.", text)] == []


def test_no_word_of_a_schema_hides_keys_from_these_tests():
    known = {
        "$schema", "$comment", "$defs", "$ref", "title", "description", "type", "const", "enum", "pattern", "minimum",
        "maximum", "minLength", "minItems", "maxItems", "properties", "required", "additionalProperties", "items",
        "prefixItems", "allOf",
    }  # fmt: skip
    assert {word for schema in SCHEMAS.values() for _, each in parts(schema) for word in each} <= known


def undocumented(value: Any, schema: dict[str, Any], root: dict[str, Any], place: str = "") -> Iterator[str]:
    """Keys of a document that its schema does not list; where it lists some of an open object, it must list all."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        for number, each in enumerate(value):
            rule = dict(enumerate(schema.get("prefixItems", ()))).get(number, schema.get("items", {}))
            yield from undocumented(each, rule, root, f"{place}[]")
    if not isinstance(value, dict):
        return
    listed = dict(schema.get("properties", {}))
    for case in schema.get("allOf", ()):
        if case["if"]["properties"]["name"]["const"] == value.get("name"):
            listed |= case["then"]["properties"]
    rest = schema.get("additionalProperties")
    for key, each in value.items():
        if key in listed:
            yield from undocumented(each, listed[key], root, f"{place}.{key}")
        elif isinstance(rest, dict) and not listed:
            yield from undocumented(each, rest, root, f"{place}.*")
        else:
            yield f"{place}.{key}"


def unlisted(name: str, document: Any) -> list[str]:
    """Keys that a schema does not list, of a document that it takes."""
    documents.parse_json(json.dumps(document), KINDS[name], name)
    return sorted(set(undocumented(document, SCHEMAS[name], SCHEMAS[name])))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_every_key_that_shard_writes_is_in_its_schema(path):
    source = gopt.load(path)
    for stage in (0, 3):
        for micro_steps in (1, 2):
            try:
                made = gopt.shard(source, 2, stage=stage, accumulate=micro_steps)
            except GoptError:
                assert micro_steps == 2 and path.stem == MAKES_ITS_OWN
                continue
            assert unlisted("manifest", made.manifest().to_json()) == []
            assert unlisted("report", made.report().to_json()) == []


OPTIONS = {
    "auto": ("mlp_adamw", "--ranks", "2", "--auto", "--memory", "1GB", "--link", "1GB/s:5us"),
    "kinds": ("mlp_adamw", "--mesh", "zone=2,shard=2", "--axis", "zone=data"),
    "local": ("cnn_sgd", "--ranks", "2", "--statistics", "local"),
    "root": ("cnn_sgd", "--ranks", "2", "--statistics", "root"),
    "weighted": ("mlp_sgd", "--ranks", "2", "--loss-reduction", "weighted:sum_1"),
    "broadcast": ("gpt_adamw", "--ranks", "2", "--partition", "whole", "-O", "shard.style=broadcast"),
    "held back": ("gpt_adamw", "--ranks", "2", "--stage", "3", "-O", "overlap.limit-mb=0"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_key_that_options_add_is_in_its_schema(name, tmp_path, capsys):
    model, *rest = OPTIONS[name]
    out = tmp_path / "out"
    assert main(["shard", str(ROOT / f"fixtures/{model}.onnx"), *rest, "-o", str(out)]) == 0
    for kind in ("manifest", "report"):
        assert unlisted(kind, json.loads((out / f"{kind}.json").read_text(encoding="utf-8"))) == []


@pytest.fixture(scope="module")
def formats():
    return script_of("docs/formats.py")


@pytest.fixture(scope="module")
def written(formats):
    return formats.make_documents()


def test_every_key_of_the_examples_is_in_its_schema(written):
    assert sorted(written) == ["index", "manifest", "report", "roles"]
    assert {name: unlisted(name, each) for name, each in written.items()} == {name: [] for name in written}


def test_a_key_that_is_not_in_its_schema_is_found(written):
    report = json.loads(json.dumps(written["report"]))
    facts = next(each for each in report["pipeline"] if each["name"] == "shard")["facts"]
    facts["nix"] = facts["buckets"][0]["nix"] = 1
    assert unlisted("report", report) == [".pipeline[].facts.buckets[].nix", ".pipeline[].facts.nix"]


def test_the_page_is_what_the_script_makes(formats, written):
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    assert page == formats.page(written), "run python docs/formats.py"
    assert [line for line in page.splitlines() if len(line) > 120] == []


def test_every_schema_is_on_the_page(formats):
    assert sorted(formats.DOCUMENTS) == sorted(SCHEMAS)


def test_help_reads_no_schema():
    code = (
        "import sys\n"
        "sys.addaudithook(lambda name, given: name == 'open' and 'schema.json' in str(given[0]) and sys.exit(9))\n"
        "from gopt.cli.main import main\n"
        "sys.exit(main(['--help']))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
