"""Which operation runs in which format: the policy, and what ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mptrain.precision import policy
from mptrain.results.cells import short_dtypes
from mptrain.results.document import Block, Cell, Column
from mptrain.results.runs import Run

RAN = ("matmul", "softmax", "norm", "loss")


def policy_block() -> Block:
    """The classes of the policy with what is done to them."""
    products = policy.LOWER_PRECISION | policy.RECURRENT | policy.CONV_PADDING
    classes = [
        ("dot products", "inputs are cast to 16 bits, sums are kept in FP32", products),
        ("exponentials, norms, losses", "inputs are cast to FP32", policy.FP32),
        ("softmax, long sums", "the result is FP32", policy.FP32_SET_OPT_DTYPE | set(policy.FP32_APPEND_DTYPE)),
        ("several inputs", "inputs are cast to the widest format among them", policy.PROMOTE),
        ("refused", "unsafe in 16 bits", set(policy.BANNED)),
    ]
    cells = [[Cell(name), Cell(what), Cell(_names(operations))] for name, what, operations in classes]
    cells.append([Cell("everything else"), Cell("runs in the format that it is given"), Cell("")])
    columns = [Column("class of operation"), Column("under FP16 and BF16"), Column("operations")]
    return Block("Which operation runs in which format", ["The policy of CUDA autocast, on every device."], columns,
                 cells, [])  # fmt: skip


def _names(operations: Iterable[str]) -> str:
    return ", ".join(sorted({policy.base_name(name).strip("_") for name in operations}))


def ran_block(runs: Iterable[Run]) -> Block:
    """What the records say ran, a line for each precision and set of formats."""
    recipes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for run in runs:
        key = run.precision_label, run.backend, *(short_dtypes(run.dtypes[name]) for name in RAN)
        recipes[key].append(run.recipe)
    cells = [
        [Cell(label, backend), *map(Cell, formats), Cell(str(len(of))), Cell(", ".join(sorted(set(of))))]
        for (label, backend, *formats), of in sorted(recipes.items())
    ]
    columns = [Column("precision", "backend"), *(Column(name) for name in RAN), Column("runs", number=True),
               Column("recipes")]  # fmt: skip
    lines = ["Seen at the kernels in one step of each run: the format of the operands; -: no such operation ran."]
    return Block("What ran in which format", lines, columns, cells, [])
