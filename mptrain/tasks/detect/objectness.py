"""Detection as YOLO does it: each default box says whether there is an object, and if so, which and where exactly."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.ops import box_area, complete_box_iou_loss

from mptrain.data.boxes import DetectionSet
from mptrain.models.yolo import YOLO, place
from mptrain.tasks.detect.average_precision import AveragePrecision
from mptrain.tasks.detect.decoding import best
from mptrain.tasks.detect.matching import owners
from mptrain.tasks.task import Task


class Objectness(Task):
    """Trains a YOLO on the sum of three means, each float32: of the objectness over all default boxes of the batch, and
    of classes and boxes over those with an object."""

    metric, higher_is_better, margin, unit = "mAP50", True, 0.03, "images"

    def __init__(self, model: YOLO, train_set: DetectionSet, test_set: DetectionSet) -> None:
        self.models = {"model": model}
        self.train_set, self.test_set = train_set, test_set
        self.boxes, self.steps, self.side = model.default_boxes(), model.steps(), model.size

    def losses(self, batch: dict) -> Iterator[tuple[str, Tensor]]:
        yield "model", mean(*self.parts(self.outputs(batch), batch["targets"]))

    def outputs(self, batch: dict) -> Tensor:
        found = self.models["model"](batch["images"]).float()
        if self.boxes.device != found.device:
            self.boxes, self.steps = self.boxes.to(found.device), self.steps.to(found.device)
        return found

    def parts(self, outputs: Tensor, targets: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of outputs (batch, boxes, 5 + classes): the sum of the objectness' cross-entropies over all default boxes,
        how many those are, the sum of what boxes and classes cost over those with an object, and how many those are.

        The objectness to be learnt is the IoU that a box has with its object now (YOLOv5); boxes cost 1 - CIoU.
        """
        wanted = torch.zeros_like(outputs[..., 4])
        cost = outputs.new_zeros(())
        positives = 0
        for row, target in enumerate(targets):
            taken, owner = owners(target, self.boxes)
            if not len(taken):
                continue
            objects, moved = target["boxes"].float()[owner], outputs[row, taken]
            placed = place(moved[:, :4], self.boxes[taken], self.steps[taken])
            classes = functional.one_hot(target["labels"][owner], outputs.shape[-1] - 5).float()
            entropy = functional.binary_cross_entropy_with_logits(moved[:, 5:], classes, reduction="sum")
            cost = cost + complete_box_iou_loss(placed, objects, reduction="sum") + entropy / classes.shape[1]
            wanted[row, taken] = overlap(placed.detach(), objects)
            positives += len(taken)
        objectness = functional.binary_cross_entropy_with_logits(outputs[..., 4], wanted, reduction="sum")
        return objectness, outputs.new_tensor(wanted.numel()), cost, outputs.new_tensor(positives)

    def size(self, batch: dict) -> int:
        return len(batch["targets"])

    def evaluate(self, batches: Iterable[dict]) -> dict[str, float]:
        precision, sums = AveragePrecision(), [0.0] * 4
        for batch in batches:
            outputs = self.outputs(batch)
            parts = self.parts(outputs, batch["targets"])
            sums = [total + float(part) for total, part in zip(sums, parts, strict=True)]
            scores = outputs[..., 4:5].sigmoid() * outputs[..., 5:].sigmoid()
            placed = place(outputs[..., :4], self.boxes, self.steps)
            for row, target in enumerate(batch["targets"]):
                precision.add(best(scores[row], placed[row], self.side), target)
        return {self.metric: precision.value(), "loss": float(mean(*map(torch.tensor, sums)))}


def mean(objectness: Tensor, boxes: Tensor, cost: Tensor, positives: Tensor) -> Tensor:
    return objectness / boxes.clamp(min=1) + cost / positives.clamp(min=1)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """IoU of each box (n, 4) with its own of the others (n, 4), not with all of them."""
    sides = (torch.minimum(one[:, 2:], other[:, 2:]) - torch.maximum(one[:, :2], other[:, :2])).clamp(min=0)
    both = sides[:, 0] * sides[:, 1]
    return both / (box_area(one) + box_area(other) - both)
