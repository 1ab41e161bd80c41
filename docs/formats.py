"""Write docs/formats.md from the schemas and a small run: ``python docs/formats.py``."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from gopt.cli.main import main

from gopt.runtime.training import checkpoint_folder

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from schemas import DOCUMENTS, SCHEMAS  # noqa: E402

WIDTH = 120
MOST_ITEMS, MOST_TEXT = 2, 60
"""Of what is longer an example shows the beginning."""

CONFIG = """\
accumulate = 2

[mesh]
shard = 2

[pass.shard]
stage = 3

[roles]
loss = "loss"
"""

SERVER_MAP = """\
"fc1.weight#0" = 1        # the first piece of a parameter
"fc1.*" = 0               # a pattern
"fc2.weight" = 1          # a parameter
"""

RELATION = """\
format = "gopt-relation/1"

[mesh]
tp = 2

[inputs.w1]
split = ["", "tp"]        # columns 0 to 16 of 32 on rank 0, the others on rank 1

[inputs.w2]
box = [[0, 16], [0, 16]]

[outputs.result]
of = "y"

[[ranks]]
rank = 1
inputs = {w2 = {box = [[16, 32], [0, 16]]}}
"""

INTRO = f"""\
# Formats

Every key of every document that gopt reads or writes. `python docs/formats.py` generates this page from the schemas in
`gopt/schemas/`, which `python docs/schemas.py` makes of the records in the code, and which also check what is read
([Documents](documents.md)). The words are those of the [glossary](glossary.md).

An entry says: key, type, whether the key is required, what it means. "Table of X" is an object with keys that are not
fixed and values of type X; "open" says that other keys may follow. Sizes are in bytes, durations in seconds, and ranges
in elements unless an entry says otherwise.

