"""Hostile pictures: one message with the picture's name, whatever is wrong with it, and no memory spent on it."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mptrain.data.pictures import FORMATS, decode
from mptrain.errors import UserError


def encoded(kind: str, mode: str = "RGB") -> bytes:
    pixels = np.arange(16 * 12 * 3, dtype=np.uint8).reshape(12, 16, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be of any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 99)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF"])
def test_good_pictures(kind):
    assert decode(io.BytesIO(encoded(kind)), "it", "RGB").size == (16, 12)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_of_grey_keep_the_upper_eight(kind):
    grey = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    buffer = io.BytesIO()
    Image.fromarray(grey).save(buffer, kind)
    for mode in ("L", "RGB"):
        found = np.asarray(decode(io.BytesIO(buffer.getvalue()), "it", mode))
        assert np.array_equal(found if mode == "L" else found[..., 2], np.arange(256).reshape(16, 16))


@pytest.mark.parametrize("size", [(100_000, 100_000), (2**31 - 1, 1), (9_500, 9_500), (0, 5)])
def test_bombs_and_impossible_sizes(size):
    with pytest.raises(UserError, match="^photo 7 cannot be decoded as a picture"):
        decode(io.BytesIO(png(*size)), "photo 7", "RGB")


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"])
def test_no_picture_and_no_program(content):
    with pytest.raises(UserError, match="cannot be decoded as a picture"):
        decode(io.BytesIO(content), "photo 7", "RGB")
    assert "EPS" not in FORMATS


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        decode(tmp_path / "none.png", "photo 7", "L")


@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF"]),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8),
)
def test_damaged_pictures_decode_or_are_refused(kind, cut, changes):
    content = bytearray(encoded(kind))
    for place, value in changes:
        content[place % len(content)] = value
    content = bytes(content[: len(content) - cut % len(content)] if cut % 2 else content)
    try:
        assert decode(io.BytesIO(content), "photo 7", "RGB").mode == "RGB"
    except UserError as error:
        assert str(error).startswith("photo 7 cannot be decoded as a picture")
