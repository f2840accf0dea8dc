"""Batch normalisation over the batches of all ranks, or of each alone.

`parallel.batchnorm=sync` makes a data-parallel run compute what one process with the whole batch computes: mean and
variance are those of all ranks' samples. `local` normalises every part by itself, which is faster and another
experiment: the smaller the part, the noisier its statistics. Rank 0's running statistics are the ones that last.

torch's own SyncBatchNorm runs on GPUs only; this one is made of plain operations and is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.parallel import Alone

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronise(models: Iterable[nn.Module], ranks: Alone) -> None:
    """Lets every batch normalisation of the networks see all ranks' samples."""
    for model in models:
        for module in model.modules():
            kind: Any = type(module)
            if kind in KINDS:
                module.__class__ = _synced(kind)
                module.ranks = ranks  # type: ignore[assignment]
            elif hasattr(module, "total"):  # a batch normalisation of our own, which sums through it
                module.total = ranks.total  # type: ignore[assignment]


@cache
def _synced(kind: Any) -> Any:
    """The kind, with another forward; the class rather than the method changes, so that copies keep it."""
    return type(f"Synced{kind.__name__}", (kind,), {"forward": _forward, "plain": kind.forward})


def _forward(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """In two passes, mean and then spread about it, in FP32 as every kernel of batch normalisation does."""
    if not self.training:
        return self.plain(x)  # type: ignore[no-any-return, operator]
    self._check_input_dim(x)
    axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    values = x.float()
    own = values.new_tensor([x.numel() // x.shape[1]])
    total: Tensor = self.ranks.total(torch.cat([values.sum(axes), own]))  # type: ignore[operator, union-attr]
    count = total[-1].detach()
    mean = total[:-1] / count
    centred = values - mean.view(shape)
    variance = self.ranks.total(centred.square().sum(axes)) / count  # type: ignore[operator, union-attr]
    if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
    y = centred * torch.rsqrt(variance + self.eps).view(shape)
    if self.affine:
        y = y * self.weight.float().view(shape) + self.bias.float().view(shape)
    return y.to(x.dtype)
