"""Peak memory of a training step where there is no allocator to ask: torch's MemTracker, counting live tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import _TOTAL_KEY, MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.optim import Optimizer

KINDS = {
    "Parameter": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "activations",
    "Buffer": "buffers",
    "Other": "copies",
}
"""What MemTracker calls a kind of tensor -> what we call it; "copies" are master copies and averages."""


class _Entered(ModTracker):
    """Tells of every module that is entered, and of nothing else."""

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        self._user_pre_fw_hook(mod, input)  # type: ignore[misc]

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:
        pass


class StepMemory(MemTracker):
    """MemTracker for the whole of a step, in which a network may run more than once (accumulation, discriminators).

    Each storage counts once, while it lives; temporaries inside a kernel are not seen. The original also keeps account
    of every module, which refuses a second forward pass and takes most of its time; here only the whole is counted.

    held: the tensors that were there before the step, whether it uses them or not. models, optimizers: whose tensors
    they are, to tell kinds apart; they add nothing.
    """

    def __init__(self, held: Iterable[Tensor], models: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()):
        super().__init__()
        self._mod_tracker = _Entered()
        self.moments: list[int] = []
        """bytes of live tensors at the start and after every operation"""
        self.track_external(*held)
        for model in models:
            for parameter in model.parameters():
                self._update_and_maybe_create_winfos(parameter, _MemRefType.PARAM)
            for buffer in model.buffers():
                self._update_and_maybe_create_winfos(buffer, _MemRefType.BUFFER)
        for optimizer in optimizers:
            self._track_optimizer_states(_MemRefType.OPT, optimizer)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if module not in self.memory_tracking:
            self.memory_tracking.update(dict.fromkeys(module.modules(), True))
            self._track_module_params_and_buffers(module)

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def __enter__(self) -> StepMemory:
        self._note_moment()
        super().__enter__()
        return self

    def _note_moment(self) -> None:
        self.moments.append(sum(now[_TOTAL_KEY] for now in self._curr_mem_snap.values()))

    def _update_peak_stats(self, peak_state: Any) -> None:
        self._note_moment()
        for place, now in self._curr_mem_snap.items():
            if self._peak_mem.get(place, 0) < now[_TOTAL_KEY]:
                self._peak_mem[place], self._peak_mem_snap[place] = now[_TOTAL_KEY], dict(now)

    def peak(self) -> int:
        """Most bytes of live tensors at any moment of the step."""
        return max((place[_TOTAL_KEY] for place in self.get_tracker_snapshot("peak").values()), default=0)

    def kinds(self) -> dict[str, int]:
        """The bytes of that moment, by the kinds of KINDS."""
        found: dict[str, int] = {}
        for place in self.get_tracker_snapshot("peak").values():
            for kind, size in place.items():
                if (name := KINDS.get(str(getattr(kind, "value", kind)))) is not None:
                    found[name] = found.get(name, 0) + size
        return found
