"""A document as one HTML file that needs nothing else: no script, no font; light or dark as the system is."""

from html import escape

from mptrain.results.document import Block, Cell, Document

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --text: #1c2024; --quiet: #60646c; --line: #dddfe3; --head: #f5f6f8; --good: #18794e; --bad: #c62a2f;
}
@media (prefers-color-scheme: dark) {
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
    parts = [_block(block) for block in document.blocks]
    parts += [
        f"<section><h2>{escape(heading)}</h2>{_list(lines)}</section>" for heading, lines in document.lists.items()
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
            *parts,
            "</body>\n</html>\n",
        ]
    )


def _block(block: Block) -> str:
    numbers = [column.number for column in block.columns]
    heads = [
        _cell("th", Cell(column.heading, column.detail), column.number, ' scope="col"') for column in block.columns
    ]
    rows = []
    for cells in block.cells:
        first = _cell("th", cells[0], numbers[0], ' scope="row"')
        others = (_cell("td", cell, number) for cell, number in zip(cells[1:], numbers[1:], strict=True))
        rows.append(f"<tr>{first}{''.join(others)}</tr>")
    return "\n".join(
        [
            f"<section><h2>{escape(block.title)}</h2>",
            *(f"<p>{escape(line)}</p>" for line in block.lines),
            f'<div class="scroll"><table>\n<thead><tr>{"".join(heads)}</tr></thead>\n<tbody>',
            *rows,
            f"</tbody></table></div>{_list(block.notes)}</section>",
        ]
    )


def _cell(tag: str, cell: Cell, number: bool, scope: str = "") -> str:
    classes = " ".join(name for name, wanted in (("number", number), (cell.tone, cell.tone != "plain")) if wanted)
    attributes = scope + (f' class="{classes}"' if classes else "")
    detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
    return f"<{tag}{attributes}>{escape(cell.main)}{detail}</{tag}>"


def _list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""
