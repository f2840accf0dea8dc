"""Detection task: matching, losses, average precision and evaluation, against hand-made values and plain references."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import box_iou

from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError
from mptrain.models.faster_rcnn import faster_rcnn_small
from mptrain.tasks import build
from mptrain.tasks.detect.average_precision import AveragePrecision
from mptrain.tasks.detect.decoding import decode
from mptrain.tasks.detect.losses import mean_loss, positives_loss
from mptrain.tasks.detect.matching import BACKGROUND, coder, match
from mptrain.tasks.detect.objectness import mean
from mptrain.tasks.detect.single_shot import SingleShot

SSD = "mptrain.models.ssd:ssd_dense"
YOLO = "mptrain.models.yolo:yolo_small"
RCNN = "mptrain.models.faster_rcnn:faster_rcnn_small"
KINDS = [(SSD, "mean"), (SSD, "positives"), (YOLO, "objectness"), (RCNN, None)]


def target(boxes, labels, difficult=None) -> dict[str, torch.Tensor]:
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "difficult": torch.tensor(difficult or [False] * len(labels), dtype=torch.bool),
    }


# ------------------------------------------------------------------------------------------------------------ matching


def test_matching_and_encoding_by_hand():
    defaults = torch.tensor([[0, 0, 10, 10], [0, 0, 10, 20], [50, 50, 60, 60], [30, 30, 40, 40]], dtype=torch.float32)
    # The first object is the second default box moved. The second overlaps the third box by 1/9, none by more.
    objects = target([[0, 2, 10, 22], [58, 50, 68, 60]], [4, 7])
    labels, offsets = match([objects, target([], [])], defaults)
    assert labels.tolist() == [[BACKGROUND, 4, 7, BACKGROUND], [BACKGROUND] * 4]
    assert offsets[0, 1].tolist() == pytest.approx([0, 10 * 2 / 20, 0, 0])
    assert offsets[0, 2].tolist() == pytest.approx([10 * 8 / 10, 0, 0, 0])
    assert not offsets[0, [0, 3]].any() and not offsets[1].any()
    larger = match([target([[0, 0, 20, 20]], [1])], torch.tensor([[5.0, 5.0, 15.0, 15.0]]))[1]
    assert larger[0, 0].tolist() == pytest.approx([0, 0, 5 * math.log(2), 5 * math.log(2)])


def test_an_overlap_of_one_half_is_enough_and_the_best_object_wins():
    labels, _ = match(
        [target([[0, 0, 10, 20], [0, 0, 10, 12]], [0, 1])], torch.tensor([[0, 0, 10, 10], [0, 0, 10, 20]]).float()
    )
    assert labels.tolist() == [[1, 0]]
    half, _ = match(
        [target([[0, 0, 10, 20], [0, 0, 10, 20.5]], [0, 0])], torch.tensor([[0, 0, 10, 10], [0, 0, 10, 20]]).float()
    )
    assert half.tolist() == [[0, 0]]


def test_decoding_inverts_encoding():
    torch.manual_seed(0)
    corners = torch.rand(2, 50, 2) * 40
    defaults, objects = (torch.cat([c, c + 5 + torch.rand(50, 2) * 20], 1) for c in corners)
    assert torch.allclose(coder.decode_single(coder.encode_single(objects, defaults), defaults), objects, atol=1e-4)


# -------------------------------------------------------------------------------------------------------------- losses


@pytest.fixture
def outputs():
    generator = torch.Generator().manual_seed(0)
    labels = torch.full((3, 40), BACKGROUND)
    labels[0, [3, 5, 8]], labels[1, 7] = torch.tensor([0, 2, 2]), 1
    wanted = torch.randn(3, 40, 4, generator=generator)
    offsets = (wanted + torch.randn(3, 40, 4, generator=generator) * 2).requires_grad_()
    return offsets, labels, wanted, generator


def smooth_l1(offsets, labels, wanted) -> torch.Tensor:
    difference = (offsets.double() - wanted.double()).abs()[labels != BACKGROUND]
    return torch.where(difference < 1, difference**2 / 2, difference - 0.5).sum()


def test_mean_loss_against_plain_float64(outputs):
    offsets, labels, wanted, generator = outputs
    logits = (torch.randn(3, 40, 3, generator=generator) * 4).requires_grad_()
    total, terms = mean_loss(logits, offsets, labels, wanted)
    probability = logits.double().sigmoid()
    expected = 0.0
    for picture in range(3):
        for box in range(40):
            for label in range(3):
                p = probability[picture, box, label]
                expected = expected - torch.log(p if labels[picture, box] == label else 1 - p)
    expected = expected / (3 * 40 * 3) + smooth_l1(offsets, labels, wanted) / (3 * 40 * 4)
    check(total / terms, expected, logits, offsets)


def test_positives_loss_against_plain_float64(outputs):
    offsets, labels, wanted, generator = outputs
    logits = (torch.randn(3, 40, 4, generator=generator) * 4).requires_grad_()
    total, terms = positives_loss(logits, offsets, labels, wanted)
    entropy = -logits.double().log_softmax(-1)
    expected, positives = smooth_l1(offsets, labels, wanted), 0
    for picture in range(3):
        objects = [box for box in range(40) if labels[picture, box] != BACKGROUND]
        nothing = [box for box in range(40) if box not in objects]
        worst = sorted(nothing, key=lambda box: -entropy[picture, box, 0].item())[: 3 * len(objects)]
        expected = expected + sum(entropy[picture, box, labels[picture, box] + 1] for box in objects)
        expected = expected + sum(entropy[picture, box, 0] for box in worst)
        positives += len(objects)
    assert terms == positives == 4
    check(total / terms, expected / positives, logits, offsets)


def check(loss, expected, logits, offsets) -> None:
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, plain in zip(
        torch.autograd.grad(loss, (logits, offsets)), torch.autograd.grad(expected, (logits, offsets)), strict=True
    ):
        torch.testing.assert_close(mine, plain.to(mine.dtype), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("loss, classes", [(mean_loss, 3), (positives_loss, 4)])
def test_loss_of_a_set_does_not_depend_on_how_it_is_cut(outputs, loss, classes):
    offsets, labels, wanted, generator = outputs
    logits = torch.randn(3, 40, classes, generator=generator)
    total, terms = loss(logits, offsets, labels, wanted)
    parts = [loss(logits[i : i + 1], offsets[i : i + 1], labels[i : i + 1], wanted[i : i + 1]) for i in range(3)]
    assert sum(part.item() for part, _ in parts) == pytest.approx(total.item(), rel=1e-6)
    assert sum(count for _, count in parts) == terms


def test_pictures_without_objects_teach_nothing_by_positives_and_background_by_the_mean():
    batch = {"images": torch.randn(2, 3, 32, 32), "targets": [target([], []), target([], [])]}
    for normalise in ("positives", "mean"):
        task = build("detect", DataSpec("synthetic"), model=SSD, size=32, classes=2, normalise=normalise)
        ((name, loss),) = task.losses(batch)
        loss.backward()
        moved = max(float(p.grad.abs().max()) for p in task.models["model"].parameters() if p.grad is not None)
        assert name == "model" and math.isfinite(loss.item()) and (moved > 0) == (normalise == "mean")


class HalfOutputs(nn.Module):
    """A detector that hands over half precision, as autocast makes it do."""

    def __init__(self, boxes: torch.Tensor, outputs: int, background: bool, size: int) -> None:
        super().__init__()
        self.boxes, self.background, self.size = boxes, background, size
        generator = torch.Generator().manual_seed(0)
        self.logits = nn.Parameter(torch.randn(len(boxes), outputs, generator=generator))
        self.offsets = nn.Parameter(torch.randn(len(boxes), 4, generator=generator))

    def forward(self, images):
        return tuple(t.half().expand(len(images), *t.shape) for t in (self.logits, self.offsets))

    def default_boxes(self):
        return self.boxes


@pytest.mark.parametrize("background", [True, False])
def test_half_outputs_and_a_box_as_large_as_a_640_pixel_picture(background):
    edges = torch.arange(0, 640, 64.0)
    corners = torch.cartesian_prod(edges, edges)
    boxes = torch.cat([torch.cat([corners, corners + 64], 1), torch.tensor([[0.0, 0.0, 640.0, 640.0]])])
    batch = {"images": torch.zeros(2, 3, 640, 640), "targets": [target([[0, 0, 640, 640]], [1])] * 2}
    model = HalfOutputs(boxes, 4 if background else 3, background, 640)
    task = SingleShot(model, None, None)
    with torch.autocast("cpu", torch.float16):
        ((_, loss),) = task.losses(batch)
        with torch.no_grad():
            values = task.evaluate([batch])
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss) and torch.isfinite(model.logits.grad).all()
    rounded = HalfOutputs(boxes, 4 if background else 3, background, 640)
    rounded.forward = lambda images: tuple(t.float() for t in HalfOutputs.forward(rounded, images))
    ((_, plain),) = SingleShot(rounded, None, None).losses(batch)
    assert loss.item() == plain.item()
    with torch.no_grad():
        assert values == SingleShot(rounded, None, None).evaluate([batch])


def test_two_stages_with_a_box_as_large_as_a_640_pixel_picture():
    torch.manual_seed(0)
    model = faster_rcnn_small(3, 640)
    pictures = torch.randn(1, 3, 640, 640)
    objects = [{"boxes": torch.tensor([[0.0, 0.0, 640.0, 640.0]]), "labels": torch.tensor([2])}]
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            parts = model(list(pictures), objects)
        assert {part.dtype for part in parts.values()} == {torch.float32}
        losses.append(sum(part.item() for part in parts.values()))
    assert math.isfinite(losses[0]) and losses[1] == pytest.approx(losses[0], rel=0.02)


# --------------------------------------------------------------------------------------------------- average precision


def found(*rows) -> dict[str, torch.Tensor]:
    """Detections from (x, score, label): a box of 10 x 10 at column x."""
    boxes = torch.tensor([[x, 0, x + 10, 10] for x, _, _ in rows], dtype=torch.float32).reshape(-1, 4)
    return {
        "boxes": boxes,
        "scores": torch.tensor([score for _, score, _ in rows]),
        "labels": torch.tensor([label for _, _, label in rows], dtype=torch.int64),
    }


def objects(*rows) -> dict[str, torch.Tensor]:
    """Objects from (x, label) or (x, label, difficult)."""
    return target([[x, 0, x + 10, 10] for x, *_ in rows], [label for _, label, *_ in rows], [len(r) > 2 for r in rows])


def precision_of(*pictures) -> float:
    precision = AveragePrecision()
    for detections, picture in pictures:
        precision.add(detections, picture)
    return precision.value()


def test_eleven_point_average_precision_by_hand():
    # Right, wrong, right, of three objects: precision 1 to recall 1/3 (0 .. .3), 2/3 to recall 2/3 (.4 .. .6), then 0.
    picture = (found((0, 0.9, 0), (200, 0.8, 0), (20, 0.7, 0)), objects((0, 0), (20, 0), (40, 0)))
    assert precision_of(picture) == pytest.approx((4 * 1 + 3 * 2 / 3) / 11)


def test_a_recall_of_exactly_three_tenths_reaches_its_point():
    picture = (found((0, 0.9, 0), (20, 0.8, 0), (40, 0.7, 0)), objects(*((20 * i, 0) for i in range(10))))
    assert precision_of(picture) == pytest.approx(4 / 11)


def test_a_second_detection_of_an_object_is_wrong():
    picture = (found((0, 0.9, 0), (1, 0.8, 0), (20, 0.7, 0)), objects((0, 0), (20, 0)))
    assert precision_of(picture) == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)


def test_difficult_objects_count_neither_way():
    # The detection of the difficult object, however sure, is neither right nor wrong; a missed one is not missed.
    hard = objects((0, 0), (20, 0, True), (40, 0, True))
    assert precision_of((found((20, 0.9, 0), (0, 0.8, 0)), hard)) == pytest.approx(1.0)
    assert precision_of(
        (found((20, 0.9, 1), (0, 0.8, 1)), hard), (found((0, 0.5, 1)), objects((0, 1)))
    ) == pytest.approx((0 + 1 / 3) / 2)


def test_classes_without_objects_are_left_out_of_the_mean():
    picture = (found((0, 0.9, 0), (20, 0.9, 5)), objects((0, 0), (40, 3)))
    assert precision_of(picture) == pytest.approx((1.0 + 0.0) / 2)


def test_no_detections_is_zero_and_no_objects_is_undefined():
    assert precision_of((found(), objects((0, 0))), (found(), objects())) == 0.0
    assert math.isnan(precision_of((found((0, 0.9, 0)), objects()), (found((0, 0.9, 0)), objects((0, 0, True)))))


def classic(pictures, classes: int) -> float:
    """The devkit's procedure, one detection after another."""
    means = []
    for label in range(classes):
        ranked = sorted(
            (
                (float(score), number, box)
                for number, (detections, _) in enumerate(pictures)
                for box, score, kind in zip(
                    detections["boxes"], detections["scores"], detections["labels"], strict=True
                )
                if kind == label
            ),
            key=lambda entry: -entry[0],
        )
        asked = sum(int(((p["labels"] == label) & ~p["difficult"]).sum()) for _, p in pictures)
        if not asked:
            continue
        taken, right, wrong = set(), [], []
        for _, number, box in ranked:
            picture = pictures[number][1]
            same = (picture["labels"] == label).nonzero().flatten()
            overlaps = box_iou(box[None], picture["boxes"][same])[0] if len(same) else torch.zeros(1)
            best = int(overlaps.argmax())
            if overlaps[best] < 0.5:
                right, wrong = [*right, 0], [*wrong, 1]
            elif not picture["difficult"][same[best]]:
                hit = (number, int(same[best])) not in taken
                right, wrong = [*right, int(hit)], [*wrong, int(not hit)]
                taken.add((number, int(same[best])))
        recall, hits = np.cumsum(right) / asked, np.cumsum(right)
        precision = hits / np.maximum(hits + np.cumsum(wrong), 1)
        points = [precision[recall >= tenth / 10] for tenth in range(11)]
        means.append(np.mean([values.max() if len(values) else 0.0 for values in points]))
    return float(np.mean(means))


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_against_the_classic_procedure(seed):
    rng = np.random.default_rng(seed)
    pictures = []
    for _ in range(25):
        places = rng.permutation(12)[: rng.integers(0, 8)] * 30
        rows = [(int(x), int(rng.integers(3)), *([True] if rng.random() < 0.2 else [])) for x in places]
        hits = [
            (x + int(rng.integers(-6, 7)), float(rng.random()), label if rng.random() < 0.8 else 2)
            for x, label, *_ in rows
            for _ in range(rng.integers(0, 3))
        ]
        pictures.append((found(*hits, (15, float(rng.random()), 1)), objects(*rows)))
    assert precision_of(*pictures) == pytest.approx(classic(pictures, 3), abs=1e-6)


