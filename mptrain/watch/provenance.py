"""Where the first NaN or infinity comes from: the failing batch is run again with an eye on every operation.

A scaler that meets an infinite gradient halves its scale. That helps if the gradient overflowed, and never if the
forward pass made the NaN: the finding tells the two apart. Every operation of the run, forward and backward, passes a
dispatch mode, which notes those with finite inputs and a result that is not finite. Modules are known by hooks; nodes
of the autograd graph carry the name of the module that made them and the source lines, so that an operation of the
backward pass can be traced to a line of the forward pass.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import TorchDispatchMode

from mptrain.watch.modules import named, tensors

PREPARES = ("empty", "full", "fill", "new_", "scalar_tensor", "lift_fresh", "resize", "detach", "view", "alias")
"""Operations whose result may hold infinities on purpose, such as masks, or nothing yet."""
FRAMES = 12
BEFORE = 20
LABEL = "mptrain.module"
OUTSIDE = "(loss)"
"""Where no module runs."""


@dataclass(frozen=True)
class Finding:
    """The first thing that was not finite.

    where: forward | backward | data | weight (or buffer). module: its path, "" of the whole network, or OUTSIDE.
    op: the first operation with finite inputs and another result, None if there is none. inputs: of that operation, or
    of the module. frames: source lines of the forward pass that led there, the innermost last. before: what the last
    modules before it put out or, if where is backward, got as gradients, each with module, type and `extent`; the
    cause often lies there.
    """

    where: str
    module: str
    type: str
    op: str | None
    inputs: list[dict[str, Any]]
    frames: list[str]
    before: list[dict[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.module or 'the whole network'} ({self.type})" if self.type else "no module (the loss)"

    def __str__(self) -> str:
        if self.where == "backward" and self.op is None:
            return f"backward at the output of {self.label}"
        text = {"data": "data that reaches", "weight": "weights of"}.get(self.where, f"{self.where} of")
        return f"{text} {self.label}" + (f" in {self.op}" if self.op else "")

    @property
    def advice(self) -> str:
        """What to do about it."""
        return {
            "data": "the batch itself is not finite: look at the data; no loss scale helps",
            "weight": "the weight was not finite before this step: go on from an earlier checkpoint",
            "forward": "a lower loss scale does not help, the forward pass does not know it; "
            + (
                "use BF16 if a value outgrew FP16 (65504), or mend the operation"
                if self._may_outgrow_half
                else "no FP16 is at work here: lower the learning rate, clip gradients, or mend the operation"
            ),
            "backward": "the gradient overflowed or an operation has no finite derivative here; a lower loss scale "
            "helps against the first only",
        }[self.where]

    @property
    def _may_outgrow_half(self) -> bool:
        """A cast may be to FP16; so may be what an operation leaves whose operands are not seen."""
        formats = {each.get("dtype") for each in self.inputs}
        return self.op is None or "_to_copy" in self.op or not formats <= {"float32", "bfloat16"}

    @property
    def details(self) -> list[str]:
        """Lines that say what it was given, what came before, and where it stands in the source."""
        given = [f"{each.get('name', each['dtype'])} {_told(each)}" for each in self.inputs]
        passed = [f"{each['module'] or 'the whole network'} {_told(each)}" for each in self.before[-3:]]
        lines = [("given", "; ".join(given)), ("before it", "; ".join(passed)), ("at", (self.frames or [""])[-1])]
        return [f"{name}: {text}" for name, text in lines if text]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "message": str(self), "advice": self.advice}


@dataclass(frozen=True)
class _Birth:
    """An operation that made the first values that are not finite out of finite ones, or NaN out of infinities."""

    op: str
    module: str
    inputs: list[dict[str, Any]]
    frames: list[str]

    @property
    def clean(self) -> bool:
        """Whether what it was given was finite."""
        return not any(given["inf"] for given in self.inputs)


def first_nonfinite(models: dict[str, nn.Module], run: Callable[[], Any]) -> Finding | None:
    """Runs forward and backward once more; returns the first thing that is not finite, None if all is.

    `run` leaves no trace: gradients, buffers and random numbers are the caller's to put back. It may return its losses.
    """
    with _Eyes(models) as eyes, torch.autograd.set_detect_anomaly(True, check_nan=False), _Operations(eyes):
        losses = run()
    return eyes.finding(tensors(losses))


class _Eyes:
    """Hooks on every module, for one run."""

    def __init__(self, models: dict[str, nn.Module]):
        self.paths = {module: path for path, module in named(models)}
        self.types = {path: type(module).__name__ for module, path in self.paths.items()}
        # before the run, in which batch norm may spoil its own; infinities may be meant, as in a mask
        self.spoilt = {id(b) for module in self.paths for b in module.buffers(recurse=False) if _has_nan(b)}
        self.running: list[str] = []
        self.bad: tuple[nn.Module, list[Tensor], int] | None = None
        self.bad_gradient: str | None = None
        self.births: list[_Birth] = []
        self.born_backward: list[_Birth] = []
        self.passed: deque[dict[str, Any]] = deque(maxlen=BEFORE)
        self.passed_backward: deque[dict[str, Any]] = deque(maxlen=BEFORE)
        self.latest: Tensor | None = None

    def __enter__(self) -> _Eyes:
        self.handles = [
            every_module.register_module_forward_pre_hook(self._enters),
            every_module.register_module_forward_hook(self._leaves, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        if (path := self.paths.get(module)) is None:
            return
        for tensor in tensors(inputs):
            if tensor.grad_fn is not None:
                _notes(tensor.grad_fn).setdefault(LABEL, self.running[-1] if self.running else OUTSIDE)
        self.running.append(path)

    def _leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if (path := self.paths.get(module)) is None:
            return
        self.running.pop()
        for tensor in tensors(output):
            for node in _label(tensor.grad_fn, path):
                self._follow(node)
            if self.bad is None and not finite(tensor):
                self.bad = module, tensors(inputs), len(self.births)
            if self.bad is None and tensor is not self.latest:  # as a container hands on what its last module made
                self.passed.append(self._passing(path, tensor))
                self.latest = tensor
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda g, path=path: self._comes_back(path, g))

    def _follow(self, node: Any) -> None:
        """Notes a step of the backward pass that spoils a finite gradient by means that no operation shows."""
        name, notes = node.name(), _notes(node)

        def look(made: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]) -> None:
            known = self.born_backward
            if not known and all(map(finite, tensors(arrived))) and not all(map(finite, tensors(made))):
                ranges = [extent(t) for t in tensors(arrived)]
                known.append(_Birth(name, notes.get(LABEL, OUTSIDE), ranges, readable(notes.get("traceback_", []))))

        node.register_hook(look)

    def _comes_back(self, path: str, gradient: Tensor) -> None:
        if self.bad_gradient is None and not finite(gradient):
            self.bad_gradient = path
        elif self.bad_gradient is None and not self.born_backward:
            self.passed_backward.append(self._passing(path, gradient))

    def _passing(self, path: str, tensor: Tensor) -> dict[str, Any]:
        return {"module": path, "type": self.types[path], **extent(tensor)}

    def finding(self, losses: list[Tensor]) -> Finding | None:
        if self.bad is not None:
            return self._forward(*self.bad)
        if self.births and not all(map(finite, losses)):
            return self._of("forward", ([birth for birth in self.births if birth.clean] or self.births)[-1])
        if self.born_backward:
            return self._of("backward", self.born_backward[0])
        if self.bad_gradient is not None:
            before = list(self.passed_backward)
            return Finding("backward", self.bad_gradient, self.types[self.bad_gradient], None, [], [], before)
        return None

    def _forward(self, module: nn.Module, inputs: list[Tensor], born: int) -> Finding:
        path = self.paths[module]
        parameters: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if not finite(p)}
        parameters |= {n: b for n, b in module.named_buffers() if id(b) in self.spoilt}
        if parameters:
            name, p = next(iter(parameters.items()))
            inner = ".".join(part for part in (path, name.rpartition(".")[0]) if part)
            ranges = [{"name": name.rpartition(".")[2], **extent(p)}]
            return Finding("weight", inner, self.types.get(inner, ""), None, ranges, [], list(self.passed))
        sound = all(map(finite, inputs))
        births = [birth for birth in self.births[:born] if sound or birth.clean]
        here = [birth for birth in births if birth.module == path] or births[-1:]
        if here:
            at = here[0] if here[0].module == path or not sound else None
            if at is not None:
                return self._of("forward", at)
        ranges = [extent(t) for t in inputs]
        where = "forward" if sound else "data"
        return Finding(where, path, self.types[path], None, ranges, [], list(self.passed))

    def _of(self, where: str, birth: _Birth) -> Finding:
        kind = self.types.get(birth.module, "")
        before = list(self.passed if where == "forward" else self.passed_backward)
        return Finding(where, birth.module, kind, birth.op, birth.inputs, birth.frames, before)


class _Operations(TorchDispatchMode):
    """Notes operations that make something not finite out of finite numbers, or NaN out of infinities, as masks are."""

    def __init__(self, eyes: _Eyes):
        super().__init__()
        self.eyes = eyes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        backward = torch._C._current_graph_task_id() != -1
        known = self.eyes.born_backward if backward else self.eyes.births
        name = func._schema.name.partition("::")[2]
        if len(known) >= 100 or name.startswith(PREPARES) or "fill" in name:
            return func(*args, **kwargs)
        inputs = tensors([*args, *kwargs.values()])
        clean = all(map(finite, inputs))
        innocent = clean or not any(map(_has_nan, inputs))
        before = [extent(t) for t in inputs] if innocent and name.endswith("_") else None
        result = func(*args, **kwargs)
        spoils = not all(map(finite, tensors(result))) if clean else any(map(_has_nan, tensors(result)))
        if innocent and spoils:
            known.append(self._birth(name, before or [extent(t) for t in inputs], backward))
        return result

    def _birth(self, name: str, inputs: list[dict[str, Any]], backward: bool) -> _Birth:
        if not backward:
            running = self.eyes.running
            return _Birth(name, running[-1] if running else OUTSIDE, inputs, readable(traceback.format_stack()))
        node = torch._C._current_autograd_node()
        metadata = {} if node is None else _notes(node)
        op = name if node is None else f"{node.name()}: {name}"
        return _Birth(op, metadata.get(LABEL, OUTSIDE), inputs, readable(metadata.get("traceback_", [])))


def _notes(node: Any) -> dict[str, Any]:
    """What a node of the autograd graph has been given to remember."""
    return node.metadata  # type: ignore[no-any-return]


def _label(node: Any, path: str) -> Iterator[Any]:
    """Gives the nodes that a module added to the graph its name, and yields them; inner modules were there first."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is not None and LABEL not in (notes := _notes(node)):
            notes[LABEL] = path
            waiting += [following for following, _ in node.next_functions]
            if not hasattr(node, "variable"):
                yield node


