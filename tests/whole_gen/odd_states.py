"""Losses, and states of other kinds than moments: targets, norms, distances, counters."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter, squares
from whole_gen.odd import float_, net, odd, rest
from whole_gen.updates import small
from whole_gen.writer import Value, Writer


@odd
def per_layer_state(w: Writer) -> None:
    """One state holds a moving average of the norm of every gradient; each clips its own."""
    p, g = net(w)
    norms = w.op("Concat", *(w.op("ReduceL2", each, keepdims=0).reshape(1) for each in g.values()), axis=0)
    seen = w.state("norms", np.full(3, 0.1, w.dtype))
    new = seen * 0.9 + norms * 0.1
    w.becomes(seen, new)
    for place, name in enumerate(p):
        own = w.op("Gather", new, w.const(np.array(place)), axis=0)
        now = w.op("Gather", norms, w.const(np.array(place)), axis=0)
        w.becomes(p[name], p[name] - g[name] * w.op("Min", own / (now + 1e-6), float_(w, 1.0)) * 0.1)


@odd
def adaptive_distance(w: Writer) -> None:
    """As D-adaptation: a scalar follows inner products of gradients with states that are sharded."""
    p, g = net(w)
    d, r = w.state("d", np.array(0.1, w.dtype)), w.state("r", np.array(0.0, w.dtype))
    dots, ones, sums = [], [], {}
    for name in p:
        s = small(w, name + ".s", p[name].shape)
        new = s * 0.9 + g[name] * d * 0.1
        w.becomes(s, new)
        dots.append((g[name] * s).sum())
        ones.append(w.op("Abs", new).sum())
        sums[name] = new
    top = r * 0.9 + w.op("Sum", *dots) * d
    w.becomes(r, top)
    big = w.op("Max", d, w.op("Abs", top) / (w.op("Sum", *ones) + 1e-3))
    w.becomes(d, big)
    for name in p:
        w.becomes(p[name], p[name] - g[name] * big)


@odd
def teacher(w: Writer) -> None:
    """A moving average of the student is the teacher, whose output is a target of the loss."""
    x = w.fed("x", [3])
    s = parameter(w, "s", 3, 2)
    t = w.state("t", w.draw("teacher", (3, 2)))
    d = w.op("Tanh", x @ s) - w.op("Tanh", x @ t)
    loss = (d * d).mean()
    (g,) = gradients(loss, [s])
    w.out("loss", loss)
    new = s - g * 0.1
    w.becomes(s, new)
    w.becomes(t, t * 0.9 + new * 0.1)


@odd
def target_copies(w: Writer) -> None:
    """A target network takes the weights over every second step."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    s, t = parameter(w, "s", 3, 2), w.state("t", w.draw("target", (3, 2)))
    loss = squares(w, x @ s, w.op("Tanh", x @ t) * 0.5 + y)
    (g,) = gradients(loss, [s])
    w.out("loss", loss)
    count = w.state("count", np.array(0, np.int64))
    more = count + 1
    w.becomes(count, more)
    new = s - g * 0.1
    w.becomes(s, new)
    due = w.op("Equal", w.op("Mod", more, w.const(np.array(2))), w.const(np.array(0)))
    w.becomes(t, w.op("Where", due, new, t))


@odd
def l2_in_loss(w: Writer) -> None:
    """The loss holds a penalty of the weights; the penalty is shown."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    a = parameter(w, "a", 3, 2)
    penalty = (a * a).sum() * 0.1
    loss = squares(w, x @ a, y) + penalty
    (g,) = gradients(loss, [a])
    w.out("penalty", penalty)
    w.out("loss", loss)
    w.becomes(a, a - g * 0.1)


def _summed(w: Writer, penalty: float = 0.0) -> tuple[Value, Value]:
    """A summed loss of one weight, times 0.1, with a penalty of the weight: the weight and its gradient."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    a = parameter(w, "a", 3, 2)
    d = x @ a - y
    loss = (d * d).sum() * 0.1
    loss = loss + (a * a).sum() * penalty if penalty else loss
    (g,) = gradients(loss, [a])
    w.out("loss", loss)
    w.options["loss_reduction"] = "sum"
    return a, g


@odd
def summed_loss(w: Writer) -> None:
    a, g = _summed(w)
    w.becomes(a, a - g * 0.1)


@odd
def summed_loss_with_penalty(w: Writer) -> None:
    """A penalty of the weights in a summed loss counts once, not once a rank."""
    a, g = _summed(w, penalty=0.2)
    w.becomes(a, a - g * 0.1)


@odd
def summed_loss_with_decay(w: Writer) -> None:
    """Decay added to the gradient of a summed loss."""
    a, g = _summed(w)
    w.becomes(a, a - (g + a * 0.3) * 0.1)


def masked(w: Writer, penalty: bool) -> None:
    x, y = w.fed("x", [3]), w.fed("y", [2])
    m = w.fed("m", [], lambda r, shape: (r.random(shape) > 0.4).astype(w.dtype))
    a = parameter(w, "a", 3, 2)
    d = x @ a - y
    total = m.sum()
    count = w.op("Max", total, float_(w, 1.0))
    loss = ((d * d).sum(1) * m).sum() / count
    if penalty:
        loss = loss + (a * a).sum() * 0.2
    (g,) = gradients(loss, [a])
    w.out("loss", loss)
    w.becomes(a, a - g * 0.1)
    w.options["loss_reduction"] = f"weighted:{total.name}"


@odd
def masked_loss(w: Writer) -> None:
    masked(w, False)


@odd
def masked_loss_with_penalty(w: Writer) -> None:
    """The penalty is in the loss beside a mean over samples that count."""
    masked(w, True)