def test_objectness_loss_against_plain_float64():
    """Two pictures, one with an object of class 1 in the place of a default box of the coarse map, one without."""
    task = small_task(YOLO, "objectness")
    boxes, steps = task.boxes.double(), task.steps.double()
    number = len(boxes) - 3 * 4 + 1  # the second anchor of the first cell of the coarse map
    assert boxes[number].tolist() == pytest.approx([8 - 46 / 6, 8 - 28 / 6, 8 + 46 / 6, 8 + 28 / 6])
    objects = target([(boxes[number] + 1).tolist()], [1])
    outputs = torch.randn(2, len(boxes), 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = match([objects, target([], [])], task.boxes)[0]
    assert labels[0, number] == 1 and (labels[1] == BACKGROUND).all()
    cost, objectness = 0.0, 0.0
    for picture, box in itertools.product(range(2), range(len(boxes))):
        row, wanted = outputs[picture, box].double(), 0.0
        if labels[picture, box] == 1:
            x, y, wide, high = 2 * row[:4].sigmoid()
            left, top, right, bottom = boxes[box]
            x, y = (left + right) / 2 + (x - 1) * steps[box], (top + bottom) / 2 + (y - 1) * steps[box]
            wide, high = wide**2 * (right - left), high**2 * (bottom - top)
            placed = torch.stack([x - wide / 2, y - high / 2, x + wide / 2, y + high / 2])
            iou, distance, shape = apart(placed, objects["boxes"][0].double())
            weight = (shape / (1 - iou + shape)).detach()
            cost = cost + 1 - iou + distance + weight * shape
            cost = cost - (torch.log(row[6].sigmoid()) + torch.log(1 - row[5].sigmoid())) / 2
            wanted = float(iou.detach())
        p = row[4].sigmoid()
        objectness = objectness - wanted * torch.log(p) - (1 - wanted) * torch.log(1 - p)
    expected = objectness / (2 * len(boxes)) + cost / int((labels == 1).sum())
    loss = mean(*task.parts(outputs, [objects, target([], [])]))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    mine, plain = (torch.autograd.grad(value, outputs)[0] for value in (loss, expected))
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-7)


