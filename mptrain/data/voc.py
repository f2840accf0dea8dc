"""Pascal VOC: photographs with annotations in XML, read from a VOCdevkit folder as its authors publish it.

    VOCdevkit/VOC2007/JPEGImages/000005.jpg
    VOCdevkit/VOC2007/Annotations/000005.xml
    VOCdevkit/VOC2007/ImageSets/Main/trainval.txt, test.txt     one picture name a line

The paper trains SSD on trainval of 2007 and 2012, Faster R-CNN on trainval of 2007, and tests both on test of 2007.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes
from torchvision.tv_tensors import Image as PictureTensor

from mptrain.data.boxes import MEAN, DetectionSet, Sample, flipped, inside
from mptrain.data.pictures import decode
from mptrain.errors import UserError

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


@dataclass(frozen=True)
class Annotation:
    """The objects of one picture: boxes (n, 4) as numbers of the file, class names, which are marked difficult."""

    boxes: np.ndarray
    names: tuple[str, ...]
    difficult: np.ndarray
    size: tuple[int, int] | None
    """width and height, if the file tells them"""


def parse(text: str | bytes, name: str) -> Annotation:
    """Reads one annotation; `name` is what an error calls it. Coordinates may have decimals.

    Raises UserError if the text is no XML, or an object lacks its name or a coordinate.
    """
    try:
        root = ElementTree.fromstring(text)
        objects = root.findall("object")
        boxes = [[float(required(o, f"bndbox/{edge}")) for edge in ("xmin", "ymin", "xmax", "ymax")] for o in objects]
        names = tuple(required(o, "name").strip() for o in objects)
        difficult = [int(o.findtext("difficult") or 0) != 0 for o in objects]
        sides = [int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height")]
    except (ElementTree.ParseError, ValueError, OverflowError) as error:
        raise UserError(f"the annotation of {name} cannot be read: {error}; get the file again") from error
    size = (sides[0], sides[1]) if min(sides) > 0 else None
    return Annotation(np.array(boxes, np.float64).reshape(-1, 4), names, np.array(difficult, bool), size)


def required(element: ElementTree.Element, path: str) -> str:
    if (text := element.findtext(path)) is None:
        raise ValueError(f"an object has no {path}")
    return text


def open_picture(path: Path, name: str) -> np.ndarray:
    """Decodes a picture file, grey ones too, to (height, width, 3) bytes. Raises UserError if damaged or missing."""
    return np.asarray(decode(path, f"the picture {name} ({path})", "RGB"))


class Photographs(DetectionSet):
    """VOC pictures from disk; `square` squeezes each to that side, `train_years` etc. are settled by `load`.

    In training, squeezed pictures go through SSD's augmentation (colour, zoom-out, crop, mirror), others are mirrored.
    """

    name, kind, classes = "voc", "real", CLASSES

    def __init__(self, parts: Sequence[tuple[Path, str]], square: int | None, with_difficult: bool) -> None:
        self.square = square
        self.entries = [
            read_entry(folder, picture, with_difficult)
            for folder, split in parts
            for picture in names_of(folder, split)
        ]

    def __len__(self) -> int:
        return len(self.entries)

    def sample(self, index: int, rng: np.random.Generator | None) -> Sample:
        entry = self.entries[index]
        sample = Sample(open_picture(entry.path, entry.name), entry.boxes, entry.labels, entry.difficult)
        if self.square is None:
            return flipped(sample) if rng is not None and rng.random() < 0.5 else sample
        if rng is not None:
            sample = ssd_augmentation(sample, int(rng.integers(2**62)))
        return squeezed(sample, self.square)


@dataclass(frozen=True)
class Entry:
    """One photograph on disk and its objects: boxes (n, 4), classes (n,), difficult (n,)."""

    path: Path
    name: str
    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray


def read_entry(folder: Path, picture: str, with_difficult: bool) -> Entry:
    name, path = f"{folder.name}/{picture}", folder / "JPEGImages" / f"{picture}.jpg"
    try:
        text = (folder / "Annotations" / f"{picture}.xml").read_bytes()
    except OSError as error:
        raise UserError(f"the annotation of {name} cannot be read: {error}; get the file again") from error
    annotation = parse(text, name)
    if unknown := sorted(set(annotation.names) - set(CLASSES)):
        raise UserError(f"the annotation of {name} names {', '.join(unknown)}; VOC has {', '.join(CLASSES)}")
    width, height = annotation.size or open_picture(path, name).shape[1::-1]
    # The devkit counts pixels from 1 and its xmax is the last column inside the box.
    boxes, kept = inside(annotation.boxes - [1, 1, 0, 0], width, height, name)
    kept &= with_difficult | ~annotation.difficult
    labels = np.array([CLASSES.index(label) for label in annotation.names], np.int64)
    return Entry(path, name, boxes[kept], labels[kept], annotation.difficult[kept])


def names_of(folder: Path, split: str) -> list[str]:
    path = folder / "ImageSets" / "Main" / f"{split}.txt"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read; data_dir has to be the VOCdevkit folder with {folder.name}") from error
    if not (names := [line.split()[0] for line in lines if line.strip()]):
        raise UserError(f"{path} names no picture; get the file again")
    return names


def squeezed(sample: Sample, side: int) -> Sample:
    """The picture resized to side x side whatever its shape, as SSD takes it."""
    height, width = sample.picture.shape[:2]
    picture = np.asarray(Image.fromarray(sample.picture).resize((side, side), Image.Resampling.BILINEAR))
    boxes = np.minimum(sample.boxes * np.array([side / width, side / height] * 2, np.float32), side)
    return Sample(picture, boxes, sample.labels, sample.difficult)


AUGMENT = v2.Compose(
    [
        v2.RandomPhotometricDistort(),
        v2.RandomZoomOut(fill=[round(255 * value) for value in MEAN], side_range=(1.0, 4.0)),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(),
        v2.SanitizeBoundingBoxes(labels_getter=lambda inputs: (inputs[2], inputs[3])),
    ]
)
"""SSD's chain (Liu et al. 2016, section 2.2)"""


def ssd_augmentation(sample: Sample, seed: int) -> Sample:
    """Distorts, zooms out, crops and mirrors at random, all of it decided by `seed`."""
    height, width = sample.picture.shape[:2]
    picture = PictureTensor(torch.from_numpy(np.ascontiguousarray(sample.picture.transpose(2, 0, 1))))
    boxes = BoundingBoxes(torch.from_numpy(sample.boxes), format="XYXY", canvas_size=(height, width))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        picture, boxes, labels, difficult = AUGMENT(
            picture, boxes, torch.from_numpy(sample.labels), torch.from_numpy(sample.difficult)
        )
    rows_first = np.ascontiguousarray(picture.numpy().transpose(1, 2, 0))
    return Sample(rows_first, boxes.as_subclass(torch.Tensor).numpy(), labels.numpy(), difficult.numpy())


def load(
    folder: Path | None, train_years: Sequence[int], square: int | None, train_difficult: bool
) -> tuple[Photographs, Photographs]:
    """trainval of `train_years` and test of 2007 under `folder`; difficult objects always stay in the test set."""
    if folder is None:
        raise UserError("data=voc is read from disk; type data_dir=/path/to/VOCdevkit")
    if not train_years or not set(train_years) <= {2007, 2012}:
        raise UserError(f"task.train_years={list(train_years)} is not in VOC; type [2007], [2012] or [2007,2012]")
    training = [(folder / f"VOC{year}", "trainval") for year in train_years]
    return (
        Photographs(training, square, train_difficult),
        Photographs([(folder / "VOC2007", "test")], square, with_difficult=True),
    )
