"""The GPU check: everything about this project that only a GPU can tell, in one command and nine minutes.

    python scripts/gpu_check.py [--out results/gpu] [--minutes 9] [--parts tests,trainings,speed,estimates]
    python scripts/gpu_check.py --device cpu --tiny --out /tmp/check      # the same code with small sizes, on a CPU

It needs a checkout, Python, torch 2.11 or newer and the packages of pyproject.toml; no network and no data. Parts:

tests       the tests marked `gpu`: native against emulated numerics, switches, synchronisation, memory
trainings   small recipes on embedded data, trained as they are, and `mptrain compare` over them
speed       every recipe at the paper's size on synthetic data, in every precision that GPUs have, at the recipe's batch
            and at the largest that fits: throughput, memory, distance to the peak, energy
estimates   what `mptrain estimate` said of the peak memory beside what was allocated

A part that runs out of time, or fails, says so in the tables, which are written after every recipe. The same command
goes on: rows of speed.csv that this commit measured on this device are kept. A copy without its history knows no
commit; `--commit` names it. Written are check.md, speed.csv, trainings.csv and tests.txt; published.csv, in
results/gpu already, is what NVIDIA published for related networks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from benchmarking import table
from gpu_meters import Energy, memory_of, missing_packages, peaks
from gpu_report import cell, outcomes, speed_tables
from gpu_speed import Bench, Built, DeviceLost, Speed

from mptrain import compose, files, measure
from mptrain.config import check
from mptrain.errors import UserError
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.results.csvfile import read_csv, write_csv
from mptrain.results.markdown import markdown
from mptrain.results.row import Row
from mptrain.results.runs import find_runs
from mptrain.results.table import build_table
from mptrain.results.words import document_of
from mptrain.train import train

ROOT = Path(__file__).parent.parent
PARTS = {"tests": 100, "trainings": 90, "speed": 300, "estimates": 30}
"""Seconds of nine minutes that each may take; speed takes what the ones before it left."""
PRECISIONS = ("fp32", "fp16", "bf16", "tf32", "fp8")
FIRST = ("resnet50_paper", "ssd_paper", "language_paper", "translate_paper", "speech_paper", "clip_paper")
SMALL = ("resnet", "ssd", "language", "translate", "gan")
ESTIMATED = ("resnet50_paper", "ssd_paper", "gan_paper")


class Check:
    """One call of the script: its options, its clock, and what was found so far."""

    def __init__(self, options: argparse.Namespace):
        self.device, self.tiny, self.out = options.device, options.tiny, options.out
        self.parts = options.parts.split(",")
        self.started = time.monotonic()
        self.minutes = options.minutes
        self.recipes = options.recipes.split(",") if options.recipes else paper_recipes(self.tiny)
        self.precisions = [name for name in PRECISIONS if name in files.names("precision")]
        if self.tiny:
            self.precisions = ["fp32", "fp16"]
        self.missing = missing_packages()
        self.environment = measure.environment(torch.device(self.device))
        self.environment["commit"] = options.commit or self.environment["commit"]
        self.speeds: list[Speed] = []
        self.kept = self.earlier()
        self.peaks: dict[str, float] = {}
        self.said: dict[str, list[str]] = {part: [] for part in PARTS}
        self.took: dict[str, float] = {}

    def left(self, reserve: float = 10.0) -> float:
        """Seconds until the script has to be done with measuring."""
        return self.minutes * 60 - reserve - (time.monotonic() - self.started)

    def run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        for part in (part for part in PARTS if part in self.parts):
            start = time.monotonic()
            reserve = 10.0 + sum(PARTS[p] for p in ("estimates",) if part == "speed" and p in self.parts)
            limit = self.left(reserve) if part == "speed" else min(self.left(), PARTS[part])
            end = start + limit
            print(f"{part}: {limit:.0f} seconds", flush=True)
            if limit > 0:
                try:
                    getattr(self, part)(lambda end=end: end - time.monotonic())
                except Exception as error:  # written down, and the other parts go on
                    self.said[part].append(f"ended early: {type(error).__name__}: {error}")
            else:
                self.said[part].append("no time left")
            self.took[part] = time.monotonic() - start
            self.write()

    def tests(self, left: Callable[[], float]) -> None:
        whole_runs = "test_gpu_run.py"  # take longest, so they come last
        files_of_tests = sorted((ROOT / "tests").glob("test_*.py"), key=lambda path: (path.name == whole_runs, path))
        found = [str(path) for path in files_of_tests if "mark.gpu" in path.read_text(encoding="utf-8")]
        call = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *found]
        with open(self.out / "tests.txt", "w+", encoding="utf-8") as log:
            try:
                path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
                environment = {**os.environ, "PYTHONPATH": path}
                subprocess.run(call, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=left(), env=environment)
                end = "ended"
            except subprocess.TimeoutExpired:
                end = "stopped for want of time"
            log.seek(0)
            lines = log.read().splitlines() or ["nothing was said"]
        self.said["tests"].append(f"{end}: {outcomes(lines)}")

    def trainings(self, left: Callable[[], float]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for recipe, precision in pairs(SMALL[:1] if self.tiny else SMALL, self.precisions):
                if left() <= 0:
                    self.said["trainings"].append(f"{recipe} {precision}: no time left")
                    continue
                values = compose.baseline(recipe, precision)
                values |= {"device": self.device, "tensorboard": False, "progress": False}
                values |= {"steps": 3, "batch_size": 8, "data": "synthetic"} if self.tiny else {}
                try:
                    train(check(values | {"out": f"{folder}/{recipe}-{precision}"}))
                except Exception as error:  # listed, and the others go on
                    self.said["trainings"].append(f"{recipe} {precision}: {type(error).__name__}: {error}")
            compared = build_table(*find_runs([Path(folder)]))
        (self.out / "trainings.csv").write_text(write_csv(compared.rows, Row), encoding="utf-8")
        self.said["trainings"].append(markdown(document_of(compared)).replace("# ", "### "))

    def speed(self, left: Callable[[], float]) -> None:
        start = time.monotonic()
        self.peaks = peaks(self.device, 256 if self.device == "cpu" else 8192)
        energy = Energy(self.device)
        self.said["speed"] += [f"Energy: {energy.how}."]
        # A batch of two: one sample has no statistics.
        changes = {"batch_size": 2} if self.tiny else {}
        for number, recipe in enumerate(self.recipes):
            known = [row for row in self.kept if row.recipe == recipe]
            if self.complete(known) or left() <= 0:
                self.speeds += known or [Speed(recipe, "", "equal", note="no time left")]
                continue
            # No recipe may take more than twice its share.
            until = time.monotonic() + 2 * left() / (len(self.recipes) - number)
            seconds = 0.0 if self.tiny else 0.7
            bench = Bench(seconds, self.peaks, energy, lambda end=until: min(left(), end - time.monotonic()))
            try:
                built = Built(recipe, self.device, changes)
                for row in bench.rows(built, self.precisions, largest=not self.tiny):
                    self.speeds.append(row)
                    said = f"{row.throughput:.4g} {row.unit}" if row.throughput else row.note
                    print(f"  {row.recipe} {row.precision} {row.which} {row.batch}: {said}", flush=True)
                    self.save()
            except DeviceLost as error:
                self.speeds.append(Speed(recipe, "", "equal", note=f"the device was lost: {error}"))
                self.said["speed"].append("The device was lost on the way; the same command goes on from there.")
                break
            except Exception as error:  # listed, and the others go on
                self.speeds.append(Speed(recipe, "", "equal", note=f"{type(error).__name__}: {error}"))
            self.took["speed"] = time.monotonic() - start
            self.write()  # whatever stops this script, what was measured is there
        self.save()

    def complete(self, rows: list[Speed]) -> bool:
        """Whether an earlier call had the time for every row of a recipe."""
        equal = {row.precision: row for row in rows if row.which == "equal"}
        wanted = {name for name, row in equal.items() if row.throughput and not self.tiny}
        tried = equal.keys() >= set(self.precisions) and {r.precision for r in rows if r.which == "largest"} >= wanted
        return tried and not any(row.note == "no time left" for row in rows)

    def estimates(self, left: Callable[[], float]) -> None:
        from mptrain import estimate  # leans on torch's own tools, which the other parts can do without

        rows = []
        for recipe in dict.fromkeys(row.recipe for row in self.speeds):
            measured = [r for r in self.speeds if (r.recipe, r.which) == (recipe, "equal") and r.step_ms and r.batch]
            measured = [row for row in measured if row.precision in ("fp32", "fp16")]
            if not measured or not (recipe in ESTIMATED or self.tiny) or left() <= 0:
                continue
            values = compose.baseline(recipe, "fp32") | {"batch_size": measured[0].batch, "accumulate": 1}
            config = check(values | {"data": "synthetic", "data_dir": None})
            try:
                models = estimate.models(config, [Precision.load(row.precision) for row in measured])
                for row, model in zip(measured, models, strict=True):
                    said = model.step(row.batch or 1).peak / 2**30
                    beside = [cell(row.peak_gib, 2), cell(row.peak_gib and said / row.peak_gib, 3)]
                    rows.append([recipe, row.precision, str(row.batch), f"{said:.2f}", *beside])
            except Exception as error:  # listed, and the others go on
                self.said["estimates"].append(f"{recipe}: {type(error).__name__}: {str(error)[:200]}")
        header = ["recipe", "precision", "batch", "estimated GiB", "allocated GiB", "ratio"]
        self.said["estimates"].append(table(header, rows))

    # What is written.

    def label(self) -> str:
        return f"{self.environment['device_name']}, {self.environment['commit']}"

    def earlier(self) -> list[Speed]:
        """Rows of an earlier call with the same device and commit."""
        try:
            first, _, rest = (self.out / "speed.csv").read_text(encoding="utf-8").partition("\n")
            return read_csv(rest, Speed) if first == f"# {self.label()}" else []
        except (OSError, ValueError, TypeError):
            return []

    def save(self) -> None:
        reached = {row.recipe for row in self.speeds}
        later = [row for row in self.kept if row.recipe not in reached]
        text = f"# {self.label()}\n{write_csv([*self.speeds, *later], Speed)}"
        (self.out / "speed.csv").write_text(text, encoding="utf-8")

    def write(self) -> None:
        here = self.environment
        command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
        driver = f", CUDA {here['cuda']}, {memory_of(self.device)}" if here["cuda"] else ""
        minutes = f"{(time.monotonic() - self.started) / 60:.1f} minutes"
        took = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in self.took.items())
        parts = [
            "# GPU check" + (" (a dry run: sizes are made small, no number means anything)" if self.tiny else ""),
            f"`{command}` on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {here['device_name']}{driver}, "
            f"torch {here['torch']}, Python {here['python']}, commit {here['commit']}, seed 0, {minutes} ({took}).",
        ]
        if self.missing:
            parts.append(f"Not installed here: {', '.join(self.missing)}.")
        for part in (part for part in PARTS if part in self.took):
            parts += [f"## {part.capitalize()}", *self.said[part]]
            parts += speed_tables(self.speeds, self.peaks) if part == "speed" else []
        (self.out / "check.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def paper_recipes(tiny: bool) -> list[str]:
    """All recipes at the paper's size, the telling ones first; small ones instead for a dry run."""
    if tiny:
        return ["resnet", "language"]
    found = [name for name in files.names("recipe") if name.endswith("_paper")]
    return sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def pairs(recipes: Sequence[str], precisions: Sequence[str]) -> list[tuple[str, str]]:
    """Every recipe in every precision: first all in FP32 and FP16, so that whatever time allows has a ratio."""
    return [(r, p) for some in (precisions[:2], precisions[2:]) for r in recipes for p in some]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of the tables")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: 9)")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--recipes", default="", help="for the part speed, with commas (default: all *_paper)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of a copy of the checkout without its history")
    parser.add_argument("--tiny", action="store_true", help="small sizes; for a dry run on a CPU")
    options = parser.parse_args(argv)
    if unknown := [part for part in options.parts.split(",") if part not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: choose from {', '.join(PARTS)}")
    try:
        hardware.resolve(options.device)
        if options.device == "cpu" and not options.tiny:
            parser.error("--device cpu takes --tiny: the paper's sizes would take days")
        Check(options).run()
    except UserError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
