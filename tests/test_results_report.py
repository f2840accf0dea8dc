"""The report's page: safe against its records, closed to the network, and exact in what its scripts compute."""

import json
import shutil
import struct
import subprocess

import numpy as np
import pytest
import torch

from mptrain.cli import main
from mptrain.results.document import Document
from mptrain.results.report.page import page, script

CHROMIUM = shutil.which("chromium")
TORCH = {
    "FP32": torch.float32,
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "FP8 E4M3": torch.float8_e4m3fn,
    "FP8 E5M2": torch.float8_e5m2,
}


def test_a_page_from_broken_records_lists_them_and_escapes_them(tmp_path, capsys):
    run = tmp_path / "runs" / "<script>alert(1)"
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"schema": 1, "status": "</script><b>", "recipe": "<i>\\u2028"}')
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page" / "r.html")]) == 0
    text = (tmp_path / "page" / "r.html").read_text()
    assert "unreadable" in text and "&lt;script&gt;alert(1)" in text
    assert text.count("<script>") == 2 and "<b>" not in text and "<i>" not in text and "\u2028" not in text
    assert "http://" not in text and "https://" not in text and "src=" not in text


def test_no_run_and_no_place_are_told_in_words(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 1
    assert "There is no run in" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent")]) == 1
    assert "There is no folder" in capsys.readouterr().err


def doubles() -> list[float]:
    """FP32 values: every kind, every tie of the small formats, and their neighbours."""
    ties = [
        m * 2.0**e
        for e in (-150, -149, -134, -133, -26, -25, -24, -18, -17, -15, -10, -9, -7, 0, 8, 15)
        for m in range(1, 40)
    ]
    tops = [447, 448, 463, 464, 465, 480, 57344, 61439, 61440, 61441, 65504, 65519, 65520, 65536, 3.3895e38, 3.4e38]
    odd = np.frombuffer(np.random.default_rng(0).bytes(4 * 3000), dtype=np.float32)
    around = [np.nextafter(np.float32(t), np.float32(s)) for t in (*ties, *tops) for s in (0, np.inf)]
    every = np.array([*ties, *tops, *around, *odd, 0.0, -0.0, np.inf], dtype=np.float32)
    return [float(x) for x in every if not np.isnan(x)] + [-1.0, -65520.0, -(2.0**-25)]


def expected(values: torch.Tensor, name: str) -> list[float]:
    if name == "TF32":  # half a unit, less one where the kept part is even, carries into it
        words = values.view(torch.int32).long() & 0xFFFFFFFF
        words = torch.where(values.isinf(), words, (words + 0xFFF + (words >> 13 & 1)) & ~0x1FFF)
        return [struct.unpack("<f", struct.pack("<I", word))[0] for word in words.tolist()]
    rounded = values.to(TORCH[name]).double()
    if name == "FP8 E4M3":  # 464, the tie above 448, goes to 448; versions of torch differ in what they make of more
        rounded = torch.where(values.abs() > 464, torch.nan, rounded)
    return rounded.tolist()


def opened(folder, html: str) -> tuple[str, str]:
    """The page as headless Chromium has it after its scripts, and what Chromium logged."""
    (folder / "page.html").write_text(html, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command = [CHROMIUM, *options, f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'page.html'}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ran.stdout, ran.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to open the page")
def test_the_page_fills_its_formats_under_its_own_policy(tmp_path):
    dom, log = opened(tmp_path, page(Document([])))
    fp16 = dom.partition('<tr data-format="FP16">')[2].partition("</tr>")[0]
    assert ">0000000001<" in fp16 and ">5.960464477539063e-8<" in fp16 and "subnormal" in fp16
    assert dom.count(">lost: rounded to zero<") == 2  # both FP8 formats
    assert "CONSOLE" not in log


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to run the page's scripts")
def test_typed_numbers_round_as_torch_rounds_them(tmp_path):
    inputs = doubles()
    source = [v if abs(v) < 1e300 else ("Infinity" if v > 0 else "-Infinity") for v in inputs]
    code = (
        f"const out = {{}}; const inputs = {json.dumps(source)}.map(Number);"
        "for (const name in FORMATS) out[name] = inputs.map((x) => { const v = rounded(x, name);"
        "return Object.is(v, -0) ? '-0' : String(v) + ' ' + bits(v, name).join(''); });"
        "document.getElementById('out').textContent = JSON.stringify(out);"
    )
    dom, _ = opened(tmp_path, f"<pre id=out></pre><script>{script('formats.js')}\n{code}</script>")
    got = json.loads(dom.partition('<pre id="out">')[2].partition("</pre>")[0])
    values = torch.tensor(inputs, dtype=torch.float32)
    for name, texts in got.items():
        for x, text, want in zip(inputs, texts, expected(values, name), strict=True):
            value = float(text.split()[0].replace("Infinity", "inf"))
            assert value == want or (value != value and want != want), (name, x, text, want)
        if name in ("FP16", "BF16"):
            stored = values.to(TORCH[name]).view(torch.int16).tolist()
            for text, word in zip(texts, stored, strict=True):
                assert text == "-0" or text.split()[1] == f"{word & 0xFFFF:016b}", (name, text)


def test_the_policy_names_the_scripts_by_hash():
    text = page(Document([]))
    assert text.count("'sha256-") == 2 and "unsafe-inline'; script" not in text
