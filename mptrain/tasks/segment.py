"""Marking every pixel with what it belongs to, and telling how much ink a picture holds: two losses of unlike size.

The marks are graded by cross-entropy, a mean over pictures and pixels; the ink by its squared error. Asked for raw, in
the units of the file (a sum of pixels from 0 to 255), that error is of the order of 10^9 and its gradient some fifty
powers of two above that of a pixel's mark; asked for as a share of what the picture could hold, the two are alike.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mptrain.data import images
from mptrain.data.dataset import Batch, DataSpec
from mptrain.errors import UserError
from mptrain.models.marker import Marker
from mptrain.tasks.task import Task, at_least

INK = ("raw", "share")


class Segment(Task):
    """Kinds of pixels: 0 the empty background, then the classes of the pictures that they belong to."""

    metric = "marked"
    higher_is_better = True
    unit = "images"

    def __init__(self, model: Marker, train_set: images.Pictures, test_set: images.Pictures, ink: str, margin: float):
        self.models = {"model": model}
        self.train_set, self.test_set = train_set, test_set
        self.mean, self.std = train_set.mean, train_set.std
        self.ink, self.margin = ink, margin

    def targets(self, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
        """Of normalised pictures: each pixel's kind, the ink of each picture, and the most it could hold."""
        pixels = ((pictures * self.std.to(pictures.device) + self.mean.to(pictures.device)) * 255).round()
        kinds = torch.where(pixels.amax(1) > 0, labels[:, None, None] + 1, 0)
        ink, most = pixels.sum((1, 2, 3)), 255.0 * pixels[0].numel()
        return (kinds, ink, most) if self.ink == "raw" else (kinds, ink / most, 1.0)

    def losses(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        pictures, labels = batch
        kinds, ink, most = self.targets(pictures, labels)
        marks, number = self.models["model"](pictures)
        told = most * number.float().sigmoid()
        yield "model", F.cross_entropy(marks.float(), kinds) + F.mse_loss(told, ink)

    def size(self, batch: Batch) -> int:
        return len(batch[1])

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """marked: share of the pixels with ink that are given the right class; background: of those without, that are
        left empty; ink_error: mean distance, as a share of the most a picture could hold."""
        right, all_of, distance, count = torch.zeros(2), torch.zeros(2), 0.0, 0
        for pictures, labels in batches:
            kinds, ink, most = self.targets(pictures, labels)
            marks, number = self.models["model"](pictures)
            hit, filled = marks.float().argmax(1) == kinds, kinds > 0
            right += torch.stack([(hit & filled).sum(), (hit & ~filled).sum()]).cpu()
            all_of += torch.stack([filled.sum(), (~filled).sum()]).cpu()
            distance += float((number.float().sigmoid() - ink / most).abs().sum())
            count += len(labels)
        marked, background = (right / all_of.clamp(min=1)).tolist()
        return {"marked": marked, "background": background, "ink_error": distance / count}


def build(
    data: DataSpec,
    classes: int = 10,
    image_size: int = 28,
    channels: int = 1,
    augment: str = "flip",
    width: int = 16,
    ink: str = "raw",
    margin: float = 0.03,
) -> Segment:
    """`ink`: "raw", the sum of a picture's pixels from 0 to 255, or "share", of what it could hold. `width`: channels
    of the first block."""
    if ink not in INK:
        raise UserError(f"task.ink={ink} is unknown; choose one of: {', '.join(INK)}")
    at_least(2, classes=classes)
    at_least(8, image_size=image_size)
    at_least(1, width=width)
    train_set, test_set = (
        images.load(data, split, classes, image_size, channels, augment) for split in ("train", "test")
    )
    if not isinstance(train_set, images.Pictures) or not isinstance(test_set, images.Pictures):
        raise UserError(f"data={data.name} has no pictures in memory; choose data=fashion or data=synthetic")
    return Segment(Marker(channels, classes + 1, width), train_set, test_set, ink, margin)
