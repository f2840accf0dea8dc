"""Detectors: sizes that their papers publish, default boxes, and formats that boxes must not take over."""

import pytest
import torch
from torch import nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import roi_align

from mptrain.errors import UserError
from mptrain.models import faster_rcnn, ssd, vgg16_weights, yolo
from mptrain.models.faster_rcnn import Float32Anchors, Float32Predictor, Float32Proposals, RegionPool


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def conv(inputs: int, outputs: int, side: int = 3) -> int:
    return inputs * outputs * side**2 + outputs


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


VGG_CONVOLUTIONS = sum(
    conv(inputs, outputs)
    for inputs, outputs in [
        *[(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 256)],
        *[(256, 512), (512, 512), (512, 512), (512, 512), (512, 512), (512, 512)],
    ]
)


def test_ssd300_has_the_published_size():
    with torch.device("meta"):
        voc, coco = (ssd.ssd300_vgg16(classes, 300, background=True) for classes in (20, 90))
        logits, offsets = voc(torch.empty(2, 3, 300, 300))
    assert logits.shape == (2, 8732, 21) and offsets.shape == (2, 8732, 4)
    assert parameters(coco) == 35_641_826  # torchvision's SSD300_VGG16_Weights.COCO_V1
    heads = sum(conv(c, n * 25) for c, n in zip((512, 1024, 512, 256, 256, 256), (4, 6, 6, 6, 4, 4), strict=True))
    extra = conv(512, 1024) + conv(1024, 1024, 1) + conv(1024, 256, 1) + conv(256, 512) + conv(512, 128, 1)
    extra += conv(128, 256) + 2 * (conv(256, 128, 1) + conv(128, 256))
    assert parameters(voc) == VGG_CONVOLUTIONS + 512 + extra + heads == 26_285_486


def test_ssd300_has_8732_default_boxes_in_the_order_of_the_outputs():
    with torch.device("meta"):
        model = ssd.ssd300_vgg16(20, 300, background=True)
    boxes = model.default_boxes()
    assert boxes.shape == (8732, 4) and boxes.dtype == torch.float32 and boxes.device.type == "cpu"
    assert boxes[0].tolist() == pytest.approx([4 - 10.5, 4 - 10.5, 4 + 10.5, 4 + 10.5])  # 7 % of 300, first cell of 8
    assert boxes[4].tolist() == pytest.approx([12 - 10.5, 4 - 10.5, 12 + 10.5, 4 + 10.5], abs=1e-4)
    assert boxes[38 * 38 * 4].tolist() == pytest.approx([8 - 22.5, 8 - 22.5, 8 + 22.5, 8 + 22.5], abs=1e-4)


def test_small_ssd_has_dense_boxes_centred_on_its_cells():
    model = ssd.ssd_dense(10, 96, background=False)
    boxes = model.default_boxes()
    assert len(boxes) == (24 * 24 + 12 * 12) * 9 == 6480
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    assert torch.equal(centres[:9], torch.full((9, 2), 2.0)) and torch.equal(centres[9], torch.tensor([6.0, 2.0]))
    assert torch.equal(centres[24 * 24 * 9], torch.tensor([4.0, 4.0]))
    logits, offsets = model(torch.zeros(1, 3, 96, 96))
    assert logits.shape == (1, 6480, 10) and offsets.shape == (1, 6480, 4)


def test_sparse_ssd_has_squares_around_its_cells():
    model = ssd.ssd_sparse(1, 208, background=False).eval()
    boxes = model.default_boxes()
    assert len(boxes) == 26 * 26 * 3 + 13 * 13 * 2
    assert boxes[:3].tolist() == [[4 - r, 4 - r, 4 + r, 4 + r] for r in (8.0, 14.0, 22.0)]
    assert boxes[-1].tolist() == [200 - 48, 200 - 48, 200 + 48, 200 + 48]
    logits, offsets = model(torch.zeros(1, 3, 208, 208))
    assert logits.shape == (1, len(boxes), 1) and offsets.shape == (1, len(boxes), 4)


def test_an_output_belongs_to_the_default_box_of_its_place():
    model = ssd.ssd_dense(3, 32, background=True)
    torch.manual_seed(0)
    picture = torch.zeros(1, 3, 32, 32)
    before = model(picture)[0]
    picture[0, :, 30:, 30:] = 1.0  # the last corner
    changed = (model(picture)[0] != before).any(-1)[0]
    centres = (model.default_boxes()[:, :2] + model.default_boxes()[:, 2:]) / 2
    fine = slice(0, 8 * 8 * 9)
    assert changed[fine].any() and (centres[fine][changed[fine]].min() > 10)


