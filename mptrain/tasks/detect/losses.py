"""Two ways to divide a detector's loss, which differ a thousandfold in the size of their gradients.

Each returns (total, terms): the loss of a set of pictures is the sum of totals over the sum of terms, however the set
was cut into batches. All inputs are float32: logits (batch, boxes, outputs), offsets and wanted offsets (batch, boxes,
4), labels (batch, boxes) with BACKGROUND where there is no object.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mptrain.tasks.detect.matching import BACKGROUND

NEGATIVES_PER_POSITIVE = 3


def mean_loss(logits: Tensor, offsets: Tensor, labels: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Sigmoid cross-entropy, the mean over pictures x boxes x classes (PyTorch's default), plus the box loss likewise.

    A gradient is at most 1 / (batch x boxes x classes), which is below FP16's smallest number for large batches.
    """
    positive = labels != BACKGROUND
    classes = torch.zeros_like(logits)
    classes[(*positive.nonzero(as_tuple=True), labels[positive])] = 1
    entropy = functional.binary_cross_entropy_with_logits(logits, classes, reduction="sum") / logits.shape[-1]
    total = entropy + box_loss(offsets, wanted, positive) / 4
    return total, torch.tensor(labels.numel(), dtype=torch.float32, device=labels.device)


def positives_loss(logits: Tensor, offsets: Tensor, labels: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """SSD's own loss: softmax over background and classes of the positives and three times as many of the worst
    negatives of each picture, plus the box loss, divided by the number of positives (Liu et al. 2016, equation 1).

    Pictures without an object add nothing.
    """
    positive = labels != BACKGROUND
    entropy = functional.cross_entropy(logits.transpose(1, 2), labels + 1, reduction="none")
    rank = entropy.masked_fill(positive, -torch.inf).argsort(1, descending=True).argsort(1)
    hard = rank < NEGATIVES_PER_POSITIVE * positive.sum(1, keepdim=True)
    total = entropy[positive | hard].sum() + box_loss(offsets, wanted, positive)
    return total, positive.sum().float()


def box_loss(offsets: Tensor, wanted: Tensor, positive: Tensor) -> Tensor:
    return functional.smooth_l1_loss(offsets[positive], wanted[positive], reduction="sum")
