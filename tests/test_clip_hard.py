"""scripts/clip_hard.py on small made-up records: the numbers in its table, its curves, and records that are damaged."""

import csv
import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from test_results_table import summary

from mptrain.watch.store import Store

SCRIPT = Path(__file__).parent.parent / "scripts" / "clip_hard.py"


@pytest.fixture
def script():
    spec = spec_from_file_location("clip_hard_script", SCRIPT)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def record(
    folder, precision, scale="none", recipe="clip_hard", seed=0, value=0.3, hard="undivided", watched=None, **more
):
    """A finished run of 600 steps; watched: {step: [(layer, lost, of so many nonzero)]}."""
    folder.mkdir(parents=True)
    task = {"name": "clip", "hard": hard, "norm": "layer", "hard_from": 300, "hard_count": 10}
    if recipe == "yolo":
        task = {"name": "detect", "normalise": "objectness"}
    (folder / "config.yaml").write_text(json.dumps({"recipe": recipe, "task": task}))
    made_up = summary(
        recipe=recipe,
        precision=precision,
        scale=scale,
        seed=seed,
        metric={"name": "recall@10", "value": value},
        steps={"applied": 590, "skipped": 10},
        final_scale=None if scale == "none" else 64.0,
        data={"name": "emoji"},
        environment={"device_name": "a machine", "torch": "2.0", "commit": "abc"},
        key={"recipe": recipe, "data": "emoji", "batch_size": 64, "settings": hard},
        **more,
    )
    (folder / "summary.json").write_text(json.dumps(made_up))
    lines = [
        {"step": 10, "loss": 4.0, "lr": 1e-3, "scale": 65536.0, "applied": 10},
        {"step": 300, "eval": {"recall@10": 0.1, "loss": 1.0}},
        {"step": 301, "loss": None, "lr": 1e-3, "scale": 32768.0, "applied": 300, "skipped": True},
        {"step": 600, "eval": {"recall@10": value, "loss": 1.0}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if watched:
        store = Store(folder / "watch.parquet")
        for step, layers in watched.items():
            store.add(products(step, *layer) for layer in layers)
        store.flush()


def products(step, layer, lost, nonzero, kind="grad_weight"):
    return {"step": step, "layer": layer, "kind": kind, "name": "products", "dtype": "float16", "count": nonzero + 5,
            "sampled": nonzero + 5, "zero": 5, "flushed": lost, "exponents": []}  # fmt: skip


WATCHED = {
    10: [("a", 1, 100), ("b", 1, 300)],
    305: [("a", 50, 100), ("b", 0, 300)],
    400: [("a", 5, 100), ("b", 3, 300)],
}


def some(folder):
    record(folder / "fp32", "fp32", value=0.30)
    record(folder / "bf16", "bf16", value=0.31)
    record(
        folder / "fp16-0",
        "fp16",
        "dynamic",
        value=0.32,
        watched=WATCHED,
        alarms=[{"rule": "scale collapsed", "step": 320}],
        watch="x",
    )
    record(folder / "fp16-1", "fp16", "dynamic", seed=1, value=0.34)
    record(folder / "other", "fp16", "dynamic", hard="shuffled", value=0.4)
    record(
        folder / "yolo", "fp16", "dynamic", recipe="yolo", watched={10: [("c", 1, 1000)]}, alarms=[], watch="healthy"
    )


def test_numbers_of_the_table(script, tmp_path):
    some(tmp_path / "runs")
    runs, said = script.read([tmp_path / "runs"])
    assert not said and len(runs) == 6
    table = {(row["hard batches"], row["precision"]): row for row in script.rows(runs)}
    assert set(table) == {("undivided", "fp32"), ("undivided", "bf16"), ("undivided", "fp16"), ("shuffled", "fp16")}
    row = table["undivided", "fp16"]
    assert (row["seeds"], row["recall@10 before"], row["recall@10 at the end"]) == ("0, 1", "0.100", "0.330")
    assert (row["skipped steps"], row["final scale"], row["scale"]) == ("10, 10", "64, 64", "dynamic")
    assert (row["gradients flushed before"], row["gradients flushed after"]) == ("0.005", "0.02")  # 2 and 8 of 400
    assert (row["layers underflowing at most"], row["first alarm"]) == ("50%", "scale collapsed (320)")
    assert table["undivided", "bf16"]["gradients flushed after"] == script.NOT_COUNTED
    (sentence, _) = sorted(script.verdicts(list(table.values())), key=lambda text: text.startswith("shuffled"))
    assert "FP16 skipped 10, 10 steps" in sentence and "from 0.100 to 0.330" in sentence
    assert "BF16 ends at 0.310 (seeds 0); FP32 ends at 0.300 (seeds 0)" in sentence


def test_curves_of_the_figure(script, tmp_path):
    some(tmp_path / "runs")
    runs, _ = script.read([tmp_path / "runs"])
    found = script.points(runs)
    fp16 = [p for p in found if p["run"] == "fp16" and p["panel"] == "undivided, norm layer"]
    layers = {p["step"]: p["value"] for p in fp16 if p["quantity"] == "layers underflowing"}
    assert layers == {10: 0.0, 305: 0.5, 400: 0.5}  # 5 of 100 are enough
    assert {p["step"]: p["value"] for p in fp16 if p["quantity"] == "loss scale"} == {10: 65536.0, 301: 32768.0}
    assert {p["step"]: p["value"] for p in fp16 if p["quantity"] == "loss"} == {10: 4.0}  # none where it was not finite
    assert not [p for p in found if p["run"] == "bf16" and p["quantity"] == "loss scale"]
    both = {(p["run"], p["step"]): p["value"] for p in script.beside(runs)}
    assert both == {
        ("CLIP fp16", 10): 0.005,
        ("CLIP fp16", 305): 0.125,
        ("CLIP fp16", 400): 0.02,
        ("YOLO fp16", 10): 0.001,
    }


def test_what_is_damaged_is_left_out_and_said(script, tmp_path):
    runs = tmp_path / "runs"
    some(runs)
    (runs / "fp32" / "summary.json").write_text("{")
    (runs / "bf16" / "config.yaml").write_text("[1, 2")
    (runs / "fp16-1" / "config.yaml").write_text("task: {norm: layer}")
    (runs / "other" / "metrics.jsonl").unlink()
    part = next((runs / "fp16-0" / "watch.parquet").iterdir())
    part.write_bytes(part.read_bytes()[:50])
    (runs / "yolo" / "summary.json").unlink()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(runs), f"--table={tmp_path / 'out' / 't'}", f"--figure={tmp_path / 'f'}"],
        capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout.splitlines()
    for folder, word in (
        ("fp32", "not JSON"), ("bf16", "config.yaml"), ("fp16-1", "config.yaml"), ("yolo", "left out"),
        ("other", "metrics.jsonl is missing"), ("fp16-0", "watch.parquet holds no count"),
    ):  # fmt: skip
        assert len([line for line in said if f"/{folder}:" in line and (word in line)]) == 1, (folder, done.stdout)
    assert "Traceback" not in done.stderr
    if done.returncode:  # without the library that draws
        assert "pip install 'mptrain[report]'" in done.stderr
    else:
        assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "f.svg").exists()
    with (tmp_path / "out" / "t.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert {(row["hard batches"], row["precision"], row["seeds"]) for row in table} == {
        ("undivided", "fp16", "0"), ("shuffled", "fp16", "0"),
    }  # fmt: skip
    text = (tmp_path / "out" / "t.md").read_text()
    assert "# CLIP through hard batches" in text and "a machine" in text


@pytest.mark.parametrize("made", [False, True])
def test_nothing_to_show_is_one_message(script, tmp_path, made, monkeypatch):
    if made:
        record(tmp_path / "runs" / "other", "fp32", recipe="resnet")
    monkeypatch.setattr(sys, "argv", ["clip_hard.py", str(tmp_path / "runs")])
    with pytest.raises(SystemExit, match=r"no finished run of clip_hard there; make some" if made else "runs"):
        script.main()
