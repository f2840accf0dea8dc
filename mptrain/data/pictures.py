"""Decode a picture that nobody vouches for, or say which one cannot be."""

import io
import warnings
from pathlib import Path

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
                return opened.convert(mode)
    except Exception as error:  # Pillow's readers raise whatever their parsing runs into
        raise UserError(
            f"{where} cannot be decoded as a picture ({error}); remove it or replace it with a good copy"
        ) from error
