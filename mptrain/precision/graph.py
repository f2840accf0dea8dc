"""Torch's backward graph: its nodes in order, and the parameter that an operand of a product comes from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

REARRANGING = (
    "ToCopy", "TBackward", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze",
    "Slice", "Clone", "Alias", "Expand", "_Image",
)  # fmt: skip
"""Nodes that only move, copy or cast: a weight on its way into a product."""


def downwards(root: Any) -> list[Any]:
    """All nodes of a backward graph, each after everything that hands it a gradient."""
    found: list[Any] = []
    seen = {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, children = stack[-1]
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            stack.pop()
            found.append(node)
    return found[::-1]


def leaf(node: Any) -> Tensor | None:
    """The parameter that a chain of rearranging nodes begins at."""
    for _ in range(12):
        if node is None:
            return None
        if hasattr(node, "variable"):
            return node.variable  # type: ignore[no-any-return]
        if not node.name().startswith(REARRANGING) or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None
