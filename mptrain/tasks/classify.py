"""Image classification: cross-entropy, top-1 accuracy (section 4.1, table 1)."""

from collections.abc import Iterable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from mptrain import models
from mptrain.data import images
from mptrain.data.dataset import Batch, DataSpec
from mptrain.errors import UserError
from mptrain.tasks.task import Task, at_least


class Classify(Task):
    """A network that gives logits, in training perhaps those of auxiliary classifiers as well, and labelled pictures.

    The loss is the cross-entropy with smoothed labels plus `aux_weight` times that of each auxiliary classifier;
    the metric is the share of pictures whose highest logit is the right one, single crop.
    """

    metric = "top1"
    higher_is_better = True
    unit = "images"

    def __init__(self, model: nn.Module, label_smoothing: float, aux_weight: float, margin: float) -> None:
        self.models = {"model": model}
        self.label_smoothing, self.aux_weight, self.margin = label_smoothing, aux_weight, margin

    def losses(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        pictures, labels = batch
        outputs = self.models["model"](pictures)
        logits, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = self.cross_entropy(logits, labels)
        for extra in auxiliary:
            loss = loss + self.aux_weight * self.cross_entropy(extra, labels)
        yield "model", loss

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.label_smoothing)

    def size(self, batch: Batch) -> int:
        return len(batch[1])

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """top1, top5 (if there are more than five classes) and the mean cross-entropy, without smoothing."""
        count, right, among_five, loss, classes = 0, 0, 0, 0.0, 0
        for pictures, labels in batches:
            logits = self.models["model"](pictures).float()
            classes = logits.shape[1]
            best = logits.topk(min(5, classes)).indices == labels[:, None]
            count += len(labels)
            right += int(best[:, 0].sum())
            among_five += int(best.sum())
            loss += float(F.cross_entropy(logits, labels, reduction="none").double().sum())
        result = {"top1": right / count, "loss": loss / count}
        return result | ({"top5": among_five / count} if classes > 5 else {})


def build(
    data: DataSpec,
    model: str,
    classes: int = 10,
    image_size: int = 28,
    channels: int = 1,
    augment: str = "flip",
    label_smoothing: float = 0.0,
    aux_weight: float = 0.0,
    margin: float = 0.01,
) -> Classify:
    """`model` is "package.module:function"; the function takes `num_classes`, as torchvision's do.

    `augment` is one of none, flip, random_crop, random_resized_crop (mptrain/data/images.py).
    """
    at_least(2, classes=classes)
    at_least(8, image_size=image_size)
    if not 0 <= label_smoothing < 1:
        raise UserError(f"task.label_smoothing={label_smoothing} must be at least 0 and below 1")
    if aux_weight < 0 or margin < 0:
        raise UserError("task.aux_weight and task.margin must not be negative")
    network = models.build(model, num_classes=classes)
    expected = next((m.in_channels for m in network.modules() if isinstance(m, nn.Conv2d)), channels)
    if expected != channels:
        raise UserError(f"task.model={model} takes {expected} channels, task.channels={channels}; set it to {expected}")
    task = Classify(network, label_smoothing, aux_weight, margin)
    task.train_set, task.test_set = (
        images.load(data, split, classes, image_size, channels, augment) for split in ("train", "test")
    )
    return task
