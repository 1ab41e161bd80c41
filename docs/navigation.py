"""What mkdocs does beside its own: navigation from docs/index.md, and links to files outside of docs.

``docs/index.md`` lists the pages by purpose; a ``##`` heading is a section, and each link under it a page. So the list
that people read in the repository and the navigation of the site are one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
OUTSIDE = ("README.md", "CHANGELOG.md", "examples/README.md", "fixtures/README.md")
"""Pages that stand beside what they describe; on the site they get names of their own."""


def navigation(index: str) -> list[dict[str, Any]]:
    """Sections of docs/index.md, each with its pages as ``{title: file}``, in order."""
    sections: list[dict[str, Any]] = []
    for line in index.splitlines():
        if line.startswith("## "):
            sections.append({line[3:].strip(): []})
        elif sections:
            pages = next(iter(sections[-1].values()))
            pages += [{title: site_name(target)} for title, target in re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)", line)]
    return [section for section in sections if any(section.values())]


def site_name(target: str) -> str:
    """The file on the site for a link of a page in docs: ``../examples/README.md`` is ``examples-readme.md``."""
    name = target.removeprefix("../")
    return name.lower().replace("/", "-") if name in OUTSIDE else target


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config["nav"] = [{"gopt": "index.md"}, *navigation((DOCS / "index.md").read_text(encoding="utf-8"))]
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that stand outside of docs."""
    from mkdocs.structure.files import File

    for name in OUTSIDE:
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, site_name(name), content=from_docs(name, text)))
    return files


def from_docs(name: str, text: str) -> str:
    """The text of a page outside of docs, with its links as they are from docs."""
    folder = Path(name).parent

    def rebase(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", match[2]):
            return match[0]
        path, hash_, anchor = match[2].partition("#")
        parts: list[str] = []
        for part in (folder / path).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        target = "/".join(parts)
        there = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"{match[1]}({there}{hash_}{anchor})"

    return re.sub(r"(\])\(([^()\s]+)\)", rebase, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links out of docs to their pages on the site; name a file that the site has not."""

    def lead(match: re.Match[str]) -> str:
        path, hash_, anchor = match[2].partition("#")
        name = path.removeprefix("../")
        if name in OUTSIDE:
            return f"[{match[1]}]({site_name(path)}{hash_}{anchor})"
        return f"{match[1]} (`{name}` in the repository)"

    return re.sub(r"\[([^\[\]]*)\]\((\.\./[^()\s]+)\)", lead, markdown)
