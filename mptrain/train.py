"""The loop: one recipe under one precision, from an empty folder, a checkpoint, or not at all if it is finished."""

from __future__ import annotations

import gc
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mptrain import batchnorm, layout, measure, optim, outcome, parallel, process, rerun, state, tasks
from mptrain.config import COSMETIC, Config
from mptrain.data.dataset import Batch, DataSpec, batches
from mptrain.data.loader import Loader, explained, mover
from mptrain.errors import UserError
from mptrain.observe import Observer, rounds_updates
from mptrain.precision import fp8_layers, hardware, ran, scaling
from mptrain.precision.buffers import MovingBuffers
from mptrain.precision.counting import Counter
from mptrain.process import Stopped
from mptrain.progress import Progress
from mptrain.results.record import Record, write_atomically


def train(config: Config) -> dict[str, Any]:
    """Runs a configuration to its end, or from where it stopped; returns the summary.

    A run that diverges ends normally with status "diverged". Raises UserError for what the user can mend and
    KeyboardInterrupt after SIGINT or SIGTERM, with a checkpoint written; any other error is recorded as "failed".
    """
    record = Record(config.folder())
    with ExitStack() as held, parallel.joined(config.device, _kind_of_ranks(config)) as ranks:
        before = ranks.first(lambda: _opened(record, config, held))
        if before is not None and before["status"] != "failed":
            if ranks.leads:
                print(f"already {before['status']}, nothing to do: {record.folder}{_unwatched(config, record)}")
            return before
        try:
            with _switches(config), parallel.minding(ranks):
                summary = Run(config, record, ranks).to_the_end()
        except parallel.RankLost:
            raise
        except Exception as error:
            said = layout.explained(explained(error))
            if ranks.leads:
                outcome.note_failure(record, config, said)
            raise said from error.__cause__
        if ranks.leads:
            print(f"{summary['status']}: {outcome.sentence(summary)}  {record.folder}")
    return summary


def scores(config: Config, record: Record, batch_size: int | None = None) -> tuple[int, dict[str, float]]:
    """The step of the newest checkpoint, and what its networks score; changes nothing in the record.

    Raises UserError if there is no checkpoint, or the record is of another configuration.
    """
    with record.opened(config.model_dump(), COSMETIC, Config.later_defaults()), _switches(config):
        run = Run(config, record)
        if state.load_newest(run, "there is no other") is None:
            raise UserError(f"{record.folder} holds no checkpoint to evaluate; the same words after mptrain train it")
        return run.attempted, run.scores(batch_size or config.eval.batch_size)


def _kind_of_ranks(config: Config) -> type[parallel.Ranks]:
    if not config.parallel.shard:
        return parallel.Ranks
    from mptrain.sharding import Shards  # slow to import

    return Shards


@contextmanager
def _switches(config: Config) -> Iterator[None]:
    """The threads and the TF32 switches that a configuration asks for."""
    numbers, device = config.numbers, hardware.resolve(config.device)
    native_tf32 = numbers.compute == "tf32" and numbers.backend(device.type) == "native"
    with hardware.tf32(native_tf32), process.threads(config.threads):
        yield


def _unwatched(config: Config, record: Record) -> str:
    if not config.watch.enabled or (record.folder / "watch.parquet").exists():
        return ""
    return "\nwatch=true was not asked for then; to look inside, give the run another folder: out=FOLDER"


def _opened(record: Record, config: Config, held: ExitStack) -> dict[str, Any] | None:
    """Holds the folder until `held` ends; how the run ended, if it has, a failure apart, which may be tried again."""
    held.enter_context(record.opened(config.model_dump(), COSMETIC, Config.later_defaults()))
    before = record.read_summary()
    if before is not None and before["status"] == "failed":
        record.forget_failure()
    return before


