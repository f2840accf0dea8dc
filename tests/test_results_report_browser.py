"""The report as a reader has it: in Chromium, by keyboard, on a wide and a narrow screen, light, dark, printed."""

import json
import re
import shutil
from contextlib import contextmanager

import pytest
from test_results_table import summary

from mptrain.cli import main
from mptrain.watch.store import Store

CHROMIUM = shutil.which("chromium")
pytest.importorskip("altair", reason="needs altair to draw the figures: pip install 'mptrain[report]'")
browsers = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'mptrain[browser]'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync"]  # fmt: skip


def filled(folder, precision, scale, seed):
    """A run with a log, and what a watch saw of it."""
    folder = folder / f"{precision}-{seed}"
    folder.mkdir(parents=True)
    record = summary(precision=precision, precision_label=precision, scale=scale, seed=seed)
    (folder / "summary.json").write_text(json.dumps(record))
    lines = [
        {"step": s, "loss": 2.0 - s / 100 + seed / 50, "scale": 8.0 if s < 50 else 4.0} for s in range(10, 101, 10)
    ]
    lines[4]["skipped"] = True
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if precision == "fp16":
        store = Store(folder / "watch.parquet")
        of = dict.fromkeys(
            ("order", "name", "dtype", "calls", "scale", "count", "sampled", "zero", "flushed", "exponents")
        )
        for step in (10, 20):
            of |= {
                "step": step,
                "layer": "</script><b>fc",
                "order": 0,
                "scale": 1.0,
                "count": 9,
                "sampled": 9,
                "zero": 1,
            }
            store.add([{**of, "kind": "grad_output", "name": "", "first_exponent": -30, "exponents": [4, 4]}])
            store.add([{**of, "kind": "grad_input", "name": "products", "flushed": 2}])
        store.flush()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for seed in (0, 1):
        filled(folder / "runs", "fp32", "none", seed)
        filled(folder / "runs", "fp16", "8", seed)
    for name in ("a.html", "b.html"):
        assert main(["report", str(folder / "runs"), "-o", str(folder / name), "--figures", str(folder / "png")]) == 0
    assert (folder / "a.html").read_bytes() == (folder / "b.html").read_bytes()
    names = ["loss", "scale", "underflow-1", "underflow-2"]
    wanted = ["memory-by-kind", *(f"recipe-resnet-{name}" for name in names)]
    assert sorted(path.stem for path in (folder / "png").glob("*.png")) == wanted
    return folder / "a.html"


@pytest.fixture(scope="module")
def chromium():
    with browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@contextmanager
def opened(chromium, file, width=1400, **options):
    """The page; at the end nothing was logged and nothing but the file was asked for."""
    said, asked = [], []
    context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{file}")
    yield page
    context.close()
    assert said == [] and asked == [f"file://{file}"]


def share(page):
    return float(re.search(r"gradients ([\d.]+) % are rounded to zero", page.inner_text("#lost"))[1])


def test_the_slider_is_moved_by_keys_and_says_what_it_changes(chromium, file):
    with opened(chromium, file) as page:
        assert page.get_attribute("#lost", "aria-live") == "polite"
        page.focus("#scale")
        before = share(page)
        page.keyboard.press("ArrowRight")
        assert share(page) == before == 100.0 and "2^1 = 2" in page.inner_text("#scale-shown")
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert share(page) == 100.0  # 2^-29 times 2^3 still lies below 2^-25
        page.keyboard.press("ArrowRight")
        assert share(page) == 50.0  # the half that lies at 2^-30
        page.keyboard.press("ArrowRight")
        assert share(page) == 0.0
        cells = page.locator("#fates tbody tr td:nth-child(3)").all_inner_texts()
        assert cells == ["0", "16", "0", "0"]
        page.click("#scale-best")
        assert page.input_value("#scale") == str(16 - 3 + 29)


