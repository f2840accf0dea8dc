"""Mixed precision training experiments: one recipe, every precision, from command to table.

As a library, without the runner: `Precision` (how numbers are kept), `loss_scaler`, `MovingBuffers`, `Watch`,
`Record`, `compare`. Each is imported when it is first used, so `import mptrain` is instant. scripts/own_loop.py is an
example.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Precision": "mptrain.precision.modes",
    "Counter": "mptrain.precision.counting",
    "MovingBuffers": "mptrain.precision.buffers",
    "DynamicSettings": "mptrain.precision.scaling",
    "loss_scaler": "mptrain.precision.scaling",
    "Record": "mptrain.results.record",
    "UserError": "mptrain.errors",
    "compare": "mptrain.results.compare",
    "Watch": "mptrain.watch.hook",
}
__all__ = [
    "Counter",
    "DynamicSettings",
    "MovingBuffers",
    "Precision",
    "Record",
    "UserError",
    "Watch",
    "compare",
    "loss_scaler",
]

if TYPE_CHECKING:
    from mptrain.errors import UserError
    from mptrain.precision.buffers import MovingBuffers
    from mptrain.precision.counting import Counter
    from mptrain.precision.modes import Precision
    from mptrain.precision.scaling import DynamicSettings, loss_scaler
    from mptrain.results.compare import compare
    from mptrain.results.record import Record
    from mptrain.watch.hook import Watch


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module mptrain has no attribute {name}")
    return getattr(importlib.import_module(_HOME[name]), name)
