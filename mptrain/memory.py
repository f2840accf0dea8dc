"""Peak memory of a training step where there is no allocator to ask: torch's MemTracker, counting live tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import _TOTAL_KEY, MemTracker


class StepMemory(MemTracker):
    """MemTracker for the whole of a step, in which a network may run more than once (accumulation, discriminators).

    Each storage counts once, while it lives; temporaries inside a kernel are not seen. The original also keeps account
    of every module, which refuses a second forward pass and takes most of its time; here only the whole is counted.

    held: the tensors that were there before the step, whether it uses them or not.
    """

    def __init__(self, held: Iterable[Tensor]):
        super().__init__()
        self.track_external(*held)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if module not in self.memory_tracking:
            self.memory_tracking[module] = True
            self._track_module_params_and_buffers(module)

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _update_peak_stats(self, peak_state: Any) -> None:
        for place, now in self._curr_mem_snap.items():
            if self._peak_mem.get(place, 0) < now[_TOTAL_KEY]:
                self._peak_mem[place], self._peak_mem_snap[place] = now[_TOTAL_KEY], dict(now)

    def peak(self) -> int:
        """Most bytes of live tensors at any moment of the step."""
        return max((place[_TOTAL_KEY] for place in self.get_tracker_snapshot("peak").values()), default=0)
