"""All forms, and those that can be put on top of one another."""

from __future__ import annotations

from wild_gen import bodies, borders, functions, headers, scopes, values
from wild_gen.form import Form

FORMS: list[Form] = [*headers.FORMS, *borders.FORMS, *values.FORMS, *functions.FORMS, *bodies.FORMS, *scopes.FORMS]
EQUAL = [form for form in FORMS if form.refusal is None and form.verified]