class Run:
    """Everything one run is made of, and the loop over it.

    task: what is trained, if it is there already.
    """

    def __init__(
        self, config: Config, record: Record, ranks: parallel.Alone | None = None, task: tasks.Task | None = None
    ):
        self.config, self.record = config, record
        self.ranks = ranks = ranks or parallel.Alone()
        self.started, self.began = datetime.now(UTC), time.monotonic()
        self.device = hardware.resolve(config.device)
        process.seed_everything(config.seed)
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        folder = None if config.data_dir is None else Path(config.data_dir)
        spec = DataSpec(config.data, folder, config.seed)
        self.task = task or tasks.build(config.task.name, spec, **config.task.options)
        self.models = dict(self.task.models)  # built on the CPU
        divides = getattr(ranks, "divide", None)  # shards come to the device one by one
        if self.device.type != "cpu" and not divides:
            self.models = {name: model.to(self.device) for name, model in self.models.items()}
        if config.channels_last:
            layout.channels_last(self.models)
        self.share_models()

        self.precision = config.numbers
        if config.count and self.precision.backend(self.device.type) != "emulated":
            raise UserError(
                f"count=true counts where products are emulated; precision={self.precision.name} runs natively here"
            )
        self.counter = Counter() if config.count else None
        self.arithmetic = self.precision.arithmetic(self.device.type, self.counter, forward_only=True)
        # an FP32 region has nothing to switch here
        self.region = nullcontext() if self.precision.compute == "float32" else self.arithmetic
        self.weights = self.precision.prepare(self.models)
        if divides:
            self.weights = divides(self.models, self.device)
        if config.compile:
            layout.compile_networks(self.models, config, self.arithmetic, ranks.size)
        self.buffers = MovingBuffers(self.models.values())
        self.has_buffers = any(True for model in self.models.values() for _ in model.buffers())
        settings = {k: v for k, v in config.scaling.model_dump().items() if v is not None}
        self.scaler = scaling.loss_scaler(
            config.scale_name, scaling.DynamicSettings(**settings), self.models, **config.layerwise.model_dump()
        )
        self.scaler.agree = ranks.agreed

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
            ranks.rank,
            ranks.size,
        )
        self.to_device = mover(self.device)
        self.throughput = measure.Throughput(self.task.unit, config.warmup, measure.waiter(self.device))
        self.instruments = measure.Instruments(self.device)
        self.observer = self.observed() if config.watch.enabled and ranks.leads else None
        self.diverged: str | None = None
        self.explained = False
        self.attempted = 0
        self.applied = dict.fromkeys(self.models, 0)
        self.skipped = dict.fromkeys(self.models, 0)
        self.recent: dict[str, list[torch.Tensor]] = defaultdict(list)

    def share_models(self) -> None:
        """Among several ranks: one start, batch normalisation as configured, and random numbers of one's own."""
        if self.ranks.size == 1:
            return
        if self.config.count:
            raise UserError("count=true counts the products of one process; start mptrain without torchrun")
        self.ranks.same(self.models)
        if self.config.parallel.batchnorm == "sync":
            batchnorm.synchronise(self.models.values(), self.ranks)
        self.task.together = self.ranks.together
        process.seed_everything(process.seed_of(self.config.seed, self.ranks.rank))

    def observed(self) -> Observer:
        """Watch, fastened to this run."""
        return Observer(
            self.config.watch,
            self.record,
            self.config.scaling.floor,
            rounds_updates(self.precision.storage, self.precision.master),
            model=self.models,
            optimizer=self.optimizers,
            scaler=self.scaler,
            arithmetic=self.arithmetic,
        )

    # The loop.

    def to_the_end(self) -> dict[str, Any]:
        state.resume(self)
        shown = self.config if self.ranks.leads else self.config.silent()
        if self.ranks.leads and (fp8 := self.precision.fp8_layers(self.models)) is not None:
            print("\n".join(fp8_layers.sentences(**fp8)))
        with Progress(shown, self.record, self.attempted) as self.progress, self.counting():
            with process.stop_requests() as self.ranks.signals, self.observer.watch if self.observer else nullcontext():
                self.loop()
            return self.end()

    def loop(self) -> None:
        """Steps until the budget is spent, the run diverges, or a signal arrives."""
        config = self.config
        windows = self.loader.windows()
        self.throughput.begin()
        while self.attempted < config.steps and self.diverged is None:
            window = next(windows)
            measured = self.measuring()
            if measured is not None and self.observer is not None:
                self.observer.watch.skip()  # one instrument at a time
            if self.observer is not None and self.observer.watch.wants_shadow and self.ranks.size == 1:
                rerun.shadow(self, window)
            with measured or nullcontext():
                skipped = self.step(window)
            if measured is not None:
                self.instruments.dtypes["loss"] = ran.name(self.loss_dtype)
            self.attempted += 1
            if self.observer is not None:
                self.observer.step(next(iter(self.recent.values()))[-1], self.progress)
            self.throughput.step(self.units, counted=measured is None)
            if skipped and not self.explained and rerun.no_scale_helps(self):
                rerun.explain(self, window)
            if skipped and self.scaler.consecutive_skips >= config.max_skips:
                self.diverged = rerun.blame(self, window)
            last = self.attempted == config.steps or self.diverged is not None
            if skipped or last or self.attempted % config.log_every == 0:
                self.log(skipped)
            if config.eval.every and self.attempted % config.eval.every == 0 and not last:
                with self.throughput.paused():
                    self.evaluate()
            stop = self.ranks.stopping
            if stop or last or self.attempted % config.checkpoint_every == 0:
                with self.throughput.paused():
                    state.save(self)
            if stop and not last:
                raise Stopped(
                    f"stopped by signal {stop} after step {self.attempted}; the same command goes on from there"
                )

    def step(self, window: list[Batch]) -> bool:
        """One iteration over a window of batches; returns whether an update was skipped."""
        sizes = [self.task.size(batch) for batch in window]
        totals = self.ranks.totals(sizes)
        self.units = sum(totals)
        self.begun = self.scaler.value, process.torch_state(self.device)
        before = self.task.state_dict()
        self.weights.zero_grad()
        if self.has_buffers:
            self.buffers.keep()
        for number, (batch, size, total) in enumerate(zip(window, sizes, totals, strict=True), start=1):
            for name, loss in self.losses(batch, self.region):
                self.recent[name].append(loss.detach() if size == total else loss.detach() * (size / total))
                self.loss_dtype = loss.dtype
                share = loss if size == self.units else loss * (size / self.units)
                self.scaler.scale(share).backward()
                if number == len(window):
                    self.apply(name)
        if skipped := self.scaler.update():
            self.buffers.restore()
            self.task.load_state_dict(before)
        return skipped

    def losses(self, batch: Batch, region: AbstractContextManager[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The losses of a batch, one by one, each computed inside the region; what is done with them is outside."""
        phases = self.task.losses(self.to_device(batch))
        for _ in self.models:
            with region:
                phase = next(phases, None)
            if phase is None:
                return
            yield phase
        if (phase := next(phases, None)) is not None:
            raise ValueError(f"the task yields more losses than it has networks, the next for {phase[0]!r}")

    def apply(self, name: str) -> None:
        """Unscale, check, clip, step: one optimizer's update from the gradients that are there."""
        optimizer = self.optimizers[name]
        self.weights.gather(name)
        self.ranks.sum_gradients(self.weights.of(name))
        finite = self.scaler.unscale_(optimizer)
        if finite and self.config.clip is not None:
            self.ranks.clip(self.weights.of(name), self.config.clip)
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

    def measuring(self) -> Any:
        """Instruments for the first step, and for the first that finds the optimizers' state in place; else None."""
        settled = self.instruments.settled
        if settled or (self.instruments.dtypes and not all(self.applied.values())):
            return None
        self.instruments.settled = all(self.applied.values())
        stack = ExitStack()
        stack.enter_context(self.throughput.paused())
        stack.enter_context(layout.as_written(self.config))
        stack.enter_context(self.instruments.watching(self.held(), self.models.values(), self.optimizers.values()))
        return stack

    def held(self) -> Iterator[torch.Tensor]:
        """Every tensor that lives from step to step."""
        for name in self.models:
            yield from self.weights.held(name)
            yield from self.weights.of(name)
            yield from (value for state in self.optimizers[name].state.values() for value in state.values())
            yield from self.average.shadow[name] if self.average is not None else ()

    def evaluate(self) -> dict[str, float]:
        """The metric, to the log and the screen too; among several ranks one evaluates and all are told."""
        with self.weights.whole(self.average):
            return self.ranks.first(self.evaluate_here)

    def evaluate_here(self) -> dict[str, float]:
        result = self.scores(self.config.eval.batch_size)
        self.record.log({"step": self.attempted, "eval": result})
        self.progress.evaluated(self.attempted, result)
        return result

    def scores(self, batch_size: int) -> dict[str, float]:
        """The metric over the whole test set, in the stated precision; leaves the random state as it was."""
        fp32 = self.config.eval.precision == "fp32"
        moved = (self.to_device(batch) for batch in batches(self.task.test_set, batch_size))
        with ExitStack() as stack:
            stack.enter_context(process.same_random_state(self.device))
            stack.enter_context(torch.no_grad())
            stack.enter_context(layout.as_written(self.config))
            stack.enter_context(self.weights.evaluating(fp32))
            stack.enter_context(nullcontext() if self.average is None else self.weights.averaged(self.average))
            stack.enter_context(hardware.tf32(False) if fp32 else self.arithmetic)
            for model in self.models.values():
                model.eval()
            try:
                return self.task.evaluate(moved)
            finally:
                for model in self.models.values():
                    model.train()

    def log(self, skipped: bool) -> None:
        """One line of metrics.jsonl: the mean losses since the last line."""
        losses = {name: value.mean().item() for name, value in self.recent_losses().items()}
        self.recent.clear()
        if not self.ranks.leads:
            return
        name = next(iter(self.models))
        line = {
            "step": self.attempted,
            "loss": losses.get(name) if len(self.models) == 1 else losses,
            "lr": self.optimizers[name].param_groups[0]["lr"],
            "scale": self.scaler.value,
            "applied": self.applied[name],
            **({"skipped": True} if skipped else {}),
        }
        self.record.log(line)
        self.progress.show(self.attempted, line)

    def recent_losses(self) -> dict[str, torch.Tensor]:
        """The losses since the last line, each of the whole batch."""
        return {name: self.ranks.total(torch.stack(values)) for name, values in self.recent.items()}

    def end(self) -> dict[str, Any]:
        """Evaluates, writes what is left, and the summary last."""
        throughput = self.throughput.result()
        with self.weights.whole(self.average):
            return self.ranks.first(lambda: self.end_here(throughput))

    def end_here(self, throughput: dict[str, Any]) -> dict[str, Any]:
        metrics: dict[str, float] = {}
        if self.diverged is None:
            metrics = self.evaluate_here()
            self.task.finish(self.record.folder)
        if self.counter is not None:
            write_atomically(self.record.folder / "counts.json", json.dumps(self.counter.table(), indent=1) + "\n")
        status = "finished" if self.diverged is None else "diverged"
        return self.record.finish(status, self.diverged, outcome.summary(self, metrics, throughput))

    @contextmanager
    def counting(self) -> Iterator[None]:
        several = len(self.models) > 1
        named = [(name if several else "", model) for name, model in self.models.items()]
        handles = self.counter.watch(named) if self.counter is not None else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