def test_runs_and_layers_are_chosen(chromium, file):
    with opened(chromium, file) as page:
        names = page.locator("#histogram-layer option").all_inner_texts()
        assert names == ["activation gradients, (all layers)", "activation gradients, </script><b>fc"]
        page.select_option("#histogram-layer", "1")
        page.select_option("#histogram-run", "1")
        assert "seed 1" in page.locator("#histogram-run option:checked").inner_text()


def test_a_typed_number_is_rounded_while_it_is_typed(chromium, file):
    with opened(chromium, file) as page:
        kept = {}
        for text in ("65519", "65520", "-0", "nan", "6e-8", "0,1"):
            page.fill("#number", text)
            kept[text] = page.inner_text('#layouts tr[data-format="FP16"] .stored')
        assert kept == {"65519": "65504", "65520": "Infinity", "-0": "-0", "nan": "NaN",
                        "6e-8": "5.960464477539063e-8", "0,1": "0.0999755859375"}  # fmt: skip
        page.fill("#number", "zero")
        assert "Type a number" in page.inner_text("#wrong")


def test_the_step_is_taken_and_taken_back(chromium, file):
    with opened(chromium, file) as page:
        assert "rounded to zero" in page.inner_text("#walk-said")
        page.fill("#walk-scale", "8")
        assert "gradients -0.05" in page.inner_text("#walk-said")
        page.click("#walk-take")
        assert page.inner_text("#walk-said").startswith("Step 2")
        page.fill("#walk-scale", "32")
        assert "overflow, skipped" in page.inner_text("#walk-said")
        page.click("#walk-take")
        assert page.input_value("#walk-scale") == "31"  # halved
        page.click("#walk-again")
        assert page.inner_text("#walk-said").startswith("Step 1") and page.input_value("#walk-scale") == "0"


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_has_its_numbers_and_fits(chromium, file, width, scheme):
    with opened(chromium, file, width, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        figures = page.locator("figure")
        assert figures.count() == 7  # histogram, memory chosen and by recipe, loss, scale, two heatmaps
        for figure in figures.all():
            within = figure if figure.locator("table").count() else figure.locator("xpath=..")
            assert within.locator("table tbody tr").count() >= 1
            assert figure.locator("figcaption").inner_text()
            assert figure.locator("[role=img][aria-labelledby]").count() == 1
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
        assert dark == (scheme == "dark")
        label = page.locator("figure text").first.evaluate("e => getComputedStyle(e).fill")
        assert label == ("rgb(230, 232, 235)" if dark else "rgb(28, 32, 36)")


def test_memory_is_shown_of_the_network_and_batch_that_are_chosen(chromium, file):
    with opened(chromium, file) as page:
        page.select_option("#memory-network", label="resnet")
        before = page.inner_text("#memory-said")
        assert "resnet at batch 128" in before and "beside it fp16 0." in before
        page.focus("#memory-batch")
        page.keyboard.press("ArrowRight")
        assert "resnet at batch 512" in page.inner_text("#memory-said")
        peaks = page.locator("#memory-table tbody tr td:last-child").all_inner_texts()
        assert len(peaks) == 3 and float(peaks[1].replace(",", "")) < float(peaks[0].replace(",", ""))


def test_all_controls_are_reached_by_tab_and_shown_to_be(chromium, file):
    with opened(chromium, file) as page:
        wanted = {"histogram-run", "histogram-layer", "scale", "scale-best", "walk-terms", "walk-rate", "walk-scale",
                  "walk-take", "walk-again", "number", "memory-network", "memory-batch"}  # fmt: skip
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
            )
            if name in wanted:
                reached.add(name)
                assert outline == "solid", name
        assert reached == wanted


def test_it_can_be_printed(chromium, file):
    with opened(chromium, file, color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("figure text").first.evaluate("e => getComputedStyle(e).fill") == "rgb(28, 32, 36)"
        assert not page.is_visible("nav") and page.is_visible("#bins") and page.is_visible("#lost")
        assert page.pdf().startswith(b"%PDF")
