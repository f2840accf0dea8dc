"""Memory of one training step by kind, of recipes in several precisions and batch sizes, for the page of a report.

    python scripts/memory_table.py [--recipes resnet ssd ...] [--out mptrain/results/report/memory.csv]

Counts as `mptrain estimate` does, on networks without numbers: no GPU, no data, the same numbers on every machine. What
cannot be estimated is named and left out. Recipes that are in the file already are kept unless they are named.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mptrain import compose, estimate, files
from mptrain.errors import UserError
from mptrain.precision.modes import Precision
from mptrain.results.csvfile import read_csv, write_csv
from mptrain.results.report.memory import KINDS, Memory

PRECISIONS = ("fp32", "fp16", "fp16_master")
FACTORS = (0.25, 1, 4)
OUT = Path("mptrain/results/report/memory.csv")


def lines_of(recipe: str) -> list[Memory]:
    """Every precision and batch size of one recipe."""
    config = compose.config([f"+recipe={recipe}"])
    own = config.batch_size
    sizes = sorted({max(1, int(own * factor)) for factor in FACTORS})
    numbers = [Precision.load(name) for name in PRECISIONS]
    found = []
    for precision, model in zip(numbers, estimate.models(config, numbers), strict=True):
        for size in sizes:
            memory = model.step(size).memory
            kinds = {kind: memory.get(kind, 0) for kind in KINDS}
            assert sum(kinds.values()) == sum(memory.values()), f"kinds that the page does not know: {set(memory)}"
            found.append(Memory(recipe, precision.label, size, size == own, **kinds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="unset: all that are not in the file")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    lines = read_csv(chosen.out.read_text(encoding="utf-8"), Memory) if chosen.out.exists() else []
    present = {line.recipe for line in lines}
    for recipe in chosen.recipes or [name for name in files.names("recipe") if name not in present]:
        began = time.perf_counter()
        try:
            found = lines_of(recipe)
        except UserError as error:
            print(f"{recipe}: left out: {error}", flush=True)
            continue
        lines = [line for line in lines if line.recipe != recipe] + found
        chosen.out.write_text(write_csv(sorted(lines, key=lambda line: line.recipe), Memory), encoding="utf-8")
        print(f"{recipe}: {len(found)} steps counted in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
