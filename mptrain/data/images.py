"""Labelled pictures for classification.

`fashion`: the embedded part of Fashion-MNIST (10,000 + 5,000 grey pictures of 28x28, 10 classes), in memory.
`imagenet`: pictures on disk or on the hub, decoded when they are needed (imagenet.py).
`synthetic`: a blurred pattern a class under noise, any size and number of classes, in memory.

A batch is (pictures (batch, channels, size, size) float32, normalised; labels (batch,) int64).
"""

import io

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mptrain.data import imagenet, samples
from mptrain.data.crops import ENLARGEMENT, resized_crop
from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.errors import UserError

NAMES = ("fashion", "imagenet", "synthetic")
AUGMENTATIONS = ("none", "flip", "random_crop", "random_resized_crop")
FASHION_MEAN, FASHION_STD = (0.286,), (0.353,)
SYNTHETIC_SIZES = {"train": 512, "test": 256}


def load(data: DataSpec, split: str, classes: int, image_size: int, channels: int, augment: str) -> Dataset:
    """The pictures of `data.name`, split "train" or "test", squares of `image_size` in `channels` (1 grey, 3 colour).

    `augment` acts in training only: `flip` mirrors half of the pictures; `random_crop` also moves them about (Caffe's
    crop out of 256x256); `random_resized_crop` mirrors and cuts out any 8 to 100 % (PyTorch's ImageNet script).
    """
    if channels not in (1, 3):
        raise UserError(f"task.channels={channels}: pictures have 1 (grey) or 3 (colour) channels")
    if augment not in AUGMENTATIONS:
        raise UserError(f"task.augment={augment} is unknown; choose one of: {', '.join(AUGMENTATIONS)}")
    if data.name == "fashion":
        return fashion(split, classes, image_size, channels, augment)
    if data.name == "imagenet":
        return imagenet.load(data, split, classes, image_size, channels, augment)
    if data.name == "synthetic":
        return synthetic(data.seed, split, classes, image_size, channels, augment)
    raise UserError(f"data={data.name} is unknown to classification; choose one of: {', '.join(NAMES)}")


class Pictures(Dataset):
    """Pictures in memory, (count, channels, size, size) uint8, with their labels."""

    def __init__(
        self, name: str, kind: str, pictures: Tensor, labels: Tensor, mean: Tensor, std: Tensor, augment: str
    ) -> None:
        self.name, self.kind = name, kind
        self.pictures, self.labels = pictures, labels
        self.mean, self.std, self.augment = mean, std, augment

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitems__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(key.indices)
        pictures = self.pictures[chosen]
        if key.train and self.augment != "none":
            pictures = augmented(pictures, self.augment, key.rng())
        return (pictures.float() / 255 - self.mean) / self.std, self.labels[chosen]


def augmented(pictures: Tensor, augment: str, rng: np.random.Generator) -> Tensor:
    """Changes (batch, channels, size, size) uint8 pictures at random, each on its own."""
    if augment == "random_crop":
        pictures = moved(pictures, rng)
    elif augment == "random_resized_crop":
        pictures = zoomed(pictures, rng)
    mirrored = torch.from_numpy(rng.random(len(pictures)) < 0.5)
    return torch.where(mirrored[:, None, None, None], pictures.flip(3), pictures)


def moved(pictures: Tensor, rng: np.random.Generator) -> Tensor:
    """Moves each picture up to the margin that a crop out of 256 pixels leaves at 224; black comes in at the edge."""
    count, channels, size, _ = pictures.shape
    margin = max(1, round(size * (ENLARGEMENT - 1) / 2))
    padded = F.pad(pictures, (margin,) * 4)
    top, left = torch.from_numpy(rng.integers(0, 2 * margin + 1, (2, count, 1)))
    rows, columns = top + torch.arange(size), left + torch.arange(size)
    every = torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return padded[*every, rows[:, None, :, None], columns[:, None, None, :]]


def zoomed(pictures: Tensor, rng: np.random.Generator) -> Tensor:
    """Cuts a box out of each picture and enlarges it to the full size, bilinearly."""
    count, _, height, width = pictures.shape
    boxes = torch.tensor([resized_crop(rng, width, height) for _ in range(count)], dtype=torch.float32)
    left, top, right, bottom = (boxes / torch.tensor([width, height, width, height])).T
    affine = torch.zeros(count, 2, 3)
    affine[:, 0, 0], affine[:, 0, 2] = right - left, left + right - 1
    affine[:, 1, 1], affine[:, 1, 2] = bottom - top, top + bottom - 1
    grid = F.affine_grid(affine, list(pictures.shape), align_corners=False)
    cut = F.grid_sample(pictures.float(), grid, padding_mode="border", align_corners=False)
    return cut.round().to(torch.uint8)


def fashion(split: str, classes: int, image_size: int, channels: int, augment: str) -> Pictures:
    if classes != 10:
        raise UserError(f"data=fashion has 10 classes, task.classes={classes}; set task.classes=10")
    table = samples.read("fashion", split)
    files = table["image"].combine_chunks().field("bytes").to_pylist()
    pictures = torch.from_numpy(np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files]))[:, None]
    labels = torch.from_numpy(table["label"].to_numpy().copy())
    if image_size != pictures.shape[-1]:
        resized = F.interpolate(pictures.float(), size=(image_size, image_size), mode="bilinear", antialias=True)
        pictures = resized.round().clamp(0, 255).to(torch.uint8)
    mean, std = torch.tensor(FASHION_MEAN), torch.tensor(FASHION_STD)
    return Pictures("fashion", "real", pictures.expand(-1, channels, -1, -1), labels, mean, std, augment)


def synthetic(seed: int, split: str, classes: int, image_size: int, channels: int, augment: str) -> Pictures:
    """A random 4x4 pattern a class, enlarged, under noise: learnable, and the same for the same seed."""
    patterns = torch.from_numpy(np.random.default_rng((seed, 0)).uniform(64, 192, (classes, channels, 4, 4)))
    rng = np.random.default_rng((seed, 1 if split == "train" else 2))
    labels = torch.from_numpy(rng.integers(0, classes, SYNTHETIC_SIZES[split]))
    pictures = torch.empty(len(labels), channels, image_size, image_size, dtype=torch.uint8)
    for index, label in enumerate(labels):
        blurred = F.interpolate(patterns[label][None].float(), size=(image_size, image_size), mode="bilinear")[0]
        noise = torch.from_numpy(rng.standard_normal(blurred.shape, dtype=np.float32))
        pictures[index] = (blurred + 32 * noise).round().clamp(0, 255).to(torch.uint8)
    half = torch.tensor(0.5)
    return Pictures("synthetic", "synthetic", pictures, labels, half, half / 2, augment)
