"""Two-stage detectors (Ren et al. 2015): a network proposes regions, a second head classifies and refines each.

torchvision's FasterRCNN does the work. Its boxes take over the number format of whatever feature map or head output
they meet, so that a network run in half precision would place a box to half a pixel only; here both hand over float32.
"""

from pathlib import Path

from torch import Tensor, nn
from torchvision.models import vgg16
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign, roi_align, roi_pool

from mptrain.errors import UserError
from mptrain.models.ssd import convolutions
from mptrain.models.vgg16_weights import fill, fill_features, read_vgg16

FROZEN = 10
"""layers of VGG-16 before conv3_1"""


class Float32Anchors(AnchorGenerator):
    """Anchors that stay float32 whatever the feature maps are."""

    def forward(self, image_list, feature_maps: list[Tensor]) -> list[Tensor]:
        return super().forward(image_list, [features.float() for features in feature_maps])


class Float32Proposals(RPNHead):
    """Objectness and offsets of the anchors, handed over in float32."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, offsets = super().forward(x)
        return [level.float() for level in logits], [level.float() for level in offsets]


class Float32Predictor(FastRCNNPredictor):
    """Class logits and offsets of the regions, handed over in float32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, offsets = super().forward(x)
        return logits.float(), offsets.float()


class RegionPool(MultiScaleRoIAlign):
    """Cuts regions (n, 4) out of one feature map to side x side cells, in float32.

    `align=False` rounds to whole cells as the authors' code does, `align=True` interpolates (He et al. 2017).
    """

    def __init__(self, side: int, stride: int, align: bool) -> None:
        super().__init__(featmap_names=["0"], output_size=side, sampling_ratio=2)
        self.stride, self.align = stride, align

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        (features,) = x.values()
        if self.align:
            return roi_align(features.float(), boxes, self.output_size, 1 / self.stride, self.sampling_ratio)
        return roi_pool(features.float(), boxes, self.output_size, 1 / self.stride)


def faster_rcnn_small(classes: int, size: int, backbone: Path | None = None) -> FasterRCNN:
    """Five convolutions to an eighth of the side, regions of 5x5 cells, two layers of 256, for 96-pixel pictures."""
    if backbone is not None:
        raise UserError("the small network has no pretrained weights; type task.backbone=null")
    features = nn.Sequential(*convolutions(3, ((32, 2), (64, 2), (128, 1), (128, 2), (128, 1)), norm=False))
    features.out_channels = 128  # type: ignore[assignment]
    anchors = Float32Anchors(((16, 24, 36, 54),), ((0.5, 1.0, 2.0),))
    return FasterRCNN(
        features,
        min_size=size,
        max_size=size,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=anchors,
        rpn_head=Float32Proposals(128, anchors.num_anchors_per_location()[0]),
        rpn_pre_nms_top_n_train=300,
        rpn_pre_nms_top_n_test=300,
        rpn_post_nms_top_n_train=100,
        rpn_post_nms_top_n_test=50,
        rpn_batch_size_per_image=64,
        box_roi_pool=RegionPool(5, 8, align=True),
        box_head=TwoMLPHead(128 * 25, 256),
        box_predictor=Float32Predictor(256, classes + 1),
        box_batch_size_per_image=32,
        box_score_thresh=0.01,
        box_nms_thresh=0.45,
    )


def faster_rcnn_vgg16(classes: int, size: int, backbone: Path | None = None) -> FasterRCNN:
    """Faster R-CNN on VGG-16 with the settings of its authors' py-faster-rcnn (end to end): 137 M parameters.

    `size` is the shorter side that pictures are scaled to (600 there, the longer side at most 5/3 of it). With a
    pretrained `backbone` (see `read_vgg16`) the first four convolutions stay as they are, as there.
    """
    network = vgg16(weights=None)
    features = network.features[:-1]
    fc6, fc7 = network.classifier[0], network.classifier[3]
    if backbone is not None:
        state = read_vgg16(backbone)
        fill_features(list(features), state)
        fill(fc6, state["classifier.0.weight"], state["classifier.0.bias"])
        fill(fc7, state["classifier.3.weight"], state["classifier.3.bias"])
        for parameter in features[:FROZEN].parameters():
            parameter.requires_grad_(False)
    features.out_channels = 512
    activation = (nn.ReLU(inplace=True), nn.Dropout())
    head = nn.Sequential(nn.Flatten(), fc6, *activation, fc7, *activation)
    anchors = Float32Anchors(((128, 256, 512),), ((0.5, 1.0, 2.0),))
    return FasterRCNN(
        features,
        min_size=size,
        max_size=size * 5 // 3,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=anchors,
        rpn_head=Float32Proposals(512, anchors.num_anchors_per_location()[0]),
        rpn_pre_nms_top_n_train=12000,
        rpn_pre_nms_top_n_test=6000,
        rpn_post_nms_top_n_train=2000,
        rpn_post_nms_top_n_test=300,
        box_roi_pool=RegionPool(7, 16, align=False),
        box_head=head,
        box_predictor=Float32Predictor(4096, classes + 1),
        box_batch_size_per_image=128,
        box_score_thresh=0.05,
        box_nms_thresh=0.3,
    )
