"""A small detector in the manner of YOLO: cross-stage blocks, batch norm and SiLU, two feature maps, and one output a
box for whether there is an object at all.

The shape is that of YOLOv5 (Jocher et al. 2020), many times smaller: the backbone halves the picture four times, the
coarse map comes back up beside the fine one, and a 1x1 convolution on each map gives the boxes around its cells.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from mptrain.errors import UserError

STEPS = (8, 16)
"""pixels between two cells of the fine and of the coarse map"""
ANCHORS = (((14.0, 31.0), (32.0, 16.0), (23.0, 29.0)), ((28.0, 43.0), (46.0, 28.0), (44.0, 51.0)))
"""width and height in pixels of the boxes around each cell of both maps, for 96-pixel pictures: the six means by IoU of
the composites' training boxes, as YOLO's are of its data's"""
PRIOR = 0.01
"""probability of an object in a box at the first step"""


class YOLO(nn.Module):
    """Takes pictures (batch, 3, size, size), returns one row a box (batch, boxes, 5 + classes): how its default box is
    moved and stretched (4, see `place`), the logit of an object being there, and the logits of its classes."""

    def __init__(self, classes: int, size: int, width: int, depth: int) -> None:
        super().__init__()
        self.size, self.outputs = size, 5 + classes
        self.stem = nn.Sequential(
            ConvNormSiLU(3, width, 3, 2), ConvNormSiLU(width, 2 * width, 3, 2), CrossStage(2 * width, 2 * width, depth)
        )
        self.fine = nn.Sequential(ConvNormSiLU(2 * width, 4 * width, 3, 2), CrossStage(4 * width, 4 * width, depth))
        self.coarse = nn.Sequential(ConvNormSiLU(4 * width, 8 * width, 3, 2), CrossStage(8 * width, 8 * width, depth))
        self.up = nn.Sequential(ConvNormSiLU(8 * width, 4 * width, 1), nn.Upsample(scale_factor=2))
        self.joined = CrossStage(8 * width, 4 * width, depth)
        self.heads = nn.ModuleList(
            nn.Conv2d(maps, len(anchors) * self.outputs, 1)
            for maps, anchors in zip((4 * width, 8 * width), ANCHORS, strict=True)
        )
        for head in self.heads:
            with torch.no_grad():  # sure of nothing being there
                head.bias.view(-1, self.outputs)[:, 4] = -math.log((1 - PRIOR) / PRIOR)  # type: ignore[union-attr,operator]

    def forward(self, pictures: Tensor) -> Tensor:
        fine = self.fine(self.stem(pictures))
        coarse = self.coarse(fine)
        fine = self.joined(torch.cat([fine, self.up(coarse)], 1))
        maps = (head(features) for head, features in zip(self.heads, (fine, coarse), strict=True))
        return torch.cat([m.permute(0, 2, 3, 1).reshape(len(m), -1, self.outputs) for m in maps], 1)

    def default_boxes(self) -> Tensor:
        """(boxes, 4) as corners in pixels, float32 on the CPU, in the order of the outputs; no buffer, as in SSD."""
        found = []
        for step, anchors in zip(STEPS, ANCHORS, strict=True):
            middle = (torch.arange(self.size // step) + 0.5) * step
            y, x = torch.meshgrid(middle, middle, indexing="ij")
            centre = torch.stack([x, y], -1).view(-1, 1, 2)
            half = torch.tensor(anchors) * (self.size / 96) / 2
            found.append(torch.cat([centre - half, centre + half], -1).view(-1, 4))
        return torch.cat(found)

    def steps(self) -> Tensor:
        """(boxes,): the distance between two cells of each default box's map, in pixels."""
        counts = [len(anchors) * (self.size // step) ** 2 for step, anchors in zip(STEPS, ANCHORS, strict=True)]
        return torch.cat([torch.full((count,), float(step)) for step, count in zip(STEPS, counts, strict=True)])


def place(moves: Tensor, boxes: Tensor, steps: Tensor) -> Tensor:
    """Where default boxes (boxes, 4) go: moves (..., boxes, 4) float32 -> corners (..., boxes, 4) in pixels.

    The centre moves by up to `steps` (boxes,), the distance between two cells; each side is stretched by 0 to 4 (as in
    YOLOv5): bounded, unlike SSD's exponential. All zeros are the default boxes themselves.
    """
    centre, side = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    share = moves.sigmoid() * 2
    centre = centre + (share[..., :2] - 1) * steps[:, None]
    half = share[..., 2:].square() * side / 2
    return torch.cat([centre - half, centre + half], -1)


class ConvNormSiLU(nn.Sequential):
    """A convolution without bias that keeps the map's size but for its stride, batch norm and SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.SiLU(inplace=True),
        )


class CrossStage(nn.Module):
    """Half of the maps go through `depth` residual blocks, half go past them (CSPNet, Wang et al. 2020)."""

    def __init__(self, inputs: int, outputs: int, depth: int) -> None:
        super().__init__()
        half = outputs // 2
        self.through = nn.Sequential(ConvNormSiLU(inputs, half, 1), *(Bottleneck(half) for _ in range(depth)))
        self.past = ConvNormSiLU(inputs, half, 1)
        self.join = ConvNormSiLU(2 * half, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([self.through(x), self.past(x)], 1))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution, added to what came in."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(ConvNormSiLU(maps, maps, 1), ConvNormSiLU(maps, maps, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def yolo_small(classes: int, size: int, backbone: Path | None = None) -> YOLO:
    """Maps of an eighth and a sixteenth of the side, three boxes around each cell: 540 at 96 pixels."""
    if backbone is not None:
        raise UserError("this network has no pretrained weights; type task.backbone=null")
    if size % 16:
        raise UserError(f"task.size={size} is not a multiple of 16, the step of the network's coarse map")
    return YOLO(classes, size, width=16, depth=1)
