"""What is installed: every package of the sources. An editable install does not notice one that is missing."""

from __future__ import annotations

from configparser import ConfigParser

from helpers import ROOT


def test_every_package_is_installed() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = set(config["options"]["packages"].split())
    tops = (("gopt", ROOT / "gopt"), ("gopt.cli", ROOT / "cli"))
    found = {
        ".".join([top, *path.parent.relative_to(folder).parts])
        for top, folder in tops for path in folder.rglob("__init__.py")
    }  # fmt: skip
    assert listed == found
