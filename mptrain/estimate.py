"""`mptrain estimate`: memory, operations and a lower bound on time of a training step, without a GPU and without data.

The run's own step (losses, the precision's arithmetic, backward, unscaling, clipping, optimizer) goes through networks
without numbers (hollow.py): two billion parameters cost seconds. torch's MemTracker counts their bytes as it counts
real ones, and every operation reports its floating point operations and the bytes it touches (roofline.py).

16-bit results are stored as a GPU stores them; the FP32 images of CPU emulation are left out.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map_only

from mptrain import compose, files, hollow, process, tasks
from mptrain.config import Config, check
from mptrain.data.dataset import Batch, BatchKey, DataSpec
from mptrain.errors import UserError
from mptrain.estimate_words import show
from mptrain.growth import Growth, Step
from mptrain.memory import StepMemory
from mptrain.precision.arithmetic import Arithmetic
from mptrain.precision.modes import Precision
from mptrain.precision.policy import FUNCTIONS
from mptrain.recall import Recall
from mptrain.results.record import Record
from mptrain.roofline import Operations
from mptrain.train import Run

MOST = 10**7
"""Samples in a batch, whose labels and lengths are real."""


class Model:
    """A recipe's training step in one precision, without numbers.

    Raises UserError if values that are not there decide its course.
    """

    def __init__(
        self, config: Config, numbers: Precision, task: tasks.Task, samples: tuple[int, Batch], recall: Recall
    ) -> None:
        self.recall, self.fake = recall, recall.fake
        self.samples, self.batch = samples
        changes: dict[str, Any] = {"precision": numbers.as_dict(), "data": "synthetic", "data_dir": None}
        changes |= {"device": "cpu", "count": False, "watch": {}, "workers": 0, "compile": False}
        with process.same_random_state(torch.device("cpu")), FakeCopyMode(self.fake):
            shared = {id(data): data for data in (task.train_set, task.test_set)}
            own = copy.deepcopy(task, shared | hollow.copies(task.models.values(), self.fake))
            self.run = Run(check({**config.model_dump(), **changes}), Record("."), task=own)
        self.run.arithmetic = self.run.region = _region(numbers)
        self.run.scaler._unscale = types.MethodType(_unscaled, self.run.scaler)  # type: ignore[method-assign]
        self.latest = 0
        """the batch of the step before, 0 before there is one"""

    def step(self, batch_size: int) -> Step:
        """A step that finds the optimizers' state in place, over the first batch's samples as often as it takes.

        What a task keeps from step to step is there if the step before had this batch or a multiple of it.
        """
        batch = self._batch(batch_size)
        window, task = [batch] * self.run.config.accumulate, self.run.task
        with process.same_random_state(torch.device("cpu")), hollow.Shapes(self.recall):
            if not self.latest:
                by_sample = type(task).part is not tasks.Task.part  # else what a step leaves is the same for any batch
                self._through([batch if by_sample else self._batch(min(batch_size, self.samples))])
            elif self.latest % batch_size == 0:
                part = task.part(task.state_dict(), 0, self.latest // batch_size)
                task.load_state_dict(tree_map_only(Tensor, Tensor.clone, part))
            self.latest = batch_size
            found = Step(batch_size=batch_size, memory={"input": hollow.size(batch)})
            found.parameters = sum(p.numel() for model in self.run.models.values() for p in model.parameters())
            tracker = StepMemory(self.run.held(), self.run.models.values(), self.run.optimizers.values())
            with tracker, Operations(found.operations):
                self._through(window)
        found.memory |= tracker.kinds()
        found.moments = tracker.moments
        return found

    def _batch(self, size: int) -> Batch:
        return hollow.batch(self.batch, self.fake, self.samples, size)

    def _through(self, window: list[Batch]) -> None:
        try:
            self.run.step(window)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            recipe = self.run.config.recipe
            raise UserError(
                f"recipe={recipe} cannot be estimated: in its step values decide what happens ({error.func}), and an "
                "estimate computes no values; train a few steps and read the memory in its summary: "
                f"mptrain +recipe={recipe} data=synthetic steps=3"
            ) from error
        except ValueError as error:  # one sample has no statistics, for instance
            size = self.run.task.size(window[0])
            raise UserError(
                f"a step over {size} {self.run.task.unit} is none: {error}; give another batch_size"
            ) from error
        finally:
            self.run.recent.clear()


def _region(numbers: Precision) -> Any:
    """The arithmetic as a GPU has it: native kernels, a switch for TF32; emulated where a precision asks for it."""
    if numbers.kernels == "emulated":
        return numbers.arithmetic("cpu")
    if numbers.compute in ("float32", "tf32"):
        return nullcontext()
    kept, fp8 = frozenset(numbers.keep_fp32) & FUNCTIONS, numbers.compute == "float8"
    compute = "bfloat16" if fp8 else numbers.compute
    return Arithmetic("cpu", compute, emulated=False, keep_fp32=kept, fp8="native" if fp8 else None)


def _unscaled(scaler: Any, gradients: list[Tensor]) -> bool:
    """Divides by the factor and takes the gradients for finite: there is nothing to look at."""
    torch._foreach_mul_(gradients, 1.0 / scaler.value)
    return True


def _batch(task: tasks.Task, size: int) -> tuple[int, Batch]:
    """The first batch of the training set in order, and its samples; fewer if there are not enough."""
    indices = task.train_set.epoch(size, None)[0]
    return len(indices), task.train_set.__getitems__(BatchKey(indices, (0, 0, 0), first=False, train=True))


def models(config: Config, precisions: Sequence[Precision]) -> Iterator[Model]:
    """A Model of the recipe for each precision; data and networks are built once."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    spec = DataSpec("synthetic", None, config.seed)
    with process.same_random_state(torch.device("cpu")), hollow.networks(fake):
        task = tasks.build(config.task.name, spec, **config.task.options)
    samples, recall = _batch(task, config.batch_size), Recall(fake)
    for numbers in precisions:
        yield Model(config, numbers, task, samples, recall)


