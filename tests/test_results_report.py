"""The report's page: safe against its records, closed to the network, and exact in what its scripts compute."""

import json
import math
import shutil
import struct
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mptrain.cli import main
from mptrain.results.report import histogram
from mptrain.results.report.inside import ALL, Gradients, read_probe, seen
from mptrain.results.report.operations import policy_block, ran_block
from mptrain.results.report.page import SCRIPTS, formats_part, page, script
from mptrain.results.summary import BadSummary
from mptrain.watch.histogram import Histogram
from mptrain.watch.store import Store

CHROMIUM = shutil.which("chromium")
TORCH = {
    "FP32": torch.float32,
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "FP8 E4M3": torch.float8_e4m3fn,
    "FP8 E5M2": torch.float8_e5m2,
}


def test_a_page_from_broken_records_lists_them_and_escapes_them(tmp_path, capsys):
    pytest.importorskip("altair", reason="needs altair to draw the figures: pip install 'mptrain[report]'")
    run = tmp_path / "runs" / "<script>alert(1)"
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"schema": 1, "status": "</script><b>", "recipe": "<i>\\u2028"}')
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page" / "r.html")]) == 0
    text = (tmp_path / "page" / "r.html").read_text()
    assert "unreadable" in text and "&lt;script&gt;alert(1)" in text
    assert text.count("<script>") == len(SCRIPTS) and "<b>" not in text and "<i>" not in text and "\u2028" not in text
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
    dom, log = opened(tmp_path, page([formats_part()]))
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
        if name in TORCH:
            kept = values.to(TORCH[name])
            wide = 8 * kept.element_size()
            words = kept.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[wide]).tolist()
            for text, word, value in zip(texts, words, kept.float().tolist(), strict=True):
                alike = text == "-0" or "NaN" in text or not math.isfinite(value)  # NaN has many patterns
                assert alike or text.split()[1] == f"{word % 2**wide:0{wide}b}", (name, text)


def trained(weights: list[float], scale: float, places: int, rate: float) -> dict:
    """The step that the page walks through, by torch: autocast's casts, FP32 products, and a skip on overflow."""
    master = torch.tensor(weights, requires_grad=True)
    x = torch.tensor([0.5, -1.5]).expand(places, 2)
    y = (x @ master.half().float()).half()
    y.retain_grad()
    loss = ((y.float() - 1) ** 2).mean()
    (loss * scale).backward()
    gradient = master.grad / scale
    finite = bool(gradient.isfinite().all())
    update = torch.tensor(rate) * gradient
    after = master.detach() - update if finite else master.detach()
    halves = (master.detach().half().float() - update).half() if finite else master.detach().half()
    return {"output": y[0].item(), "loss": loss.item(), "atOutput": y.grad[0].item(), "finite": finite,
            "unscaled": gradient.tolist(), "weights": after.tolist(), "halves": halves.tolist()}  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to run the page's scripts")
def test_the_step_that_is_walked_through_is_torchs(tmp_path):
    pairs = [[1.3, -0.2], [0.1, 0.7], [-30.0, 41.5], [1e-5, -0.66667]]
    cases = [
        ([float(np.float32(w)) for w in pair], 2.0**scale, 2**places, rate)
        for pair in pairs for scale in (0, 3, 10, 16, 24) for places in (0, 6, 10) for rate in (0.1, 1e-5)
    ]  # fmt: skip
    code = (
        f"const cases = {json.dumps(cases)};"
        "const odd = (x) => typeof x === 'number' && !Number.isFinite(x);"
        "const text = (k, x) => (odd(x) ? String(x).replace('Infinity', 'inf') : x);"
        "const out = cases.map(([weights, scale, n, rate]) => stepped({ weights, scale, clean: 0 }, n, rate));"
        "document.getElementById('out').textContent = JSON.stringify(out, text);"
    )
    scripts = "\n".join(script(name) for name in ("formats.js", "step.js"))
    dom, _ = opened(tmp_path, f"<pre id=out></pre><script>{scripts}\n{code}</script>")
    got = json.loads(dom.partition('<pre id="out">')[2].partition("</pre>")[0])
    skipped = 0
    for case, step in zip(cases, got, strict=True):
        want = trained(*case)
        for name, value in want.items():
            mine = step[name]
            if name == "loss":  # torch's mean over equal terms may round its sum
                assert float(mine) == pytest.approx(value, rel=1e-6), case
            elif isinstance(value, list):
                assert [float(v) for v in mine] == pytest.approx(value, rel=0, abs=0, nan_ok=True), (case, name)
            else:
                assert float(mine) == value, (case, name)
        skipped += not want["finite"]
        assert step["next"]["scale"] == (case[1] if want["finite"] else max(1, case[1] / 2))
    assert 10 < skipped < len(cases) - 10


def test_what_ran_is_listed_by_precision_with_its_recipes():
    dtypes = {"matmul": "float16", "softmax": "float32", "norm": "none ran", "loss": "float32"}
    runs = [
        SimpleNamespace(precision_label="fp16", backend="emulated", dtypes=dtypes, recipe=recipe)
        for recipe in ("b", "a", "a")
    ]
    [cells] = ran_block(runs).cells
    assert [cell.main for cell in cells] == ["fp16", "f16", "f32", "-", "f32", "3", "a, b"]
    assert "softmax" in " ".join(cell.main for line in policy_block().cells for cell in line)


