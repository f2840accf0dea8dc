"""ImageNet, or any labelled pictures in the same form: on disk or on the hub, decoded batch by batch.

`data_dir=FOLDER` is train/CLASS/*.JPEG and val/CLASS/*.JPEG, or whatever `datasets` loads (Parquet files, a saved
DatasetDict); `data_dir=hub:NAME` is a data set of the hub, e.g. hub:ILSVRC/imagenet-1k. The latter two need a column
`image` and a column `label`.
"""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mptrain.data.crops import ENLARGEMENT, centred, resized_crop
from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.data.pictures import decode
from mptrain.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
HELD_OUT = ("validation", "val", "test")
LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG, or Parquet files for `datasets`"


@dataclass(frozen=True)
class Source:
    """Pictures not yet read."""

    labels: np.ndarray
    classes: int
    read: Callable[[int], tuple[Path | io.BytesIO, str]]
    """encoded picture number i, and what to call it in a message"""


def load(data: DataSpec, split: str, classes: int, image_size: int, channels: int, augment: str) -> Dataset:
    """The split "train" or "test"; UserError if the folder is missing, has another layout or another class count."""
    if data.folder is None:
        raise UserError(f"data=imagenet needs data_dir=FOLDER ({LAYOUT}) or data_dir=hub:ILSVRC/imagenet-1k")
    place = str(data.folder)
    if place.startswith("hub:"):
        source = table(place, place.removeprefix("hub:"), split, classes)
    elif not data.folder.is_dir():
        raise UserError(f"data_dir={place} does not exist; data=imagenet expects {LAYOUT} there")
    elif (data.folder / "train").is_dir() and subfolders(data.folder / "train"):
        source = folders(data.folder, split)
    elif any(data.folder.rglob("*.parquet")) or (data.folder / "dataset_dict.json").is_file():
        source = table(place, place, split, classes)
    else:
        raise UserError(f"data_dir={place} is laid out otherwise; data=imagenet expects {LAYOUT} there")
    if source.classes != classes:
        raise UserError(
            f"data_dir={place} holds {source.classes} classes, task.classes={classes}; "
            f"set task.classes={source.classes}"
        )
    return DecodedPictures(source, image_size, channels, augment)


def folders(root: Path, split: str) -> Source:
    """One folder a class; the classes are those of train/, numbered in alphabetical order."""
    part = root / ("train" if split == "train" else "val")
    if not part.is_dir():
        raise UserError(f"data_dir={root} has no {part.name}/; data=imagenet expects {LAYOUT} there")
    numbers = {name: number for number, name in enumerate(subfolders(root / "train"))}
    if unknown := set(subfolders(part)) - set(numbers):
        raise UserError(f"{part} has classes that train/ lacks: {', '.join(sorted(unknown)[:5])}")
    files: list[bytes] = []
    labels: list[int] = []
    for name in subfolders(part):
        found = sorted(file for file in os.listdir(part / name) if Path(file).suffix.lower() in ENDINGS)
        found = [file for file in found if not file.startswith(".")]
        files += [os.fsencode(f"{name}/{file}") for file in found]
        labels += [numbers[name]] * len(found)
    seen = set(labels)
    if part.name == "train" and (empty := [name for name, number in numbers.items() if number not in seen]):
        raise UserError(f"{part} has classes without a picture: {', '.join(empty[:5])}; remove or fill them")
    if not files:
        raise UserError(f"{part} holds no pictures; data=imagenet expects {LAYOUT}")
    # One array: a million Python strings would be copied into every loader process, as their reference counts change.
    names = np.array(files)

    def read(index: int) -> tuple[Path, str]:
        file = part / os.fsdecode(names[index])
        return file, str(file)

    return Source(np.array(labels), len(numbers), read)


