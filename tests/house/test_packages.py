"""What is installed: every package of the sources. An editable install does not notice one that is missing."""

from __future__ import annotations

from configparser import ConfigParser

from helpers import ROOT

CONFIG = ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")


def test_every_package_is_installed() -> None:
    listed = set(CONFIG["options"]["packages"].split())
    tops = (("gopt", ROOT / "gopt"), ("gopt.cli", ROOT / "cli"))
    found = {
        ".".join([top, *path.parent.relative_to(folder).parts])
        for top, folder in tops for path in folder.rglob("__init__.py")
    }  # fmt: skip
    assert listed == found


def test_the_runtime_is_one_wheel_and_comes_with_every_extra_that_runs() -> None:
    """Texts need none of its 250 MB: a hook of pre-commit installs gopt without an extra."""
    extras = CONFIG["options.extras_require"]
    [runtime] = extras["run"].split()
    assert "onnxruntime" in runtime and "onnxruntime" not in CONFIG["options"]["install_requires"]
    assert {name for name, needed in extras.items() if runtime not in needed.split()} == {"docs"}
