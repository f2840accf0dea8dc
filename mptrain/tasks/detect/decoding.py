"""From a detector's outputs to a list of objects."""

import torch
from torch import Tensor
from torchvision.ops import batched_nms, clip_boxes_to_image

from mptrain.tasks.detect.matching import coder

LOWEST_SCORE = 0.01
CANDIDATES = 400
"""of each class and picture, before suppression"""
SUPPRESSION_OVERLAP = 0.45
DETECTIONS = 200
"""of each picture; the four numbers are those of SSD's authors"""


def decode(scores: Tensor, offsets: Tensor, boxes: Tensor, size: int) -> dict[str, Tensor]:
    """One picture's detections, best first: boxes (n, 4) in pixels, scores (n,), labels (n,).

    Takes scores (boxes, classes), offsets (boxes, 4) and default boxes (boxes, 4), all float32.
    """
    return best(scores, coder.decode_single(offsets, boxes), size)


def best(scores: Tensor, placed: Tensor, size: int) -> dict[str, Tensor]:
    """The same from boxes (boxes, 4) in their place, in pixels."""
    placed = clip_boxes_to_image(placed, (size, size))
    highest, index = scores.topk(min(CANDIDATES, len(scores)), dim=0)
    labels = torch.arange(scores.shape[1], device=scores.device).expand_as(highest)
    likely = highest > LOWEST_SCORE
    found, values, classes = placed[index[likely]], highest[likely], labels[likely]
    kept = batched_nms(found, values, classes, SUPPRESSION_OVERLAP)[:DETECTIONS]
    return {"boxes": found[kept], "scores": values[kept], "labels": classes[kept]}
