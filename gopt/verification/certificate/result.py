"""Result of a check of a certificate: wrong, resting on lemmas, or checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class CertificateFault:
    """A line that does not follow. ``line``: from 1; ``program``: source or rank; ``due``: the expected expression."""

    line: int
    program: str
    value: str
    actual: str
    due: str


@dataclass(slots=True)
class CertificateCheck(HtmlTable):
    """Result of a check; ``lemmas``: name of a law that the checker does not have -> the values that rest on it."""

    lines: int
    checked: int
    lemmas: dict[str, list[str]] = field(default_factory=dict)
    fault: CertificateFault | None = None

    def __repr__(self) -> str:
        return f"<CertificateCheck {self.verdict}: {self.checked} of {self.lines} lines>"

    @property
    def verdict(self) -> str:
        return "wrong" if self.fault is not None else "unproven" if self.lemmas else "checked"

    @property
    def exit_code(self) -> int:
        return {"checked": 0, "wrong": 1, "unproven": 4}[self.verdict]

    def reason(self) -> str:
        """In a line, why the certificate is not checked; '' for a checked one."""
        if self.fault is not None:
            return f"line {self.fault.line}, {self.fault.program}, {self.fault.value!r} does not follow"
        return f"{self.lines - self.checked} lines rest on lemmas" if self.lemmas else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "gopt-certificate-check/1", "verdict": self.verdict, "lines": self.lines, "checked": self.checked,
            "lemmas": self.lemmas, "fault": None if self.fault is None else asdict(self.fault),
        }  # fmt: skip
