"""A step shared out between trainers and servers: made, checked, and written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gopt.analysis.coupling import refuse_unlike
from gopt.analysis.stored_roles import roles_text
from gopt.artifact.manifest import Manifest
from gopt.artifact.report_record import Report
from gopt.options.types import checked
from gopt.parameter_server.options import SplitOptions
from gopt.steps.source import Source, as_source
from gopt.system import background
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.notebook import HtmlTable

if TYPE_CHECKING:
    from gopt.parameter_server.split import SplitStep


@dataclass(frozen=True, slots=True)
class Split(HtmlTable):
    """A step shared out between trainers and servers, checked."""

    source: Source
    step: SplitStep

    def __repr__(self) -> str:
        return f"<Split {self.source.name}: {self.step}>"

    def html_rows(self) -> Iterable[tuple[str, object]]:
        return [("source", self.source.name), ("split", str(self.step))]

    def manifest(self) -> Manifest:
        """The manifest as it is written."""
        from gopt.parameter_server.folder import split_manifest

        return split_manifest(self.step, self.source.rank_startup)

    def report(self) -> Report:
        """The report as it is written."""
        from gopt.parameter_server.report import build_split_report

        return build_split_report(self.step, self.source.entry())

    @gc_paused()
    @checked
    def write(
        self,
        folder: str | os.PathLike[str],
        *,
        force: bool = False,
        jobs: int | None = None,
        advance: ProgressCallback = no_progress,
    ) -> Report:
        """Write the output folder, whole or not at all, in at most ``jobs`` processes; returns the report."""
        from gopt.parameter_server.folder import write_split

        roles = roles_text(self.step.training)
        with background.processes(jobs) if jobs is not None else nullcontext():
            return write_split(
                self.step, folder, self.source.entry(), roles, self.source.rank_startup, force=force, advance=advance
            )


@gc_paused()
@checked
def split(
    source: Source | str | os.PathLike[str], options: SplitOptions, *, advance: ProgressCallback = no_progress
) -> Split:
    """Split a step between trainers and servers and check the result; nothing is written.

    ``source`` may be a file; ``advance`` is called with each phase. Raises OptionError and UnsupportedError
    for what cannot be split so.

    >>> gopt.split("fixtures/mlp_adamw.onnx", gopt.SplitOptions(trainers=2, servers=1)).source.name
    'mlp_adamw.onnx'
    """
    from gopt.parameter_server.split import split_step

    source = as_source(source)
    advance("splitting")
    training = source.training
    if options.trainers > 1 or options.accumulate > 1:
        refuse_unlike(training, source.roles, options.loss_reduction)
    return Split(source, split_step(training, options))
