"""Attention and turned heads by PyTorch."""

from __future__ import annotations

import math
from typing import Any

from gopt.operators.torch_call import TYPES, NodeSettings


def _heads(x: Any, count: int | None) -> Any:
    """[samples, places, heads * size] -> [samples, heads, places, size]."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


def attention(
    t: Any, a: NodeSettings, q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None,
    lengths: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    flat = q.ndim == 3
    q = _heads(q, a.get("q_num_heads"))
    k, v = _heads(k, a.get("kv_num_heads")), _heads(v, a.get("kv_num_heads"))
    if past_k is not None:
        k, v = t.cat([past_k, k], 2), t.cat([past_v, v], 2)
    present, group = (k, v), q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) if group > 1 else part for part in (k, v))
    offset = 0 if past_k is None else past_k.shape[2]
    if lengths is not None:
        offset = lengths.reshape(-1, 1, 1, 1) - q.shape[2]
    bias = _bias(t, a, q, k, mask, offset, lengths)
    plain = bias is None and not a.get("softcap", 0.0) and a.results < 4
    if plain:
        y, scores = t.nn.functional.scaled_dot_product_attention(q, k, v, scale=a.get("scale")), None
    else:
        y, scores = _scored(t, a, q, k, v, bias)
    y = y.transpose(1, 2).flatten(2) if flat else y
    return y, *present, scores


def _bias(t: Any, a: NodeSettings, q: Any, k: Any, mask: Any, offset: Any, lengths: Any) -> Any:
    """The addend of scores: minus infinity where a query does not see a key; None for no addend."""
    least, bias = -math.inf, mask
    if mask is not None:
        lack = k.shape[2] - mask.shape[-1]
        bias = t.where(mask, 0.0, least).to(q.dtype) if mask.dtype == t.bool else mask
        bias = t.nn.functional.pad(bias, [0, lack], value=least) if lack > 0 else bias
    rows, columns = t.arange(q.shape[2], device=q.device).unsqueeze(1), t.arange(k.shape[2], device=q.device)
    ahead, back, right = columns - rows - offset, a.get("left_window_size", -1), a.get("right_window_size", -1)
    visible = [ahead <= 0] if a.get("is_causal", 0) else []
    visible += [ahead >= -back] if back >= 0 else []
    visible += [ahead <= right] if right >= 0 else []
    visible += [columns < lengths.reshape(-1, 1, 1, 1)] if lengths is not None else []
    for part in visible:
        more = t.where(part, 0.0, least).to(q.dtype)
        bias = more if bias is None else bias + more
    return bias


def _scored(t: Any, a: NodeSettings, q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any]:
    root, cap, shown = math.sqrt(a.get("scale", 1 / math.sqrt(q.shape[-1]))), a.get("softcap", 0.0), []
    scores = (q * root) @ (k * root).mT
    shown.append(scores)
    scores = (scores / cap).tanh() * cap if cap else scores
    shown.append(scores)
    scores = scores if bias is None else scores + bias
    shown.append(scores)
    precision = getattr(t, TYPES[a["softmax_precision"]]) if a.get("softmax_precision") else scores.dtype
    share = scores.to(precision).softmax(-1)
    if bias is not None:
        share = t.where(bias.amax(-1, keepdim=True) == -math.inf, 0, share)
    share = share.to(q.dtype)
    shown.append(share)
    return share @ v, shown[a.get("qk_matmul_output_mode", 0)]


def rotary(t: Any, a: NodeSettings, x: Any, cosines: Any, sines: Any, at: Any = None) -> Any:
    heads = _heads(x, a.get("num_heads"))
    size = a.get("rotary_embedding_dim", 0) or heads.shape[-1]
    turned, rest = heads[..., :size], heads[..., size:]
    if at is not None:
        shape = (*at.shape, cosines.shape[-1])
        cosines, sines = (table.index_select(0, at.reshape(-1)).reshape(shape) for table in (cosines, sines))
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    apart = a.get("interleaved", 0)
    real, imaginary = (turned[..., 0::2], turned[..., 1::2]) if apart else turned.chunk(2, -1)
    parts = [cosines * real - sines * imaginary, sines * real + cosines * imaginary]
    turned = t.stack(parts, -1).flatten(-2) if apart else t.cat(parts, -1)
    heads = t.cat([turned, rest], -1)
    return heads if x.ndim == 4 else heads.transpose(1, 2).reshape(x.shape)


def linear(
    t: Any, a: NodeSettings, q: Any, k: Any, v: Any, state: Any = None, decay: Any = None, beta: Any = None
) -> tuple[Any, Any]:  # fmt: skip
    """LinearAttention, time by time: a state of keys and values decays, and is corrected."""
    count, few, dtype = a["q_num_heads"], a["kv_num_heads"], q.dtype
    rule = a.get("update_rule", "gated_delta")
    wide = t.promote_types(dtype, t.float32)
    queries, keys, values = (_heads(x, heads).to(wide) for x, heads in ((q, count), (k, few), (v, few)))
    size, narrow = keys.shape[-1], dtype if state is None else state.dtype
    state = t.zeros(*keys.shape[:2], size, values.shape[-1], dtype=wide, device=q.device) if state is None else state
    state, rows = state.to(wide), []
    scale = a.get("scale", 0.0) or 1 / math.sqrt(size)
    for time in range(q.shape[1]):
        key, value = keys[:, :, time], values[:, :, time]
        if "gated" in rule:
            state = state * _heads(decay, few)[:, :, time].to(wide).exp().unsqueeze(-1)
        if "delta" in rule:
            step = _heads(beta, beta.shape[-1])[:, :, time].to(wide)
            value = step * (value - (state * key.unsqueeze(-1)).sum(2))
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        read = state.repeat_interleave(count // few, 1)
        rows.append(scale * (queries[:, :, time].unsqueeze(-1) * read).sum(2))
    y = t.stack(rows, 1).flatten(2)
    return y.to(dtype), state.to(narrow)
