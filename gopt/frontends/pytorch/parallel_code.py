"""The statements of a script for several processes, taken out: `gopt shard` shards a step of the module alone."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from gopt.frontends.pytorch.training_loops import called
from gopt.text.sanitize import listed

_WRAPPERS = (
    "torch.distributed.fsdp.", "torch.distributed._composable.", "torch.distributed.tensor.parallel.",
    "torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel",
)  # fmt: skip
"""Functions of torch with a module as their first argument, and the same module, distributed, as their result."""
_STARTS = ("torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group")
_SYNCHRONISING = frozenset({
    "set_requires_gradient_sync", "set_is_last_backward", "set_requires_all_reduce", "set_reshard_after_backward",
    "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_reshard_after_forward",
})  # fmt: skip
"""Methods of a distributed module about the traffic of its gradients and parameters."""
_SAMPLERS = "torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler"


@dataclass
class Undistributed(ast.NodeTransformer):
    """Takes out the wrappers of a module, the start of processes and the control of their traffic.

    ``lines``: of the statements to leave out of a factory; ``samplers``: lines with a sampler of a process."""

    lines: list[int] = field(default_factory=list)
    samplers: list[int] = field(default_factory=list)
    _paths: dict[str, str] = field(default_factory=dict)

    def of(self, tree: ast.Module) -> ast.Module:
        """The tree without them."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self._paths |= {part.asname or part.name: f"{node.module}.{part.name}" for part in node.names}
            elif isinstance(node, ast.Import):
                self._paths |= {part.asname: part.name for part in node.names if part.asname}
        self.samplers += [node.lineno for node in ast.walk(tree) if self._path(node) in _SAMPLERS]  # type: ignore[attr-defined]
        self.visit(tree)
        return tree

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        path = self._path(node.value)
        method = isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
        if path.startswith((*_WRAPPERS, *_STARTS)) or (method and path.rpartition(".")[2] in _SYNCHRONISING):
            self._leave_out(node)
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        wrapped = False
        while isinstance(node.value, ast.Call) and node.value.args and self._path(node.value).startswith(_WRAPPERS):
            node.value, wrapped = node.value.args[0], True
        if wrapped:
            self._leave_out(node)
            if [ast.unparse(target) for target in node.targets] == [ast.unparse(node.value)]:
                return None
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST | None:  # type: ignore[override]
        """A node with its parts; a branch, a loop, a context or an attempt goes with the last statement of its body."""
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            further = [*getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            if isinstance(node, (ast.For, ast.If, ast.With, ast.Try)) and not further:
                self._leave_out(node)
                return None
            node.body = [ast.copy_location(ast.Pass(), node)]  # type: ignore[attr-defined]
        return node

    def _leave_out(self, node: ast.stmt) -> None:
        self.lines += range(node.lineno, (node.end_lineno or node.lineno) + 1)

    def _path(self, node: ast.AST) -> str:
        """The function of a call, by the path of its import."""
        name, dot, rest = called(node).partition(".")
        return f"{self._paths.get(name, name)}{dot}{rest}"

    def advice(self) -> list[str]:
        """Hints about the lines."""
        hints = list[str]()
        if self.lines:
            hints.append(
                f"leave out {_line_numbers(self.lines)}: the step is exported of the module alone, in one process, and "
                "gopt shard and torchrun do that work"
            )
        if self.samplers:
            hints.append(
                f"leave out the sampler of processes, {_line_numbers(self.samplers)}: the loop around the ranks takes "
                "rank.sampler(dataset)"
            )
        return hints


def _line_numbers(lines: list[int]) -> str:
    numbers = list(map(str, sorted(set(lines))))
    return f"line{'s' * (len(numbers) > 1)} {listed(numbers, len(numbers))}"
