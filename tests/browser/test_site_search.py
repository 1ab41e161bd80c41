"""The site, opened from a disk: its search finds pages without a server and without the network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import Browser, Page
from helpers import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.slow]
QUERY = "document.querySelector('[data-md-component=search-query]')"
RESULTS = "[...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)"


def test_the_search_of_a_page_on_disk_finds_pages(tmp_path):
    found = subprocess.run([Path(__file__).with_name("chromium.sh")], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    browser = Browser(found.stdout.split()[0], tmp_path / "profile")
    try:
        page = Page(browser, tmp_path / "site/running.html")
        page.run(f"{QUERY}.focus(); 1")
        page.type("halo")
        page.run(f"{QUERY}.dispatchEvent(new Event('keyup', {{bubbles: true}})); 1")
        end = time.monotonic() + 120
        while not (links := page.run(RESULTS)) and time.monotonic() < end:
            time.sleep(0.1)
        assert any("/site/sharding.html" in link for link in links)
        assert page.complaints() == []
        assert [each for each in page.requests() if not each.startswith(("file:", "data:"))] == []
    finally:
        browser.close()
