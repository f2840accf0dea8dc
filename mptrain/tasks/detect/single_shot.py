"""Single-shot detection: every default box is scored and shifted at once."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mptrain.data.boxes import DetectionSet
from mptrain.models.ssd import SSD
from mptrain.tasks.detect.average_precision import AveragePrecision
from mptrain.tasks.detect.decoding import decode
from mptrain.tasks.detect.losses import mean_loss, positives_loss
from mptrain.tasks.detect.matching import match
from mptrain.tasks.task import Task


class SingleShot(Task):
    """Trains an SSD with either loss of `losses`. Boxes, matching, losses and suppression are float32 throughout."""

    metric, higher_is_better, margin, unit = "mAP50", True, 0.03, "images"

    def __init__(self, model: SSD, train_set: DetectionSet, test_set: DetectionSet) -> None:
        self.models = {"model": model}
        self.train_set, self.test_set = train_set, test_set
        self.boxes, self.side, self.background = model.default_boxes(), model.size, model.background

    def losses(self, batch: dict) -> Iterator[tuple[str, Tensor]]:
        logits, offsets = self.outputs(batch)
        total, terms = self.loss(logits, offsets, batch["targets"])
        yield "model", total / terms.clamp(min=1)

    def outputs(self, batch: dict) -> tuple[Tensor, Tensor]:
        logits, offsets = self.models["model"](batch["images"])
        return logits.float(), offsets.float()

    def loss(self, logits: Tensor, offsets: Tensor, targets: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        labels, wanted = match(targets, self.boxes_on(logits.device))
        compute = positives_loss if self.background else mean_loss
        return compute(logits, offsets, labels, wanted)

    def boxes_on(self, device: torch.device) -> Tensor:
        if self.boxes.device != device:
            self.boxes = self.boxes.to(device)
        return self.boxes

    def size(self, batch: dict) -> int:
        return len(batch["targets"])

    def evaluate(self, batches: Iterable[dict]) -> dict[str, float]:
        precision, total, terms = AveragePrecision(), 0.0, 0.0
        for batch in batches:
            logits, offsets = self.outputs(batch)
            part, count = self.loss(logits, offsets, batch["targets"])
            total, terms = total + float(part), terms + float(count)
            scores = logits.softmax(-1)[..., 1:] if self.background else logits.sigmoid()
            for row, target in enumerate(batch["targets"]):
                found = decode(scores[row], offsets[row], self.boxes_on(logits.device), self.side)
                precision.add(found, target)
        return {self.metric: precision.value(), "loss": total / max(terms, 1.0)}
