"""watch.parquet as readers see it: chosen columns, part by part, of files that nobody vouches for.

What to do about a part that cannot be read is for the reader to say: stop there, leave a gap, or do without the run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mptrain.results.summary import BadSummary


def parts(folder: Path) -> list[Path]:
    """The files of a watch.parquet, in order; links are not followed."""
    return sorted(path for path in folder.glob("*.parquet") if not path.is_symlink())


def read(part: Path, columns: Sequence[str], later: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of one part; raises BadSummary if it is damaged or lacks a column.

    later: columns that older parts lack; their rows do without.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(part)
        there = file.schema_arrow.names
        if missing := sorted(set(columns) - set(there)):
            raise BadSummary(f"{part.name} lacks {', '.join(missing)}")
        rows: list[dict[str, Any]] = file.read([*columns, *(name for name in later if name in there)]).to_pylist()
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise BadSummary(f"{part.name} is no part of a watch: {str(error).splitlines()[0]}") from error
    return rows
