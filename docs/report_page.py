"""Take the picture of docs/report-page.md: ``python docs/report_page.py``.

It needs Chromium, which tests/browser/chromium.sh finds or installs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BROWSER = HERE.parent / "tests/browser"
sys.path.insert(0, str(BROWSER))
from browser import Browser, Page  # noqa: E402
from gopt.cli.main import main  # noqa: E402

PICTURE = HERE / "report-page.webp"
MODEL = HERE.parent / "fixtures/gpt_adamw.onnx"


def take(page: Path, profile: Path) -> bytes:
    """The page from its head to its timeline, in light colours."""
    path = subprocess.run([BROWSER / "chromium.sh"], capture_output=True, text=True, check=True).stdout.split()[0]
    browser = Browser(path, profile)
    try:
        shown = Page(browser, page, width=1180, height=800)
        end = shown.run("document.getElementById('operators').getBoundingClientRect().top + scrollY")
        clip = {"x": 0, "y": 0, "width": 1180, "height": end, "scale": 1}
        return shown.picture(clip=clip)
    finally:
        browser.close()


def make() -> None:
    """Shard, verify, and take the picture."""
    with tempfile.TemporaryDirectory() as home:
        folder, proof, page = (str(Path(home, name)) for name in ("gpt.ranks", "proof.json", "page.html"))
        assert main(["shard", str(MODEL), "--mesh", "dp=2,shard=2,tp=2", "-o", folder, "-q"]) == 0
        gopt = [sys.executable, "-m", "gopt.cli"]
        told = subprocess.run([*gopt, "verify", folder, "--steps", "1", "--json"], capture_output=True, check=True)
        Path(proof).write_bytes(told.stdout)
        assert main(["report", folder, "--html", page, "--verification", proof, "-q"]) == 0
        PICTURE.write_bytes(take(Path(page), Path(home, "profile")))


if __name__ == "__main__":
    make()
