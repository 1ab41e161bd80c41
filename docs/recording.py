"""Record the README's five minutes as a moving picture: ``python docs/recording.py``.

The commands run for real. A command appears, its output after as many seconds as it took, and the picture scrolls as a
terminal does. It is one SVG file, without scripts: its parts appear by animations that every browser knows.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from terminal_picture import FIRST, LINE, Ran, Screen, drawn, run, transcript

HERE = Path(__file__).parent
PICTURE = HERE / "pictures/five-minutes.svg"
README = HERE.parent / "README.md"
COLUMNS, ROWS = 110, 30
READ, END = 2.5, 5.0
"""Seconds after each command's output, and after the last, before all begins again."""
_FORMAT = """\
<svg viewBox="0 0 {{width}} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{{unique_id}}-matrix {{{{ font-family: monospace; font-size: {{char_height}}px; }}}}
{{styles}}
</style>
<clipPath id="{{unique_id}}-screen"><rect width="{{width}}" height="{screen}"/></clipPath>
<rect width="{{width}}" height="{height}" rx="8" fill="#292929"/>
<g transform="translate(10, 10)" clip-path="url(#{{unique_id}}-screen)">
<g class="{{unique_id}}-matrix">
{scroll}
{{matrix}}
</g>
</g>
</svg>
"""


@dataclass(frozen=True, slots=True)
class Film:
    """When each line appears, and how long all takes, in seconds."""

    appears: tuple[float, ...]
    seconds: float

    def part(self, at: float) -> str:
        """A moment as a part of the whole."""
        return f"{at / self.seconds:.4f}"

    def scrolled(self) -> dict[float, int]:
        """Moment -> lines that have gone off the top by then."""
        return {at: max(0, line + 1 - ROWS) for line, at in enumerate(self.appears)}


def commands() -> tuple[str, ...]:
    """The gopt commands of the README's five minutes on the shipped fixture."""
    block = re.search(r"```bash\n(python samples.py\n.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert block is not None
    return tuple(line.partition("#")[0].strip() for line in block[1].splitlines() if line.startswith("gopt"))


def samples() -> str:
    """The README's script that makes the samples."""
    block = re.search(r"```python\n(# samples.py.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert block is not None
    return block[1]


def prepare() -> None:
    """What a newcomer has before the first command: the fixture, and samples."""
    Path("fixtures").mkdir()
    shutil.copy(HERE.parent / "fixtures/mlp_adamw.onnx", "fixtures")
    exec(compile(samples(), "samples.py", "exec"), {})


def timed(ran: list[Ran]) -> Film:
    """Each command appears, and its output when it has run."""
    now, appears = 0.5, []
    for number, each in enumerate(ran):
        appears += [now] * (2 if number else 1)  # an empty line, and the command
        now += max(each.seconds, 0.7)
        appears += [now] * len(each.lines)
        now += READ
    return Film(tuple(appears), now + END)


def film(ran: list[Ran]) -> str:
    """The moving picture."""
    times = timed(ran)
    screen = ROWS * LINE + 6
    scroll = _animated_scroll(times)
    code = _FORMAT.format(height=f"{screen + 20:.1f}", screen=f"{screen:.1f}", scroll=scroll)
    picture = drawn(transcript(ran), "five-minutes", COLUMNS, code)
    return re.sub(r'(<text [^>]*? y="([\d.]+)"[^>]*>)', lambda found: found[1] + _appearing(times, found[2]), picture)


def _appearing(times: Film, row: str) -> str:
    at = times.part(times.appears[round((float(row) - FIRST) / LINE)])
    return (
        f'<animate attributeName="visibility" dur="{times.seconds:.1f}s" repeatCount="indefinite" calcMode="discrete" '
        f'values="hidden;visible" keyTimes="0;{at}"/>'
    )


def _animated_scroll(times: Film) -> str:
    moves = times.scrolled()
    values = ";".join(["0 0", *(f"0 {-lines * LINE:.1f}" for lines in moves.values())])
    keys = ";".join(["0", *(times.part(at) for at in moves)])
    return (
        f'<animateTransform attributeName="transform" type="translate" dur="{times.seconds:.1f}s" '
        f'repeatCount="indefinite" calcMode="discrete" values="{values}" keyTimes="{keys}"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(film(run(Screen("five-minutes", commands(), COLUMNS, prepare))), encoding="utf-8")
