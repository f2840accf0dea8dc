"""What really ran: the formats of dot products, softmax and normalisation, seen at the kernels themselves."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mptrain.precision.dispatch import rounding

CLASSES = {
    "matmul": {
        "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "_convolution", "cudnn_convolution",
        "mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_addmm_activation",
        "mkldnn_linear", "_linear_pointwise", "_scaled_mm",
    },
    "softmax": {"_softmax", "_log_softmax", "softmax", "log_softmax", "logsumexp"},
    "norm": {
        "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "_batch_norm_impl_index",
        "cudnn_batch_norm", "batch_norm_with_update", "native_layer_norm", "native_group_norm", "_fused_rms_norm",
    },
}  # fmt: skip
_CLASS_OF = {name: group for group, names in CLASSES.items() for name in names}


class RanDtypes(TorchDispatchMode):
    """Records, while it is on, in which format each class of operation of the forward pass got its input.

    Where an FP32 kernel stands for another format's arithmetic, that format is recorded; of softmax, the format of the
    result (on a GPU one kernel upcasts its input itself).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        group = _CLASS_OF.get(func._schema.name.partition("::")[2])
        if group is not None and torch._C._current_graph_task_id() == -1:
            seen = [result] if group == "softmax" else args
            x = next((a for a in seen if isinstance(a, Tensor) and a.is_floating_point()), None)
            if x is not None:
                emulated = rounding() if group == "matmul" else None
                self.seen[group].add(emulated or name(x.dtype))
        return result

    def table(self) -> dict[str, str]:
        """{"matmul": "float16", "softmax": "float32", "norm": ...}; "none ran" where no such operation did."""
        return {group: " and ".join(sorted(self.seen[group])) or "none ran" for group in CLASSES}


class RanOperations(TorchDispatchMode):
    """Records, while it is on, in which format each operation left its result, in the order of their first run.

    Where an FP32 kernel stands for another format's products, that format is recorded. Of several results the first
    counts: the statistics that batch normalisation returns beside it are FP32 everywhere. Views, casts, copies and
    what fills or picks from a tensor are left out: they compute nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operation = func._schema.name.partition("::")[2].strip("_")
        if not func.is_view and operation not in COMPUTES_NOTHING and torch._C._current_graph_task_id() == -1:
            left, taken = (
                [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]
                for value in (result, (args, kwargs))
            )
            if left and taken:
                product = func._schema.name.partition("::")[2] in CLASSES["matmul"]
                found = (rounding() if product else None) or name(left[0].dtype)
                self.seen[operation.removeprefix("native_").removesuffix("_for_cpu")].add(found)
        return result

    def table(self) -> dict[str, str]:
        """{"convolution": "float16", "log_softmax": "float32", ...}; several formats are joined by "and"."""
        return {operation: " and ".join(sorted(formats)) for operation, formats in self.seen.items()}


COMPUTES_NOTHING = {
    "to_copy", "copy", "clone", "detach", "contiguous", "lift_fresh", "fill", "zero", "new_zeros", "new_ones",
    "new_full", "new_empty", "empty", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "bernoulli", "uniform", "normal", "cat", "stack", "index", "index_select", "gather", "slice_scatter", "where",
    "masked_fill", "constant_pad_nd", "unsafe_view", "reshape_alias", "native_dropout", "flip", "roll",
    "unsafe_split", "transpose", "split", "chunk", "unbind",
}  # fmt: skip


def name(dtype: torch.dtype) -> str:
    """torch.float16 -> "float16"."""
    return str(dtype).removeprefix("torch.")
