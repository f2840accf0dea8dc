"""Peak memory of a training step where there is no allocator to ask: torch's MemTracker, counting live tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import _TOTAL_KEY, MemTracker


class StepMemory(MemTracker):
    """MemTracker for steps that run a network more than once (accumulation, both passes of a discriminator).

    Each storage counts once, while it lives; temporaries inside a kernel are not seen. The original refuses a second
    forward pass of one network, because its statistics per module would be overwritten; only the total is read here.

    held: the tensors that were there before the step, whether it uses them or not.
    """

    def __init__(self, held: Iterable[Tensor]):
        super().__init__()
        self.track_external(*held)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)

    def peak(self) -> int:
        """Most bytes of live tensors at any moment of the step."""
        return max((place[_TOTAL_KEY] for place in self.get_tracker_snapshot("peak").values()), default=0)
