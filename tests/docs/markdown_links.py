"""Links and anchors of Markdown files, read without a generator: what GitHub makes of headings is the rule."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
HTML = re.compile(r"<(?:img|a|source)\b[^>]*?\b(?:src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True, slots=True)
class Broken:
    """A link whose file or anchor is not there."""

    page: str
    target: str
    why: str


def prose(text: str) -> str:
    """A page without fenced blocks, inline code and comments."""
    text = re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->|``.+?``|`[^`\n]+`", "", text, flags=re.S)


def links(text: str) -> list[str]:
    """Targets of all links and pictures."""
    plain = prose(text)
    return LINK.findall(plain) + HTML.findall(plain)


def anchors(text: str) -> set[str]:
    """Anchors of a page: of its headings, as GitHub names them, and its own."""
    outside = re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.M | re.S)
    seen: Counter[str] = Counter()
    found = set(ANCHOR.findall(outside))
    for heading in HEADING.findall(outside):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(root: Path, pages: list[Path]) -> list[Broken]:
    """Relative links of the pages that lead nowhere, or out of the repository."""
    found = []
    texts: dict[Path, str] = {}
    for page in pages:
        for target in links(page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page.resolve()
            why = None
            if not path.is_relative_to(root) or not path.exists():
                why = "no such file"
            elif anchor and path.suffix == ".md":
                texts.setdefault(path, path.read_text(encoding="utf-8"))
                why = None if anchor in anchors(texts[path]) else "no such heading"
            if why:
                found.append(Broken(str(page.relative_to(root)), target, why))
    return found