def subfolders(folder: Path) -> list[str]:
    """Names of folders, in alphabetical order; hidden ones, which tools leave behind (.git), are none of ours."""
    return sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def table(place: str, name: str, split: str, classes: int) -> Source:
    """A data set that `datasets` reads: from the hub, Parquet files, or one saved to disk."""
    import datasets

    try:
        if (Path(name) / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(name)
        else:
            splits = datasets.load_dataset(name)
    except Exception as error:
        raise UserError(f"data_dir={place} cannot be loaded by `datasets`: {error}") from error
    wanted = next((s for s in (("train",) if split == "train" else HELD_OUT) if s in splits), None)
    if wanted is None:
        raise UserError(
            f"data_dir={place} has splits {', '.join(splits)}; "
            f"data=imagenet needs train and one of {', '.join(HELD_OUT)}"
        )
    rows = splits[wanted]
    if missing := {"image", "label"} - set(rows.column_names):
        raise UserError(f"data_dir={place} lacks {', '.join(sorted(missing))}; it has {', '.join(rows.column_names)}")
    rows = rows.cast_column("image", datasets.Image(decode=False))
    labels = np.asarray(rows["label"], dtype=np.int64)
    known = getattr(rows.features["label"], "num_classes", classes)
    if labels.min() < 0 or labels.max() >= known:
        raise UserError(
            f"data_dir={place}: labels of {wanted} go from {labels.min()} to {labels.max()}, "
            f"{known} classes need 0 to {known - 1}"
        )

    def read(index: int) -> tuple[Path | io.BytesIO, str]:
        encoded = rows[index]["image"]
        where = f"picture {index} of {wanted} in {place}"
        if encoded["bytes"] is None:
            return Path(encoded["path"]), where
        return io.BytesIO(encoded["bytes"]), where

    return Source(labels, known, read)


class DecodedPictures(Dataset):
    """Pictures decoded, cut to squares and normalised when a batch asks for them."""

    name, kind = "imagenet", "real"

    def __init__(self, source: Source, image_size: int, channels: int, augment: str) -> None:
        self.source, self.image_size, self.channels, self.augment = source, image_size, channels, augment
        mean, std = (MEAN, STD) if channels == 3 else ((np.mean(MEAN),), (np.mean(STD),))
        self.mean, self.std = (torch.tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (mean, std))

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitems__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        # A generator a picture: how many numbers one crop draws does not change the next picture's.
        rngs: Sequence[np.random.Generator | None] = [None] * len(key.indices)
        if key.train and self.augment != "none":
            rngs = key.rng().spawn(len(key.indices))
        squares = [self.square(int(index), rng) for index, rng in zip(key.indices, rngs, strict=True)]
        pictures = torch.from_numpy(np.stack(squares)).view(len(squares), self.image_size, self.image_size, -1)
        pictures = pictures.permute(0, 3, 1, 2).contiguous()
        return (pictures.float() / 255 - self.mean) / self.std, torch.from_numpy(self.source.labels[key.indices])

    def square(self, index: int, rng: np.random.Generator | None) -> np.ndarray:
        encoded, where = self.source.read(index)
        picture = decode(encoded, where, "L" if self.channels == 1 else "RGB")
        return np.asarray(cut(picture, self.image_size, self.augment, rng))


def cut(picture: Image.Image, size: int, augment: str, rng: np.random.Generator | None) -> Image.Image:
    """A square of `size`: the centre if rng is None, otherwise at random and mirrored half of the time.

    Evaluation takes the centre 224 of 256 (or the same share of another size), of the shorter side; after Caffe's
    training of a picture pressed into 256x256.
    """
    smooth = Image.Resampling.BILINEAR
    enlarged = round(size * ENLARGEMENT)
    if augment == "random_resized_crop" and rng is not None:
        picture = picture.resize((size, size), smooth, resized_crop(rng, picture.width, picture.height))
    elif augment == "random_crop":
        picture = picture.resize((enlarged, enlarged), smooth)
        left, top = (enlarged - size) // 2, (enlarged - size) // 2
        if rng is not None:
            left, top = (int(offset) for offset in rng.integers(0, enlarged - size + 1, 2))
        picture = picture.crop((left, top, left + size, top + size))
    else:
        shorter = min(picture.size)
        across, down = (max(enlarged, int(enlarged * side / shorter)) for side in picture.size)
        picture = picture.resize((across, down), smooth).crop(centred(across, down, size, size))
    if rng is not None and rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return picture
