"""watch.parquet: one row per step, layer and tensor, in parts, so that a killed run loses none it has checkpointed.

A folder of parts, each named by the last step in it, which pandas, pyarrow and DuckDB read as one table:

    step        applied to; 1 is the first
    layer       path of the module ("" for the loss); `order`: when it ran first within the step
    kind        input | output | grad_output | weight | grad_weight | moment | buffer | loss; of products grad_input
    name        of the parameter, moment or buffer; "products" where the row counts what rounding did to the products
                (under FP8 to their operands)
    dtype       as the tensor is kept; `calls`: how many tensors were taken together
    scale       the loss scale that gradients carried
    count, sampled, norm, min, max, mean, abs_mean, std, zero, nan, inf, subnormal, below, above
                see Statistics: magnitudes are without the loss scale, counts are of the tensor as it was; of products
                too, `sampled` of `count` were looked at
    flushed     of products: nonzero before rounding and zero after; null where this cannot be known
    lost        of weights kept in 16 bits: how many did not move although their gradient was not zero; null elsewhere
    small_updates
                of weights kept in FP32: how many of those that have a gradient are over 2048 times their update, which
                FP16 would round away; null elsewhere, and where the optimizer did not step
    first_exponent, exponents
                counts of 2^e <= |x| < 2^(e+1) from the first exponent on, loss scale included; of products before
                rounding, where something was flushed
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mptrain.errors import UserError

TEXT = ("layer", "kind", "name", "dtype")
WHOLE = ("step", "order", "calls", "count", "sampled", "zero", "nan", "inf", "subnormal", "below", "above", "flushed",
         "lost", "small_updates", "first_exponent")  # fmt: skip
REAL = ("scale", "norm", "min", "max", "mean", "abs_mean", "std")


MOST_WAITING, LONGEST_WAIT = 10_000, 60.0
"""Rows, and seconds: what waits is written by then at the latest."""


class Store:
    """Rows on their way to the disk; what still waits when the process ends, or nobody holds it any more, is written.

    Raises UserError if the folder cannot be made.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.waiting: list[dict[str, Any]] = []
        self.begun = False
        self.written = time.monotonic()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror}); give Watch another folder: out=") from error
        weakref.finalize(self, _write_at_last, folder, self.waiting)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Takes rows; raises UserError if the first come to those of an earlier run, which `cut` would have seen."""
        if not self.begun and any(self.folder.glob("*.parquet")):
            raise UserError(
                f"{self.folder} holds the rows of an earlier run: delete it, give another folder (out=), or go on "
                "after the step that it had reached: watch.resume(step)"
            )
        self.begun = True
        self.waiting += rows
        if len(self.waiting) >= MOST_WAITING or time.monotonic() - self.written > LONGEST_WAIT:
            self.flush()

    def flush(self) -> None:
        """Writes what waits as one more part, whole or not at all."""
        _write(self.folder, self.waiting)
        self.written = time.monotonic()

    def cut(self, step: int) -> list[dict[str, Any]]:
        """Drops all rows after a step, from where the run goes on; returns those that stay, in order.

        A part that cannot be read is set aside, as `*.damaged`, with a message.
        """
        self.waiting.clear()
        self.begun = True
        stay: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*.parquet")) if self.folder.is_dir() else ():
            try:
                rows = read_part(path)
            except ValueError as error:
                print(f"mptrain: watch: {error}; the rows of its steps are lost", file=sys.stderr)
                path.rename(path.with_suffix(".damaged"))
                continue
            # a run killed between `flush` and `unlink` left rows in the old part and in the one that replaces it
            last = stay[-1]["step"] if stay else 0
            keep = [row for row in rows if last < row["step"] <= step]
            stay += keep
            if len(keep) < len(rows):
                self.waiting += keep
                self.flush()
                if not keep or path.name != _name(keep):
                    path.unlink()
        return stay


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Brings rows to the disk and empties their list."""
    if not rows:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows, pa.schema(list(_columns().items())))
    folder.mkdir(parents=True, exist_ok=True)
    name = _name(rows)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        pq.write_table(table, file, write_page_checksum=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / name)
    rows.clear()


def _write_at_last(folder: Path, rows: list[dict[str, Any]]) -> None:
    try:
        _write(folder, rows)
    except OSError as error:
        print(f"mptrain: watch: {folder}: {error.strerror}; its last rows are lost", file=sys.stderr)


def _name(rows: list[dict[str, Any]]) -> str:
    return f"{max(row['step'] for row in rows):09d}.parquet"


def _columns() -> dict[str, Any]:
    """Every column with its type in Arrow."""
    import pyarrow as pa

    columns = {name: kind for names, kind in ((TEXT, pa.string()), (WHOLE, pa.int64()), (REAL, pa.float64()))
               for name in names}  # fmt: skip
    return {**columns, "exponents": pa.list_(pa.int64())}


def read_part(path: Path) -> list[dict[str, Any]]:
    """The rows of one part, checked against its checksums; raises ValueError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        rows: list[dict[str, Any]] = table.to_pylist()
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path.name} is damaged ({(str(error).splitlines() or [''])[0][:200]})") from error
    found, known = {field.name: field.type for field in table.schema}, _columns()  # not covered by a checksum
    if len(found) < table.num_columns or any(known.get(name) != kind for name, kind in found.items()):
        raise ValueError(f"{path.name} is damaged (its columns are {', '.join(table.column_names)[:200]})")
    if not all(isinstance(row.get("step"), int) for row in rows):
        raise ValueError(f"{path.name} is damaged (a row without its step)")
    return rows
