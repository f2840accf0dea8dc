"""What is printed, before it is known where: blocks with a table each, then lists.

Terminal, Markdown and HTML render it and add nothing.
"""

from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["plain", "good", "bad", "quiet"]


@dataclass(frozen=True)
class Cell:
    """A main value, a smaller second line, and a tone."""

    main: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Column:
    """A heading of two lines, and how the column behaves where space is short.

    `narrow`: it stays, is folded into the first column, or is dropped. `least`: the width that it keeps.
    """

    heading: str
    detail: str = ""
    narrow: Literal["keep", "fold", "drop"] = "keep"
    number: bool = False
    least: int = 0


@dataclass(frozen=True)
class Block:
    """A table under its title and lines of description, with notes below."""

    title: str
    lines: list[str]
    columns: list[Column]
    cells: list[list[Cell]]
    notes: list[str]


@dataclass(frozen=True)
class Document:
    """Blocks in order, then lists under their headings."""

    blocks: list[Block]
    lists: dict[str, list[str]] = field(default_factory=dict)
