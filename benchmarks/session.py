"""The whole step as one onnxruntime session: ``python session.py STEP.onnx STATE.npz BATCH.npz STEPS DEVICE``.

As fast as a user of onnxruntime can have it without changing the graph: everything is bound once, states go from one
set of buffers to another and back. DEVICE is ``cpu`` or ``cuda``. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import onnxruntime
from counters import WARMUP, memory

PROVIDERS: dict[str, list[Any]] = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"],
}


def main(model: str, state: str, batch: str, steps: int, device: str) -> None:
    if device == "cuda":
        onnxruntime.preload_dlls()
    imports = memory()[0]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=PROVIDERS[device])
    assert session.get_providers()[0].lower().startswith(device)

    def value(array: np.ndarray) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)

    outputs = [each.name for each in session.get_outputs()]
    loss = next(name for name in outputs if not name.endswith(".new"))
    feeds = {name: value(array) for name, array in np.load(batch).items()} | {"lr": value(np.array(1e-4, np.float32))}
    held = dict(np.load(state).items())
    sets = [{name: value(array) for name, array in each.items()} for each in (held, _like(held))]
    bindings = []
    for before, after in (sets, sets[::-1]):
        binding = session.io_binding()
        for name, given in (feeds | before).items():
            binding.bind_ortvalue_input(name, given)
        for name in outputs:
            if name == loss:
                binding.bind_output(name, "cpu")
            else:
                binding.bind_ortvalue_output(name, after[name.removesuffix(".new")])
        bindings.append(binding)
    seconds, losses = [], []
    for step in range(WARMUP + steps):
        begin = time.perf_counter()
        binding = bindings[step % 2]
        session.run_with_iobinding(binding)
        losses.append(float(binding.get_outputs()[outputs.index(loss)].numpy()))
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds[WARMUP:], "losses": losses, "peak": [memory()[1]], "imports": imports}))


def _like(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.empty_like(array) for name, array in arrays.items()}


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])
