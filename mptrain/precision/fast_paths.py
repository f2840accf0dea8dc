"""nn.MultiheadAttention and nn.TransformerEncoder evaluate product by product in our regions, as under CUDA autocast.

Without gradients both take one kernel for the whole layer, which rounds where it likes. Where autocast is on they do
without it, but `torch.is_autocast_enabled()`, which they ask, means CUDA's.
"""

from collections.abc import Callable

import torch
from torch.backends import mha


def leave_where(inside: Callable[[], bool]) -> None:
    """From now on the layers are told that their fast paths are off where `inside()`; elsewhere nothing changes."""
    enabled = mha.get_fastpath_enabled

    def get_fastpath_enabled() -> bool:
        if not torch.jit.is_scripting():  # what torch.jit compiles is the other line
            return enabled() and not inside()
        return True

    mha.get_fastpath_enabled = get_fastpath_enabled
