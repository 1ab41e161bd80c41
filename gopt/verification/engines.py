"""The engines by which verify computes the nodes of source and ranks."""

from __future__ import annotations

from enum import Enum

from gopt.errors import RunError
from gopt.runtime.session import SessionCache


class NodeEngine(str, Enum):
    """The engine of nodes."""

    ONNXRUNTIME = "onnxruntime"
    """ONNX Runtime; onnx's reference evaluator, or ONNX Runtime without rewrites, checks one step."""
    TORCH = "torch"
    """PyTorch; onnx's reference evaluator or ONNX Runtime checks one step."""
    BOTH = "both"
    """ONNX Runtime; PyTorch checks one step."""

    def sessions(self, deadline: float | None) -> SessionCache:
        """The sessions of source and ranks. Raises RunError without PyTorch."""
        return torch_sessions() if self is NodeEngine.TORCH else SessionCache(deadline)

    def second(self) -> SessionCache | None:
        """The sessions that check a step in place of the usual second engine."""
        return torch_sessions() if self is NodeEngine.BOTH else None


def torch_sessions() -> SessionCache:
    """PyTorch, node by node, on the host. Raises RunError where it is not installed."""
    try:
        from gopt.runtime.pytorch.device import Execution, TorchHost
    except ImportError as error:
        raise RunError(f"PyTorch cannot be used: {error}", "install it with: pip install 'gopt[torch]'") from error
    return TorchHost("cpu", Execution.NODES).sessions()
