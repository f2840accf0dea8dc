"""Flat dataclasses as csv and back: one line each, every cell read back equal to what was written."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

Line = TypeVar("Line")
# A spreadsheet would run a text that begins so as a formula. A leading apostrophe makes it text; reading removes it.
FORMULA = ("=", "+", "-", "@", "'")


def write_csv(lines: Sequence[Any], kind: type) -> str:
    """Lines of the dataclass `kind` as csv text under a header; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(kind)]
    writer.writerow(names)
    for line in lines:
        writer.writerow([_cell(getattr(line, name)) for name in names])
    return text.getvalue()


def read_csv(text: str, kind: type[Line]) -> list[Line]:
    """The lines of a text that `write_csv` made."""
    types = get_type_hints(kind)
    lines = csv.DictReader(io.StringIO(text, newline=""))
    return [kind(**{name: _value(cell, types[name]) for name, cell in line.items()}) for line in lines]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return "'" + value if value.startswith(FORMULA) else value
    return repr(value)  # the shortest text that reads back as the same float


def _value(cell: str, kind: Any) -> Any:
    if kind is str:
        return cell.removeprefix("'")
    if cell == "":
        return None
    if kind in (bool, bool | None):
        return cell == "True"
    return int(cell) if kind in (int, int | None) else float(cell)
