"""The page: claims, tables and number formats as one HTML file that asks nothing of the network.

Everything from a record reaches the page escaped, as text. The scripts are files of this folder and hold no data; the
page's security policy allows these very scripts, by their hash, and no others.
"""

import base64
import hashlib
from html import escape
from importlib.resources import files

from mptrain.results.document import Document
from mptrain.results.webpage import webpage

SCRIPTS = ("formats.js", "numbers.js")
FORMATS = ("FP32", "TF32", "BF16", "FP16", "FP8 E4M3", "FP8 E5M2")
TITLE = "mptrain: report"

STYLE = """
.bits { font-family: ui-monospace, monospace; } .bits span { display: inline-block; }
.stored { white-space: nowrap; }
.bits .sign { color: var(--bad); } .bits .exponent { color: var(--good); }
.bits span + span { margin-left: .5em; }
input { font: inherit; padding: .3rem .5rem; width: 14rem; max-width: 100%; }
@media (max-width: 40rem) { body { padding: 0 .7rem; } th, td { padding: .35rem .4rem; } }
@media print { body { margin: 0; max-width: none; } .scroll { overflow: visible; } section { break-inside: avoid; } }
"""

NUMBERS = """
<section id="formats"><h2>Number formats</h2>
<p>A typed number (read as FP64) as each format keeps it: rounded to the nearest value, ties to the even one.
Bits are sign, exponent and mantissa.</p>
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


def page(document: Document) -> str:
    """The whole file."""
    scripts = [script(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in scripts)
    whole = webpage(document, TITLE)
    whole = whole.replace("default-src 'none';", f"default-src 'none'; script-src {hashes};", 1)
    whole = whole.replace("</style>", f"{STYLE}</style>", 1)
    numbers = NUMBERS.format(rows="\n".join(ROW.format(name=escape(name)) for name in FORMATS))
    end = numbers + "".join(f"<script>{text}</script>\n" for text in scripts)
    head, _, tail = whole.rpartition("</body>")
    return f"{head}{end}</body>{tail}"


def script(name: str) -> str:
    """The text of one of the page's scripts."""
    return (files("mptrain.results.report") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
