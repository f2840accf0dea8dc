"""How fast each class of operation runs in each format on this device, beside FP32.

    python scripts/benchmark_ops.py [--blocks 15] [--seconds 0.05] [--threads 1] [--device cpu]

The classes are those of the paper's section 3.3: dot products, large reductions, point-wise operations. Each is run
forward and backward under the precision's arithmetic, on inputs as they are stored in training: 16 bits where the
precision computes in 16 bits. Where a format is emulated, its time is that of the emulation and no claim about the
format. Blocks of all precisions alternate; shown are medians, and ratios within a round with their quartiles.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarking import Loop, Spread, alternate, as_in_runs, clock, parser, ratio, report, table
from torch import Tensor

from mptrain import measure
from mptrain.gpus import Machine
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.roofline import counted, this_cpu

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Operation(NamedTuple):
    """One operation: its class, its input and its parameters by shape, and what it computes."""

    group: str
    name: str
    x: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...]
    compute: Callable[..., Tensor]


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


OPERATIONS = (
    Operation("dot products", "matmul 512 x 512 x 512", (512, 512), ((512, 512),), lambda x, w: x @ w),
    Operation(
        "dot products",
        "convolution 16 x 32 x 32 x 32, 3 x 3",
        (16, 32, 32, 32),
        ((32, 32, 3, 3),),
        lambda x, w: F.conv2d(x, w, padding=1),
    ),
    Operation("reductions", "batch norm 16 x 32 x 32 x 32", (16, 32, 32, 32), ((32,), (32,)), batch_norm),
    Operation("reductions", "softmax 512 x 1024", (512, 1024), (), lambda x: x.softmax(-1)),
    Operation("point-wise", "relu of 2^19", (2**19,), (), F.relu),
    Operation("point-wise", "product of two of 2^19", (2**19,), (), lambda x: x * x.detach()),
)


def loop(operation: Operation, numbers: Precision, device: str) -> Loop:
    """Forward and backward passes of an operation; what they take, the device's waiting included."""
    stored = STORED.get(numbers.compute, torch.float32)
    x = torch.randn(operation.x, device=device).to(stored).requires_grad_()
    parameters = [torch.randn(shape, device=device, requires_grad=True) for shape in operation.parameters]
    region: Any = nullcontext() if numbers.compute == "float32" else numbers.arithmetic(device)
    native_tf32 = numbers.compute == "tf32" and numbers.backend(device) == "native"
    wait, now = measure.waiter(torch.device(device)), clock(device)

    def run(count: int) -> float:
        with hardware.tf32(native_tf32):
            wait()
            start = now()
            for _ in range(count):
                with region:
                    y = operation.compute(x, *parameters)
                torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))
            wait()
            return now() - start

    return run


def measured(
    operation: Operation, device: str, seconds: float, blocks: int, machine: Machine | None
) -> list[dict[str, Any]]:
    """One line for each precision: its median, and its ratio to FP32 with quartiles.

    machine: what FP32's least time follows from, if it is known.
    """
    loops = {name: loop(operation, Precision.load(name), device) for name in PRECISIONS}
    loops["fp32"](1)
    steps = max(1, math.ceil(seconds / max(1e-9, loops["fp32"](1))))
    times = alternate(loops, steps, blocks)
    least = counted(lambda: loops["fp32"](1)).seconds(machine) * 1e3 if machine else None
    lines = []
    for name in PRECISIONS:
        beside = ratio(times["fp32"], times[name])  # speed: FP32's time over this one's
        median = Spread.of(times[name]).median * 1e3
        backend = Precision.load(name).backend(device)
        lines.append(
            {
                "class": operation.group,
                "operation": operation.name,
                "precision": name,
                "backend": backend,
                "milliseconds": median,
                "of_the_limit": least / median if least and name == "fp32" else None,
                "speed": beside.median,
                "low": beside.low,
                "high": beside.high,
            }
        )
    return lines


def main() -> None:
    options = parser(__doc__, "ops")
    options.add_argument("--blocks", type=int, default=15, help="rounds of blocks (default: 15)")
    options.add_argument("--seconds", type=float, default=0.05, help="of a block in FP32 (default: 0.05)")
    options.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    given = options.parse_args()
    as_in_runs(given.threads)
    torch.manual_seed(0)
    machine = this_cpu(clock=clock(), numbers=2**19) if given.device == "cpu" else None
    lines = [line for each in OPERATIONS for line in measured(each, given.device, given.seconds, given.blocks, machine)]
    rows = []
    for operation in OPERATIONS:
        own = [line for line in lines if line["operation"] == operation.name]
        cells = [f"{each['speed']:.2f}x ({each['low']:.2f} to {each['high']:.2f})" for each in own[1:]]
        limit = own[0]["of_the_limit"]
        own_time = [f"{own[0]['milliseconds']:.3f}", f"{limit:.0%}" if limit else ""]
        rows.append([operation.group, operation.name, *own_time, *cells])
    backends = [(line["precision"], line["backend"]) for line in lines[1 : len(PRECISIONS)]]
    header = [
        "class",
        "operation",
        "FP32, ms",
        "of the limit",
        *(f"{name} ({backend}), speed" for name, backend in backends),
    ]
    about = (
        "Forward and backward. Speed: FP32's time over this one's, more is faster, with quartiles. The paper's 2x to "
    )
    about += "6x are of native FP16 on Volta; an emulated format's line says what the emulation costs."
    if machine:
        about += (
            f" The limit of FP32 is a roofline of this run: {machine.peaks['float32'] / 1e9:.0f} GFLOP/s in a product "
            f"of two 1024 x 1024 matrices, and {machine.bandwidth / 1e9:.1f} GB/s in a copy of 2^19 numbers, which "
            "caches may hold."
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with open(given.out.with_suffix(".csv"), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    report(given.out, "Speed by class of operation and format", about, [table(header, rows)])


if __name__ == "__main__":
    main()
