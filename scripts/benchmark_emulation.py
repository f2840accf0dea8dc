"""What a training step costs in each precision on this CPU, beside FP32 and beside torch's own FP16.

    python scripts/benchmark_emulation.py [--steps 3] [--blocks 3] [--threads 1]

Emulated FP16 and TF32 are exact and run on any CPU. torch's own CPU autocast in FP16 may use the processor's FP16
units where it has them (AVX512-FP16, AMX-FP16) and falls back to slow reference kernels elsewhere. Measured are this
processor as it is and, in a child process with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, one without FP16 units.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mptrain import compose, files
from mptrain.config import check
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.results.record import Record
from mptrain.train import Run

RECIPES = ("resnet", "language")
PRECISIONS = ("fp32", "fp16", "bf16", "tf32")
NATIVE = "torch's own FP16"
SLOW = 5.0
"""Seconds; a first step slower than this is the measurement."""


def run_of(recipe: str, precision: str, folder: Path) -> Run:
    values = compose.baseline(recipe, precision) | {
        "tensorboard": False,
        "device": "cpu",
        "out": str(folder / precision),
    }
    return Run(check(values), Record(values["out"]))


def stepper(recipe: str, which: str, folder: Path) -> Callable[[int], None]:
    """Runs so many training steps of a recipe; torch's own FP16 is the same loop under torch's own autocast."""
    run = run_of(recipe, "fp32" if which == NATIVE else which, folder)
    if which == NATIVE:
        run.region = torch.autocast("cpu", torch.float16)
    windows = run.loader.windows()

    def steps(count: int) -> None:
        for _ in range(count):
            run.step(next(windows))

    return steps


def measure(recipe: str, names: tuple[str, ...], steps: int, blocks: int) -> dict[str, float | str]:
    """Median seconds per step of each, blocks of all of them alternating; or what torch said instead."""
    found: dict[str, list[float]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        steppers = {}
        for name in names:
            try:
                run = stepper(recipe, name, Path(folder))
                start = time.perf_counter()
                run(1)
                if (first := time.perf_counter() - start) > SLOW:
                    found[name].append(first)  # no warm-up matters here, and no patience lasts for more
                else:
                    steppers[name] = run
            except RuntimeError as error:
                errors[name] = str(error).splitlines()[0]
        for _ in range(blocks):
            for name, run in steppers.items():
                start = time.perf_counter()
                run(steps)
                found[name].append((time.perf_counter() - start) / steps)
    return {name: errors[name] if name in errors else statistics.median(found[name]) for name in names}


def without_fp16_units(recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    call = [sys.executable, __file__, "--child", recipe, "--steps", "1", "--blocks", "2"]
    call += ["--threads", str(options.threads)]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    return json.loads(subprocess.run(call, env=environment, capture_output=True, text=True, check=True).stdout)


def has_fp16_units() -> bool:
    """Whether /proc/cpuinfo names FP16 arithmetic (x86: AVX512-FP16 or AMX-FP16, Arm: fphp)."""
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return any(word in ("avx512_fp16", "amx_fp16", "fphp", "asimdhp") for word in words)


def show(name: str, seconds: float | str, base: float) -> None:
    if isinstance(seconds, str):
        print(f"  {name:<44} does not run: {seconds}")
    else:
        print(f"  {name:<44} {seconds * 1e3:9.1f} ms   {seconds / base:7.2f} x fp32", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=3, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(measure(options.child, ("fp32", NATIVE), options.steps, options.blocks)))
        return
    units = has_fp16_units()
    print(f"This CPU has {'' if units else 'no '}FP16 units; whether torch uses them is measured below.")
    print(f"BF16 is {'native' if hardware.cpu_has_bfloat16() else 'emulated'} here. {options.threads} thread(s).")
    for recipe in RECIPES:
        if recipe not in files.names("recipe"):
            continue
        print(f"\n{recipe}, one training step")
        found = measure(recipe, (*PRECISIONS, NATIVE), options.steps, options.blocks)
        base = float(found["fp32"])
        for name in PRECISIONS:
            show(f"{name} ({Precision.load(name).backend('cpu')})", found[name], base)
        show(f"{NATIVE}, this CPU", found[NATIVE], base)
        limited = without_fp16_units(recipe, options)
        show(f"{NATIVE}, as without FP16 units", limited[NATIVE], float(limited["fp32"]))


if __name__ == "__main__":
    main()
