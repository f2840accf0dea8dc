"""A family for tests: small perceptrons on numbers made by chance, with faults on request."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.data.dataset import Batch, BatchKey, Dataset, DataSpec
from mptrain.errors import UserError
from mptrain.tasks.task import Task


class Numbers(Dataset):
    """`bad` batches of the first epoch (all of every epoch: [-1]), and its `bad_sample`, are multiplied by
    `bad_factor`.

    A batch is (inputs, labels, its number: 1000 times the epoch, plus the position).
    """

    kind = "synthetic"

    bad_sample = -1
    broken = -1
    """a sample that cannot be read"""

    def __init__(self, name: str, seed: int, samples: int, noise: float, bad: list[int], bad_factor: float):
        self.name, self.noise, self.bad, self.bad_factor = name, noise, bad, bad_factor
        rng = np.random.default_rng(seed)
        self.x = torch.from_numpy(rng.standard_normal((samples, 8)).astype(np.float32))
        self.y = (self.x[:, :4].sum(1) > 0).long() + 2 * (self.x[:, 4:].sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, key: BatchKey) -> Batch:
        if self.broken in key.indices:
            raise UserError(f"sample {self.broken} cannot be read; replace it")
        x, y = self.x[key.indices], self.y[key.indices]
        if key.train and self.noise:
            x = x + self.noise * torch.randn(x.shape, generator=key.generator())
        _, epoch, position, *_ = key.seed
        if key.train and (self.bad == [-1] or (epoch == 0 and position in self.bad)):
            x = x * self.bad_factor
        if key.train and epoch == 0 and self.bad_sample in key.indices:
            x = torch.where(torch.from_numpy(key.indices == self.bad_sample)[:, None], x * self.bad_factor, x)
        return x, y, 1000 * epoch + position


class Tiny(Task):
    metric = "accuracy"
    higher_is_better = True
    margin = 0.05
    unit = "samples"

    def __init__(self, models: dict[str, nn.Module], options: dict[str, Any]):
        self.models, self.options = models, options
        self.seen = 0

    def losses(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        x, y, turn = batch
        self.seen += 1
        time.sleep(self.options["sleep"])
        if self.options["crash_at"] == turn:
            raise RuntimeError("the tiny task was told to crash")
        for number, (name, model) in enumerate(self.models.items()):
            if number and turn < self.options["second_from"]:
                continue
            own = x * self.options["second_factor"] if number and turn in self.options["second_bad"] else x
            yield name, F.cross_entropy(model(own).float(), y)

    def size(self, batch: Batch) -> int:
        return len(batch[1])

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        count, right, loss = 0, 0, 0.0
        torch.rand(3)  # what an evaluation draws must not reach training
        np.random.rand()
        for x, y, _ in batches:
            logits = next(iter(self.models.values()))(x).float()
            count, right = count + len(y), right + int((logits.argmax(1) == y).sum())
            loss += float(F.cross_entropy(logits, y, reduction="none").double().sum())
        return {"accuracy": float("nan") if self.options["nan_metric"] else right / count, "loss": loss / count}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def perceptron(hidden: int, depth: int, norm: bool, dropout: float) -> nn.Module:
    layers: list[nn.Module] = []
    wide = 8
    for _ in range(depth):
        layers += [nn.Linear(wide, hidden), *([nn.BatchNorm1d(hidden)] if norm else []), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        wide = hidden
    return nn.Sequential(*layers, nn.Linear(wide, 4))


def build(
    data: DataSpec,
    hidden: int = 16,
    depth: int = 1,
    norm: bool = False,
    dropout: float = 0.0,
    samples: int = 40,
    noise: float = 0.0,
    pair: bool = False,
    bad: list[int] | None = None,
    bad_factor: float = 1e30,
    second_bad: list[int] | None = None,
    second_factor: float = 1e30,
    second_from: int = 0,
    nan_metric: bool = False,
    crash_at: int = -1,
    sleep: float = 0.0,
    bad_sample: int = -1,
    broken: int = -1,
) -> Tiny:
    if data.name not in ("numbers", "synthetic"):
        raise UserError(f"data={data.name} is unknown; there are numbers, synthetic")
    if data.folder is not None and not data.folder.is_dir():
        raise UserError(f"data_dir={data.folder} is not a folder; give the folder of the data set")
    names = ("first", "second") if pair else ("model",)
    options = {
        "second_bad": second_bad or [], "second_factor": second_factor, "second_from": second_from,
        "nan_metric": nan_metric, "crash_at": crash_at, "sleep": sleep,
    }  # fmt: skip
    task = Tiny({name: perceptron(hidden, depth, norm, dropout) for name in names}, options)
    task.train_set = Numbers(data.name, data.seed, samples, noise, bad or [], bad_factor)
    task.train_set.bad_sample, task.train_set.broken = bad_sample, broken
    task.test_set = Numbers(data.name, data.seed + 1, 30, 0.0, [], 1.0)
    return task
