"""The runner beside a loop written by hand, Lightning and Accelerate: same network, data, optimizer and precision.

    python scripts/benchmark_loop.py [--blocks 9] [--threads 1] [--growth]

Lightning and Accelerate are optional (`pip install lightning accelerate`); what is not installed has no column. Each
of the four is a process of its own, so that none runs with another's patches, caches or allocator. Blocks of steps
alternate between them, one runs at a time, and all draw batches in memory from a generator that holds them back
between two blocks. All keep the memory they free. Progress bars, logs, checkpoints and TensorBoard are off for all;
Lightning runs in its "barebones" mode. The runner's loop is the whole one that `mptrain` runs. The loop by hand does
what such loops do: zero_grad, forward, backward, step; in FP16, which no CPU library has, with this project's
arithmetic and scaler.

--growth measures instead how the runner's share grows with the width of a network and its batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile

import torch
import torch.nn.functional as F
from benchmarking import Spread, alternate, parser, peak, ratio, report, table
from contenders import PEERS, Case, Contender, batches, built, configured

from mptrain.roofline import Work, counted


def race(contenders: list[Contender], case: Case, seconds: float, blocks: int) -> dict[str, list[float]]:
    """Seconds per step of each, in blocks of about `seconds`."""
    if case.precision == "fp16":
        contenders = [c for c in contenders if c.name not in PEERS]
    loops, trainings = {}, [(c.name, c.training(case)) for c in contenders]
    for name, training in trainings:
        loops[name] = training.__enter__()
    for loop in loops.values():
        loop(2)  # in these the runner looks at memory and formats
    steps = max(2, round(2 * seconds / loops["by hand"](2)))
    found = alternate(loops, steps, blocks)
    for _, training in trainings:
        training.__exit__(None, None, None)
    return found


def work(case: Case) -> Work:
    """What a training step by hand does, in FP32."""
    with tempfile.TemporaryDirectory() as folder:
        config = configured(case, folder)
        task = built(case, config)
        model = task.models["model"]
        optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr, **config.optimizer.options)
        x, y = next(batches(task, config.batch_size))

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        step()
        return counted(step)


def compared(contenders: list[Contender], cases: list[Case], seconds: float, blocks: int) -> list[str]:
    """The table of all contenders, with the distance to the peak."""
    others = [c.name for c in contenders if c.name != "by hand"]
    rows = []
    tops = {"fp32": peak(torch.float32), "bf16": peak(torch.bfloat16)}
    for case in cases:
        times = race(contenders, case, seconds, blocks)
        own = Spread.of(times["by hand"]).median
        done = work(case)
        share = done.flops / own / tops.get(case.precision, tops["fp32"])
        row = [case.name, case.precision, f"{own * 1e3:.3f}", f"{done.flops / 1e9:.3g}", f"{share:.0%}"]
        for name in others:
            row.append("{} ({})".format(*ratio(times[name], times["by hand"]).cells()) if name in times else "")
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    header = ["network", "precision", "by hand, ms", "GFLOP", "of the peak"]
    peaks = f"Peak: a product of two 1024 x 1024 matrices in this run, FP32 {tops['fp32'] / 1e9:.0f} and BF16 "
    peaks += f"{tops['bf16'] / 1e9:.0f} GFLOP/s; emulated FP16 computes in FP32."
    return [table([*header, *(f"{name} / by hand (quartiles)" for name in others)], rows), peaks]


def growth(contenders: list[Contender], seconds: float, blocks: int) -> list[str]:
    """The runner beside the loop by hand over widths and batches, with the distance to the peak."""
    rows, top = [], peak(torch.float32)
    for wide, batch in ((32, 32), (64, 64), (128, 128), (256, 128), (512, 128), (1024, 128), (512, 16), (512, 512)):
        row = [str(wide), str(batch)]
        flops = work(Case("fp32", wide, batch)).flops
        for precision in ("fp32", "bf16", "fp16"):
            times = race(contenders, Case(precision, wide, batch), seconds, blocks)
            median, quartiles = ratio(times["runner"], times["by hand"]).cells()
            more = Spread.of([a - b for a, b in zip(times["runner"], times["by hand"], strict=True)]).median
            own = Spread.of(times["by hand"]).median
            share = [f"{flops / own / top:.0%}"] if precision == "fp32" else []
            row += [f"{own * 1e3:.2f}", *share, f"{median} ({quartiles})", f"{more * 1e6:+.0f}"]
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    columns = [
        f"{p}: {what}"
        for p in ("fp32", "bf16", "fp16")
        for what in ("by hand, ms", *(["of the peak"] if p == "fp32" else []), "ratio", "runner's more, us")
    ]
    said = f"Peak: a product of two 1024 x 1024 FP32 matrices in this run, {top / 1e9:.0f} GFLOP/s."
    return [table(["width", "batch", *columns], rows), said]


def main() -> None:
    options = parser(__doc__, "loop")
    options.add_argument("--blocks", type=int, default=9, help="rounds of blocks (default: 9)")
    options.add_argument("--seconds", type=float, default=0.2, help="length of a block (default: 0.2)")
    options.add_argument("--growth", action="store_true", help="widths and batches instead")
    options.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds this")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    peers = [] if given.growth else [name for name in PEERS if importlib.util.find_spec(name)]
    contenders = [Contender(name, given.threads) for name in ("runner", "by hand", *peers)]
    try:
        measured(contenders, peers, given)
    finally:
        for contender in contenders:
            contender.process.kill()  # Lightning answers no gentler signal


def measured(contenders: list[Contender], peers: list[str], given: argparse.Namespace) -> None:
    ratios = "Ratios are medians over rounds of the time per step over that of the loop by hand in the same round"
    if given.growth:
        out = given.out.with_stem(given.out.stem + "_growth")
        parts = growth(contenders, given.seconds, given.blocks)
        report(out, "What the runner adds, by width and batch", f"{ratios}, with quartiles.", parts)
        return
    sizes = [(64, 64), (128, 128), (0, 128)]
    cases = [Case(p, wide, batch) for wide, batch in sizes for p in ("fp32", "bf16", "fp16")]
    parts = compared(
        contenders, [c for c in cases if given.only in f"{c.name} {c.precision}"], given.seconds, given.blocks
    )
    about = f"Each contender is a process of its own; blocks alternate. {ratios}, with quartiles; below 1 is faster."
    report(given.out, "The runner beside a loop by hand, Lightning and Accelerate", about, parts, peers)


if __name__ == "__main__":
    main()
