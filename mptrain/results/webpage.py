"""A document as one HTML file that needs nothing else: no font, nothing from a network; light or dark as the system."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from mptrain.results.document import Block, Cell, Column, Document

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --text: #1c2024; --quiet: #60646c; --line: #dddfe3; --head: #f5f6f8; --good: #18794e; --bad: #c62a2f;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #16181b; --text: #e6e8eb; --quiet: #9ba1a8; --line: #33373d; --head: #1f2226;
    --good: #4cc38a; --bad: #ff8b8b;
  }
}
body { background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
body { margin: 2rem auto; padding: 0 1.5rem; max-width: 84rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; overflow-wrap: anywhere; }
p, li { overflow-wrap: anywhere; } p { color: var(--quiet); margin: .1rem 0; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .45rem .8rem; border-bottom: 1px solid var(--line); }
thead th { background: var(--head); white-space: nowrap; }
tbody th { font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
small { display: block; color: var(--quiet); font-weight: 400; font-size: .82rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .quiet { color: var(--quiet); }
ul { padding-left: 1.2rem; font-size: .92rem; }
"""


def webpage(document: Document, title: str) -> str:
    """The whole page; every text is escaped."""
    parts = [section(block) for block in document.blocks]
    parts += [listed(heading, lines) for heading, lines in document.lists.items()]
    return framed(title, parts)


def framed(title: str, parts: Iterable[str], style: str = "", scripts: Sequence[str] = ()) -> str:
    """A page around parts that are HTML. Its policy lets these very scripts run, by their hash, and loads nothing."""
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in scripts)
    policy = f"default-src 'none'; {f'script-src {hashes}; ' if scripts else ''}style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
            *parts,
            *(f"<script>{text}</script>" for text in scripts),
            "</body>\n</html>\n",
        ]
    )


def section(block: Block, anchor: str = "", inside: str = "") -> str:
    """A block under its heading; inside: HTML that follows its table."""
    return "\n".join(
        [
            f'<section id="{escape(anchor)}">' if anchor else "<section>",
            f"<h2>{escape(block.title)}</h2>",
            *(f"<p>{escape(line)}</p>" for line in block.lines),
            f"{table(block.columns, block.cells)}{_list(block.notes)}{inside}</section>",
        ]
    )


def table(columns: Sequence[Column], lines: Iterable[Sequence[Cell]]) -> str:
    """A table that scrolls sideways where the page is narrow."""
    numbers = [column.number for column in columns]
    heads = [_cell("th", Cell(column.heading, column.detail), column.number, ' scope="col"') for column in columns]
    rows = []
    for cells in lines:
        first = _cell("th", cells[0], numbers[0], ' scope="row"')
        others = (_cell("td", cell, number) for cell, number in zip(cells[1:], numbers[1:], strict=True))
        rows.append(f"<tr>{first}{''.join(others)}</tr>")
    top = f'<div class="scroll"><table>\n<thead><tr>{"".join(heads)}</tr></thead>\n<tbody>'
    return "\n".join([top, *rows, "</tbody></table></div>"])


def listed(heading: str, lines: list[str], anchor: str = "") -> str:
    """Lines under a heading."""
    start = f'<section id="{escape(anchor)}">' if anchor else "<section>"
    return f"{start}<h2>{escape(heading)}</h2>{_list(lines)}</section>"


def _cell(tag: str, cell: Cell, number: bool, scope: str = "") -> str:
    classes = " ".join(name for name, wanted in (("number", number), (cell.tone, cell.tone != "plain")) if wanted)
    attributes = scope + (f' class="{classes}"' if classes else "")
    detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
    return f"<{tag}{attributes}>{escape(cell.main)}{detail}</{tag}>"


def _list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
