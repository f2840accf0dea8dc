"""Mean average precision as Pascal VOC 2007 has it: 11 recall points, IoU of one half, no difficult objects."""

import math

import torch
from torch import Tensor
from torchvision.ops import box_iou

OVERLAP = 0.5
RECALLS = [tenth / 10 for tenth in range(11)]
"""divided, not added up, so that a recall of exactly 3/10 reaches its point"""
DETECTIONS = 200
"""of one class counted in a picture: all that SSD keeps"""


class AveragePrecision:
    """Collects pictures one by one and compares them at the end."""

    def __init__(self) -> None:
        from torchmetrics.detection import MeanAveragePrecision  # slow to import, and needed to evaluate only

        self.metric = MeanAveragePrecision(
            iou_thresholds=[OVERLAP],
            rec_thresholds=RECALLS,
            max_detection_thresholds=[1, 10, DETECTIONS],
            backend="pycocotools",
            sync_on_compute=False,  # one rank evaluates, and the others wait for it elsewhere
        )
        self.metric.warn_on_many_detections = False
        self.objects = 0

    def add(self, detections: dict[str, Tensor], target: dict[str, Tensor]) -> None:
        """Takes detections (boxes, scores, labels) and objects (boxes, labels, difficult) of one picture."""
        detections = {name: values.detach().cpu() for name, values in detections.items()}
        target = {name: values.detach().cpu() for name, values in target.items()}
        asked = ~target["difficult"]
        counted = ~hits_difficult(detections, target)
        self.objects += int(asked.sum())
        self.metric.update(
            [{name: values[counted] for name, values in detections.items()}],
            [{"boxes": target["boxes"][asked], "labels": target["labels"][asked]}],
        )

    def value(self) -> float:
        """The mean over the classes that occur in the test set; NaN if it holds no object at all."""
        return float(self.metric.compute()["map_50"]) if self.objects else math.nan


def hits_difficult(detections: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Which detections (n,) count neither as right nor wrong: what they overlap most of their class is difficult."""
    if not len(target["boxes"]):
        return torch.zeros(len(detections["boxes"]), dtype=torch.bool)
    overlaps = box_iou(detections["boxes"].float(), target["boxes"].float())
    overlaps[detections["labels"][:, None] != target["labels"]] = 0
    best, index = overlaps.max(1)
    return (best >= OVERLAP) & target["difficult"][index]