The examples come from one small run: `fixtures/mlp_sgd.onnx` on 2 ranks, with [this configuration](#gopttoml), and a
checkpoint behind its first step. They show the first {MOST_ITEMS} items of a list; `…` stands for what is left out.
"""


def page(documents: dict[str, Any]) -> str:
    """The page as it should stand in docs/formats.md; ``documents`` are those of the examples."""
    examples = {"config": CONFIG.rstrip(), "servers": SERVER_MAP.rstrip(), "relation": RELATION.rstrip()}
    examples |= {name: show(shortened(each)) for name, each in documents.items()}
    parts = [INTRO]
    for name, (heading, _) in DOCUMENTS.items():
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
        parts.append(f"## {heading}\n\n{wrap(schema['description'])}\n")
        if keys := list(entries(schema, 0)):
            parts.append("\n".join(keys) + "\n")
        for key, each in schema.get("$defs", {}).items():
            parts.append(f"### {heading}: {key}\n\n{wrap(each['description'])}\n")
            parts.append("\n".join(entries(each, 0)) + "\n")
        if name in examples:
            language = "toml" if name in ("config", "servers", "relation") else "text"
            parts.append(f"### {heading}: example\n\n```{language}\n{examples[name]}\n```\n")
    return "\n".join(parts)


def entries(schema: dict[str, Any], depth: int) -> Iterator[str]:
    """The keys of an object, of the objects in its lists and tables, and what depends on the name of a pass."""
    while "items" in schema:
        schema = schema["items"]
    for key, each in schema.get("properties", {}).items():
        yield from entry(f"`{key}`", each, "required" if key in schema.get("required", ()) else "optional", depth)
    rest = schema.get("additionalProperties")
    if isinstance(rest, dict) and "properties" in schema:
        yield from entry("any other key", rest, "optional", depth)
    elif isinstance(rest, dict):
        yield from entries(rest, depth)
    for case in schema.get("allOf", ()):
        name = case["if"]["properties"]["name"]["const"]
        for key, each in case["then"]["properties"].items():
            yield from entry(f"`{key}` of `{name}`", each, "", depth)


def entry(label: str, schema: dict[str, Any], required: str, depth: int) -> Iterator[str]:
    """One bullet, and those below it."""
    head = ", ".join(filter(None, (type_name(schema), required, "open" if is_open(schema) else "")))
    text = f"{label} — {head}. " if head else f"{label} — "
    indent = "  " * depth
    yield wrap(text + " ".join(told(schema)), f"{indent}- ", f"{indent}  ")
    if "$ref" not in schema:
        yield from entries(schema, depth + 1)


def told(schema: dict[str, Any]) -> Iterator[str]:
    """The descriptions of a value, and of its items and values."""
    yield from filter(None, [schema.get("description")])
    for each in schema.get("prefixItems", ()):
        yield from told(each)
    if "items" in schema:
        yield from told(schema["items"])
    rest = schema.get("additionalProperties")
    if isinstance(rest, dict) and "properties" not in schema:
        yield from told(rest)


def type_name(schema: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        name: str = schema["$ref"].rpartition("/")[2]
        return name
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return "one of " + ", ".join("`null`" if each is None else f"`{each}`" for each in schema["enum"])
    given = schema.get("type", [])
    names = [given] if isinstance(given, str) else given
    found = [one_type(each, schema, inner=len(names) < 3) for each in names]
    least = f" ≥ {schema['minimum']}" if schema.get("minimum") else ""
    return " or ".join(filter(None, (", ".join(found[:-1]), *found[-1:]))) + least


def one_type(name: str, schema: dict[str, Any], inner: bool) -> str:
    """A type of JSON in the words of the page; ``inner``: with what it holds."""
    if name == "array":
        return f"list of {plural(type_name(schema['items']))}" if inner and "items" in schema else "list"
    rest = schema.get("additionalProperties")
    if name == "object" and isinstance(rest, dict) and "properties" not in schema:
        return f"table of {plural(type_name(rest))}" if inner else "table"
    return name


def plural(name: str) -> str:
    """``integer`` -> ``integers``; a choice between types goes in brackets."""
    first, space, rest = name.partition(" ")
    return f"({name})" if "," in name or " or " in name else first + "s" + space + rest


def is_open(schema: dict[str, Any]) -> bool:
    """Whether keys may follow that the schema does not list."""
    return schema.get("type") == "object" and schema.get("additionalProperties", True) is True


def wrap(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def make_documents() -> dict[str, Any]:
    """Shard a shipped fixture and run one step: format -> what was written."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        config, out, kept = folder / "gopt.toml", folder / "mlp.ranks", folder / "checkpoints"
        config.write_text(CONFIG, encoding="utf-8")
        source = HERE.parent / "fixtures/mlp_sgd.onnx"
        run("shard", str(source), "--config", str(config), "-o", str(out))
        np.savez(folder / "data.npz", x=np.zeros((32, 32), np.float32), y=np.zeros(32, np.int64))
        data = ("--data", str(folder / "data.npz"), "--set", "lr=0.1", "--steps", "1")
        run("run", str(out), *data, "--engine", "threads", "--checkpoint", str(kept))
        model = onnx.load(str(out / "source.onnx"), load_external_data=False)
        roles = next(each.value for each in model.metadata_props if each.key == "gopt.roles")
        texts = {
            "manifest": (out / "manifest.json").read_text(encoding="utf-8"),
            "report": (out / "report.json").read_text(encoding="utf-8"),
            "index": next(kept.glob("step_*/index.json")).read_text(encoding="utf-8"),
            "roles": roles,
        }
    found = {name: json.loads(text) for name, text in texts.items()}
    for entry in [each for name in ("manifest", "index") for each in found[name]["files"].values()]:
        entry["bytes"] = 4096  # the page stays as it is where a file gets longer
    return found


def run(*arguments: str) -> None:
    checkpoint_folder.new_identity = lambda: "0123456789abcdef" * 2  # the page shows the same one each time
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(list(arguments))
    if code:
        raise SystemExit(told.getvalue())


class Rest:
    """Stands for what is left out."""


def shortened(value: Any) -> Any:
    """The first items of lists, the beginning of texts, no digests."""
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        shown = [shortened(each) for each in value[:MOST_ITEMS]]
        return [*shown, Rest()] if len(value) > MOST_ITEMS else shown
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return "…"
    return value[:MOST_TEXT] + "…" if isinstance(value, str) and len(value) > MOST_TEXT else value


def show(value: Any, indent: int = 0, lead: int = 0) -> str:
    """JSON text: a value that fits stands on one line; ``lead``: what stands before it there."""
    line = flat(value)
    if len(line) + indent + lead < WIDTH or not isinstance(value, dict | list):
        return line
    pad = " " * (indent + 2)
    if isinstance(value, list):
        rows = [show(each, indent + 2) for each in value]
    else:
        rows = [f"{json.dumps(key)}: {show(each, indent + 2, len(key) + 4)}" for key, each in value.items()]
    start, end = "[]" if isinstance(value, list) else "{}"
    return start + "\n" + ",\n".join(pad + row for row in rows) + "\n" + " " * indent + end


def flat(value: Any) -> str:
    if isinstance(value, Rest):
        return "…"
    if isinstance(value, list):
        return "[" + ", ".join(map(flat, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {flat(each)}" for key, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    (HERE / "formats.md").write_text(page(make_documents()), encoding="utf-8")
