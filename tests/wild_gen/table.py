"""All forms, those that can be put on top of one another, and those of any step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto, checker

from gopt.errors import UnsupportedError
from wild_gen import bodies, borders, functions, headers, scopes, values
from wild_gen.form import Form

FORMS: list[Form] = [*headers.FORMS, *borders.FORMS, *values.FORMS, *functions.FORMS, *bodies.FORMS, *scopes.FORMS]
EQUAL = [form for form in FORMS if form.refusal is None and form.verified]
GENERAL = {form.name: form for form in EQUAL if len(form.only) != 1}
"""Those that are not for one step alone: a step of another kind may be unfit, too."""


class Unfit(UnsupportedError):
    """A model cannot be written in a form."""


def rewritten(model: ModelProto, forms: Sequence[Form], folder: Path) -> dict[str, str]:
    """Write a model in forms, one on top of the other; return what became of names. Raises Unfit."""
    for k, node in enumerate(model.graph.node):
        node.name = f"n{k}"
    names: dict[str, str] = {}
    try:
        for form in sorted(forms, key=lambda form: "name" in form.name):  # other edits know the loss by its name
            new = form.edit(model, folder) or {}
            names = {old: new.get(name, name) for old, name in (names or dict(zip(new, new))).items()}
    except (LookupError, StopIteration, ValueError, OSError, checker.ValidationError) as error:
        raise Unfit(f"{form.name}: {error}") from error
    return names
