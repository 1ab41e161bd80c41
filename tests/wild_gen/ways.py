"""Ways to write an update, a loss or a state: whole steps as text, each with gradients of known names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from written_steps import MOMENTS, MOMENTUM, NET, SHAPES, Written, each, sgd

SCALAR: Mapping[str, tuple[str, tuple[int, ...]]] = {"shown": ("float", ())}


@dataclass(frozen=True, slots=True)
class Way:
    """``words``: what the refusal says, where gopt refuses; ``settled``: the options with which the ranks are right."""

    step: Written
    words: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()


def const(name: str, value: object) -> str:
    return f"  {name} = Constant<value = float {{{value}}}>()\n"


def beside(kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A state for each parameter."""
    return {f"{name}_{kind}": ("float", shape) for name, shape in SHAPES.items()}


def loss(text: str) -> str:
    """The forward with another loss."""
    return NET.replace("loss = ReduceMean<keepdims = 0>(square)", text)


def average(name: str, of: str, old: str) -> str:
    """``name_out`` = 0.9 old + 0.1 of."""
    return each(f"  x{name}_@ = Mul(@_{old}, keep)\n  y{name}_@ = Mul({of}, part)\n"
                f"  @_{name}_out = Add(x{name}_@, y{name}_@)\n")  # fmt: skip


PARTS = const("keep", 0.9) + const("part", 0.1) + const("half", 0.5)
COUNT = "  one = Constant<value_int = 1>()\n  two = Constant<value_int = 2>()\n  none = Constant<value_int = 0>()\n"
TIED = """
  eighth = Constant<value = float {0.125}>()
  h = MatMul(x, w)
  wt = Transpose<perm = [1, 0]>(w)
  o = MatMul(h, wt)
  d = Sub(o, x)
  square = Mul(d, d)
  loss = ReduceMean<keepdims = 0>(square)
  do = Mul(d, eighth)
  ht = Transpose<perm = [1, 0]>(h)
  g1t = MatMul(ht, do)
  g1 = Transpose<perm = [1, 0]>(g1t)
  dh = MatMul(do, w)
  xt = Transpose<perm = [1, 0]>(x)
  g2 = MatMul(xt, dh)
"""
LABELS = NET.replace(
    "d = Sub(o, y)",
    "depth = Constant<value_int = 2>()\n  values = Constant<value_floats = [0.0, 1.0]>()\n"
    "  wide = Cast<to = 7>(label)\n  hot = OneHot(wide, depth, values)\n  d = Sub(o, hot)",
)
SLOW = each("  s_@ = Mul(g@, lr)\n  fast_@ = Sub(@, s_@)\n  d_@ = Sub(fast_@, @_slow)\n  a_@ = Mul(d_@, half)\n"
            "  near_@ = Add(@_slow, a_@)\n")  # fmt: skip
SINGLE = """
  half = Constant<value = float {0.5}>()
  scaled = Mul(y, w)
  o = Add(scaled, b)
  square = Mul(o, o)
  loss = ReduceMean<keepdims = 0>(square)
  quarter = Mul(half, half)
  do = Mul(o, quarter)
  dy = Mul(do, y)
  sum_b = ReduceSum<keepdims = 0>(do)
  sum_w = ReduceSum<keepdims = 0>(dy)
"""
"""A weight and a bias of one element; their gradients have no dimensions yet."""
FUNCTIONS = """<domain: "own", opset_import: ["" : 20]> Scale (a, b) => (d) { t = Mul(a, b) d = Identity(t) }
<domain: "own", opset_import: ["" : 20, "own" : 1]> Step (a, b, c) => (d) { t = own.Scale(b, c) d = Sub(a, t) }"""
PAIRS = ",".join(f"{name}={name}_out" for name in SHAPES)

