"""What a data sample is, and how it becomes a Parquet file."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

FOLDER = Path(__file__).parents[2] / "mptrain" / "data" / "samples"


@dataclass(frozen=True)
class Sample:
    """One Parquet file: its columns, the function that makes its rows, where they came from and on what terms."""

    name: str
    rows: Callable[[], list[dict]]
    features: Features
    source: str
    """registry, package and version"""
    changes: str
    licence: str
    """SPDX expression"""
    copyright: tuple[str, ...]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.parquet"

    def table(self) -> pa.Table:
        """The rows under a schema whose metadata `datasets` understands, with licence and origin beside it."""
        schema = self.features.arrow_schema
        origin = {
            "SPDX-License-Identifier": self.licence,
            "SPDX-FileCopyrightText": "\n".join(self.copyright),
            "source": self.source,
            "changes": self.changes,
        }
        return pa.Table.from_pylist(self.rows(), schema=schema.with_metadata(schema.metadata | origin))

    def write(self) -> int:
        """Writes the Parquet file and its licence file; returns the number of rows."""
        table = self.table()
        unfinished = self.file.with_suffix(".tmp")
        # One page a column: the compressor sees all pictures at once.
        pq.write_table(table, unfinished, compression="brotli", compression_level=11, data_page_size=2**26)
        unfinished.replace(self.file)
        tags = [f"SPDX-FileCopyrightText: {line}" for line in self.copyright]
        tags += ["", f"SPDX-License-Identifier: {self.licence}", ""]
        self.file.with_name(f"{self.file.name}.license").write_text("\n".join(tags), encoding="utf-8")
        return len(table)

    def is_current(self) -> bool:
        """Whether a rebuild gives the committed rows, schema and metadata."""
        rebuilt = io.BytesIO()
        pq.write_table(self.table(), rebuilt)  # Parquet renames the items of lists
        return pq.read_table(rebuilt).equals(pq.read_table(self.file), check_metadata=True)
