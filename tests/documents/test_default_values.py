"""Values of hyper-parameters that a step is written with, as documents say them."""

from __future__ import annotations

import pytest

from gopt.documents.default_values import DefaultValue
from gopt.documents.records import from_document, to_document


@pytest.mark.parametrize(
    ("given", "document", "text"),
    [
        (DefaultValue("0.001"), {"schedule": "0.001"}, "0.001"),
        (DefaultValue("cosine:1:0:9", steps=20), {"schedule": "cosine:1:0:9", "steps": 20}, "cosine:1:0:9"),
        (DefaultValue(table=(0.5, 0.25)), {"table": [0.5, 0.25]}, "a table of 2 steps, 0.5 to 0.25"),
    ],
)
def test_values_in_documents_and_in_words(given, document, text):
    assert to_document(given) == document and from_document(DefaultValue, document) == given and str(given) == text
