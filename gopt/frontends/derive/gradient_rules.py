"""Changes of gradients between the backward and the update: loss scale, clip by norm, clip by value."""

from __future__ import annotations

UNSCALE = """unscale (inverse, g) => (plain)
{
  plain = Mul (g, inverse)
}"""

NOT_FINITE = """not_finite (g) => (found)
{
  zero = Sub (g, g)
  odd = IsNaN (zero)
  whole = Cast <to: int = 1> (odd)
  found = ReduceMax <keepdims: int = 0> (whole)
}"""
"""1 where an element is infinite or no number: g - g is not a number there."""

SQUARED_NORM = """squared_norm (g) => (total)
{
  wide = Cast <to: int = 1> (g)
  square = Mul (wide, wide)
  total = ReduceSum <keepdims: int = 0> (square)
}"""

CLIP_FACTOR = """clip_factor <bound, tiny, one> (total) => (factor)
{
  most = Constant <value: tensor = @bound> ()
  small = Constant <value: tensor = @tiny> ()
  unit = Constant <value: tensor = @one> ()
  norm = Sqrt (total)
  below = Add (norm, small)
  share = Div (most, below)
  factor = Min (share, unit)
}"""
"""torch.nn.utils.clip_grad_norm_: bound / (norm + 1e-6), at most 1."""

CLIP_VALUE = """clip_value <low, high> (g) => (bounded)
{
  least = Constant <value: tensor = @low> ()
  most = Constant <value: tensor = @high> ()
  bounded = Clip (g, least, most)
}"""

NEW_SCALE = """new_scale <growth, backoff, interval, one, zero> (scale, tracker, overflowed) => (new_scale, new_tracker)
{
  up = Constant <value: tensor = @growth> ()
  down = Constant <value: tensor = @backoff> ()
  enough = Constant <value: tensor = @interval> ()
  unit = Constant <value: tensor = @one> ()
  none = Constant <value: tensor = @zero> ()
  successes = Add (tracker, unit)
  grows = Equal (successes, enough)
  raised = Mul (scale, up)
  infinite = IsInf (raised)
  grown = Where (infinite, scale, raised)
  kept = Where (grows, grown, scale)
  lowered = Mul (scale, down)
  new_scale = Where (overflowed, lowered, kept)
  ends = Or (overflowed, grows)
  new_tracker = Where (ends, none, successes)
}"""
"""The rule of torch.amp.GradScaler: half of it after an overflow, twice after 2000 steps without one."""
