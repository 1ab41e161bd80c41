"""Several losses: networks side by side and in sequence, trunks that losses share, scalars that are only shown."""

from __future__ import annotations

import itertools

from whole_gen.derivatives import detached, gradients
from whole_gen.forwards import act, parameter, squares
from whole_gen.kinds import kind
from whole_gen.odd import float_
from whole_gen.updates import Shared, adam, heavy, sgd, velocity
from whole_gen.writer import Value, Writer

Params = dict[str, Value]


def _layers(w: Writer, name: str, *widths: int) -> Params:
    """The parameters of a perceptron; some layers have a bias."""
    found = {}
    for place, pair in enumerate(itertools.pairwise(widths)):
        found[f"{name}{place}"] = parameter(w, f"{name}{place}", *pair)
        if w.pick(True, False):
            found[f"{name}{place}.b"] = parameter(w, f"{name}{place}.b", pair[1])
    return found


def _through(w: Writer, x: Value, p: Params, name: str) -> Value:
    places = [each for each in p if each.startswith(name) and not each.endswith(".b")]
    for place, each in enumerate(places):
        x = x @ p[each]
        if f"{each}.b" in p:
            x = x + p[f"{each}.b"]
        x = w.op("Tanh", x) if place < len(places) - 1 else x
    return x


def _soft(w: Writer, x: Value) -> Value:
    """The mean of log(1 + exp(x))."""
    return w.op("Log", w.op("Exp", x) + 1.0).mean()


def _updates(w: Writer, rate: Value, *groups: tuple[Params, list[Value]]) -> None:
    """One optimizer for each group, as real steps have it."""
    for p, found in groups:
        rule = w.pick(sgd, heavy, adam, velocity)
        for each, gradient in zip(p.values(), found, strict=True):
            w.becomes(each, rule(w, each, gradient, Shared(rate)))


def _shown(w: Writer, **losses: Value) -> None:
    names = list(losses)
    for name in names if w.pick(True, False) else names[::-1]:
        w.out(name, losses[name])


def _total(w: Writer, parts: list[Value], *factors: float) -> Value:
    total = parts[0]
    for part, factor in zip(parts[1:], factors):
        total = total + part * factor
    return total


def _adversaries(w: Writer) -> tuple[Params, Params, Value, Value]:
    """A generator and a discriminator, and their inputs."""
    noise, size, hidden = w.pick(3, 2), w.pick(4, 3), w.pick(5, 4)
    g = _layers(w, "g", noise, hidden, size)
    d = _layers(w, "d", size, hidden, 1)
    return g, d, w.fed("x", [size]), w.fed("z", [noise])


@kind
def adversaries_side_by_side(w: Writer) -> None:
    """Both losses read the old values of both networks."""
    g, d, x, z = _adversaries(w)
    rate = w.setting("lr", 0.1)
    fake = _through(w, z, g, "g")
    again = fake if w.pick(True, False) else _through(w, z, g, "g")
    real, told = _through(w, x, d, "d"), _through(w, fake, d, "d")
    judged = told if again is fake and w.pick(True, False) else _through(w, again, d, "d")
    if w.pick("saturating", "means") == "means":
        loss_d, loss_g = told.mean() - real.mean(), -judged.mean()
        w.refusal = "gradient of 'd1.b': it does not come from the backward"  # where it is named: it is zero
    else:
        loss_d, loss_g = _soft(w, -real) + _soft(w, told), _soft(w, -judged)
    found_d, found_g = gradients(loss_d, list(d.values())), gradients(loss_g, list(g.values()))
    shown = {"loss_d": loss_d, "loss_g": loss_g}
    if w.pick(True, False):
        shown["both"] = loss_d + loss_g
    _shown(w, **shown)
    _updates(w, rate, (d, found_d), (g, found_g))


@kind
def adversaries_in_sequence(w: Writer) -> None:
    """The generator's loss reads the discriminator's new values."""
    g, d, x, z = _adversaries(w)
    rate = w.setting("lr", 0.1)
    fake = _through(w, z, g, "g")
    loss_d = _soft(w, -_through(w, x, d, "d")) + _soft(w, _through(w, fake, d, "d"))
    rule = w.pick(sgd, heavy, adam)
    new = {}
    for (name, each), gradient in zip(d.items(), gradients(loss_d, list(d.values()))):
        new[name] = rule(w, each, gradient, Shared(rate))
    read = {name: detached(w, each) for name, each in new.items()}
    again = fake if w.pick(True, False) else _through(w, z, g, "g")
    loss_g = _soft(w, -_through(w, again, read, "d"))
    found = gradients(loss_g, list(g.values()))
    _shown(w, **({"loss_d": loss_d, "loss_g": loss_g} if w.pick(True, False) else {"loss_d": loss_d}))
    for name, each in d.items():
        w.becomes(each, new[name])
    _updates(w, rate, (g, found))
    w.refusal = "reads the new value of"


