"""The loop: one recipe under one precision, from an empty folder, a checkpoint, or not at all if it is finished."""

from __future__ import annotations

import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mptrain import measure, optim, tasks
from mptrain.config import COSMETIC, Config
from mptrain.data.dataset import Batch, DataSpec, batches
from mptrain.data.loader import Loader, mover
from mptrain.errors import UserError
from mptrain.precision import hardware, ran, scaling
from mptrain.precision.buffers import MovingBuffers
from mptrain.precision.counting import Counter
from mptrain.progress import Progress
from mptrain.results import checkpoint
from mptrain.results.record import Record, write_atomically
from mptrain.watch.blame import first_nonfinite


def train(config: Config) -> dict[str, Any]:
    """Runs a configuration to its end, or from where it stopped; returns the summary.

    A run that diverges ends normally with status "diverged". Raises UserError for what the user can mend and
    KeyboardInterrupt after SIGINT or SIGTERM, with a checkpoint written; any other error is recorded as "failed".
    """
    record = Record(config.folder())
    before = record.read_summary()
    with record.opened(config.model_dump(), COSMETIC):
        if before is not None and before["status"] != "failed":
            print(f"already {before['status']}, nothing to do: {record.folder}")
            return before
        record.forget_failure()
        with hardware.tf32(config.numbers.compute == "tf32"), _threads(config.threads), _stop_requests() as stop:
            try:
                return Run(config, record).to_the_end(stop)
            except (KeyboardInterrupt, Stopped):
                raise
            except Exception as error:
                _note_failure(record, config, error)
                raise


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived, and the run was left resumable."""


class Run:
    """Everything one run is made of, and the loop over it."""

    def __init__(self, config: Config, record: Record):
        self.config, self.record = config, record
        self.started = datetime.now(UTC)
        self.device = hardware.resolve(config.device)
        seed_everything(config.seed)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        folder = None if config.data_dir is None else Path(config.data_dir).absolute()
        self.task = tasks.build(config.task.name, DataSpec(config.data, folder, config.seed), **config.task.options)
        self.models = {name: model.to(self.device) for name, model in self.task.models.items()}

        self.precision = config.numbers
        if config.count and self.precision.backend(self.device.type) != "emulated":
            raise UserError(
                f"count=true counts where products are emulated; precision={self.precision.name} runs natively here"
            )
        self.counter = Counter() if config.count else None
        self.arithmetic = self.precision.arithmetic(self.device.type, self.counter)
        self.weights = self.precision.prepare(self.models)
        self.buffers = MovingBuffers(self.models.values())
        settings = {k: v for k, v in config.scaling.model_dump().items() if v is not None}
        self.scaler = scaling.loss_scaler(config.scale_name, scaling.DynamicSettings(**settings))

        options = config.optimizer
        self.optimizers = {
            name: optim.optimizer(options.name, self.weights.of(name), options.lr, **options.options)
            for name in self.models
        }
        self.rate = optim.schedule(
            config.schedule.name, config.steps, config.schedule.warmup, **config.schedule.options
        )
        self.average = optim.Average({n: self.weights.of(n) for n in self.models}, config.ema) if config.ema else None

        self.loader = Loader(
            self.task.train_set,
            config.batch_size,
            config.accumulate,
            config.seed,
            config.workers,
            self.device.type == "cuda",
        )
        self.to_device = mover(self.device)
        self.throughput = measure.Throughput(self.task.unit, config.warmup, measure.waiter(self.device))
        self.first_step = measure.FirstStep(self.device)
        self.attempted = 0
        self.applied = dict.fromkeys(self.models, 0)
        self.skipped = dict.fromkeys(self.models, 0)
        self.recent: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.loss_dtype = "none ran"

    # The loop.

    def to_the_end(self, stop: list[int]) -> dict[str, Any]:
        config = self.config
        self.resume()
        with Progress(config, self.record, self.attempted) as progress, self._counting():
            windows = self.loader.windows()
            self.throughput.begin()
            for first in _first_then_rest(self.attempted < config.steps):
                if self.attempted >= config.steps:
                    break
                window = next(windows)
                watching = self.first_step.watching([*self.models.values()], [*self.optimizers.values()])
                with watching if first else nullcontext():
                    skipped = self.step(window)
                self.attempted += 1
                self.throughput.step(self.units)
                if skipped and self.scaler.consecutive_skips >= config.max_skips:
                    return self.end("diverged", self.blame(window))
                if skipped or self.attempted % config.log_every == 0 or self.attempted == config.steps:
                    progress.show(self.attempted, self.log(skipped))
                last = self.attempted == config.steps
                if config.eval.every and self.attempted % config.eval.every == 0 and not last:
                    with self.throughput.paused():
                        self.evaluate()
                if stop or last or self.attempted % config.checkpoint_every == 0:
                    with self.throughput.paused():
                        self.save()
                if stop and not last:
                    raise Stopped(
                        f"stopped by signal {stop[0]} after step {self.attempted}; the same command goes on from there"
                    )
        return self.end("finished", None)

    def step(self, window: list[Batch]) -> bool:
        """One iteration over a window of batches; returns whether an update was skipped."""
        sizes = [self.task.size(batch) for batch in window]
        self.units = sum(sizes)
        state = self.task.state_dict()
        self.weights.zero_grad()
        self.buffers.keep()
        for number, (batch, size) in enumerate(zip(window, sizes, strict=True), start=1):
            phases = self.task.losses(self.to_device(batch))
            while True:
                with self.arithmetic:
                    phase = next(phases, None)
                if phase is None:
                    break
                name, loss = phase
                self.recent[name].append(loss.detach())
                self.loss_dtype = ran.name(loss.dtype)
                self.scaler.scale(loss if len(window) == 1 else loss * (size / self.units)).backward()
                if number == len(window):
                    self.apply(name)
        if skipped := self.scaler.update():
            self.buffers.restore()
            self.task.load_state_dict(state)
        return skipped

    def apply(self, name: str) -> None:
        """Unscale, check, clip, step: one optimizer's update from the gradients that are there."""
        optimizer = self.optimizers[name]
        self.weights.gather(name)
        finite = self.scaler.unscale_(optimizer)
        if finite and self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.weights.of(name), self.config.clip)
        factor = self.rate(self.applied[name])
        for group in optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * factor
        if self.scaler.step(optimizer):
            self.weights.publish(name)
            self.applied[name] += 1
            if self.average is not None:
                self.average.update(name)
        elif finite is False:
            self.skipped[name] += 1

    # Around the loop.

    def evaluate(self) -> dict[str, float]:
        """The metric over the whole test set, in the stated precision; leaves the random state as it was."""
        fp32 = self.config.eval.precision == "fp32"
        moved = (self.to_device(batch) for batch in batches(self.task.test_set, self.config.eval.batch_size))
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.weights.evaluating(fp32))
            stack.enter_context(nullcontext() if self.average is None else self.average.evaluating(self.models))
            stack.enter_context(hardware.tf32(False) if fp32 else self.arithmetic)
            for model in self.models.values():
                model.eval()
            try:
                result = self.task.evaluate(moved)
            finally:
                for model in self.models.values():
                    model.train()
        self.record.log({"step": self.attempted, "eval": result})
        return result

    def log(self, skipped: bool) -> dict[str, Any]:
        """One line of metrics.jsonl: the mean losses since the last line."""
        losses = {name: torch.stack(values).mean().item() for name, values in self.recent.items()}
        self.recent.clear()
        name = next(iter(self.models))
        line = {
            "step": self.attempted,
            "loss": losses.get(name) if len(losses) == 1 else losses,
            "lr": self.optimizers[name].param_groups[0]["lr"],
            "scale": self.scaler.value,
            "applied": self.applied[name],
            **({"skipped": True} if skipped else {}),
        }
        self.record.log(line)
        return line

    def blame(self, window: list[Batch]) -> str:
        """Why the run diverged: step, scale, and the layer where the last batch first went wrong."""

        def again() -> None:
            self.weights.zero_grad()
            self.buffers.keep()
            state = self.task.state_dict()
            for batch in window:
                phases = self.task.losses(self.to_device(batch))
                while True:
                    with self.arithmetic:
                        phase = next(phases, None)
                    if phase is None:
                        break
                    self.scaler.scale(phase[1]).backward()
            self.buffers.restore()
            self.task.load_state_dict(state)
            self.weights.zero_grad()

        where = first_nonfinite(self.models, again) or "no single layer (the batch is finite when it is run again)"
        return (
            f"{self.scaler.consecutive_skips} updates in a row were not finite, the last at step {self.attempted} "
            f"with scale {self.scaler.value:g}; first in the {where}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "weights": self.weights.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "task": self.task.state_dict(),
            "loader": self.loader.state_dict(),
            "counter": None if self.counter is None else self.counter.state_dict(),
            "steps": {"attempted": self.attempted, "applied": self.applied, "skipped": self.skipped},
            "recent": {name: torch.stack(values) for name, values in self.recent.items()},
            "random": random_state(self.device),
            "log_bytes": self.record.flush(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, model in self.models.items():
            model.load_state_dict(state["models"][name])
            self.optimizers[name].load_state_dict(state["optimizers"][name])
        self.weights.load_state_dict(state["weights"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.task.load_state_dict(self.to_device(state["task"]))
        self.loader.load_state_dict(state["loader"])
        if self.counter is not None:
            self.counter.load_state_dict(state["counter"])
        steps = state["steps"]
        self.attempted, self.applied, self.skipped = steps["attempted"], steps["applied"], steps["skipped"]
        self.recent.update({name: list(values.unbind()) for name, values in state["recent"].items()})
        set_random_state(state["random"], self.device)
        self.record.cut_log(state["log_bytes"])

    def resume(self) -> None:
        """Goes on from the newest whole checkpoint, or starts anew."""
        state, notices = checkpoint.load_latest(self.record.checkpoints)
        for notice in notices:
            print(f"mptrain: {notice}; " + ("using the one before" if state else "starting anew"), file=sys.stderr)
        if state is None:
            self.record.cut_log(0)
            return
        self.load_state_dict(state)
        print(f"resuming after step {self.attempted}: {self.record.folder}")

    def save(self) -> None:
        checkpoint.save(self.record.checkpoints, self.attempted, self.state_dict())

    def end(self, status: str, reason: str | None) -> dict[str, Any]:
        """Evaluates, writes what is left, and the summary last."""
        throughput = self.throughput.result()
        metrics: dict[str, float] = {}
        if status == "finished":
            metrics = self.evaluate()
            self.task.finish(self.record.folder)
        if self.counter is not None:
            import json

            write_atomically(self.record.folder / "counts.json", json.dumps(self.counter.table(), indent=1) + "\n")
        task, config = self.task, self.config
        environment = measure.environment(self.device)
        now = datetime.now(UTC)
        return self.record.finish(
            status,
            reason,
            {
                **identity(config),
                "device": self.device.type,
                "backend": self.precision.backend(self.device.type),
                "dtypes": {**self.first_step.dtypes, "loss": self.loss_dtype},
                "metric": {
                    "name": task.metric,
                    "value": metrics.get(task.metric),
                    "higher_is_better": task.higher_is_better,
                    "margin": task.margin,
                },
                "metrics": {key: value for key, value in metrics.items() if key != task.metric},
                "throughput": throughput,
                "memory": self.first_step.memory(),
                "steps": {
                    "attempted": self.attempted,
                    "applied": min(self.applied.values()),
                    "skipped": max(self.skipped.values()),
                    **({"by_optimizer": self.skipped} if len(self.skipped) > 1 else {}),
                },
                "final_scale": None if self.scaler.label == "none" else self.scaler.value,
                "data": {"name": task.train_set.name, "kind": task.train_set.kind},
                "eval_precision": config.eval.precision,
                "environment": environment,
                "started": self.started.isoformat(timespec="seconds"),
                "finished": now.isoformat(timespec="seconds"),
                "wall_s": (now - self.started).total_seconds(),
                "key": {
                    "recipe": config.recipe,
                    "data": task.train_set.name,
                    "steps": config.steps,
                    "batch_size": config.batch_size,
                    "accumulate": config.accumulate,
                    "settings": config.comparable(),
                    "device": environment["device_name"],
                    "threads": environment["threads"],
                    "torch": environment["torch"],
                },
            },
        )

    @contextmanager
    def _counting(self) -> Iterator[None]:
        several = len(self.models) > 1
        named = [(name if several else "", model) for name, model in self.models.items()]
        handles = self.counter.watch(named) if self.counter is not None else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def identity(config: Config) -> dict[str, Any]:
    """What every summary says of the run itself, however it ended."""
    return {
        "recipe": config.recipe,
        "precision": config.numbers.name,
        "precision_label": config.numbers.label,
        "scale": config.scale_label,
        "seed": config.seed,
    }


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """The global generators' states, in types that load with weights_only=True."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _first_then_rest(first: bool) -> Iterator[bool]:
    """True once, then False for ever: the first step of this process is looked at."""
    if first:
        yield True
    while True:
        yield False


def _note_failure(record: Record, config: Config, error: Exception) -> None:
    """Writes status "failed"; where even that cannot be written, the original error is what the user sees."""
    with suppress(OSError):
        record.finish("failed", f"{type(error).__name__}: {error}"[:2000], identity(config))


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, to be answered between two steps; a second SIGINT interrupts at once."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals are somebody else's
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
