"""Softmax, losses, normalisation, signals, attention."""

from __future__ import annotations

import numpy as np

from operator_cases.case import RUNTIME, SINGLE, Draw, add

for name in ("Softmax", "LogSoftmax"):
    for axis in (-1, 0, 1):
        add(name, f"y = {name}<axis={axis}>(x)", "x", f"axis {axis}", x=(2, 3, 4))
for name in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
    for how in ("mean", "sum", "none"):
        add(name, f'y = {name}<reduction="{how}">(x, t)', "x", how, x=(4, 3), t=[0, 2, 1, 2])
        add(
            name, f'y = {name}<reduction="{how}">(x, t, w)', "x", f"{how}, weights", x=(4, 3), t=[0, 2, 1, 2],
            w=Draw((3,), 0.5, 2),
        )  # fmt: skip
        add(
            name, f'y = {name}<reduction="{how}", ignore_index=2>(x, t)', "x", f"{how}, ignores", x=(4, 3),
            t=[0, 2, 1, 2],
        )  # fmt: skip
    add(name, f"y = {name}(x, t)", "x", "positions", x=(2, 3, 4), t=[[0, 2, 1, 2], [1, 1, 0, 2]])
    add(
        name, f'y = {name}<reduction="sum">(x, t, w)', "w", "by weights", x=(4, 3), t=[0, 2, 1, 2], w=Draw((3,), 0.5, 2)
    )
add("SoftmaxCrossEntropyLoss", "z, y = SoftmaxCrossEntropyLoss(x, t)", "x", "log_prob", x=(4, 3), t=[0, 2, 1, 2])
add(
    "SoftmaxCrossEntropyLoss", "z, p = SoftmaxCrossEntropyLoss(x, t) y = Mul(z, p)", "x", "both", x=(4, 3),
    t=[0, 2, 1, 2],
)  # fmt: skip
for kind, attributes, shape in (
    ("plain", "", (4,)),
    ("axis 1", "<axis=1>", (3, 4)),
    ("epsilon", "<epsilon=0.1>", (4,)),
):
    add(
        "LayerNormalization", f"y = LayerNormalization{attributes}(x, s, b)", "x s b", kind, x=(2, 3, 4), s=shape,
        b=shape,
    )  # fmt: skip
    add("RMSNormalization", f"y = RMSNormalization{attributes}(x, s)", "x s", kind, x=(2, 3, 4), s=shape)
add("LayerNormalization", "y = LayerNormalization(x, s)", "x s", "without bias", x=(2, 3, 4), s=(4,))
add("LayerNormalization", "y = LayerNormalization(x, s, b)", "x s b", "broadcast scale", x=(2, 3, 4), s=(1,), b=(3, 4))
add(
    "LayerNormalization", "z, y, v = LayerNormalization(x, s)", "x", "mean", refused="LayerNormalization", x=(2, 3, 4),
    s=(4,),
)  # fmt: skip
for shape in ((2, 4), (2, 4, 3), (2, 4, 3, 2)):
    if len(shape) > 2:
        add(
            "InstanceNormalization", "y = InstanceNormalization<epsilon=0.01>(x, s, b)", "x s b", f"rank {len(shape)}",
            x=shape, s=(4,), b=(4,),
        )  # fmt: skip
        add(
            "GroupNormalization", "y = GroupNormalization<num_groups=2>(x, s, b)", "x s b", f"rank {len(shape)}",
            since=21, how=SINGLE, x=shape, s=(4,), b=(4,),
        )  # fmt: skip
        add(
            "GroupNormalization", "y = GroupNormalization<num_groups=2>(x, s, b)", "x s b",
            f"by group, rank {len(shape)}", until=20, x=shape, s=(2,), b=(2,),
        )  # fmt: skip
    add(
        "BatchNormalization", "y = BatchNormalization<epsilon=0.01>(x, s, b, m, v)", "x s b", f"rank {len(shape)}",
        x=shape, s=(4,), b=(4,), m=(4,), v=Draw((4,), 0.5, 2),
    )  # fmt: skip
add(
    "BatchNormalization", "y = BatchNormalization(x, s, b, m, v)", "x s b", "two types", x=(2, 4),
    s=Draw((4,)).numbers("s").astype(np.float32), b=Draw((4,)).numbers("b").astype(np.float32),
    m=Draw((4,)).numbers("m").astype(np.float32), v=Draw((4,), 0.5, 2).numbers("v").astype(np.float32), how=SINGLE,
)  # fmt: skip
add(
    "BatchNormalization", "y = BatchNormalization(x, s, b, m, v)", "x m v", "statistics", refused="BatchNormalization",
    x=(2, 4), s=(4,), b=(4,), m=(4,), v=Draw((4,), 0.5, 2),
)  # fmt: skip
add(
    "BatchNormalization", "y, n, w = BatchNormalization<training_mode=1>(x, s, b, m, v)", "x s", "training mode",
    refused="BatchNormalization", x=(3, 4), s=(4,), b=(4,), m=(4,), v=Draw((4,), 0.5, 2),
)  # fmt: skip
for axis, power in ((-1, 2), (1, 1), (0, 2)):
    add(
        "LpNormalization", f"y = LpNormalization<axis={axis}, p={power}>(x)", "x", f"axis {axis}, p {power}",
        how=RUNTIME, x=(2, 3, 4),
    )  # fmt: skip