WAYS = {
    # gradients: sums of one, shapes and sizes that follow them
    "a sum of one": Way(Written(NET + each("  z_@ = Sum(g@)\n  s_@ = Mul(z_@, lr)\n  @_out = Sub(@, s_@)\n"))),
    "mean and largest of one": Way(
        Written(NET + each("  z_@ = Mean(g@)\n  u_@ = Max(z_@)\n  s_@ = Mul(u_@, lr)\n  @_out = Sub(@, s_@)\n"))
    ),
    "zeros of a state's shape": Way(
        Written(NET + each("  k_@ = Shape(@)\n  z_@ = ConstantOfShape(k_@)\n  u_@ = Sum(g@, z_@)\n"
                           "  s_@ = Mul(u_@, lr)\n  @_out = Sub(@, s_@)\n"))
    ),
    "a rate of a state's shape": Way(
        Written(NET + each("  k_@ = Shape(@)\n  l_@ = Expand(lr, k_@)\n  s_@ = Mul(g@, l_@)\n  @_out = Sub(@, s_@)\n"))
    ),
    "divided by a gradient's size": Way(
        Written(NET + each("  n_@ = Size(g@)\n  f_@ = Cast<to = 1>(n_@)\n  u_@ = Mul(g@, lr)\n  s_@ = Div(u_@, f_@)\n"
                           "  @_out = Sub(@, s_@)\n"))
    ),
    "a state's shape in the forward": Way(
        Written(loss("k = Shape(w0)\n  f = Cast<to = 1>(k)\n  n = ReduceSum<keepdims = 0>(f)\n  z = Mul(n, zero)\n"
                     "  mean = ReduceMean<keepdims = 0>(square)\n  loss = Add(mean, z)") + sgd())
    ),
    "one constant everywhere": Way(
        Written(NET + each("  u_@ = Mul(g@, quarter)\n  s_@ = Mul(u_@, lr)\n  @_out = Sub(@, s_@)\n"))
    ),
    "updates in double": Way(
        Written(NET + "  wide_lr = Cast<to = 11>(lr)\n" + each(
            "  u_@ = Cast<to = 11>(g@)\n  v_@ = Cast<to = 11>(@)\n  s_@ = Mul(u_@, wide_lr)\n  n_@ = Sub(v_@, s_@)\n"
            "  @_out = Cast<to = 1>(n_@)\n"))
    ),
    # states of settings
    "a bound is a state": Way(
        Written(NET + PARTS + "  bound_out = Mul(bound, keep)\n  low = Neg(bound)\n" + each(
            "  c_@ = Clip(g@, low, bound)\n  s_@ = Mul(c_@, lr)\n  @_out = Sub(@, s_@)\n"), {"bound": ("float", ())})
    ),
    "a dropout ratio is a state": Way(
        Written(loss("no = Cast<to = 9>(zero)\n  same, mask_ = Dropout(square, ratio, no)\n"
                     "  loss = ReduceMean<keepdims = 0>(same)") + PARTS + "  ratio_out = Mul(ratio, keep)\n" + sgd(),
                {"ratio": ("float", ())})
    ),
    **{
        f"a counter of shape {list(shape)}": Way(
            Written(NET + PARTS + "  unit = Constant<value = float {1}>()\n  step_out = Add(step, unit)\n"
                    "  power = Pow(keep, step_out)\n  rest = Sub(unit, power)\n  fix = ReduceMax<keepdims = 0>(rest)\n"
                    + each("  a_@ = Mul(@_m, keep)\n  @_m_out = Add(a_@, g@)\n  b_@ = Div(@_m_out, fix)\n"
                           "  s_@ = Mul(b_@, lr)\n  @_out = Sub(@, s_@)\n"),
                    {**MOMENTS, "step": ("float", shape)}, start={"step": 0})
        )
        for shape in ((), (1,), (1, 1))
    },
    "a state that nothing reads": Way(
        Written(NET + PARTS + sgd() + "  odd_out = Mul(odd, keep)\n", {"odd": ("float", (3, 5))})
    ),
    # shapes of parameters
    "biases of one row": Way(
        Written(NET.replace("ReduceSum<keepdims = 0>", "ReduceSum<keepdims = 1>") + sgd(),
                shapes={**SHAPES, "b0": (1, 5), "b1": (1, 2)})
    ),
    "a parameter without elements": Way(
        Written(NET + sgd() + "  gz = Constant<value = float[0,3] {}>()\n  sz = Mul(gz, lr)\n  z_out = Sub(z, sz)\n",
                shapes={**SHAPES, "z": (0, 3)})
    ),
    **{
        f"parameters of shape {list(shape)}": Way(
            Written(SINGLE + f"  k = Constant<value = int64[{len(shape)}] {{{','.join(map(str, shape))}}}>()\n"
                    + each("  g@ = Reshape(sum_@, k)\n  s_@ = Mul(g@, lr)\n  @_out = Sub(@, s_@)\n", "wb"),
                    shapes={"w": shape, "b": shape}, gradients=("gw", "gb"))
        )
        for shape in ((), (1,), (1, 1))
    },
    # new values that other new values are made of
    "Nesterov": Way(
        Written(NET + PARTS + each(
            "  a_@ = Mul(@_m, keep)\n  @_m_out = Add(a_@, g@)\n  b_@ = Mul(@_m_out, keep)\n  c_@ = Add(g@, b_@)\n"
            "  s_@ = Mul(c_@, lr)\n  @_out = Sub(@, s_@)\n"), MOMENTS)
    ),
    "lookahead every second step": Way(
        Written(NET + PARTS + COUNT + "  step_out = Add(step, one)\n  left = Mod(step_out, two)\n"
                "  now = Equal(left, none)\n" + SLOW
                + each("  @_slow_out = Where(now, near_@, @_slow)\n  @_out = Where(now, near_@, fast_@)\n"),
                {**beside("slow"), "step": ("int64", ())}, start={"step": 0})
    ),
    "lookahead in each step": Way(
        Written(NET + PARTS + SLOW + each("  @_slow_out = Identity(near_@)\n  @_out = Identity(near_@)\n"),
                beside("slow")),
        ("may replace any of", "--states w0=w0_out"), ("--states", PAIRS),
    ),
    "an average of an average": Way(
        Written(NET + PARTS + sgd() + average("e", "@_out", "e") + average("f", "@_e_out", "f"),
                {**beside("e"), **beside("f")})
    ),
    "an average of the old average": Way(
        Written(NET + PARTS + sgd() + average("e", "@_out", "e") + average("f", "@_e", "f"),
                {**beside("e"), **beside("f")})
    ),
    "an average of old parameters": Way(Written(NET + PARTS + sgd() + average("e", "@", "e"), beside("e"))),
    "old parameters kept": Way(
        Written(NET + sgd() + each("  @_old_out = Identity(@)\n"), beside("old")),
        ("may each be the new value of 'w0'", "--states"),
        ("--states", PAIRS + "," + ",".join(f"{name}_old={name}_old_out" for name in SHAPES)),
    ),
    "two optimizers in turn": Way(
        Written(NET + PARTS + each(
            "  s_@ = Mul(g@, lr)\n  mid_@ = Sub(@, s_@)\n  a_@ = Mul(@_m, keep)\n  @_m_out = Add(a_@, g@)\n"
            "  b_@ = Mul(mid_@, part)\n  c_@ = Sub(mid_@, b_@)\n  e_@ = Mul(@_m_out, lr)\n  @_out = Sub(c_@, e_@)\n"),
            MOMENTS)
    ),
    "tied, with decay": Way(
        Written(TIED + const("small", 0.01) + "  gw = Add(g1, g2)\n  e = Mul(w, small)\n  f = Add(gw, e)\n"
                "  s = Mul(f, lr)\n  w_out = Sub(w, s)\n", shapes={"w": (3, 5)}, gradients=("gw",),
                batch={"y": ("float", (1,))})
    ),
    "tied, decay between the two": Way(
        Written(TIED + const("small", 0.01) + "  e = Mul(w, small)\n  f = Add(g1, e)\n  k = Add(f, g2)\n"
                "  s = Mul(k, lr)\n  w_out = Sub(w, s)\n", shapes={"w": (3, 5)}, gradients=("g1", "g2"),
                batch={"y": ("float", (1,))})
    ),
    # losses and what is shown
    "a loss of one row": Way(
        Written(loss("mean = ReduceMean<keepdims = 0>(square)\n  loss = Unsqueeze(mean, first)") + sgd(), loss=(1,))
    ),
    "a loss of one row and column": Way(
        Written(loss("loss = ReduceMean<keepdims = 1>(square)") + sgd(), loss=(1, 1))
    ),
    "a loss to be maximised": Way(
        Written(loss("mean = ReduceMean<keepdims = 0>(square)\n  loss = Neg(mean)").replace(
            "do = Mul(d, quarter)", "down = Mul(d, quarter)\n  do = Neg(down)") + sgd().replace("Sub(", "Add("))
    ),
    "metrics of gradients and updates": Way(
        Written(NET + MOMENTUM + "  p = ReduceL2<keepdims = 0>(gw0)\n  q = ReduceL1<keepdims = 0>(s_b0)\n"
                "  r = ReduceMax<keepdims = 0>(gw1)\n  t = Sum(p, q, r)\n  shown = Add(t, loss)\n", MOMENTS, SCALAR)
    ),
    "a maximum beside the loss": Way(
        Written(loss("loss = ReduceMean<keepdims = 0>(square)\n  shown = ReduceMax<keepdims = 0>(square)") + sgd(),
                shown=SCALAR)
    ),
    "labels of 8 bits, classes shown": Way(
        Written(LABELS + sgd() + "  classes = ArgMax<axis = 1, keepdims = 0>(o)\n", shown={"classes": ("int64", (4,))},
                batch={"label": ("uint8", (4,))})
    ),
    # functions and bodies
    "functions of one inner name": Way(
        Written(NET + each("  @_out = own.Step(@, g@, lr)\n"), functions=FUNCTIONS)
    ),
    "a function twice in a row": Way(
        Written(NET + each("  mid_@ = own.Step(@, g@, lr)\n  @_out = own.Step(mid_@, g@, lr)\n"), functions=FUNCTIONS)
    ),
    "a body's value named like a later one": Way(
        Written(NET.replace("h = Relu(h1)", "on = Greater(lr, zero)\n  h = If (on) <then_branch = a () => "
                            "(float[4,5] r) { r = Relu(h1) }, else_branch = b () => (float[4,5] do) "
                            "{ do = Relu(h1) }>") + sgd())
    ),
    "a parameter through an If": Way(
        Written(NET.replace("h0 = MatMul(x, w0)", "on = Greater(lr, zero)\n  read = If (on) <then_branch = a () => "
                            "(float[3,5] p) { p = Identity(w0) }, else_branch = b () => (float[3,5] q) "
                            "{ q = Identity(w0) }>\n  h0 = MatMul(x, read)") + sgd())
    ),
    "an update in a Loop": Way(
        Written(NET + sgd(("b0", "w1", "b1")) + COUNT + "  go = Cast<to = 9>(one)\n  w0_out = Loop (one, go, w0) "
                "<body = turn (int64 place, bool on, float[3,5] old) => (bool next, float[3,5] new) "
                "{ next = Identity(on)\n s = Mul(gw0, lr)\n new = Sub(old, s) }>\n"),
        ("control flow around a parameter", "Loop"),
    ),
}  # fmt: skip