@kind
def networks_apart(w: Writer) -> None:
    """Two or three networks that share nothing, or the batch alone; each has a loss of its own."""
    rate, count = w.setting("lr", 0.1), w.pick(2, 3)
    x = w.fed("x", [3])
    shown, groups = {}, []
    for place in range(count):
        p = _layers(w, "abc"[place], 3, w.pick(4, 2), w.pick(2, 1))
        read = x if w.pick(True, False) else w.fed(f"x{place}", [3])
        out = _through(w, read, p, "abc"[place])
        loss = squares(w, out, w.fed(f"y{place}", list(out.shape[1:])))
        shown[f"loss{place}"] = loss
        groups.append((p, loss))
    found = [(p, gradients(loss, list(p.values()))) for p, loss in groups]
    if w.pick(True, False):
        shown["total"] = _total(w, [loss for _, loss in groups], *[1.0] * (count - 1))
    _shown(w, **shown)
    _updates(w, rate, *found)


@kind
def trunk_of_two(w: Writer) -> None:
    """A trunk that is trained by two losses; their sum is shown, or not, or alone."""
    rate, x = w.setting("lr", 0.1), w.fed("x", [3])
    trunk, one, other = _layers(w, "t", 3, 4), _layers(w, "a", 4, w.pick(2, 3)), _layers(w, "c", 4, 1)
    h = act(w, _through(w, x, trunk, "t"))
    policy, value = _through(w, h, one, "a"), _through(w, h, other, "c")
    first = squares(w, policy, w.fed("y", list(policy.shape[1:])))
    second = squares(w, value, w.fed("r", [1]))
    weight = w.pick(0.5, 2.0)
    every = [*trunk.values(), *one.values(), *other.values()]
    parts = {**trunk, **one, **other}
    if w.pick("total", "summed") == "total":
        total = _total(w, [first, second], weight)
        found = gradients(total, every)
    else:
        total = None
        mine = dict(zip([*trunk, *one], gradients(first, [*trunk.values(), *one.values()])))
        theirs = dict(zip([*trunk, *other], gradients(second, [*trunk.values(), *other.values()])))
        found = [mine[n] + theirs[n] * weight if n in trunk else (mine.get(n) or theirs[n]) for n in parts]
        w.gradients.update((each.name, gradient) for each, gradient in zip(every, found))
    shown = {"policy_loss": first, "value_loss": second}
    if total is not None and w.pick(True, False):
        shown = {"loss": total}
    elif total is not None:
        shown["loss"] = total
    _shown(w, **shown)
    _updates(w, rate, (parts, found))


@kind
def metric_of_another_kind(w: Writer) -> None:
    """One loss; other functions of the forward are shown: an error, an entropy, a norm of activations, perplexity."""
    rate, x = w.setting("lr", 0.1), w.fed("x", [3])
    p = _layers(w, "p", 3, 4, w.pick(2, 3))
    out = _through(w, x, p, "p")
    y = w.fed("y", list(out.shape[1:]))
    loss = squares(w, out, y)
    shown = {"loss": loss}
    how = w.pick("mae", "entropy", "size", "exp", "ratio", "nearer")
    if how == "mae":
        shown["mae"] = w.op("Abs", out - y).mean()
    elif how == "entropy":
        odds = w.op("Softmax", out, axis=-1)
        shown["entropy"] = -(odds * w.op("Log", odds + 1e-3)).sum(-1).mean()
    elif how == "size":
        shown["size"] = (out * out).mean().sqrt()
    elif how == "exp":
        shown["perplexity"] = w.op("Exp", loss)
    elif how == "ratio":
        shown["ratio"] = w.op("Exp", out - w.fed("old", list(out.shape[1:]))).mean()
    else:
        shown["near"] = (x @ p["p0"]).mean()
    found = gradients(loss, list(p.values()))
    if w.pick(True, False):
        shown["norm"] = w.op("Sqrt", _total(w, [(g * g).sum() for g in found], *[1.0] * (len(found) - 1)))
    _shown(w, **shown)
    _updates(w, rate, (p, found))


