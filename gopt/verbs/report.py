"""``gopt.report``: an output folder as one HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gopt.offline.html_report import ReportPage, report_page, write_page
from gopt.offline.html_report.write import check_page
from gopt.options.types import checked
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verbs.on_disk import Folder, on_disk
from gopt.verification.result import Verification


@checked
def report(
    folder: Folder,
    html: str | os.PathLike[str] | None = None,
    *,
    trace: str | os.PathLike[str] | None = None,
    verification: str | os.PathLike[str] | Verification | None = None,
    force: bool = False,
    advance: ProgressCallback = no_progress,
) -> ReportPage:
    """Return the record of the page of an output folder; it is written to the file ``html`` where one is given.

    ``trace``: what ``gopt run --trace`` wrote; the timeline shows its times. ``verification``: what ``gopt.verify``
    returned, or the file of ``gopt verify --json``; the page shows the proof. ``force`` replaces a page that gopt
    wrote. Raises InputError, OptionError and RunError.

    >>> gopt.report(gopt.shard("fixtures/mlp_sgd.onnx", 2), "page.html", force=True).heading.ranks
    2
    """
    if html is not None:
        check_page(Path(html), force=force)
    proof: Path | Mapping[str, Any] | None
    if isinstance(verification, Verification):
        proof = verification.to_json()
    else:
        proof = None if verification is None else Path(verification)
    advance("reading")
    with on_disk(folder) as ranks:
        page = report_page(ranks, trace=None if trace is None else Path(trace), verification=proof)
    if html is not None:
        advance("writing")
        write_page(page, Path(html), force=force)
    return page