def step(config: Config, numbers: Precision) -> Step:
    """One training step of a configuration at its batch; raises UserError if values decide its course."""
    return next(models(config, [numbers])).step(config.batch_size)


def estimate(argv: Sequence[str]) -> int:
    """Prints the tables; returns 0."""
    config = compose.config(argv)
    if config.numbers.accumulate == "float16":
        raise UserError(
            f"precision={config.numbers.name} sums in FP16, for which GPUs have no kernels of ours; "
            "precision=fp16 has the same memory"
        )
    if config.batch_size > MOST:
        raise UserError(
            f"batch_size={config.batch_size}: an estimate goes up to {MOST:,}, and tells the largest that fits"
        )
    if config.scale_name == "layerwise":
        raise UserError(
            "scale=layerwise goes by the values of weights and gradients, and an estimate computes none; scale=dynamic "
            "has the same weights, activations and products"
        )
    one = any(text.lstrip("+").startswith("precision=") for text in argv)
    asked = _asked(config, one)
    shapes = {_traced_as(numbers): None for numbers in asked}
    growths = {}
    for shape, model in zip(shapes, models(config, list(shapes)), strict=True):
        growths[shape] = Growth(model.step, config.batch_size)
    show(config, {numbers: growths[_traced_as(numbers)] for numbers in asked})
    return 0


def _traced_as(numbers: Precision) -> Precision:
    """A precision whose step costs the same bytes and operations: FP16 is as BF16, TF32 as FP32."""
    same = {"float16": "bfloat16", "tf32": "float32"}
    changes = {name: same.get(value, value) for name in ("compute", "storage") for value in [getattr(numbers, name)]}
    emulated = numbers.kernels == "emulated"
    return numbers if emulated else replace(numbers, name="fp32", scale="none", **changes)


def _asked(config: Config, one: bool) -> list[Precision]:
    """The precision that was named, or every one that GPUs have kernels for."""
    if one:
        return [config.numbers]
    loaded = [Precision.load(name) for name in files.names("precision")]
    native = [p for p in loaded if p.accumulate == "float32" and p.kernels == "auto"]
    return sorted(native, key=lambda p: (p.name != "fp32", p.storage != "float32", p.name))
