"""What a training step of each small recipe costs in FP16 and BF16 on this CPU, beside FP32.

    python scripts/benchmark_families.py [--steps 2] [--blocks 3] [--threads 2] [RECIPE ...]

Blocks of steps of the three alternate in one process; printed are medians and their ratio to FP32.
"""

from __future__ import annotations

import argparse

import torch
from benchmark_emulation import measure

from mptrain import files
from mptrain.precision.modes import Precision

PRECISIONS = ("fp32", "fp16", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("recipes", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backends = {name: Precision.load(name).backend("cpu") for name in PRECISIONS[1:]}
    print("| recipe | FP32, ms a step |" + "".join(f" {name} ({backends[name]}) |" for name in backends))
    print("|---|---:|---:|---:|")
    for recipe in options.recipes or [name for name in files.names("recipe") if not name.endswith("_paper")]:
        found = measure(recipe, PRECISIONS, options.steps, options.blocks)
        base = float(found["fp32"])
        cells = (v if isinstance(v, str) else f"{v / base:.2f} x" for v in (found[name] for name in backends))
        print(f"| `{recipe}` | {base * 1e3:.0f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