@odd
def no_data(w: Writer) -> None:
    """A parameter that the loss does not reach decays; one is in no graph but its update; one has a zero gradient."""
    p, g = net(w)
    rest(w, p, g, *p)
    free, ticks = w.state("free", w.draw("free", (3, 2))), w.state("ticks", np.zeros(5, np.int64))
    w.becomes(free, free * 0.9)
    w.becomes(ticks, ticks + 1)
    still = w.state("still", w.draw("still", (2, 2)))
    w.becomes(still, w.op("Identity", still))


@odd
def empty(w: Writer) -> None:
    """A parameter without elements."""
    p, g = net(w)
    rest(w, p, g, *p)
    none = w.state("none", np.zeros((0, 3), w.dtype))
    w.becomes(none, none * 0.9)


@odd
def zero_gradient(w: Writer) -> None:
    """The gradient of one parameter is zero times its own."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    a, b = parameter(w, "a", 3, 2), parameter(w, "b", 2)
    loss = squares(w, x @ a + b * 0.0, y)
    ga, gb = gradients(loss, [a, b])
    w.out("loss", loss)
    for each, g in ((a, ga), (b, gb)):
        m = small(w, each.name + ".m", each.shape)
        w.becomes(m, m * 0.9 + g)
        w.becomes(each, each - g * 0.1 - each * 0.01)


@odd
def stacked_weights(w: Writer) -> None:
    """Two layers in one parameter [2, n, n]; the forward gathers each."""
    x, y = w.fed("x", [3]), w.fed("y", [3])
    s = parameter(w, "s", 2, 3, 3)
    h = x
    for layer in range(2):
        h = w.op("Tanh", h @ w.op("Gather", s, w.const(np.array([layer])), axis=0).reshape(3, 3))
    loss = squares(w, h, y)
    (g,) = gradients(loss, [s])
    w.out("loss", loss)
    norm = w.op("ReduceL2", g, w.const(np.array([1, 2])), keepdims=1)
    m = small(w, "s.m", (2, 3, 3))
    new = m * 0.9 + g / (norm + 0.1)
    w.becomes(m, new)
    w.becomes(s, s - new * 0.1)


@odd
def shown_values(w: Writer) -> None:
    """Outputs that show gradients, norms, a ratio of update to weight, and a histogram."""
    p, g = net(w)
    ratios = []
    for name in p:
        step = g[name] * 0.1
        ratios.append((w.op("ReduceL2", step, keepdims=0) / (w.op("ReduceL2", p[name], keepdims=0) + 1e-3)).reshape(1))
        w.becomes(p[name], p[name] - step)
    w.out("ratios", w.op("Concat", *ratios, axis=0))
    w.out("biggest", w.op("ArgMax", w.op("Abs", g["w0"]).reshape(-1), axis=0, keepdims=0))


@odd
def negative_tolerance(w: Writer) -> None:
    """Steps are skipped while the norm grows: the last norm is a state, the flag too."""
    p, g = net(w)
    last = w.state("last", np.array(0.3, w.dtype))
    norm = w.op("Sum", *((each * each).sum() for each in g.values())).sqrt()
    good = w.op("Less", norm, last * 1.5)
    w.becomes(last, w.op("Where", good, norm * 0.5 + last * 0.5, last))
    skipped = w.state("skipped", np.array(0, np.int32))
    w.becomes(skipped, skipped + w.op("Not", good).to(np.int32))
    for name in p:
        w.becomes(p[name], p[name] - w.op("Where", good, g[name], float_(w, 0.0)) * 0.1)


@odd
def last_norm(w: Writer) -> None:
    """The last step's norm clips this one; its new value does not read it."""
    p, g = net(w)
    last = w.state("last", np.array(0.3, w.dtype))
    norm = w.op("Sum", *((each * each).sum() for each in g.values())).sqrt()
    factor = w.op("Min", last / (norm + 1e-3), float_(w, 1.0))
    w.becomes(last, norm)
    for name in p:
        w.becomes(p[name], p[name] - g[name] * factor * 0.1)


@odd
def last_norm_of_rate(w: Writer) -> None:
    """The same where the rate is fed."""
    p, g = net(w)
    lr = w.setting("lr", 0.1)
    last = w.state("last", np.array(0.3, w.dtype))
    norm = w.op("Sum", *((each * each).sum() for each in g.values())).sqrt()
    factor = w.op("Min", last / (norm + 1e-3), float_(w, 1.0))
    w.becomes(last, norm)
    for name in p:
        w.becomes(p[name], p[name] - g[name] * factor * lr)


@odd
def rate_by_layer(w: Writer) -> None:
    """A fed vector of rates, and a matrix of rates that is fed."""
    p, g = net(w)
    w.hyper["rates"] = w.inputs["rates"] = np.array([0.1, 0.2, 0.05], w.dtype)
    rates = Value(w, "rates", w.inputs["rates"])
    for place, name in enumerate(p):
        w.becomes(p[name], p[name] - g[name] * w.op("Gather", rates, w.const(np.array(place)), axis=0))


@odd
def summed_loss_with_shared_penalty(w: Writer) -> None:
    """A weight is used twice in a summed loss, and has a penalty: one sum of three terms is its gradient."""
    x, y = w.fed("x", [3]), w.fed("y", [3])
    a = parameter(w, "a", 3, 3)
    d = w.op("Tanh", x @ a) @ a.turn(1, 0) - y
    loss = (d * d).sum() * 0.1 + (a * a).sum() * 0.2
    (g,) = gradients(loss, [a])
    w.out("loss", loss)
    w.becomes(a, a - g * 0.1)
    w.options["loss_reduction"] = "sum"
