"""The embedded emoji as arrays: every concept as each of several vendors drew it."""

import functools
import io
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mptrain.data import samples


@dataclass(frozen=True)
class Emoji:
    """Everything in one order of concepts."""

    pictures: Tensor
    """(concepts, vendors, 3, 32, 32) uint8, on white"""
    vendors: list[str]
    held_out: str
    """the vendor whose drawings are the test split"""
    labels: list[str]
    tags: list[list[str]]
    groups: list[int]
    subgroups: list[str]


@functools.cache
def read_emoji() -> Emoji:
    """Decodes all drawings, which takes about a second."""
    rows = samples.read("emoji").to_pylist()
    vendors = list(dict.fromkeys(row["vendor"] for row in rows))
    concepts = list(dict.fromkeys(row["hexcode"] for row in rows))
    drawn = {(row["hexcode"], row["vendor"]): row for row in rows}
    pictures = np.stack(
        [[decode(drawn[concept, vendor]["image"]["bytes"]) for vendor in vendors] for concept in concepts]
    )
    one_each = [drawn[concept, vendors[0]] for concept in concepts]
    return Emoji(
        torch.from_numpy(pictures).permute(0, 1, 4, 2, 3).contiguous(),
        vendors,
        next(row["vendor"] for row in rows if row["split"] == "test"),
        *([row[column] for row in one_each] for column in ("label", "tags", "group", "subgroup")),
    )


def decode(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as picture:
        return np.array(picture.convert("RGB"))