add("MeanVarianceNormalization", "y = MeanVarianceNormalization(x)", "x", how=RUNTIME, x=(2, 3, 2, 2))
add("MeanVarianceNormalization", "y = MeanVarianceNormalization<axes=[1]>(x)", "x", "axes", how=RUNTIME, x=(2, 3, 2, 2))
for size in (3, 5, 1):
    add(
        "LRN", f"y = LRN<size={size}, alpha=0.3, beta=0.6, bias=1.5>(x)", "x", f"size {size}", how=RUNTIME,
        x=(2, 5, 2, 2),
    )  # fmt: skip
add("Dropout", "y = Dropout(x)", "x", "inference", x=(3, 4))
add(
    "Dropout", "y = Dropout(x, r, t)", "x", "training mode", refused="Dropout", x=(3, 4), r=np.array(0.5),
    t=np.array(True),
)  # fmt: skip


for kind, attributes, shape in (
    ("real", "", (2, 6, 1)),
    ("complex", "", (2, 6, 2)),
    ("inverse", "<inverse=1>", (2, 6, 2)),
    ("onesided", "<onesided=1>", (2, 6, 1)),
):
    add("DFT", f"y = DFT{attributes}(x)", "x", kind, x=shape)
add("DFT", "y = DFT(x, n, a)", "x", "length, axis", x=(4, 6, 2), n=np.array(5), a=np.array(0))
add("STFT", "y = STFT(x, f, w)", "x w", "window", x=(1, 12, 1), f=np.array(3), w=(6,))
add("STFT", "y = STFT<onesided=0>(x, f, , n)", "x", "length", x=(1, 12, 1), f=np.array(3), n=np.array(6))


HEADS = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 3)}
add("Attention", "y = Attention(q, k, v)", "q k v", "heads", **HEADS)
add("Attention", "y = Attention<scale=0.3, softcap=2.0>(q, k, v)", "q k v", "scale, softcap", **HEADS)
add("Attention", "y = Attention<is_causal=1>(q, k, v)", "q k v", "causal", **HEADS)
add("Attention", "y = Attention(q, k, v, m)", "q k v m", "mask", **HEADS, m=(3, 5))
add(
    "Attention", "m = Constant<value = bool[1, 5] {1, 1, 0, 1, 1}>() y = Attention(q, k, v, m)", "q k v", "bool mask",
    **HEADS,
)  # fmt: skip
add(
    "Attention", "y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v)", "q k v", "grouped, flat", q=(2, 3, 8),
    k=(2, 5, 4), v=(2, 5, 6),
)  # fmt: skip
add("Attention", "y, e, f = Attention(q, k, v, , p, r)", "q k v p r", "past", **HEADS, p=(2, 2, 2, 4), r=(2, 2, 2, 3))
add("RotaryEmbedding", "y = RotaryEmbedding(x, c, s)", "x c s", x=(2, 3, 4, 6), c=(2, 4, 3), s=(2, 4, 3))
add(
    "RotaryEmbedding", "y = RotaryEmbedding<interleaved=1>(x, c, s, p)", "x c s", "interleaved, positions",
    refused="RotaryEmbedding", x=(2, 3, 4, 6), c=(8, 3), s=(8, 3), p=[[0, 3, 2, 1], [7, 6, 5, 4]],
)  # fmt: skip
add(
    "RotaryEmbedding", "y = RotaryEmbedding<num_heads=3, rotary_embedding_dim=4>(x, c, s)", "x c s", "flat, partly",
    x=(2, 4, 18), c=(2, 4, 2), s=(2, 4, 2),
)  # fmt: skip
for rule in ("linear", "gated", "delta", "gated_delta"):
    decay = {"d": Draw((2, 4, 6), -1, -0.1)} if "gated" in rule else {}
    beta = {"b": Draw((2, 4, 2), 0.1, 0.9)} if "delta" in rule else {}
    operands = ", ".join(["q", "k", "v", "s", "d" if decay else "", "b" if beta else ""]).rstrip(", ")
    add(
        "LinearAttention", f'y, n = LinearAttention<q_num_heads=2, kv_num_heads=2, update_rule="{rule}">({operands})',
        " ".join(["q k v s", *decay, *beta]), rule, how=SINGLE, q=(2, 4, 6), k=(2, 4, 6), v=(2, 4, 4), s=(2, 2, 3, 2),
        **decay, **beta,
    )  # fmt: skip
