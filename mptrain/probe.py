"""mptrain probe: a few FP32 steps, and what FP16 would have made of their gradients at every loss scale.

Its folder holds probe.md (what is printed), probe.csv (a row per layer and kind of gradient: how many values, the share
of zeros, then flushed_2^k and overflowed_2^k for the scales 2^0 to 2^24, shares of the nonzero values) and probe.json:

    recommended    precision, scale and reason
    terms          per output of the network: N, the terms that the loss averages over, as its largest gradient shows
    updates_lost   share of the weights that are over 2048 times their update, which FP16 weights would lose
    largest_output per layer
    formats        per precision: the format of each class of operation; operations: of each operation by name
    storage        per precision: bytes of weights, copies, gradients, optimizer state, and of a step at its peak
    census         the rows of probe.csv, with the counts of 2^e <= |x| < 2^(e+1) under `exponents`
"""

from __future__ import annotations

import copy
import csv
import io
import itertools
import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain import compose, files, optim, probe_words
from mptrain.data.dataset import Batch
from mptrain.errors import UserError
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanDtypes, RanOperations
from mptrain.probe_words import Probed
from mptrain.process import same_random_state
from mptrain.results.markdown import markdown
from mptrain.results.record import Record, write_atomically
from mptrain.results.terminal import print_document
from mptrain.tasks.task import Task
from mptrain.train import Run
from mptrain.watch.census import Census, recommend, rows

STEPS = 3


def probe(argv: Sequence[str]) -> int:
    """The verb; returns the exit status."""
    if not any(text.startswith("steps=") for text in argv):
        argv = [*argv, f"steps={STEPS}"]
    config = compose.config(argv)
    if config.numbers.name != "fp32" or config.scale_name != "none":
        raise UserError("probe looks at FP32 gradients; leave out precision= and scale=, it recommends them")
    folder = Path(config.out) if config.out else Path(config.results).parent / "probes" / config.folder().name
    folder = folder.expanduser().absolute()
    device = hardware.resolve(config.device)
    _make(folder)
    with hardware.tf32(False):
        run = Run(config, Record(folder))
        beginning = run.loader.state_dict()
        batch = next(run.loader.windows())[0]
        run.loader.load_state_dict(beginning)
        names = sorted(files.names("precision"), key=lambda name: (name != "fp32", name))
        tried = {name: tried_out(run, Precision.load(name), batch) for name in names}
        census = Census()
        with census.taking(run.models, run.optimizers.values()):
            for window in itertools.islice(run.loader.windows(), config.steps):
                run.step(window)
    told = [text for text in argv if not text.startswith(("steps=", "out=", "progress="))]
    found = Probed(config, tuple(told), device.type, census, recommend(census), tried)
    document = probe_words.document(found)
    print_document(document)
    write_atomically(folder / "probe.json", json.dumps(as_json(found), indent=1) + "\n")
    write_atomically(folder / "probe.csv", as_csv(found))
    write_atomically(folder / "probe.md", markdown(document))
    print(f"written: {folder / 'probe.json'}, probe.csv, probe.md")
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}); give another one: out=FOLDER") from error


def tried_out(run: Run, numbers: Precision, batch: Batch) -> dict[str, Any]:
    """One step under a precision, on a copy of the task: {backend, sums, formats, operations, storage}.

    FP16 sums are left out, since they take minutes and change no format: the products are those of FP32 sums.
    """
    summed = numbers.with_changes(accumulate="float32")
    options = run.config.optimizer
    region = nullcontext() if summed.compute == "float32" else summed.arithmetic(run.device.type)
    backend = summed.backend(run.device.type)
    classes, operations, memory = RanDtypes(), RanOperations(), _Peak(run.device)
    task = _copied(run.task)
    models = task.models
    with same_random_state(run.device):
        weights = summed.prepare(models)
        optimizers = {
            name: optim.optimizer(options.name, weights.of(name), options.lr, **_usable(options, summed))
            for name in models
        }
        own = _distinct(p for model in models.values() for p in model.parameters())
        copies = _distinct(p for name in models for p in weights.of(name) if id(p) not in own)
        memory.held = [*own.values(), *copies.values(), *(b for model in models.values() for b in model.buffers())]
        with hardware.tf32(summed.compute == "tf32" and backend == "native"), memory:
            phases = task.losses(run.to_device(batch))
            while True:
                with classes, operations, region:
                    phase = next(phases, None)
                if phase is None:
                    break
                name, loss = phase
                loss.backward()
                weights.gather(name)
                optimizers[name].step()
        states = [v for o in optimizers.values() for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
        storage = {
            "weights": _bytes(own),
            "copies": _bytes(copies),
            "gradients": _bytes(_distinct(p.grad for p in own.values() if p.grad is not None)),
            "optimizer": _bytes(_distinct(states)),
            "peak": memory.bytes(),
        }
    return {
        "backend": backend,
        "sums": numbers.accumulate,
        "formats": classes.table(),
        "operations": operations.table(),
        "storage": storage,
    }


def _usable(options: Any, numbers: Precision) -> dict[str, Any]:
    """The optimizer's options; where its state is kept in FP16, with an epsilon that is not zero there."""
    fp16_state = numbers.update == "storage" and numbers.storage == "float16"
    return {**options.options, **({"eps": 1e-4} if fp16_state and options.name != "sgd" else {})}


def _copied(task: Task) -> Task:
    """The task with networks of its own; the data are shared."""
    return copy.deepcopy(task, {id(data): data for data in (task.train_set, task.test_set)})


class _Peak:
    """Bytes at the peak of what happens inside, beyond what the rest of the process holds."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.device = device
        self.held: list[Tensor] = []

    def __enter__(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.others = torch.cuda.memory_allocated(self.device) - _bytes(_distinct(self.held))
        else:
            from mptrain.memory import StepMemory

            self.tracker = StepMemory(self.held)
            self.tracker.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if not self.on_gpu:
            self.tracker.__exit__(*exception)

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self.others if self.on_gpu else self.tracker.peak()


def _distinct(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    return {id(t): t for t in tensors}


def _bytes(tensors: dict[int, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def as_json(found: Probed) -> dict[str, Any]:
    census = found.census
    return {
        "recipe": found.config.recipe,
        "steps": found.config.steps,
        "seed": found.config.seed,
        "device": found.device,
        "recommended": found.advice._asdict(),
        "terms": {name: 1 / largest for name, largest in census.outputs.items() if largest > 0},
        "updates_lost": census.lost[0] / max(1, census.lost[1]),
        "largest_output": dict(census.largest),
        **{
            part: {name: each[part] for name, each in found.tried.items()}
            for part in ("formats", "operations", "storage")
        },
        "census": list(rows(census)),
    }


def as_csv(found: Probed) -> str:
    table = list(rows(found.census))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(table[0]["flushed"])
    writer.writerow(
        ["layer", "kind", "values", "zero", *(f"flushed_{n}" for n in names), *(f"overflowed_{n}" for n in names)]
    )
    for row in table:
        shares = [*row["flushed"].values(), *row["overflowed"].values()]
        writer.writerow([row["layer"], row["kind"], row["values"], row["zero"], *shares])
    return out.getvalue()