SSD = Gradients("<b>ssd", "a census", {(ALL, "activation gradients"): Histogram({-30: 3, -20: 4, 2: 1}, zero=8)})


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to run the page's scripts")
def test_the_slider_counts_as_the_library_does(tmp_path):
    random = np.random.default_rng(0)
    sets = [
        Histogram({int(e): int(random.integers(1, 10**12)) for e in random.integers(-60, 20, 30)}) for _ in range(9)
    ]
    given = [dict(zip(("first", "counts"), h.bins(), strict=True)) for h in sets]
    code = (
        f"const sets = {json.dumps(given)}; const out = [];"
        "for (const set of sets) for (let k = -8; k <= 48; k++) out.push(fates(set, k));"
        "document.getElementById('out').textContent = JSON.stringify(out);"
    )
    dom, _ = opened(tmp_path, f"<pre id=out></pre><script>{script('histogram.js')}\n{code}</script>")
    got = iter(json.loads(dom.partition('<pre id="out">')[2].partition("</pre>")[0]))
    for h in sets:
        for k in range(-8, 49):
            zero, subnormal, normal, infinite = next(got)
            assert zero + subnormal + normal + infinite == h.nonzero
            assert zero / h.nonzero == h.flushed(2.0**k)
            assert subnormal / h.nonzero == h.subnormal(2.0**k)
            assert infinite / h.nonzero == pytest.approx(h.overflowed(2.0**k), abs=1e-15)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to open the page")
def test_the_histogram_prints_its_shares(tmp_path):
    part, left_out = histogram.histogram_section([SSD])
    dom, log = opened(tmp_path, page([formats_part(), histogram_part(part)]))
    assert not left_out and "CONSOLE" not in log and "<b>" not in dom
    assert "37.50 % are rounded to zero, 50.00 % are subnormal, 0 % overflow." in dom
    assert "Exact zeros before any rounding: 50.00 % of all." in dom and "largest safe scale: 2^11" in dom


def histogram_part(html: str):
    return replace(formats_part(), anchor="histogram", html=html)


def test_histograms_without_room_or_content_are_named(monkeypatch):
    zeros = Gradients("all zero", "", {(ALL, "activation gradients"): Histogram({}, zero=5)})
    found, left_out = histogram.kept([SSD, zeros])
    assert found == [{"name": "<b>ssd", "about": "a census", "sets": [
        {"name": "activation gradients, (all layers)", "first": -30, "counts": [3] + [0] * 9 + [4] + [0] * 21 + [1],
         "zero": 8, "best": 11}]}]  # fmt: skip
    assert left_out == ["all zero: histograms left out, all its gradients are zero"]
    assert "<" not in histogram.embedded(found)
    monkeypatch.setattr(histogram, "MOST_BYTES", 50)
    assert histogram.kept([SSD])[1] == ["<b>ssd: histograms left out, no room left on the page"]


def row(step: int, kind: str, **of):
    empty = dict.fromkeys(("order", "name", "dtype", "calls", "scale", "count", "sampled", "zero", "flushed"))
    return empty | {"step": step, "layer": "fc", "kind": kind, "order": 0, "name": "", "scale": 8.0, **of}


def watched_run(folder, rows):
    (folder / "run").mkdir(parents=True)
    store = Store(folder / "run" / "watch.parquet")
    store.add(rows)
    store.flush()
    return SimpleNamespace(folder=str(folder / "run"), recipe="tiny", precision_label="fp16", scale="8", seed=0)


def test_a_watched_run_gives_histograms_without_its_scale_and_losses_by_step(tmp_path):
    gradient = {"sampled": 8, "count": 8, "zero": 1, "first_exponent": -4, "exponents": [3, 4]}
    products = {"name": "products", "count": 10, "sampled": 10, "zero": 2, "exponents": []}
    rows = [row(step, "grad_output", **gradient) for step in (3, 6)]
    rows += [row(3, "grad_input", flushed=4, **products), row(3, "grad_weight", flushed=0, **products)]
    rows += [row(6, "grad_input", flushed=8, **products), row(6, "grad_output", **{**gradient, "scale": 3.0})]
    found = seen([watched_run(tmp_path, rows)], [])
    assert not found.unread
    [gradients] = found.gradients
    assert gradients.of[ALL, "activation gradients"] == gradients.of["fc", "activation gradients"]
    assert gradients.of["fc", "activation gradients"] == Histogram({-7: 6, -6: 8}, zero=2)
    assert "it was 8" in gradients.about and "1 tensors whose loss scale was no power of two" in gradients.about
    losses = found.losses[str(tmp_path / "run")]
    assert losses.counted and losses.share == {("fc", 3): 0.25, ("fc", 6): 1.0}


def test_without_counted_products_zeros_stand_in_and_it_is_said(tmp_path):
    rows = [row(3, "grad_output", sampled=8, count=8, zero=2, first_exponent=0, exponents=[6])]
    losses = seen([watched_run(tmp_path, rows)], []).losses[str(tmp_path / "run")]
    assert not losses.counted and losses.share == {("fc", 3): 0.25}


def test_files_that_hold_something_else_are_named(tmp_path):
    run = watched_run(tmp_path, [row(3, "grad_output", sampled=8, count=8, zero=9, first_exponent=999, exponents=[1])])
    assert "beyond -160..160" in seen([run], []).unread[0]
    next((tmp_path / "run" / "watch.parquet").iterdir()).write_bytes(b"PAR1 no parquet")
    assert "is no part of a watch" in seen([run], []).unread[0]
    (tmp_path / "probe.json").write_text('{"census": 3, "recommended": {}}')
    with pytest.raises(BadSummary, match="census"):
        read_probe(tmp_path / "probe.json")
    assert len(seen([run], [tmp_path, tmp_path]).unread) == 2


def test_the_policy_names_the_scripts_by_hash():
    text = page([formats_part()])
    assert text.count("'sha256-") == len(SCRIPTS) and text.count("unsafe-inline") == 1
