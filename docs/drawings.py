"""Draw the pictures of docs/concepts.md, docs/proving.md and docs/schedules.md: ``python docs/drawings.py``.

Each is drawn from what gopt makes of a shipped fixture, so that cuts, bytes and the order of calls are the true ones.
``tests/docs/test_drawings.py`` compares the files with what this script draws.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import gopt
from gopt.analysis.training import Phase
from gopt.schedules.builders import build_schedule
from gopt.schedules.drawing import timeline_svg
from gopt.schedules.simulation import simulate
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.words import Words

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "fixtures"
CAP = 8 / 1024
"""The largest bucket, in MiB, of the pictures that need several."""

INK, QUIET, PAPER, LINE = "#1b1f24", "#57606a", "#ffffff", "#d0d7de"
RANKS = ("#4477aa", "#b8561f", "#228833", "#aa4499")
FORWARD, BACKWARD, UPDATE, GATHER, SCATTER = "#77aadd", "#eedd88", "#99ddbb", "#4477aa", "#cc6644"


@dataclass(slots=True)
class Drawing:
    """An SVG of a size in pixels, on paper of its own, so that it reads on dark pages too."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = PAPER) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "start") -> None:
        """One line of text; y is its base line."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, stroke: str = QUIET, dash: str = "") -> None:
        """A straight line."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{stroke}"{dashes}/>'
        )

    def svg(self) -> str:
        """The file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'role="img" font-family="Helvetica, Arial, sans-serif">\n<title>{escape(self.title)}</title>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}" stroke="{LINE}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def written(model: str, mesh: Any, **options: Any) -> dict[str, Any]:
    """Report and manifest of a fixture that is sharded."""
    with tempfile.TemporaryDirectory() as folder:
        gopt.shard(gopt.load(FIXTURES / model), mesh, **options).write(folder, force=True)
        return {
            name: json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("report", "manifest")
        }


def bucket() -> Drawing:
    """One bucket of four tensors, and its cuts among four ranks."""
    documents = written("mlp_adamw.onnx", 4)
    tensors = next(run for run in documents["report"]["pipeline"] if run["name"] == "shard")["facts"]["buckets"][0][
        "tensors"
    ]
    sizes = {state["tensor"]: _elements(state["shape"]) for state in documents["manifest"]["states"]}
    total = sum(sizes[name] for name in tensors)
    cuts = [0]
    for rank in documents["manifest"]["ranks"]:
        cuts.append(cuts[-1] + sum(p["stop"] - p["start"] for s in rank["state"][:1] for p in s["pieces"]))
    drawing = Drawing(860, 300, "A bucket of four tensors, cut into four shards")
    left, width = 30, 800
    drawing.text(left, 32, "Bucket b0 of fixtures/mlp_adamw.onnx on 4 ranks: four gradients seen as one flat array", 15)
    x = float(left)
    for name in tensors:
        part = width * sizes[name] / total
        drawing.box(x, 92, part, 44, "#dde3ea", INK)
        if part > 60:
            drawing.text(x + part / 2, 112, name, 13, INK, "middle")
            drawing.text(x + part / 2, 128, f"{sizes[name]:,} elements", 11, QUIET, "middle")
        else:
            last = name == tensors[-1]
            drawing.line(x + part / 2, 92, x + part / 2, 74)
            words = f"{name}, {sizes[name]} elements"
            drawing.text(x + part if last else x + part / 2, 70, words, 11, QUIET, "end" if last else "middle")
        x += part
    for member in range(4):
        begin, end = (left + width * cuts[member + at] / total for at in (0, 1))
        drawing.box(begin, 176, end - begin, 40, RANKS[member])
        drawing.text((begin + end) / 2, 201, f"rank {member}: {cuts[member + 1] - cuts[member]:,}", 13, PAPER, "middle")
    for cut in cuts:
        at = left + width * cut / total
        drawing.line(at, 84, at, 228, INK, "4 3")
        drawing.text(at, 244, f"{cut:,}", 12, INK, "start" if cut == 0 else "end" if cut == total else "middle")
    drawing.text(
        left,
        270,
        "Cuts: offsets in elements. Each member reduces, holds and updates the elements between two cuts.",
        12,
        QUIET,
    )
    drawing.text(
        left,
        287,
        "A tensor may be cut anywhere (--partition flat), between rows (rows) or not at all (whole).",
        12,
        QUIET,
    )
    return drawing


def _elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def stages() -> Drawing:
    """What the largest of four ranks holds at each stage, and what it sends."""
    drawing = Drawing(860, 330, "What a rank holds and sends at stages 0 to 3")
    drawing.text(
        30,
        32,
        "fixtures/gpt_adamw.onnx on 4 ranks, buckets of 8 KiB: what the largest rank holds and sends in a step",
        15,
    )
    kinds = (("parameters", FORWARD), ("optimizer_states", UPDATE), ("gradients", BACKWARD))
    made = [written("gpt_adamw.onnx", 4, stage=stage, bucket_mb=CAP)["report"]["ranks"] for stage in range(4)]
    scale = 480 / max(sum(rank["bytes"][kind] for kind, _ in kinds) for rank in made[0])
    for stage, ranks in enumerate(made):
        y = 84 + stage * 50
        largest = max(ranks, key=lambda rank: sum(rank["bytes"][kind] for kind, _ in kinds))
        drawing.text(30, y + 20, f"stage {stage}", 14)
        x = 100.0
        for kind, fill in kinds:
            width = largest["bytes"][kind] * scale
            drawing.box(x, y, width, 32, fill)
            if width > 42:
                drawing.text(x + width / 2, y + 21, _kib(largest["bytes"][kind]), 12, INK, "middle")
            x += width
        total = sum(largest["bytes"][kind] for kind, _ in kinds)
        calls = " + ".join(f"{each['calls']} {each['op']}" for each in largest["communication"])
        sent = sum(each["bytes_sent"] for each in largest["communication"])
        drawing.text(x + 8, y + 14, f"{_kib(total)} held", 12)
        drawing.text(x + 8, y + 29, f"{_kib(sent)} sent: {calls}", 11, QUIET)
    _legend(drawing, 100, 58, [("parameters", FORWARD), ("optimizer states", UPDATE), ("reduced gradients", BACKWARD)])
    drawing.text(
        30,
        300,
        "Stage 1 shards optimizer states. Stage 2 shards accumulated gradients too; without --accumulate both are one.",
        12,
        QUIET,
    )
    drawing.text(
        30,
        317,
        "Stage 3 shards parameters and gathers them before use: once for the forward, and again for the backward.",
        12,
        QUIET,
    )
    return drawing


def _kib(size: float) -> str:
    return f"{size / 1024:.1f} KiB"


def _legend(drawing: Drawing, x: float, y: float, entries: list[tuple[str, str]]) -> None:
    for words, fill in entries:
        drawing.box(x, y - 10, 12, 12, fill)
        drawing.text(x + 18, y, words, 12, QUIET)
        x += 40 + 6.6 * len(words)


def mesh() -> Drawing:
    """Eight ranks as a grid: what ranks of a row and of a column do together."""
    drawing = Drawing(860, 320, "A mesh of eight ranks")
    drawing.text(30, 32, "--mesh dp=2,shard=4: eight ranks as a grid, the last axis varies fastest", 15)
    for row in range(2):
        drawing.text(60, 125 + row * 90, f"dp = {row}", 13, QUIET)
        drawing.box(126, 80 + row * 90, 468, 76, "#eef1f4", LINE)
        for column in range(4):
            x, y = 140 + column * 114, 90 + row * 90
            drawing.box(x, y, 98, 56, RANKS[column])
            drawing.text(x + 49, y + 24, f"rank {row * 4 + column}", 14, PAPER, "middle")
            drawing.text(x + 49, y + 43, f"shard {column} of 4", 11, PAPER, "middle")
    for column in range(4):
        drawing.text(189 + column * 114, 70, f"shard = {column}", 13, QUIET, "middle")
    drawing.text(616, 110, "A row is a group along shard:", 13)
    drawing.text(616, 128, "ReduceScatter of gradients,", 12, QUIET)
    drawing.text(616, 144, "AllGather of parameters.", 12, QUIET)
    drawing.text(616, 186, "A column is a group along dp:", 13)
    drawing.text(616, 204, "the same shard twice; AllReduce", 12, QUIET)
    drawing.text(616, 220, "of that shard's gradients.", 12, QUIET)
    drawing.text(
        30,
        290,
        "Every rank sees samples of its own: dp and shard are axes of the data. Equal colours hold equal states.",
        12,
        QUIET,
    )
    drawing.text(
        30,
        307,
        "Along tp, ep, cp, sp, h and w the ranks work on the same samples, and the computation itself is split.",
        12,
        QUIET,
    )
    return drawing


def timeline() -> Drawing:
    """A step at stage 3 in the order of its file: nodes by phase, calls from issue to first reader."""
    program = gopt.shard(gopt.load(FIXTURES / "gpt_adamw.onnx"), 2, stage=3, bucket_mb=CAP).program
    nodes = program.graph.nodes
    left, width = 100, 730
    scale = width / len(nodes)
    drawing = Drawing(860, 330, "A step's timeline at stage 3")
    drawing.text(
        30, 32, "fixtures/gpt_adamw.onnx, 2 ranks, stage 3, buckets of 8 KiB: one step in the order of its nodes", 15
    )
    drawing.text(30, 118, "nodes")
    # What a pass adds has no phase of its own: it counts as of the phase around it.
    ends = {
        phase: max(at for at, node in enumerate(nodes) if node.phase is phase) + 1
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    bounds = [0, ends[Phase.FORWARD], ends[Phase.BACKWARD], len(nodes)]
    for fill, begin, end in zip((FORWARD, BACKWARD, UPDATE), bounds, bounds[1:]):
        drawing.box(left + begin * scale, 98, (end - begin) * scale, 32, fill)
    readers = {name: index for index in reversed(range(len(nodes))) for name in nodes[index].inputs}
    rows = {"AllGather": ("gathers", 152, GATHER), "ReduceScatter": ("reductions", 234, SCATTER)}
    for words, top, _ in rows.values():
        drawing.text(30, top + 22, words)
    last = dict.fromkeys(rows, -1)
    for index, node in enumerate(nodes):
        if node.op_type not in rows or node.domain != "gopt.comm":
            continue
        last[node.op_type] += 1
        _, top, fill = rows[node.op_type]
        first = min((readers[name] for name in node.outputs if name in readers), default=len(nodes))
        y = top + last[node.op_type] % 4 * 17
        drawing.box(left + index * scale, y, max(4.0, (first - index) * scale), 13, fill)
        drawing.line(left + index * scale, 130, left + index * scale, y, fill, "2 2")
    _legend(
        drawing,
        100,
        76,
        [
            ("forward", FORWARD),
            ("backward", BACKWARD),
            ("update", UPDATE),
            ("AllGather", GATHER),
            ("ReduceScatter", SCATTER),
        ],
    )
    drawing.line(left, 308, left + width, 308)
    drawing.text(left, 324, "first node", 11, QUIET)
    drawing.text(left + width, 324, f"node {len(nodes)}", 11, QUIET, "end")
    drawing.text(
        left + width / 2,
        324,
        "a bar begins where the call is issued, and ends at the first node that reads its result",
        11,
        QUIET,
        "middle",
    )
    return drawing


def proof() -> Drawing:
    """A gradient's way through nodes of two ranks and a call, in the expressions of ``gopt prove``."""
    with tempfile.TemporaryDirectory() as home:
        gopt.shard(FIXTURES / "mlp_adamw.onnx", 2, stage=2).write(Path(home, "out"))
        prover = Prover(folder_relation(Path(home, "out")))
        prover.run()
    weight = prover.training.gradients["fc1.weight"]
    bucket = "gopt.shard.b0"
    steps = [
        (weight, "MatMul, the backward", "each member has its own: it varies along shard"),
        (f"{bucket}.scattered", "ReduceScatter, mean", "the members of the sum are named: shard"),
        (f"{bucket}.c0.v1", "Mul by 0.1", "a factor is a rational coefficient"),
        (f"{bucket}.c0.state1_out", "Add", "the new moment: what the source makes of the mean, in ranges"),
    ]
    values = [prover.ranks[rank].files[0] for rank in (0, 1)]
    moment = prover.expressions.leaf("state", "fc1.weight.exp_avg", (64, 32))
    words = Words(prover.expressions, {values[0][weight]: "dW", moment: "m"}, prover.expressions.values)
    drawing = Drawing(1010, 110 + 92 * len(steps), "A gradient's way through four nodes and a call")
    drawing.text(
        30, 32, "fixtures/mlp_adamw.onnx, 2 ranks, stage 2: dW is the gradient of fc1.weight, m its first moment", 15
    )
    for column, rank in enumerate((0, 1)):
        drawing.text(230 + 385 * column, 62, f"rank {rank} has", 13, QUIET)
    for row, (name, node, remark) in enumerate(steps):
        top = 78 + 92 * row
        drawing.text(30, top + 20, node)
        drawing.text(30, top + 38, name, 11, QUIET)
        for column, made in enumerate(values):
            pieces = [piece for piece in prover.expressions.pieces(made[name]) if piece[2] - piece[1] > 700]
            number, start, stop = pieces[-1 if column == 0 else 0]
            left = 230 + 385 * column
            drawing.box(left, top, 370, 48, "#dde3ea", RANKS[column])
            drawing.text(left + 185, top + 20, words.text(number, top=True), 13, INK, "middle")
            drawing.text(left + 185, top + 38, f"elements {start} to {stop} of {64 * 32}", 11, QUIET, "middle")
            if row:
                drawing.line(left + 185, top - 44 + 16, left + 185, top)
        drawing.text(230, top + 62, remark, 11, QUIET)
    return drawing


@dataclass(frozen=True, slots=True)
class ScheduleDrawing:
    """Eight micro-batches through four members."""

    name: str

    def svg(self) -> str:
        """The file's text."""
        return timeline_svg(simulate(build_schedule(self.name, 4, 8)))


SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v")
DRAWINGS = {
    "bucket.svg": bucket, "stages.svg": stages, "mesh.svg": mesh, "timeline.svg": timeline, "proof.svg": proof,
    **{f"schedule-{name.partition(':')[0]}.svg": partial(ScheduleDrawing, name) for name in SCHEDULES},
}  # fmt: skip

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw().svg(), encoding="utf-8")