def finite(tensor: Tensor) -> bool:
    """Whether all values are; waits for the device."""
    return bool(_values(tensor).isfinite().all())


def _has_nan(tensor: Tensor) -> bool:
    return bool(_values(tensor).isnan().any())


def _values(tensor: Tensor) -> Tensor:
    """Without graph, and in a format that torch can ask whether it is finite."""
    tensor = tensor.detach()
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def extent(tensor: Tensor) -> dict[str, Any]:
    """{shape, dtype, min, max, nan, inf} of a tensor, its finite values' extremes."""
    values = _values(tensor)
    inside = values[values.isfinite()].float()
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "min": inside.min().item() if inside.numel() else None,
        "max": inside.max().item() if inside.numel() else None,
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
    }


def _told(seen: dict[str, Any]) -> str:
    """An extent in words."""
    shape = "x".join(map(str, seen["shape"])) or "a number"
    bad = [f"{seen[kind]} {kind}" for kind in ("nan", "inf") if seen[kind]]
    inside = [] if seen["min"] is None else [f"{seen['min']:.3g} to {seen['max']:.3g}"]
    return f"({shape}) {' and '.join(inside + bad) or 'empty'}"


def readable(stack: list[str]) -> list[str]:
    """The user's own frames, each "file:line: code", without those of libraries, this module and the loop."""
    here = Path(__file__).parent.parent
    skipped = [str(here / name) for name in ("watch", "precision", "train.py", "cli.py", "process.py")]
    skipped += [str(Path(torch.__file__).parent), "<frozen", str(Path(traceback.__file__).parent)]
    found = []
    for entry in stack:
        head, *code = [line.strip() for line in entry.strip().splitlines()]
        file, line = (head.split('"')[1], head.split("line ")[1].split(",")[0]) if '"' in head else (head, "")
        if not any(file.startswith(folder) for folder in skipped):
            found.append(f"{file}:{line}: {code[0] if code else ''}")
    return found[-FRAMES:]
