"""Two-stage detection: regions are proposed, then classified; torchvision computes losses and detections."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torchvision.models.detection import FasterRCNN

from mptrain.data.boxes import DetectionSet
from mptrain.tasks.detect.average_precision import AveragePrecision
from mptrain.tasks.task import Task


class TwoStage(Task):
    """Trains a Faster R-CNN on the sum of four losses: objectness and shift of anchors, class and shift of regions."""

    metric, higher_is_better, margin, unit = "mAP50", True, 0.03, "images"

    def __init__(self, model: FasterRCNN, train_set: DetectionSet, test_set: DetectionSet) -> None:
        self.models = {"model": model}
        self.train_set, self.test_set = train_set, test_set

    def losses(self, batch: dict) -> Iterator[tuple[str, Tensor]]:
        # Class 0 is background there.
        targets = [{"boxes": t["boxes"].float(), "labels": t["labels"] + 1} for t in batch["targets"]]
        parts = self.models["model"](list(batch["images"]), targets)
        yield "model", sum(part.float() for part in parts.values())

    def size(self, batch: dict) -> int:
        return len(batch["targets"])

    def evaluate(self, batches: Iterable[dict]) -> dict[str, float]:
        precision = AveragePrecision()
        for batch in batches:
            detections = self.models["model"](list(batch["images"]))
            for found, target in zip(detections, batch["targets"], strict=True):
                precision.add({**found, "labels": found["labels"] - 1}, target)
        return {self.metric: precision.value()}
