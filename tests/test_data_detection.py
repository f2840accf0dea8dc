"""Detection data: composites, tree tiles, the VOC reader and synthetic rectangles."""

import io
import logging

import numpy as np
import pytest
import torch
from PIL import Image

from mptrain.data import composites, detection, rectangles, trees, voc
from mptrain.data.boxes import Sample, flipped, inside, normalised, turned
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError


def key(*indices: int, train: bool = True, seed: int = 3) -> BatchKey:
    return BatchKey(np.array(indices), (seed, 0, 0), True, train)


def picture_with(box: tuple[int, int, int, int], shape=(20, 30)) -> Sample:
    picture = np.zeros((*shape, 3), np.uint8)
    picture[box[1] : box[3], box[0] : box[2]] = 255
    return Sample(picture, np.array([box], np.float32), np.array([1]), np.array([False]))


def bounds(picture: np.ndarray) -> list[int]:
    rows, columns = (np.flatnonzero(picture.any((axis, 2))) for axis in (1, 0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


@pytest.mark.parametrize("change", [flipped, turned, lambda s: turned(flipped(s)), lambda s: voc.squeezed(s, 60)])
def test_boxes_follow_the_picture(change):
    changed = change(picture_with((3, 4, 12, 16)))
    assert np.abs(changed.boxes[0] - bounds(changed.picture > 127)).max() <= 1


def test_mirror_and_transposition_are_exact():
    sample = picture_with((3, 4, 12, 16))
    assert flipped(sample).boxes.tolist() == [[18, 4, 27, 16]]
    assert turned(sample).boxes.tolist() == [[4, 3, 16, 12]]


def test_boxes_are_cut_at_the_border_and_flat_ones_dropped_with_the_name(caplog):
    boxes = np.array([[-5, 2, 10, 50], [0, 0, 30, 20], [5, 5, 5, 9], [9, 9, 2, 2], [np.nan, 0, 1, 1], [40, 1, 50, 9]])
    with caplog.at_level(logging.WARNING):
        clipped, kept = inside(boxes, 30, 20, "VOC2007/000001")
    assert kept.tolist() == [True, True, False, False, False, False]
    assert clipped[:2].tolist() == [[0, 2, 10, 20], [0, 0, 30, 20]]
    assert [r.getMessage() for r in caplog.records] == [
        "VOC2007/000001: 4 of 6 boxes have no area in the picture and are left out"
    ]


def test_normalised_has_the_statistics_of_imagenet():
    white = normalised(np.full((1, 2, 2, 3), 255, np.uint8))
    assert white.shape == (1, 3, 2, 2) and white.dtype == torch.float32
    assert white[0, :, 0, 0].tolist() == pytest.approx([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])


# ---------------------------------------------------------------------------------------------------------- composites


def test_pasted_boxes_are_tight_apart_and_the_same_every_time():
    items = np.zeros((3, 28, 28), np.uint8)
    items[:, 4:24, 8:20] = 200
    for seed in range(20):
        made = [
            composites.paste(np.zeros((96, 96, 3), np.uint8), items, np.array([4, 5, 6]), np.random.default_rng(seed))
            for _ in range(2)
        ]
        assert np.array_equal(made[0].picture, made[1].picture) and np.array_equal(made[0].boxes, made[1].boxes)
        covered = np.zeros((96, 96), int)
        for x1, y1, x2, y2 in made[0].boxes.astype(int):
            covered[y1:y2, x1:x2] += 1
        assert covered.max() == 1
        visible = made[0].picture[..., 0] > 8  # half opaque of half that grey, on black
        assert not visible[covered == 0].any()
        for x1, y1, x2, y2 in made[0].boxes.astype(int):
            inner = visible[y1:y2, x1:x2]
            assert inner[0].any() and inner[-1].any() and inner[:, 0].any() and inner[:, -1].any()


def test_composites_come_from_their_own_half_of_the_data(monkeypatch):
    asked = []
    photograph = Sample(np.full((120, 120, 3), 90, np.uint8), np.zeros((0, 4)), np.zeros(0), np.zeros(0, bool))
    monkeypatch.setattr(trees, "photographs", lambda split: asked.append(split) or (photograph,))
    monkeypatch.setattr(composites.samples, "read", lambda name, split: asked.append(split) or Rows())
    dataset = composites.compose("test", 5, 96)
    assert asked == ["test", "test"] and len(dataset) == 5 and dataset.kind == "composite"
    batch = dataset.__getitems__(key(0, 1, 2, train=False))
    assert batch["images"].shape == (3, 3, 96, 96)
    assert {int(label) for target in batch["targets"] for label in target["labels"]} == {7}


class Rows:
    def to_pylist(self):
        encoded = io.BytesIO()
        Image.fromarray(np.full((28, 28), 255, np.uint8)).save(encoded, "PNG")
        return [{"image": {"bytes": encoded.getvalue()}, "label": 7}]


# --------------------------------------------------------------------------------------------------------------- trees


def test_a_tile_marks_crowns_that_it_shows_less_than_half_of():
    photograph = Sample(
        np.zeros((200, 200, 3), np.uint8),
        np.array([[90, 10, 110, 30], [95, 40, 105, 50], [80, 60, 104, 70], [150, 150, 160, 160]], np.float32),
        np.zeros(4, np.int64),
        np.array([False, True, False, False]),
    )
    tile = trees.cut_tile(photograph, 0, 0, 100, 0.5)
    assert tile.boxes.tolist() == [[90, 10, 100, 30], [95, 40, 100, 50], [80, 60, 100, 70]]
    assert tile.difficult.tolist() == [False, True, False]
    assert trees.cut_tile(photograph, 0, 100, 100, 0.5).difficult.tolist() == [False, True, True]
    assert trees.without_difficult(tile).boxes.tolist() == [[90, 10, 100, 30], [80, 60, 100, 70]]


def test_tiles_side_by_side_cover_the_test_strip():
    train, test = trees.load(128)
    assert (train.kind, train.classes) == ("real", ("tree",))
    height, width = trees.photographs("test")[0].picture.shape[:2]
    assert len(test) == -(-height // 128) * -(-width // 128)
    assert sum((~tile.difficult).sum() for tile in test.tiles) >= 150
    one, same, other = (train.__getitems__(key(5, 6, seed=seed))["images"] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_tile_larger_than_a_photograph_is_refused():
    with pytest.raises(UserError, match="task.size=401 is larger .* at most task.size=400"):
        trees.load(401)


# ----------------------------------------------------------------------------------------------------------------- voc


def annotate(*objects: str, size: str = "<size><width>40</width><height>30</height><depth>3</depth></size>") -> str:
    return f"<annotation>{size}{''.join(objects)}</annotation>"


def thing(name: str, *edges, difficult: str = "<difficult>0</difficult>") -> str:
    tags = zip(("xmin", "ymin", "xmax", "ymax"), edges, strict=True)
    box = "".join(f"<{tag}>{edge}</{tag}>" for tag, edge in tags)
    return f"<object><name>{name}</name>{difficult}<bndbox>{box}</bndbox></object>"


HARD = "<difficult>1</difficult>"


@pytest.fixture
def devkit(tmp_path):
    """A VOCdevkit of a few small pictures, one grey, one without objects."""
    pictures = {
        "VOC2007/trainval": {
            "000001": annotate(thing("dog", 1, 1, 40, 30), thing("cat", "11.5", "5.0", "20.5", "9", difficult=HARD)),
            "000002": annotate(),
            "000003": annotate(thing("person", 5, 5, 4, 9), thing("person", 3, 3, 12, 12, difficult="")),
        },
        "VOC2007/test": {"000010": annotate(thing("sofa", 2, 2, 9, 9, difficult=HARD), size="")},
        "VOC2012/trainval": {"2008_000001": annotate(thing("bird", 30, 20, 40, 30))},
    }
    for part, annotations in pictures.items():
        year, split = part.split("/")
        for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (tmp_path / year / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / year / "ImageSets/Main" / f"{split}.txt").write_text("".join(f"{name}\n" for name in annotations))
        for name, text in annotations.items():
            (tmp_path / year / "Annotations" / f"{name}.xml").write_text(text)
            mode = "L" if name == "000002" else "RGB"
            Image.new(mode, (40, 30), "grey").save(tmp_path / year / "JPEGImages" / f"{name}.jpg")
    return tmp_path


def test_voc_boxes_count_from_zero_and_hold_the_last_pixel(devkit):
    train, test = voc.load(devkit, [2007, 2012], 300, True)
    assert (len(train), len(test), train.kind) == (4, 1, "real")
    assert train.entries[0].boxes.tolist() == [[0, 0, 40, 30], [10.5, 4, 20.5, 9]]
    assert train.entries[0].labels.tolist() == [voc.CLASSES.index("dog"), voc.CLASSES.index("cat")]
    assert train.entries[0].difficult.tolist() == [False, True]
    assert train.entries[2].boxes.tolist() == [[2, 2, 12, 12]]
    assert test.entries[0].boxes.tolist() == [[1, 1, 9, 9]] and test.entries[0].difficult.tolist() == [True]


def test_voc_leaves_difficult_objects_out_of_training_only(devkit):
    train, test = voc.load(devkit, [2007], None, False)
    assert [len(entry.boxes) for entry in train.entries] == [1, 0, 1]
    assert len(test.entries[0].boxes) == 1


def test_voc_reports_a_flat_box_once_by_name(devkit, caplog):
    with caplog.at_level(logging.WARNING):
        train, _ = voc.load(devkit, [2007], None, True)
        list(batches(train, 2))
    assert [r.getMessage() for r in caplog.records] == [
        "VOC2007/000003: 1 of 2 boxes have no area in the picture and are left out"
    ]


def test_voc_batches_grey_and_empty_pictures_squeezed_or_in_their_own_size(devkit):
    square, _ = voc.load(devkit, [2007], 60, True)
    batch = square.__getitems__(key(0, 1, 2, train=False))
    assert batch["images"].shape == (3, 3, 60, 60)
    assert batch["targets"][0]["boxes"][0].tolist() == [0, 0, 60, 60]
    assert batch["targets"][1]["boxes"].shape == (0, 4) and batch["targets"][1]["labels"].dtype == torch.int64
    Image.new("RGB", (20, 30)).save(devkit / "VOC2007/JPEGImages/000002.jpg")
    ragged = voc.load(devkit, [2007], None, True)[0].__getitems__(key(0, 1, train=False))["images"]
    assert [tuple(image.shape) for image in ragged] == [(3, 30, 40), (3, 30, 20)]


def test_voc_augmentation_depends_on_the_key_alone(devkit):
    train, _ = voc.load(devkit, [2007], 60, True)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = (train.__getitems__(key(0, 1, 2, seed=seed)) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first["images"], again["images"]) and not torch.equal(first["images"], other["images"])
    for seed in range(25):
        for target in train.__getitems__(key(0, 1, 2, seed=seed))["targets"]:
            boxes = target["boxes"]
            assert len(boxes) == len(target["labels"]) == len(target["difficult"])
            assert (boxes >= 0).all() and (boxes <= 60).all() and (boxes[:, 2:] > boxes[:, :2]).all()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: (d / "VOC2007/Annotations/000002.xml").unlink(), "annotation of VOC2007/000002 cannot be read"),
        (lambda d: (d / "VOC2007/Annotations/000002.xml").write_text("<annotation>"), "annotation of VOC2007/000002"),
        (lambda d: write(d, thing("dog", 1, "two", 3, 4)), "VOC2007/000002 cannot be read: could not convert"),
        (lambda d: write(d, thing("dog", 1, 2, 3, 4).replace("xmax", "x")), "an object has no bndbox/xmax"),
        (lambda d: write(d, thing("dragon", 1, 2, 3, 4)), "VOC2007/000002 names dragon; VOC has aeroplane, "),
        (lambda d: (d / "VOC2007/ImageSets/Main/test.txt").unlink(), "test.txt cannot be read; data_dir has to be"),
        (lambda d: (d / "VOC2007/ImageSets/Main/test.txt").write_text(" \n"), "test.txt names no picture"),
    ],
)
def test_voc_names_what_is_wrong_at_the_start(devkit, damage, message):
    damage(devkit)
    with pytest.raises(UserError, match=message):
        voc.load(devkit, [2007], 300, True)


def write(devkit, text: str) -> None:
    (devkit / "VOC2007/Annotations/000002.xml").write_text(annotate(text))


@pytest.mark.parametrize("share", [0, 0.5, 0.9])
def test_voc_names_a_truncated_picture(devkit, share):
    path = devkit / "VOC2007/JPEGImages/000003.jpg"
    noise = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    train, _ = voc.load(devkit, [2007], 300, True)
    with pytest.raises(UserError, match="picture VOC2007/000003 .* cannot be decoded"):
        train.__getitems__(key(0, 2))


def test_voc_needs_a_folder_and_known_years(devkit):
    with pytest.raises(UserError, match="type data_dir=/path/to/VOCdevkit"):
        voc.load(None, [2007], 300, True)
    for years in ([], [2008]):
        with pytest.raises(UserError, match=r"type \[2007\], \[2012\] or \[2007,2012\]"):
            voc.load(devkit, years, 300, True)


# ------------------------------------------------------------------------------------------------------------- by name


def test_synthetic_rectangles_fill_their_boxes_with_the_colour_of_their_class():
    train, test = rectangles.load(48, 3, seed=1)
    assert (len(train), len(test), train.kind) == (256, 64, "synthetic")
    samples = [train.sample(index, None) for index in range(50)]
    assert {len(sample.boxes) for sample in samples} == {0, 1, 2, 3, 4}
    for sample in samples:
        if len(sample.boxes):
            x1, y1, x2, y2 = sample.boxes[-1].astype(int)
            colours = {tuple(pixel) for pixel in sample.picture[y1:y2, x1:x2].reshape(-1, 3).tolist()}
            assert colours == {[(255, 0, 0), (0, 255, 0), (0, 0, 255)][sample.labels[-1]]}
    assert np.array_equal(train.sample(9, None).picture, rectangles.load(48, 3, seed=1)[0].sample(9, None).picture)
    assert not np.array_equal(train.sample(9, None).picture, test.sample(9, None).picture)


def test_unknown_names_and_wrong_numbers_of_classes_are_refused():
    with pytest.raises(UserError, match="data=fashion has no boxes; .*composite, trees, voc or synthetic"):
        detection.load(DataSpec("fashion"), 96, 10, True, (2007,), True)
    with pytest.raises(UserError, match="data=trees has 1 classes, not task.classes=10; type task.classes=1"):
        detection.load(DataSpec("trees"), 96, 10, True, (2007,), True)
