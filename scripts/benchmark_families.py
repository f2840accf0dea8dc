"""What a training step of each small recipe costs in FP16 and BF16 on this CPU, beside FP32.

    python scripts/benchmark_families.py [--steps 1] [--blocks 3] [--threads 1] [RECIPE ...]

Blocks of steps of the three alternate in one process; shown are medians, ratios within a round with their quartiles,
and the distance to the peak of a large product. All recipes take longer than three minutes on a shared machine.
"""

from __future__ import annotations

import sys

import torch
from benchmark_emulation import against, measure, work
from benchmarking import Spread, as_in_runs, parser, peak, report, table

from mptrain import files
from mptrain.precision.modes import Precision

PRECISIONS = ("fp32", "fp16", "bf16")
DEFAULT = ("resnet", "ssd", "faster_rcnn", "speech", "translate", "language", "gan", "clip")


def main() -> None:
    options = parser(__doc__, "families")
    options.add_argument("--steps", type=int, default=1, help="steps in a block (default: 1)")
    options.add_argument("--blocks", type=int, default=3, help="rounds of blocks (default: 3)")
    options.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"default: {' '.join(DEFAULT)}")
    given = options.parse_args()
    as_in_runs(given.threads)
    backends = {name: Precision.load(name).backend("cpu") for name in PRECISIONS}
    top = peak(torch.float32)
    rows = []
    for recipe in given.recipes or [name for name in DEFAULT if name in files.names("recipe")]:
        found = measure(recipe, PRECISIONS, given.steps, given.blocks)
        base = found["fp32"]
        if isinstance(base, str):
            rows.append([f"`{recipe}`", base, "", "", ""])
            continue
        seconds = Spread.of(base).median
        cells = [against(found[name], base)[1] for name in PRECISIONS[1:]]
        rows.append([f"`{recipe}`", f"{seconds * 1e3:.0f}", f"{work(recipe) / seconds / top:.0%}", *cells])
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    header = ["recipe", "FP32, ms a step", "of the FP32 peak"]
    header += [f"{name} ({backends[name]}) / fp32 (quartiles)" for name in PRECISIONS[1:]]
    about = f"Peak: a product of two 1024 x 1024 FP32 matrices in this run, {top / 1e9:.0f} GFLOP/s."
    report(given.out, "A training step of every family in FP16 and BF16, beside FP32", about, [table(header, rows)])


if __name__ == "__main__":
    main()