def apart(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """IoU of two boxes (4,), squared distance of their centres over the squared diagonal around both, how much their
    proportions differ (Zheng et al. 2020, equations 7 to 10)."""
    sides = (torch.minimum(one[2:], other[2:]) - torch.maximum(one[:2], other[:2])).clamp(min=0)
    areas = sum((box[2:] - box[:2]).prod() for box in (one, other))
    around = torch.maximum(one[2:], other[2:]) - torch.minimum(one[:2], other[:2])
    centres = (one[:2] + one[2:] - other[:2] - other[2:]) / 2
    angles = [torch.atan((box[2] - box[0]) / (box[3] - box[1])) for box in (one, other)]
    iou = sides.prod() / (areas - sides.prod())
    return iou, (centres**2).sum() / (around**2).sum(), 4 / math.pi**2 * (angles[0] - angles[1]) ** 2


# ------------------------------------------------------------------------------------------------------------ decoding


def test_decoding_suppresses_within_a_class_only_and_stays_inside():
    boxes = torch.tensor([[0, 0, 20, 20], [1, 0, 21, 20], [90, 90, 110, 110]], dtype=torch.float32)
    scores = torch.tensor([[0.9, 0.005], [0.8, 0.7], [0.6, 0.02]])
    detections = decode(scores, torch.zeros(3, 4), boxes, 96)
    assert detections["labels"].tolist() == [0, 1, 0, 1]
    assert detections["scores"].tolist() == pytest.approx([0.9, 0.7, 0.6, 0.02])
    assert detections["boxes"].tolist() == [[0, 0, 20, 20], [1, 0, 21, 20], [90, 90, 96, 96], [90, 90, 96, 96]]
    rounded = decode(scores.half().float(), torch.zeros(3, 4), boxes, 96)
    assert torch.equal(rounded["boxes"], detections["boxes"]) and torch.equal(rounded["labels"], detections["labels"])


# ---------------------------------------------------------------------------------------------------------- evaluation


def small_task(model: str, normalise: str | None):
    torch.manual_seed(0)
    task = build("detect", DataSpec("synthetic", seed=1), model=model, size=32, classes=2, normalise=normalise)
    task.models["model"].eval()
    return task


@pytest.mark.parametrize("model, normalise", KINDS)
def test_evaluation_does_not_depend_on_the_batch_size(model, normalise):
    task = small_task(model, normalise)
    network = task.models["model"]
    if model != RCNN:  # sure enough, and of different things, to detect something from the start
        for layer in network.head.classification_head.module_list if model == SSD else network.heads:
            nn.init.normal_(layer.weight, std=0.2)
            nn.init.zeros_(layer.bias)
    task.test_set.count = 29
    with torch.no_grad():
        one, seven, all_at_once = (task.evaluate(batches(task.test_set, size)) for size in (1, 7, 64))
    assert one["mAP50"] > 0
    for other in (seven, all_at_once):
        assert other.keys() == one.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, abs=1e-3 if name == "mAP50" else 1e-5 * value)