def test_sigmoid_heads_start_sure_of_nothing():
    torch.manual_seed(0)
    logits, _ = ssd.ssd_dense(10, 96, background=False)(torch.randn(2, 3, 96, 96))
    assert float(logits.detach().sigmoid().mean()) == pytest.approx(0.01, rel=0.5)


def test_small_ssd_stays_in_float32_where_it_must_when_halved():
    model = ssd.ssd_dense(2, 64, background=True)
    boxes = model.default_boxes()
    assert torch.equal(model.half().default_boxes(), boxes)


def test_yolo_has_its_boxes_around_its_cells_in_the_order_of_the_outputs():
    torch.manual_seed(0)
    model = yolo.yolo_small(10, 96).eval()
    boxes, steps = model.default_boxes(), model.steps()
    assert len(boxes) == len(steps) == (12 * 12 + 6 * 6) * 3 == 540
    assert boxes[0].tolist() == [4 - 7, 4 - 15.5, 4 + 7, 4 + 15.5]  # 14 x 31 around the first cell of 8 pixels
    assert boxes[-1].tolist() == [88 - 22, 88 - 25.5, 88 + 22, 88 + 25.5]  # 44 x 51 around the last one of 16
    assert steps.tolist() == [8.0] * 432 + [16.0] * 108
    picture = torch.zeros(1, 3, 96, 96)
    before = model(picture)
    assert before.shape == (1, 540, 15)
    picture[0, :, :8, :8] = 1.0
    reached = (model(picture) - before).abs()[0, :432, 4].view(12, 12, 3).amax(-1)
    assert reached[0, 0] > 10 * reached[6:, 6:].max()  # what reaches all of it came over the coarse map
    assert torch.equal(model.half().default_boxes(), boxes)
    zero = yolo.place(torch.zeros(2, 540, 4), boxes, steps)
    assert torch.allclose(zero, boxes.expand(2, -1, -1), atol=1e-5)
    far = yolo.place(torch.tensor([[100.0, -100.0, 100.0, -100.0]]), boxes[:1], steps[:1])
    assert far[0].tolist() == pytest.approx(
        [12 - 28, -4, 12 + 28, -4]
    )  # a cell to the right and up, four times as wide


def test_yolo_starts_sure_of_nothing_and_is_made_of_cross_stages():
    torch.manual_seed(0)
    model = yolo.yolo_small(10, 96)
    assert float(model(torch.randn(2, 3, 96, 96))[..., 4].detach().sigmoid().mean()) == pytest.approx(0.01, rel=0.5)

    def unit(inputs, outputs, side=1):
        return inputs * outputs * side**2 + 2 * outputs

    def stage(inputs, outputs):
        half = outputs // 2
        return 2 * unit(inputs, half) + unit(half, half) + unit(half, half, 3) + unit(outputs, outputs)

    backbone = unit(3, 16, 3) + unit(16, 32, 3) + stage(32, 32) + unit(32, 64, 3) + stage(64, 64)
    neck = unit(64, 128, 3) + stage(128, 128) + unit(128, 64) + stage(128, 64)
    assert parameters(model) == backbone + neck + conv(64, 45, 1) + conv(128, 45, 1)
    stages = [module for module in model.modules() if isinstance(module, yolo.CrossStage)]
    x = torch.randn(1, 32, 4, 4)
    by_hand = stages[0].join(torch.cat([stages[0].through(x), stages[0].past(x)], 1))
    assert len(stages) == 4 and torch.allclose(stages[0](x), by_hand)


def test_faster_rcnn_vgg16_has_137_million_parameters():
    with torch.device("meta"):
        model = faster_rcnn.faster_rcnn_vgg16(20, 600)
    proposals = conv(512, 512) + conv(512, 9, 1) + conv(512, 36, 1)
    head = linear(512 * 49, 4096) + linear(4096, 4096) + linear(4096, 21) + linear(4096, 84)
    assert parameters(model) == VGG_CONVOLUTIONS + proposals + head
    assert parameters(model) == pytest.approx(137e6, rel=0.005)
    assert (model.transform.min_size, model.transform.max_size) == ((600,), 1000)


