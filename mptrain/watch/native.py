"""What native 16-bit kernels flush in the backward pass of anybody's loop: beside each product the same one in FP32.

A native kernel shows only what is left after rounding, and a zero does not tell whether it was one before. But when a
product's node of the backward graph has done its work, its operands still lie there. The FP32 kernel takes the product
of the same 16-bit numbers once more: what is not zero there and is zero here was flushed. This needs neither the batch
nor the loss, only the outputs of layers. It does not see forward results, fused attention and recurrent kernels, and
operands that are gone by then, which `torch.utils.checkpoint(use_reentrant=False)` computes again; `Watch.shadow` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.precision.counting import Counter
from mptrain.precision.dispatch import LOWER
from mptrain.precision.graph import leaf
from mptrain.watch.statistics import Measured, measure

MARK = "mptrain.watch"
MATRICES = {
    "AddmmBackward": ("_saved_mat1", "_saved_mat2", 1),
    "MmBackward": ("_saved_self", "_saved_mat2", 0),
    "BmmBackward": ("_saved_self", "_saved_mat2", 0),
    "BaddbmmBackward": ("_saved_batch1", "_saved_batch2", 1),
}
"""Of a node y = a @ b (+ c): where it keeps a and b, and whether c's gradient comes before theirs."""
CONVOLUTION = "ConvolutionBackward"
Gradients = tuple[Tensor | None, ...]


class Native:
    """The counts of one step, per layer and direction ("grad_input", "grad_weight").

    layers: of each parameter its layer and name. ran: the layers that have run, a parameter may be lent to another.
    exact: of products that lost something, what they were before.
    """

    def __init__(self, layers: Mapping[nn.Parameter, tuple[str, str]], ran: Collection[str], sample: int | None):
        self.layers, self.ran, self.sample = layers, ran, sample
        self.counter = Counter(sample)
        self.dtypes: dict[tuple[str, str], torch.dtype] = {}
        self.exact: dict[tuple[str, str], list[Measured]] = defaultdict(list)
        self.on = True

    def look(self, made: Iterable[Tensor], layer: str | None) -> None:
        """Attends to the products that led to these tensors; those of no layer's parameters belong to `layer`."""
        waiting = [t.grad_fn for t in made if t.grad_fn is not None] if self.on else []
        while waiting:
            node: Any = waiting.pop()
            if node is None or hasattr(node, "variable") or MARK in (notes := node.metadata):
                continue
            notes[MARK] = True
            waiting += [child for child, _ in node.next_functions]
            if node.name().startswith((*MATRICES, CONVOLUTION)) and node._input_metadata[0].dtype in LOWER:
                self._attend(node, layer)

    def _attend(self, node: Any, layer: str | None) -> None:
        parameters = [self.layers.get(leaf(child)) for child, _ in node.next_functions]  # type: ignore[call-overload]
        layer = next((known[0] for known in parameters if known is not None and known[0] in self.ran), layer)
        if layer is None:
            return

        def look(made: Gradients, arrived: Gradients) -> None:
            if self.on and arrived[0] is not None:
                for known, low, exact in zip(parameters, made, _exact(node, arrived[0], made), strict=True):
                    if exact is not None and low is not None:
                        self._add((layer, "grad_input" if known is None else "grad_weight"), exact, low)

        node.register_hook(look)

    def _add(self, key: tuple[str, str], exact: Tensor, low: Tensor) -> None:
        self.counter.add(*key, exact, low)
        self.dtypes[key] = low.dtype
        if exact.device.type != "cpu" or bool(((low == 0) & (exact != 0)).any()):
            self.exact[key].append(measure(exact, self.sample))


@torch.no_grad()
def _exact(node: Any, arrived: Tensor, made: Gradients) -> Gradients:
    """The gradients that a product hands on, those that it made, by FP32 kernels; none if its operands are gone."""
    name = node.name()
    try:
        with torch._C._DisableAutocast():
            if name.startswith(CONVOLUTION):
                return _of_convolution(node, arrived.float(), made)
            return _of_matrices(
                node, arrived.float(), made, *next(v for k, v in MATRICES.items() if name.startswith(k))
            )
    except RuntimeError:  # checkpointing gives its operands once
        return (None,) * len(made)


def _of_matrices(node: Any, g: Tensor, made: Gradients, first: str, second: str, added: int) -> Gradients:
    if getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return (None,) * len(made)
    c, (a, b) = made[:added], made[added:]
    return (
        *(None if low is None else g.sum_to_size(low.shape) for low in c),
        None if a is None else g @ getattr(node, second).float().mT,
        None if b is None else getattr(node, first).float().mT @ g,
    )


def _of_convolution(node: Any, g: Tensor, made: Gradients) -> Gradients:
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g,
        node._saved_input.float(),
        node._saved_weight.float(),
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        [low is not None for low in made],
    )
