"""Which default box learns which object, and how far it has to move."""

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder, SSDMatcher
from torchvision.ops import box_iou

BACKGROUND = -1
ENOUGH_OVERLAP = 0.5

coder = BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
"""Offsets of centre and log side, in units of SSD's prior variances 0.1 and 0.2."""


def match(targets: list[dict[str, Tensor]], boxes: Tensor) -> tuple[Tensor, Tensor]:
    """For each default box (boxes, 4): the class it learns (batch, boxes), BACKGROUND for none, and its offsets (…, 4).

    A default box learns the object it overlaps most, if its IoU is at least one half; an object's best default box
    learns it in any case (Liu et al. 2016, section 2.2). Offsets of background are zero.
    """
    labels = torch.full((len(targets), len(boxes)), BACKGROUND, device=boxes.device)
    offsets = torch.zeros(len(targets), len(boxes), 4, device=boxes.device)
    for row, target in enumerate(targets):
        taken, owner = owners(target, boxes)
        if len(taken):
            labels[row, taken] = target["labels"][owner]
            offsets[row, taken] = coder.encode_single(target["boxes"].float()[owner], boxes[taken])
    return labels, offsets


def owners(target: dict[str, Tensor], boxes: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the default boxes (boxes, 4) that learn an object of one picture, and of the object they learn."""
    if not len(target["boxes"]):
        nothing = torch.zeros(0, dtype=torch.int64, device=boxes.device)
        return nothing, nothing
    owner = SSDMatcher(ENOUGH_OVERLAP)(box_iou(target["boxes"].float(), boxes))
    taken = torch.where(owner >= 0)[0]
    return taken, owner[taken]
