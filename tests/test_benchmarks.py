"""The benchmarks: what their numbers are made of, and that each of them runs."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def benchmarking(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import benchmarking

    return benchmarking


def test_blocks_alternate_and_the_first_round_is_left_out(benchmarking):
    ran = []

    def loop(name):
        return lambda count: ran.append((name, count)) or len(ran) * count

    found = benchmarking.alternate({"a": loop("a"), "b": loop("b"), "c": loop("c")}, steps=5, blocks=3)
    assert {count for _, count in ran} == {5}
    rounds = ["".join(name for name, _ in ran[i : i + 3]) for i in range(0, 12, 3)]
    assert [sorted(r) for r in rounds] == [list("abc")] * 4
    assert len({r[0] for r in rounds}) == 3
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert min(min(times) for times in found.values()) == 4.0  # seconds per step; the fourth call is the first counted


def test_a_ratio_is_the_median_of_the_ratios_of_a_round(benchmarking):
    found = benchmarking.ratio([2.0, 30.0, 6.0, 8.0, 50.0], [1.0, 10.0, 3.0, 2.0, 10.0])  # 2, 3, 2, 4, 5
    assert found == (3.0, 2.0, 4.0)
    assert found.cells() == ("3.000", "2.000 to 4.000")
    assert benchmarking.Spread.of([7.0]) == (7.0, 7.0, 7.0)


def test_the_report_says_what_has_to_be_known(benchmarking, tmp_path, capsys):
    out = tmp_path / "made" / "up.md"
    benchmarking.report(out, "Title", "About.", [benchmarking.table(["a", "b"], [["1", "2"]])])
    text = out.read_text()
    assert capsys.readouterr().out == text
    assert "| a | b |\n| --- | ---: |\n| 1 | 2 |" in text
    for word in ("torch 2.", "commit ", "thread(s)", "CPU: "):
        assert word in text


def run(name, *options, timeout=600):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *map(str, options)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_loop_benchmark_runs(tmp_path):
    said = run(
        "benchmark_loop.py", "--blocks", 2, "--seconds", 0.05, "--only", "64, batch 64", "--out", tmp_path / "x.md"
    )
    assert [line.split(" | ")[1] for line in said.splitlines() if line.startswith("| perc")] == ["fp32", "bf16", "fp16"]


@pytest.mark.slow
def test_the_benchmark_of_operations_runs(tmp_path):
    said = run("benchmark_ops.py", "--blocks", 2, "--seconds", 0.001, "--out", tmp_path / "x.md")
    assert said.count("\n| dot products |") == said.count("\n| reductions |") == said.count("\n| point-wise |") == 2
    with open(tmp_path / "x.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["precision"] for line in lines[:4]] == ["fp32", "tf32", "bf16", "fp16"]
    assert all(float(line["speed"]) == 1 and float(line["of_the_limit"]) > 0 for line in lines[::4])
    assert all(0 < float(line["low"]) <= float(line["speed"]) <= float(line["high"]) for line in lines)


@pytest.mark.parametrize("command", [["--help"], ["--version"], []])
def test_what_is_only_read_needs_nothing_slow(command):
    slow = {"torch", "numpy", "pydantic", "hydra", "omegaconf", "rich", "scipy"}
    code = f"import sys, mptrain.cli; mptrain.cli.main({command}); print(*{slow} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS.parent, capture_output=True, text=True, check=True)
    assert done.stdout and done.stderr.strip() == ""


def test_the_records_of_the_benchmark_are_records(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import benchmark_startup

    from mptrain.results.runs import find_runs
    from mptrain.results.table import build_table

    benchmark_startup.write_records(tmp_path, 60)
    runs, excluded = find_runs([tmp_path])
    assert len(runs) == 60 and not excluded
    assert [len(group.rows) for group in build_table(runs, excluded).groups] == [5, 1]


def test_published_ratios_are_those_of_their_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_report

    from mptrain import files

    with open(gpu_report.PUBLISHED, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 10
    for row in rows:
        assert float(row["mixed"]) / float(row["base"]) == pytest.approx(
            float(row["ratio"]), rel=0.01
        )  # both were rounded
        assert row["recipe"] in files.names("recipe") and row["source"].startswith("NVIDIA/")


def test_the_gpu_check_runs_dry_on_a_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    dry = ["--device", "cpu", "--tiny", "--recipes", "resnet", "--out", str(tmp_path)]
    assert gpu_check.main([*dry, "--parts", "trainings,speed,estimates"]) == 0
    lines = list(csv.DictReader((tmp_path / "speed.csv").read_text().splitlines()[1:]))
    assert [(row["recipe"], row["precision"], row["which"]) for row in lines] == [
        ("resnet", "fp32", "equal"),
        ("resnet", "fp16", "equal"),
    ]
    for row in lines:
        assert float(row["throughput"]) > 0 and float(row["tflops"]) > 0 and row["note"] == ""
        assert row["peak_gib"] == row["watts"] == ""  # a CPU measures neither
    text = (tmp_path / "check.md").read_text()
    for part in ("## Trainings", "## Speed", "### resnet", "## Estimates", "dry run"):
        assert part in text
    assert "Error" not in text and text.count("1 finished") == 2
    before = (tmp_path / "speed.csv").read_text()
    assert gpu_check.main([*dry, "--parts", "speed"]) == 0  # goes on, and there is nothing left to measure
    assert (tmp_path / "speed.csv").read_text() == before


def test_the_gpu_check_says_what_did_not_work(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check
    import gpu_speed

    def too_much(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_speed, "Steps", too_much)
    dry = ["--device", "cpu", "--tiny", "--recipes", "resnet,nothing", "--parts", "speed", "--out", str(tmp_path)]
    assert gpu_check.main(dry) == 0
    text = (tmp_path / "check.md").read_text()
    assert text.count("does not fit") >= 2 and "recipe=nothing is unknown" in text
    assert gpu_check.main([*dry, "--minutes", "0"]) == 0
    assert "no time left" in (tmp_path / "check.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_check_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_emulation_is_exact_and_rounding_after_modules_is_not(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import exactness

    whole = {"100.00 %", ""}
    for case in exactness.CASES:
        assert set(exactness.shares(case, "emulated FP16")) <= whole, case
    assert set(exactness.shares("linear", exactness.MODULES)) == {"100.00 %"}
    for case in ("residual block", "attention"):  # what happens between modules is not rounded
        output, inputs, _ = exactness.shares(case, exactness.MODULES)
        assert output not in whole and inputs not in whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emulation", "families", "startup", "watch"])
def test_the_other_benchmarks_run(tmp_path, name):
    quick = {"emulation": ["--steps", 1, "--blocks", 2], "families": ["--blocks", 2, "resnet"]}
    quick["watch"] = ["--recipes", "language", "--every", 2, "--blocks", 1]
    options = quick.get(name, ["--tries", 1, "--records", "10,100"])
    said = run(f"benchmark_{name}.py", *options, "--out", tmp_path / "x.md")
    assert "| --- |" in said and any(word in said for word in ("MFU", "peak |", "no roofline"))


def test_the_growth_of_the_loop_names_the_peak(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import benchmark_loop

    monkeypatch.setattr(benchmark_loop, "race", lambda *args: {"runner": [2.2, 2.2], "by hand": [2.0, 2.0]})
    monkeypatch.setattr(benchmark_loop, "peak", lambda dtype: 1e9)
    monkeypatch.setattr(benchmark_loop, "work", lambda case: benchmark_loop.Work([("float32", 1e6 * case.wide, 0)]))
    text, said = benchmark_loop.growth([], 0.1, 2)
    header, _, first, *_ = text.splitlines()
    assert header.count("of the peak") == 1 and header.count("|") == first.count("|")
    assert first.startswith("| 32 | 32 | 2000.00 | 2% | 1.100 (1.100 to 1.100) | +200000 |")
    assert "1 GFLOP/s" in said


def test_operations_of_a_recurrent_layer_of_cudnn():
    from mptrain.roofline import FORMULAS

    aten, x = torch.ops.aten, torch.empty(5, 3, 7)
    weights = [torch.empty(44, 7), torch.empty(44, 11), torch.empty(44), torch.empty(44)]
    forward = FORMULAS[aten._cudnn_rnn](x, weights, 4, None, out_val=None)
    assert forward == 2 * 15 * (44 * 7 + 44 * 11)
    assert FORMULAS[aten._cudnn_rnn_backward](x, weights, 4, None, out_val=None) == 2 * forward
    assert FORMULAS[aten._cudnn_rnn](x.flatten(0, 1), weights, 4, None, out_val=None) == forward  # packed


def test_the_largest_batch_is_guessed_and_then_tried(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from contextlib import contextmanager
    from types import SimpleNamespace

    import gpu_speed

    tried = []

    @contextmanager
    def training(built, precision, size):
        tried.append(size)
        if size > 36:
            raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")
        yield None

    total = SimpleNamespace(total_memory=48 * gpu_speed.GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(gpu_speed, "training", training)
    monkeypatch.setattr(gpu_speed.Bench, "fill", lambda self, row, _, flop: setattr(row, "throughput", flop["tf32"]))
    bench = gpu_speed.Bench(1.0, {}, None, lambda: 60.0)
    built = SimpleNamespace(recipe="made_up", device=torch.device("cuda"))
    equal = gpu_speed.Speed("made_up", "fp32", "equal", 8, peak_gib=10.0, step_ms=100.0)
    # 2 GiB stay, 8 GiB belong to 8 samples; 0.92 of 48 GiB less 2 has room for 42.
    row = bench.largest(built, "fp32", 2 * gpu_speed.GIB, equal, {"tf32": 24.0})
    assert tried == [40, 32] and (row.batch, row.throughput, row.note) == (32, 96.0, "")
    equal.step_ms = 4000.0
    row = bench.largest(built, "fp32", 2 * gpu_speed.GIB, equal, {"tf32": 24.0})
    assert row.batch == 8 and "limited by a step of 3 s" in row.note
    equal.step_ms, tried[:] = 100.0, []
    monkeypatch.setattr(gpu_speed, "training", lambda *args: training("", "", tried.append(args[2]) or 99))
    row = bench.largest(built, "fp32", 2 * gpu_speed.GIB, equal, {"tf32": 24.0})
    assert row.batch is None and row.note == "none of four batches fits"
    bench.left = lambda: 0.0
    assert bench.largest(built, "fp32", 2 * gpu_speed.GIB, equal, {"tf32": 24.0}).note == "no time left"
