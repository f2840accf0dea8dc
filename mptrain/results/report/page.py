"""The page: parts under one another, with a list of them on top, as one HTML file that asks nothing of the network.

Everything from a record reaches the page escaped, as text. The scripts are files of this folder and hold no data; the
page's security policy allows these very scripts, by their hash, and no others.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from mptrain.results.webpage import framed

SCRIPTS = ("formats.js", "numbers.js", "histogram.js", "step.js", "memory.js")
FORMATS = ("FP32", "TF32", "BF16", "FP16", "FP8 E4M3", "FP8 E5M2")
TITLE = "mptrain: report"

NUMBERS = """
<section id="formats"><h2>Number formats</h2>
<p>A typed number (read as FP64) as each format keeps it: rounded to the nearest value, ties to the even one
(converting to TF32, GPUs round such ties away from zero). Bits are sign,
exponent and mantissa.</p>
<p><label>Number <input id="number" value="6e-8" inputmode="text" autocomplete="off" spellcheck="false"
aria-describedby="wrong"></label> <span id="wrong" role="status" class="bad"></span></p>
<div class="scroll"><table id="layouts"><thead><tr><th scope="col">format</th><th scope="col">bits</th>
<th scope="col">kept as</th><th scope="col">what happened</th></tr></thead>
<tbody>{rows}</tbody></table></div></section>
"""
ROW = (
    '<tr data-format="{name}"><th scope="row">{name}</th><td class="bits"><span class="sign"></span>'
    '<span class="exponent"></span><span></span></td><td class="stored"></td><td class="kind"></td></tr>'
)


@dataclass(frozen=True)
class Part:
    """A piece of the page: an HTML section with this id, and its title, which is text."""

    anchor: str
    title: str
    html: str


def page(parts: Sequence[Part]) -> str:
    """The whole file."""
    links = "".join(f'<li><a href="#{escape(part.anchor)}">{escape(part.title)}</a></li>' for part in parts)
    contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>'
    return framed(TITLE, [contents, *(part.html for part in parts)], script("page.css"), [script(n) for n in SCRIPTS])


def formats_part() -> Part:
    """Bit layouts, with a number to type in."""
    rows = "\n".join(ROW.format(name=escape(name)) for name in FORMATS)
    return Part("formats", "Number formats", NUMBERS.format(rows=rows))


def step_part() -> Part:
    """One training step with its numbers."""
    return Part("step", "One training step, walked through", script("step.html"))


def script(name: str) -> str:
    """The text of a file of this folder: a script, a section, the style."""
    return (files("mptrain.results.report") / name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in, whatever its texts are."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
