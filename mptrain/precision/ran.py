"""What really ran: the formats of dot products, softmax and normalisation, seen at the kernels themselves."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def name(dtype: torch.dtype) -> str:
    """torch.float16 -> "float16"."""
    return str(dtype).removeprefix("torch.")
