"""Print a document to a terminal, or as plain text where the output is none."""

import shutil
import sys
from typing import TextIO, cast

from mptrain.results.document import Block, Cell, Column, Document

WIDE = 112  # columns that the whole table needs; below, what is not essential is left out and named
PIPE_WIDTH = 120
STYLES = {"plain": "", "good": "green", "bad": "red", "quiet": "dim"}
PLAIN_LETTERS = str.maketrans({"±": "+-", "…": "~", "█": "#"})


def print_document(document: Document, out: TextIO | None = None, width: int | None = None) -> None:
    """Write the document to `out` (standard output), fitted to `width` (the terminal's, 120 for a pipe)."""
    from rich.console import Console
    from rich.text import Text

    out = out or sys.stdout
    width = width or shutil.get_terminal_size((PIPE_WIDTH, 40)).columns
    console = Console(file=cast(TextIO, _Encodable(out)), width=width, highlight=False, markup=False, emoji=False)
    for block in document.blocks:
        console.print(Text(block.title, style="bold"), soft_wrap=False)
        for line in block.lines:
            console.print(Text(line, style="dim"))
        console.print(_table(block, width))
        dropped = [column.heading for column in block.columns if column.narrow == "drop"] if width < WIDE else []
        left_out = [f"left out at {width} columns: {', '.join(dropped)}"] if dropped else []
        for note in [*block.notes, *left_out]:
            _item(console, note)
        console.print()
    for heading, lines in document.lists.items():
        console.print(Text(heading, style="bold"))
        for line in lines:
            _item(console, line)
        console.print()


def _item(console, line: str) -> None:  # type: ignore[no-untyped-def]  # rich is imported only where it is used
    from rich.padding import Padding

    console.print(Padding(_plain(f"- {line}"), (0, 0, 0, 2), expand=False))


def _table(block: Block, width: int):  # type: ignore[no-untyped-def]
    from rich import box
    from rich.table import Table
    from rich.text import Text

    folded = [number for number, column in enumerate(block.columns) if column.narrow == "fold"]
    wide = width >= WIDE
    shown = [number for number, column in enumerate(block.columns) if wide or column.narrow == "keep"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    for number in shown:
        _add_column(table, block.columns[number])
    for cells in block.cells:
        texts = [_text(cells[number]) for number in shown]
        if not wide:
            for number in folded:
                texts[0].append(f"\n{cells[number].main} {cells[number].detail}", style="dim")
        table.add_row(*texts)
    return table if block.cells else Text("")


def _add_column(table, column: Column) -> None:  # type: ignore[no-untyped-def]
    heading = f"{column.heading}\n{column.detail}" if column.detail else column.heading
    table.add_column(
        _plain(heading),
        justify="right" if column.number else "left",
        no_wrap=column.number,
        min_width=column.least or None,
        overflow="fold",
    )


def _text(cell: Cell):  # type: ignore[no-untyped-def]
    text = _plain(cell.main, STYLES[cell.tone])
    if cell.detail:
        text.append(f"\n{cell.detail}", style=STYLES[cell.tone] or "dim")
    return text


def _plain(content: str, style: str = ""):  # type: ignore[no-untyped-def]
    from rich.text import Text

    return Text(content, style=style)


class _Encodable:
    """A stream that never fails on a letter its encoding lacks."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.encoding = out.encoding or "utf-8"

    def write(self, text: str) -> int:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            text = text.translate(PLAIN_LETTERS).encode(self.encoding, "replace").decode(self.encoding)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()
