"""Captioned pictures on disk or on the hub, decoded when they are needed."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mptrain.data.pictures import decode
from mptrain.errors import UserError

HUB = "jxie/flickr8k"

Captioned = tuple[Callable[[int], Tensor], list[str]]
"""Decodes the i-th picture -> (3, size, size) uint8; the captions."""


def image_folder(folder: Path | None, size: int) -> tuple[Captioned, Captioned]:
    """The training and the held-out part; UserError if one is missing or not in this form."""
    if folder is None:
        return hub(size)
    held_out = next((part for part in ("test", "validation") if (folder / part).is_dir()), None)
    if not (folder / "train").is_dir() or held_out is None:
        raise UserError(
            f"data=imagetext: {folder} needs train/ and test/ (or validation/), "
            "each with a metadata.csv or metadata.jsonl"
        )
    return part(folder / "train", size), part(folder / held_out, size)


def part(folder: Path, size: int) -> Captioned:
    """Pictures named in the metadata file, which is as `datasets` wants it: file_name and text (or caption)."""
    rows = metadata(folder)
    files = [folder / row["file_name"] for row in rows]
    captions = [row["text"] if "text" in row else row["caption"] for row in rows]
    return lambda i: square(files[i], size, str(files[i])), captions


def metadata(folder: Path) -> list[dict[str, str]]:
    try:
        if (file := folder / "metadata.jsonl").is_file():
            rows = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines() if line.strip()]
        elif (file := folder / "metadata.csv").is_file():
            with file.open(encoding="utf8", newline="") as opened:
                rows = list(csv.DictReader(opened))
        else:
            raise UserError(f"data=imagetext: {folder} has no metadata.csv and no metadata.jsonl")
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{file} cannot be read ({error}); mend or replace it") from error
    if not rows or not all(_names_a_picture(row) for row in rows):
        raise UserError(f"{file}: every row needs a file_name and a text (or caption)")
    return rows


def _names_a_picture(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    text = row["text"] if "text" in row else row.get("caption")
    return isinstance(row.get("file_name"), str) and isinstance(text, str)


def square(file: Path | io.BytesIO, size: int, where: str) -> Tensor:
    """The middle square, resized; UserError if it is not a picture."""
    return to_square(decode(file, where, "RGB"), size)


def to_square(picture: Image.Image, size: int) -> Tensor:
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    picture = picture.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def hub(size: int) -> tuple[Captioned, Captioned]:
    import datasets

    try:
        found = datasets.load_dataset(HUB)
    except Exception as error:
        raise UserError(
            f"data=imagetext: the hub's {HUB} cannot be read ({error}); give data_dir=FOLDER with train/ and test/"
        ) from error
    return hub_part(found["train"], size), hub_part(found["test"], size)


def hub_part(rows, size: int) -> Captioned:
    import datasets

    caption = next(name for name in ("caption_0", "caption", "text") if name in rows.column_names)
    encoded = rows.cast_column("image", datasets.Image(decode=False))
    where = f"picture %d of {HUB}"
    return lambda i: square(io.BytesIO(encoded[i]["image"]["bytes"]), size, where % i), list(rows[caption])
