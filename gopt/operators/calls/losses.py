"""Losses of classes by PyTorch."""

from __future__ import annotations

from typing import Any

from gopt.operators.torch_call import NodeSettings


def log_likelihood(t: Any, a: NodeSettings, logs: Any, labels: Any, weights: Any = None) -> Any:
    """``logs``: [samples, classes, ...]; ``labels``: [samples, ...]."""
    ignored, how = a.get("ignore_index"), a.get("reduction", "mean")
    counted = t.ones_like(labels, dtype=t.bool) if ignored is None else labels != ignored
    inside = t.where(counted, labels, 0).to(t.int64)
    losses = -logs.gather(1, inside.unsqueeze(1)).squeeze(1)
    factors = counted.to(logs.dtype)
    if weights is not None:
        factors = factors * weights.index_select(0, inside.reshape(-1)).reshape(labels.shape)
        losses = losses * factors
    losses = t.where(counted, losses, 0)
    if how == "none":
        return losses
    return losses.sum() if how == "sum" else losses.sum() / factors.sum()


def cross_entropy(t: Any, a: NodeSettings, scores: Any, labels: Any, weights: Any = None) -> tuple[Any, Any]:
    logs = scores.log_softmax(1)
    return log_likelihood(t, a, logs, labels, weights), logs