def test_boxes_of_a_half_precision_network_are_float32():
    half = [torch.zeros(1, 8, 40, 50, dtype=torch.float16)]
    anchors = Float32Anchors(((128, 256, 512),), ((0.5, 1.0, 2.0),))
    images = ImageList(torch.zeros(1, 3, 640, 800), [(640, 800)])
    (found,) = anchors(images, half)
    assert found.dtype == torch.float32 and torch.equal(found, anchors(images, [half[0].float()])[0])
    logits, offsets = Float32Proposals(8, 9).half()(half)
    assert {t.dtype for t in (*logits, *offsets)} == {torch.float32}
    assert {t.dtype for t in Float32Predictor(8, 3).half()(half[0][0, :, 0].T)} == {torch.float32}
    region = [torch.tensor([[33.3, 44.4, 633.3, 744.4]])]
    pooled = RegionPool(7, 16, align=False)({"0": half[0]}, region, [(640, 800)])
    assert pooled.shape == (1, 8, 7, 7) and pooled.dtype == torch.float32


def test_aligned_regions_interpolate_and_rounded_ones_take_the_maximum():
    features = torch.arange(64.0).view(1, 1, 8, 8)
    region = [torch.tensor([[0.0, 0.0, 32.0, 32.0]])]
    aligned = RegionPool(2, 8, align=True)({"0": features}, region, [(64, 64)])
    assert torch.equal(aligned, roi_align(features, region, 2, 1 / 8, 2))
    assert RegionPool(2, 16, align=False)({"0": features}, region, [(64, 64)]).flatten().tolist() == [
        9.0,
        10.0,
        17.0,
        18.0,
    ]


def test_small_networks_refuse_what_they_cannot_take(tmp_path):
    with pytest.raises(UserError, match="task.backbone=null"):
        ssd.ssd_dense(10, 96, True, tmp_path)
    with pytest.raises(UserError, match="task.backbone=null"):
        faster_rcnn.faster_rcnn_small(10, 96, tmp_path)
    with pytest.raises(UserError, match="task.size=100 is not a multiple of 8"):
        ssd.ssd_dense(10, 100, True)
    with pytest.raises(UserError, match="task.backbone=null"):
        yolo.yolo_small(10, 96, tmp_path)
    with pytest.raises(UserError, match="task.size=300"):
        ssd.ssd300_vgg16(20, 512, True)


@pytest.mark.parametrize("content", [None, b"", b"not a state dict", {"features.0.weight": torch.zeros(1)}, {}])
def test_a_backbone_file_that_is_not_vgg16_is_refused(tmp_path, content):
    path = tmp_path / "vgg16.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UserError, match="does not hold the weights of torchvision's VGG-16 .*; write them with"):
        vgg16_weights.read_vgg16(path)


@pytest.mark.slow
def test_pretrained_layers_arrive_in_both_detectors(monkeypatch):
    from torchvision.models import vgg16

    torch.manual_seed(1)
    state = vgg16().state_dict()
    state["classifier.0.weight"] = torch.arange(25088.0).expand(4096, 25088)
    state["classifier.3.bias"] = torch.arange(4096.0)
    for module in (ssd, faster_rcnn):
        monkeypatch.setattr(module, "read_vgg16", lambda path: state)
    single = ssd.ssd300_vgg16(20, 300, True, "file").backbone
    first_dense, second_dense = single.extra[0][-1][1], single.extra[0][-1][3]
    assert torch.equal(single.features[0].weight, state["features.0.weight"])
    assert torch.equal(single.features[21].weight, state["features.21.weight"])
    assert torch.equal(single.extra[0][5].bias, state["features.28.bias"])
    assert first_dense.weight[7, 2].tolist() == [
        [2 * 49 + 21 * row + 3 * column for column in range(3)] for row in range(3)
    ]
    assert second_dense.bias.tolist() == list(range(0, 4096, 4))
    two_stage = faster_rcnn.faster_rcnn_vgg16(20, 600, "file")
    assert torch.equal(two_stage.backbone[28].weight, state["features.28.weight"])
    assert torch.equal(two_stage.roi_heads.box_head[1].weight, state["classifier.0.weight"])
    frozen = {name for name, p in two_stage.named_parameters() if not p.requires_grad}
    assert frozen == {f"backbone.{layer}.{kind}" for layer in (0, 2, 5, 7) for kind in ("weight", "bias")}
