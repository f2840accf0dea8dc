"""Emulated FP16 beside FP32, torch's own CPU FP16 and rounding after every module: time and exactness.

    python scripts/benchmark_emulation.py [--steps 2] [--blocks 5] [--threads 1]

Time is that of whole training steps of two recipes, blocks of all ways alternating in one process.

- emulated: this project's FP16, TF32 and, where the processor has none, BF16.
- torch's own: the same loop under torch's CPU autocast in FP16. It may use FP16 units (AVX512-FP16, AMX-FP16) and has
  slow reference kernels for the rest. Measured as it is here and, in a child process with
  ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, as on a processor without FP16 units.
- after modules: what quantisers placed in a network do (QPyTorch and others): every module's output and its gradient
  are rounded by an autograd function in a forward hook, weights and their gradients around the step. The rounding is
  torch's own cast, so this way is as exact and as fast as it can be.

Exactness is the share of elements with the very bits of the definition: each operation in FP32 on FP16 operands, its
result rounded once, and the same for each product of its derivative.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarking import Spread, alternate, as_in_runs, parser, peak, ratio, report, table, timed
from exactness import MODULES, NATIVE, exactness_table, round_after_modules, round_in_place

from mptrain import compose, files
from mptrain.config import check
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.results.record import Record
from mptrain.roofline import counted
from mptrain.train import Run

RECIPES = ("resnet", "language")
PRECISIONS = ("fp32", "fp16", "bf16", "tf32")
SLOW = 5.0
"""Seconds; a first step slower than this is the measurement."""
Times = dict[str, list[float] | str]
"""Seconds a step, block by block, or what torch said instead."""


def run_of(recipe: str, precision: str, folder: Path) -> Run:
    values = compose.baseline(recipe, precision) | {
        "tensorboard": False,
        "device": "cpu",
        "out": str(folder / precision),
    }
    return Run(check(values), Record(values["out"]))


def stepper(recipe: str, which: str, folder: Path) -> Callable[[int], None]:
    """Runs so many training steps of a recipe, in a precision or in one of the other ways."""
    run = run_of(recipe, "fp32" if which in (NATIVE, MODULES) else which, folder / which.replace(" ", "_"))
    if which == NATIVE:
        run.region = torch.autocast("cpu", torch.float16)
    if which == MODULES:
        for model in run.models.values():
            round_after_modules(model)
    windows = run.loader.windows()
    parameters = [p for model in run.models.values() for p in model.parameters()]
    if which == MODULES:
        apply = run.apply

        def rounding(name: str) -> None:
            round_in_place(p.grad for p in parameters)
            apply(name)
            round_in_place(iter(parameters))

        run.apply = rounding  # type: ignore[method-assign]

    def steps(count: int) -> None:
        for _ in range(count):
            run.step(next(windows))
        run.recent.clear()

    return steps


def measure(recipe: str, names: tuple[str, ...], steps: int, blocks: int) -> Times:
    """Blocks of all of them alternate."""
    found: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        loops = {}
        for name in names:
            try:
                loop = timed(stepper(recipe, name, Path(folder)))
                first = loop(1)
            except RuntimeError as error:
                found[name] = str(error).splitlines()[0]
                continue
            if first > SLOW:
                found[name] = [first]  # no warm-up matters here, and no patience lasts for more
            else:
                loops[name] = loop
        found |= alternate(loops, steps, blocks)
    return {name: found[name] for name in names}


def work(recipe: str) -> float:
    """FLOP of a step's products."""
    with tempfile.TemporaryDirectory() as folder:
        steps = stepper(recipe, "fp32", Path(folder))
        return counted(lambda: steps(1)).flops


def against(times: list[float] | str, base: list[float]) -> tuple[str, str]:
    """Milliseconds a step, and the ratio to FP32 with its quartiles."""
    if isinstance(times, str):
        return "does not run", ""
    if len(times) != len(base):
        return f"{times[0] * 1e3:.1f}", f"{times[0] / Spread.of(base).median:.0f} (one step)"
    median, quartiles = ratio(times, base).cells()
    return f"{Spread.of(times).median * 1e3:.1f}", f"{median} ({quartiles})"


def without_fp16_units(recipe: str, options: argparse.Namespace) -> Times:
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


def time_table(options: argparse.Namespace) -> list[str]:
    tops = {"fp32": peak(torch.float32), "bf16": peak(torch.bfloat16)}
    rows, notes = [], []
    for recipe in (name for name in RECIPES if name in files.names("recipe")):
        found = measure(recipe, (*PRECISIONS, MODULES, NATIVE), options.steps, options.blocks)
        limited = without_fp16_units(recipe, options)
        base, done = found["fp32"], work(recipe)
        assert not isinstance(base, str)
        for name, times in found.items():
            backend = f" ({Precision.load(name).backend('cpu')})" if name in PRECISIONS else ""
            native_bf16 = name == "bf16" and hardware.cpu_has_bfloat16()
            shown, share = against(times, base), ""
            if not isinstance(times, str):
                share = f"{done / Spread.of(times).median / tops['bf16' if native_bf16 else 'fp32']:.0%}"
            rows.append([recipe, name + backend, *shown, share])
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
        rows.append([recipe, f"{NATIVE}, as without FP16 units", *against(limited[NATIVE], limited["fp32"]), ""])  # type: ignore[arg-type]
        notes += [f"{recipe}: {done / 1e9:.3g} GFLOP a step."]
        for name, times in (("here", found[NATIVE]), ("as without FP16 units", limited[NATIVE])):
            emulated = found["fp16"]
            if not isinstance(times, str) and not isinstance(emulated, str):
                faster = Spread.of(times).median / Spread.of(emulated).median
                notes.append(f"Emulated FP16 is {faster:.0f} times as fast as torch's own {name}.")
            elif isinstance(times, str):
                notes.append(f"torch's own {name}: {times}.")
    notes.append(
        f"Peak of a 1024 x 1024 product in this run: FP32 {tops['fp32'] / 1e9:.0f}, BF16 {tops['bf16'] / 1e9:.0f} "
        f"GFLOP/s. This CPU has {'' if has_fp16_units() else 'no '}FP16 units; whether torch uses them shows above."
    )
    header = ["recipe", "way", "ms a step", "over FP32 (quartiles)", "of the peak"]
    return [table(header, rows), "\n".join(f"- {note}" for note in notes)]


def main() -> None:
    options = parser(__doc__, "emulation")
    options.add_argument("--steps", type=int, default=2, help="steps in a block (default: 2)")
    options.add_argument("--blocks", type=int, default=5, help="rounds of blocks (default: 5)")
    options.add_argument("--child", help=argparse.SUPPRESS)
    given = options.parse_args()
    as_in_runs(given.threads)
    if given.child:
        print(json.dumps(measure(given.child, ("fp32", NATIVE), given.steps, given.blocks)))
        return
    parts = [
        "Whole training steps:",
        *time_table(given),
        "Elements with the bits of the definition:",
        exactness_table(),
    ]
    about = (
        "Blocks of all ways alternate in one process; ratios are medians over rounds with quartiles. The definition: "
        "each operation in FP32 on FP16 operands, rounded once."
    )
    report(given.out, "Emulated FP16: time and exactness", about, parts)


if __name__ == "__main__":
    main()
