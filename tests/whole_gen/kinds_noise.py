"""What joins a sum over the samples before a step divides it by their number."""

from __future__ import annotations

from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Value, Writer


@kind
def joined_sums(w: Writer) -> None:
    """A noise, a decay, or a state that no sample reaches is added to the sum over samples; the number of samples, or
    a count, divides both: on ranks of part of the batch what is added weighs more."""
    w.open = w.pick(True, False)
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    h = w.op("Tanh", x @ w0)
    e, d = h - y, (h - y) * 2.0 * (1.0 - h * h)
    how = w.pick("size", "count") if w.open else w.pick("size", "count", "number")
    if how == "count":
        u = w.fed("u", [1])
        seen = u * u + 0.1
        loss, count, d = (e * e * seen).sum(), seen.sum(), d * seen
    else:
        loss = (e * e).sum()
        count = w.op("Size", x).to(w.dtype) / 3.0 if how == "size" else float(w.samples)
    w.out("loss", loss / count if w.pick(True, False) else loss)
    g = x.turn(1, 0) @ d
    way = w.pick("noise", "scaled noise", "decay", "momentum", "clipped", "none")
    if "noise" in way:
        w.hyper["noise"] = w.inputs["noise"] = w.draw("noise", (3, 2))
        noise = Value(w, "noise", w.inputs["noise"])
        total = g + (noise * 0.3 if way == "scaled noise" else noise)
    elif way == "decay":
        total = g + w0 * 0.4
    elif way == "momentum":
        m = w.state("m", w.draw("m", (3, 2)))
        total = g + m * 0.9
        w.becomes(m, total)
    elif way == "clipped":
        total = w.op("Clip", g, w.like(-1.5, g), w.like(1.5, g))
    else:
        total = g
    w.refusal = "of one rank's own batch, beside a gradient|local gradient|is a part of the update"
    w.refusal += {"noise": "|which no loss depends on", "clipped": "|not linear in them"}.get(way.split()[-1], "")
    w.gradients["w0"] = total / count
    w.becomes(w0, w0 - total / count * 0.1)
