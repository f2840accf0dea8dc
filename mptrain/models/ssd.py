"""Single-shot detectors (Liu et al. 2016): feature maps of several scales, and two convolutions on each that score and
shift the default boxes around every cell.

`background=True` gives classes + 1 logits for a softmax, the first being background (the SSD paper); `background=False`
gives one logit a class for independent sigmoids, which start out sure of nothing being there.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDHead

from mptrain.errors import UserError
from mptrain.models.vgg16_weights import fill, fill_features, read_vgg16

PRIOR = 0.01
"""probability of a class at the first step, where there is no background class"""
SMALLEST_BOX = 18.0
"""pixels, of the dense boxes; the largest of six sizes is about three times as large"""

Layers = Sequence[tuple[int, int]]


class SSD(nn.Module):
    """Takes pictures (batch, 3, size, size), returns logits (batch, boxes, outputs) and offsets (batch, boxes, 4)."""

    def __init__(
        self,
        backbone: nn.Module,
        head: SSDHead,
        generator: AnchorGenerator | DefaultBoxGenerator,
        grids: Sequence[int],
        size: int,
        background: bool,
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.generator = backbone, head, generator
        self.grids, self.size, self.background = tuple(grids), size, background
        if not background:
            for layer in head.classification_head.module_list:
                nn.init.constant_(layer.bias, -math.log((1 - PRIOR) / PRIOR))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.head(list(self.backbone(pictures).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def default_boxes(self) -> Tensor:
        """(boxes, 4) in pixels, float32 on the CPU, in the order of the outputs.

        They are no buffer, since turning the network into another number format must not move them.
        """
        pictures = ImageList(torch.empty(1, 3, self.size, self.size), [(self.size, self.size)])
        boxes = self.generator(pictures, [torch.empty(1, 1, grid, grid) for grid in self.grids])[0]
        if isinstance(self.generator, AnchorGenerator):  # whose boxes sit on the corner of a cell, not in its middle
            per_cell = self.generator.num_anchors_per_location()
            shifts = [torch.full((g * g * n, 1), self.size / g / 2) for g, n in zip(self.grids, per_cell, strict=True)]
            boxes = boxes + torch.cat(shifts)
        return boxes


class Features(nn.Module):
    """Two feature maps: 3x3 convolutions, given as (channels, stride), to the fine map and from there to the coarse."""

    def __init__(self, fine: Layers, coarse: Layers, norm: bool) -> None:
        super().__init__()
        self.fine = nn.Sequential(*convolutions(3, fine, norm))
        self.coarse = nn.Sequential(*convolutions(fine[-1][0], coarse, norm))

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        fine = self.fine(pictures)
        return OrderedDict(fine=fine, coarse=self.coarse(fine))


def convolutions(inputs: int, layers: Layers, norm: bool) -> Iterator[nn.Module]:
    """Each layer followed by batch norm, if asked for, and ReLU."""
    for outputs, stride in layers:
        layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not norm)
        # He's initialisation keeps the spread of activations through layers with ReLU.
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
        yield layer
        if norm:
            yield nn.BatchNorm2d(outputs)
        yield nn.ReLU(inplace=True)
        inputs = outputs


def ssd_dense(classes: int, size: int, background: bool, backbone: Path | None = None) -> SSD:
    """Maps of a quarter and an eighth of the side, nine boxes around each cell as RetinaNet has: 6,480 at 96 pixels.

    Six convolutions like VGG's, without normalisation.
    """
    refuse(size, 8, backbone)
    features = Features(((16, 2), (32, 2), (64, 1), (64, 1)), ((128, 2), (128, 1)), norm=False)
    sizes = [SMALLEST_BOX * 2 ** (third / 3) for third in range(6)]
    ratios = (0.5, 1.0, 2.0)
    generator = AnchorGenerator((tuple(sizes[:3]), tuple(sizes[3:])), (ratios, ratios))
    outputs = classes + 1 if background else classes
    head = SSDHead([64, 128], generator.num_anchors_per_location(), outputs)
    for part, columns in ((head.classification_head, outputs), (head.regression_head, 4)):
        # So many boxes would make the heads' 3x3 convolutions more than half of the work; 1x1 do.
        part.module_list = nn.ModuleList(nn.Conv2d(width, 9 * columns, 1) for width in (64, 128))
    return SSD(features, head, generator, (size // 4, size // 8), size, background)


def ssd_sparse(classes: int, size: int, background: bool, backbone: Path | None = None) -> SSD:
    """Maps of an eighth and a sixteenth of the side, three and two square boxes around each cell: 2,366 at 208 pixels.

    Seven convolutions with batch norm.
    """
    refuse(size, 16, backbone)
    features = Features(((16, 2), (32, 2), (64, 2), (64, 1), (64, 1)), ((128, 2), (128, 1)), norm=True)
    generator = AnchorGenerator(((16, 28, 44), (64, 96)), ((1.0,), (1.0,)))
    outputs = classes + 1 if background else classes
    head = SSDHead([64, 128], generator.num_anchors_per_location(), outputs)
    return SSD(features, head, generator, (size // 8, size // 16), size, background)


def refuse(size: int, step: int, backbone: Path | None) -> None:
    if backbone is not None:
        raise UserError("the small networks have no pretrained weights; type task.backbone=null")
    if size % step:
        raise UserError(f"task.size={size} is not a multiple of {step}, the step of the network's coarse map")


def ssd300_vgg16(classes: int, size: int, background: bool, backbone: Path | None = None) -> SSD:
    """SSD300 on VGG-16: 8,732 default boxes, 26.3 M parameters for VOC's 20 classes. `backbone`: see `read_vgg16`."""
    if size != 300:
        raise UserError(f"task.size={size}; SSD300 takes pictures of 300 pixels: type task.size=300")
    outputs = classes + 1 if background else classes
    model = detection.ssd300_vgg16(weights=None, weights_backbone=None, num_classes=outputs)
    if backbone is not None:
        state = read_vgg16(backbone)
        tail = model.backbone.extra[0]
        fill_features([*model.backbone.features, *tail[:-1]], state)
        # fc6 and fc7 become convolutions of a quarter of the channels and every third tap (Liu et al. 2016, 3).
        fc6, fc7 = (layer for layer in tail[-1] if isinstance(layer, nn.Conv2d))
        dense6, dense7 = state["classifier.0.weight"].view(4096, 512, 7, 7), state["classifier.3.weight"]
        fill(fc6, dense6[::4, :, ::3, ::3], state["classifier.0.bias"][::4])
        fill(fc7, dense7[::4, ::4, None, None], state["classifier.3.bias"][::4])
    return SSD(model.backbone, model.head, model.anchor_generator, (38, 19, 10, 5, 3, 1), size, background)
