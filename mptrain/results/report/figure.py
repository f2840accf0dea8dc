"""A figure: a picture, what it shows in a sentence, and all its numbers as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mptrain.results.document import Cell, Column
from mptrain.results.report import charts
from mptrain.results.webpage import table


@dataclass(frozen=True)
class Figure:
    """name: of its files, and unique on the page. chart: makes the picture when it is needed."""

    name: str
    caption: str
    chart: Callable[[], Any]
    columns: Sequence[Column]
    cells: Sequence[Sequence[Cell]]

    def html(self) -> str:
        """Picture, caption, and the numbers to unfold."""
        picture = charts.inline(self.chart(), self.name)
        about = f'<figcaption id="{escape(self.name)}-caption">{escape(self.caption)}</figcaption>'
        numbers = f"<details><summary>Numbers</summary>{table(self.columns, self.cells)}</details>"
        label = f'role="img" aria-labelledby="{escape(self.name)}-caption"'
        return f'<figure id="{escape(self.name)}"><div {label}>{picture}</div>{about}{numbers}</figure>'


def beside(figures: Iterable[Figure]) -> str:
    """Figures beside one another where there is room."""
    inside = "\n".join(figure.html() for figure in figures)
    return f'<div class="beside">{inside}</div>' if inside else ""


def number(value: float | None) -> str:
    """Four significant digits; "" for none."""
    return "" if value is None else f"{value:.4g}"
