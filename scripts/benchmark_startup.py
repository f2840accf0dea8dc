"""How long commands take before they do anything, and `mptrain compare` over many records.

    python scripts/benchmark_startup.py [--tries 5] [--records 10,100,1000,10000]

Each command is a process of its own, started again for every try. Shown are processor seconds (user and system) and
seconds of the wall, medians; on a shared machine the first say more. The records are summaries as a run leaves them,
of made-up seeds: per recipe and precision ten seeds, so that tables have as many lines as records over ten.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from benchmarking import parser, report, table

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import mptrain'": ["-c", "import mptrain"],
    "mptrain --help": ["-m", "mptrain", "--help"],
    "mptrain (the recipes)": ["-m", "mptrain"],
    "mptrain +recipe=resnet precision=fp17 (refused)": ["-m", "mptrain", "+recipe=resnet", "precision=fp17"],
    "mptrain compare --help": ["-m", "mptrain", "compare", "--help"],
    "python -c 'import torch'": ["-c", "import torch"],
}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp16_master")
SEEDS = 10


def seconds(arguments: list[str], tries: int) -> tuple[float, float]:
    """Median processor and wall seconds of a Python process with these arguments."""
    found = []
    for _ in range(tries):
        before, start = os.times(), time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wall, after = time.perf_counter() - start, os.times()
        used = after.children_user - before.children_user + after.children_system - before.children_system
        found.append((used, wall))
    used, wall = (statistics.median(column) for column in zip(*found, strict=True))
    return used, wall


def write_records(folder: Path, count: int) -> None:
    """`count` folders of finished runs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        seed, row = number % SEEDS, number // SEEDS
        precision, recipe = PRECISIONS[row % len(PRECISIONS)], f"made_up_{row // len(PRECISIONS)}"
        run = folder / f"{recipe}-{precision}-seed{seed}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("recipe: made_up\n", encoding="utf-8")
        (run / "summary.json").write_text(json.dumps(_summary(recipe, precision, seed, rng)) + "\n", encoding="utf-8")


def _summary(recipe: str, precision: str, seed: int, rng: np.random.Generator) -> dict:
    dtypes = {"matmul": precision, "softmax": "float32", "norm": precision, "loss": "float32"}
    metric = {"name": "top1", "value": 0.88 + 0.003 * rng.standard_normal(), "higher_is_better": True, "margin": 0.01}
    key = {"recipe": recipe, "data": "fashion", "steps": 600, "batch_size": 128, "accumulate": 1, "settings": "0"}
    return {
        "schema": 1,
        "status": "finished",
        "reason": None,
        "recipe": recipe,
        "precision": precision,
        "precision_label": precision,
        "scale": "none",
        "seed": seed,
        "device": "cpu",
        "backend": "native",
        "dtypes": dtypes,
        "metric": metric,
        "throughput": {"value": 2000.0 + 50 * rng.standard_normal(), "unit": "images/s", "warmup": 5, "steps": 600},
        "memory": {"peak_mib": 120.0, "how": "live tensor bytes"},
        "steps": {"attempted": 600, "applied": 600, "skipped": 0},
        "final_scale": None,
        "data": {"name": "fashion", "kind": "real"},
        "environment": {"torch": "2.14.1", "device_name": "made up", "commit": "abc1234"},
        "eval_precision": "fp32",
        "finished": "2026-01-01T00:01:00+00:00",
        "key": key | {"device": "cpu", "torch": "2.14.1"},
    }


def main() -> None:
    options = parser(__doc__, "startup")
    options.add_argument("--tries", type=int, default=5)
    options.add_argument("--records", default="10,100,1000,10000", help="numbers of records, with commas")
    given = options.parse_args()
    rows = []
    for name, arguments in COMMANDS.items():
        used, wall = seconds(arguments, given.tries)
        rows.append([f"`{name}`", f"{used:.3f}", f"{wall:.3f}"])
    compared = []
    for count in map(int, given.records.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            write_records(Path(folder), count)
            used, wall = seconds(["-m", "mptrain", "compare", folder], min(given.tries, 3) if count < 5000 else 1)
        compared.append([str(count), f"{used:.2f}", f"{wall:.2f}", f"{used / count * 1e3:.2f}"])
    parts = [
        table(["command", "processor, s", "wall, s"], rows),
        "`mptrain compare` over records of ten seeds and five precisions a recipe:",
        table(["records", "processor, s", "wall, s", "processor, ms a record"], compared),
    ]
    report(given.out, "Start-up, and tables of many records", "Medians; no roofline: nothing here computes.", parts)


if __name__ == "__main__":
    main()