@pytest.mark.parametrize("model, normalise", KINDS)
def test_a_few_steps_lower_the_loss(model, normalise):
    task = small_task(model, normalise)
    network = task.models["model"].train()
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    batch = task.train_set.__getitems__(BatchKey(np.arange(6), (0,), True, True))
    assert task.size(batch) == 6
    values = []
    for _ in range(12):
        ((name, loss),) = task.losses(batch)
        assert name == "model" and loss.dtype == torch.float32 and loss.ndim == 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.8 * values[0]


@pytest.mark.parametrize("model, normalise", KINDS)
def test_a_network_full_of_nan_has_a_nan_loss_and_detects_nothing(model, normalise):
    task = small_task(model, normalise)
    with torch.no_grad():
        for parameter in task.models["model"].parameters():
            parameter.fill_(math.nan)
        assert task.evaluate(batches(task.test_set, 64))["mAP50"] == 0.0
        task.models["model"].train()
        ((_, loss),) = task.losses(task.train_set.__getitems__(BatchKey(np.arange(6), (0,), True, True)))
    assert math.isnan(loss.item())


FITTING = {"model": SSD, "size": 32, "classes": 2, "normalise": "mean"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"normalise": "sum"}, "task.normalise=sum is unknown; type task.normalise=mean, task.normalise=positives"),
        ({"normalise": None}, "an SSD takes task.normalise=mean or positives, a YOLO objectness"),
        ({"normalise": "objectness"}, "an SSD takes task.normalise=mean or positives, a YOLO objectness"),
        ({"model": YOLO}, "a YOLO objectness"),
        ({"model": YOLO, "normalise": None}, "a YOLO objectness"),
        ({"model": RCNN, "normalise": "objectness"}, "a Faster R-CNN null"),
        ({"model": YOLO, "normalise": "objectness", "size": 40}, "task.size=40 is not a multiple of 16"),
        ({"model": RCNN}, "a Faster R-CNN null"),
        ({"size": 0}, "task.size=0 and task.classes=2 have to be at least 1"),
        ({"backbone": "vgg.pth"}, "type task.backbone=null"),
        ({"model": "torch:nothing"}, "has no function nothing"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        build(
            "detect", DataSpec("synthetic"), **{"model": SSD, "size": 32, "classes": 2, "normalise": "mean"} | options
        )


def test_one_rank_evaluates_without_the_others(monkeypatch):
    """The others are in no evaluation: whoever waits for them there waits for ever."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for call in ("get_world_size", "barrier", "all_gather"):
        monkeypatch.setattr(torch.distributed, call, lambda *args, **options: pytest.fail("waits for other ranks"))
    found = AveragePrecision()
    box, label = torch.tensor([[1.0, 2.0, 11.0, 12.0]]), torch.tensor([3])
    target = {"boxes": box, "labels": label, "difficult": torch.tensor([False])}
    found.add({"boxes": box, "scores": torch.tensor([0.9]), "labels": label}, target)
    assert found.value() == 1.0
