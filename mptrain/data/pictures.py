"""Decode a picture that nobody vouches for, or say which one cannot be."""

import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from mptrain.errors import UserError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""What data sets are made of. Pillow knows more, some of which runs other programs (EPS starts Ghostscript)."""


def decode(file: Path | io.BytesIO, where: str, mode: str) -> Image.Image:
    """A whole picture in `mode`; `where` is what an error calls it.

    Raises UserError if it is missing, damaged, of another format, or would unpack to more pixels than Pillow's
    MAX_IMAGE_PIXELS (89 million): a small file may claim any size.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged side notes; the picture itself is what counts
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as opened:
                return _in_eight_bits(opened).convert(mode)
    except Exception as error:  # Pillow's readers raise whatever their parsing runs into
        raise UserError(
            f"{where} cannot be decoded as a picture ({error}); remove it or replace it with a good copy"
        ) from error


def _in_eight_bits(picture: Image.Image) -> Image.Image:
    """Pillow cuts 16-bit grey off at 255, which leaves white; its upper eight bits are the picture."""
    if picture.mode not in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
        return picture
    return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
