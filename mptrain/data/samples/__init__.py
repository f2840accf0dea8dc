"""Small real data sets that travel inside the package, one Parquet file each (licences: README.md beside this file)."""

from importlib import resources
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import Table

from mptrain.errors import UserError


def names() -> list[str]:
    """Every embedded sample, in alphabetical order."""
    return sorted(file.stem for file in _folder().glob("*.parquet"))


def path(name: str) -> Path:
    """The Parquet file of a sample; UserError if there is none of that name."""
    file = _folder() / f"{name}.parquet"
    if name not in names():
        raise UserError(f"there is no embedded sample {name!r}; choose one of: {', '.join(names())}")
    return file


def read(name: str, split: str | None = None) -> Table:
    """The rows of a sample, or of one of its splits ("train", "test", for text also "validation"), in stored order.

    Columns are those that `datasets` reads from the same file: pictures and sound are struct{bytes, path} holding an
    encoded file, class labels are int64 and the column `split` is a string.
    """
    table = pq.read_table(path(name))
    if split is None:
        return table
    rows = table.filter(pc.equal(table["split"], split))
    if not len(rows):
        given = ", ".join(pc.unique(table["split"]).to_pylist())
        raise UserError(f"the sample {name!r} has no split {split!r}; choose one of: {given}")
    return rows


def _folder() -> Path:
    return Path(str(resources.files(__name__)))
