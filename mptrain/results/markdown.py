"""A document as GitHub-flavoured Markdown; nothing that came from a record can act as markup."""

import re

from mptrain.results.document import Block, Cell, Document

MARKUP = re.compile(r"([\\`*_\[\]<>|#~$])")


def markdown(document: Document) -> str:
    """The whole document, ending with a line break."""
    parts = [_block(block) for block in document.blocks]
    parts += ["\n".join([f"## {heading}", "", *_list(lines)]) for heading, lines in document.lists.items()]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    headings = [
        _joined(Cell(column.heading, f"({column.detail})" if column.detail else "")) for column in block.columns
    ]
    rules = ["---:" if column.number else "---" for column in block.columns]
    lines = [f"## {_escaped(block.title)}", "", *(f"{_escaped(line)}  " for line in block.lines), ""]
    lines += [_line(headings), _line(rules), *(_line([_joined(cell) for cell in cells]) for cells in block.cells)]
    return "\n".join(lines + (["", *_list(block.notes)] if block.notes else []))


def _joined(cell: Cell) -> str:
    return _escaped(f"{cell.main} {cell.detail}".strip())


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _list(lines: list[str]) -> list[str]:
    return [f"- {_escaped(line)}" for line in lines]


def _escaped(text: str) -> str:
    return MARKUP.sub(r"\\\1", text.replace("&", "&amp;"))