@kind
def head_with_a_loss_of_its_own(w: Writer) -> None:
    """A probe reads the trunk's activations, and its loss trains the probe alone: nothing flows back."""
    rate, x = w.setting("lr", 0.1), w.fed("x", [3])
    p, probe = _layers(w, "p", 3, 4, 2), _layers(w, "q", w.pick(2, 4), 3)
    h = act(w, _through(w, x, {n: v for n, v in p.items() if n.startswith("p0")}, "p"))
    out = _through(w, h, {n: v for n, v in p.items() if n.startswith("p1")}, "p")
    loss = squares(w, out, w.fed("y", [2]))
    read = h if probe["q0"].shape[0] == 4 else out
    own = squares(w, _through(w, read, probe, "q"), w.fed("kind", [3]))
    found, theirs = gradients(loss, list(p.values())), gradients(own, list(probe.values()))
    _shown(w, loss=loss, probe_loss=own)
    _updates(w, rate, (p, found), (probe, theirs))


@kind
def clipped_together(w: Writer) -> None:
    """Two networks whose gradients are clipped by one norm, which is shown."""
    rate, x = w.setting("lr", 0.1), w.fed("x", [3])
    one, other = _layers(w, "a", 3, 4, 2), _layers(w, "c", 3, 2, 1)
    first = squares(w, _through(w, x, one, "a"), w.fed("y", [2]))
    second = squares(w, _through(w, x, other, "c"), w.fed("r", [1]))
    found = [gradients(first, list(one.values())), gradients(second, list(other.values()))]
    together = w.pick(True, False)
    norms = [_norm(w, [*found[0], *found[1]])] * 2 if together else [_norm(w, each) for each in found]
    limit = float_(w, 0.05)
    clipped = [
        [each * w.op("Min", limit / (norm + 1e-6), float_(w, 1.0)) for each in group]
        for group, norm in zip(found, norms)
    ]
    shown = {"first": first, "second": second, "norm": norms[0]} | ({} if together else {"other_norm": norms[1]})
    _shown(w, **shown)
    _updates(w, rate, (one, clipped[0]), (other, clipped[1]))


def _norm(w: Writer, found: list[Value]) -> Value:
    return w.op("Sqrt", _total(w, [(g * g).sum() for g in found], *[1.0] * (len(found) - 1)))


@kind
def target_and_critic(w: Writer) -> None:
    """An actor, a critic and a slow copy of it, which makes the critic's target: both losses read old values."""
    rate, x, u = w.setting("lr", 0.1), w.fed("x", [3]), w.fed("next", [3])
    actor, critic = _layers(w, "a", 3, 4, 2), _layers(w, "c", 3, 4, 1)
    slow = {name: w.state(f"slow.{name}", w.draw(f"slow.{name}", each.shape)) for name, each in critic.items()}
    value = _through(w, x, critic, "c")
    aim = w.fed("reward", [1]) + _through(w, u, slow, "c") * 0.9
    second = squares(w, value, aim)
    odds = w.op("LogSoftmax", _through(w, x, actor, "a"), axis=-1)
    gain = (aim - value) if w.pick(True, False) else w.fed("gain", [1])
    first = -(odds * gain).mean()
    found, theirs = gradients(first, list(actor.values())), gradients(second, list(critic.values()))
    _shown(w, actor_loss=first, critic_loss=second)
    rule = w.pick(sgd, heavy)
    for (name, each), gradient in zip(critic.items(), theirs):
        new = rule(w, each, gradient, Shared(rate))
        w.becomes(each, new)
        old = slow[name]
        w.becomes(old, old * 0.9 + new * 0.1)
    _updates(w, rate, (actor, found))


@kind
def counted_loss_of_one(w: Writer) -> None:
    """One network's data is weighted by a factor that is fed with the batch, and its loss by one that is set."""
    rate, x, share = w.setting("lr", 0.1), w.fed("x", [3]), w.setting("share", 0.3)
    one, other = _layers(w, "a", 3, 4, 2), _layers(w, "c", 3, 2, 1)
    first = squares(w, _through(w, x, one, "a"), w.fed("y", [2]))
    gap = _through(w, x, other, "c") - w.fed("r", [1])
    second = (gap * gap * w.fed("weight", [1])).mean() * share
    found = [gradients(first, list(one.values())), gradients(second, list(other.values()))]
    _shown(w, first=first, second=second)
    _updates(w, rate, (one, found[0]), (other, found[1]))
