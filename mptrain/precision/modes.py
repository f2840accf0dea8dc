"""Precision: one named way of keeping numbers, read from configs/precision/<name>.yaml.

This module imports no torch until a method needs it, so that the command line can check a configuration at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from mptrain import files
from mptrain.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mptrain.precision.arithmetic import Arithmetic
    from mptrain.precision.counting import Counter
    from mptrain.precision.storage import Weights

CHOICES = {
    "compute": ("float32", "tf32", "bfloat16", "float16", "float8"),
    "storage": ("float32", "bfloat16", "float16"),
    "accumulate": ("float32", "float16"),
    "update": ("float32", "storage"),
    "kernels": ("auto", "emulated"),
}
SMALLEST_SCALE = 2.0**-126


def fits_fp32(scale: float) -> bool:
    """Whether FP32 holds a loss scale and its inverse, both as normal numbers."""
    return SMALLEST_SCALE <= scale <= 1 / SMALLEST_SCALE


@dataclass(frozen=True)
class Precision:
    """How the numbers of a training run are kept (Mixed Precision Training, section 3).

    compute: format of operands and results of dot products; "float8" is that of linear layers, all else is BF16.
    storage: format of the network's own parameters.
    master: an FP32 copy of the parameters is what the optimizer updates (section 3.1).
    update: arithmetic and state of the optimizer: FP32, or the storage format.
    accumulate: format of the running sum of a dot product (section 3.3); FP16 is rounded every `chunk` products.
    kernels: "auto" uses the device's own where it has them and emulates elsewhere; "emulated" always emulates.
    keep_fp32: functions ("softmax", "conv2d") and modules ("fc", "layer*.bn") that stay in FP32.
    scale: the loss scale where the command line sets none.
    """

    name: str
    compute: str = "float32"
    storage: str = "float32"
    master: bool = True
    update: str = "float32"
    accumulate: str = "float32"
    chunk: int = 16
    kernels: str = "auto"
    keep_fp32: tuple[str, ...] = ()
    scale: str = "none"

    @classmethod
    def load(cls, name: str, **changes: Any) -> Precision:
        """Reads configs/precision/<name>.yaml, with changes; raises UserError if unknown or contradictory."""
        return cls.from_mapping(files.read_yaml(files.config("precision", name)), **changes)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], **changes: Any) -> Precision:
        """Builds a checked Precision from plain data; raises UserError with every complaint at once."""
        values = {**mapping, **changes}
        if complaints := complaints_about(values):
            raise UserError("; ".join(complaints))
        return cls(**{**values, "keep_fp32": tuple(values.get("keep_fp32") or ())})

    def with_changes(self, **changes: Any) -> Precision:
        """The same precision with some fields changed; raises UserError as `load` does."""
        return Precision.from_mapping(self.as_dict(), **changes)

    @property
    def label(self) -> str:
        """The name, followed by what differs from the named file."""
        named = Precision.load(self.name)
        changed = [
            f"{f.name}={_show(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(named, f.name)
        ]
        return " ".join([self.name, *changed])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "keep_fp32": list(self.keep_fp32)}

    # What needs torch.

    def backend(self, device_type: str | torch.device) -> str:
        """ "native" where the device's own kernels compute the dot products, "emulated" where FP32 kernels do."""
        from mptrain.precision import hardware

        device_type = hardware.kind(device_type)
        return "emulated" if self.kernels == "emulated" or not hardware.is_native(self, device_type) else "native"

    def arithmetic(
        self, device_type: str | torch.device = "cpu", counter: Counter | None = None, forward_only: bool = False
    ) -> Arithmetic:
        """The autocast region of this precision: `with arithmetic: loss = loss_function(model(x).float(), y)`.

        forward_only: promises that no region holds an optimizer's step, a backward pass or torch.autograd.grad; saves
        30 microseconds a product, and a loss, where a CPU multiplies BF16 natively.
        Raises UserError for a device that is neither a CPU nor a CUDA GPU, and for a counter where nothing is rounded
        by us: native kernels, FP32 and TF32.
        """
        from mptrain.precision import hardware, policy
        from mptrain.precision.arithmetic import Arithmetic

        device_type = hardware.kind(device_type)
        if counter is not None and (self.backend(device_type) == "native" or self.compute == "tf32"):
            raise UserError(
                f"count=true counts what rounding to 16 or 8 bits does where it is emulated; precision={self.name} "
                f"{'rounds no result' if self.compute in ('float32', 'tf32') else 'runs natively here'}; "
                "use precision=fp16 on a CPU, or precision.kernels=emulated with a 16-bit precision"
            )
        sixteen = self if self.compute != "float8" else self.with_changes(compute="bfloat16")
        return Arithmetic(
            device_type,
            sixteen.compute,
            emulated=self.compute != "float32" and sixteen.backend(device_type) == "emulated",
            chunk=self.chunk if self.accumulate == "float16" else 0,
            keep_fp32=frozenset(self.keep_fp32) & policy.FUNCTIONS,
            counter=counter,
            fp8=self.backend(device_type) if self.compute == "float8" else None,
            forward_only=forward_only,
        )

    def fp8_layers(self, models: Mapping[str, nn.Module]) -> dict[str, Any] | None:
        """{"layers": paths that multiply in FP8, "out": {why not: paths}}; None for precisions without FP8."""
        if self.compute != "float8":
            return None
        from mptrain.precision import fp8_layers

        inside, outside = fp8_layers.plan(models, self.keep_fp32)
        return {"layers": inside, "out": outside}

    def prepare(self, models: nn.Module | dict[str, nn.Module]) -> Weights:
        """Brings the networks' parameters to their storage format; returns what the optimizers are to update.

        Raises UserError for parameters that are already in another format, and for names in keep_fp32 that match
        neither a function nor a module.
        """
        from torch import nn

        from mptrain.precision.storage import prepare

        return prepare(self, {"model": models} if isinstance(models, nn.Module) else models)


def complaints_about(values: Mapping[str, Any]) -> list[str]:
    """Everything wrong with a precision's fields, each as one clause; empty if nothing is."""
    known = {f.name: f for f in fields(Precision)}
    complaints = [f"precision.{key} is unknown; there are {', '.join(known)}" for key in values if key not in known]
    for key, allowed in CHOICES.items():
        if key in values and values[key] not in allowed:
            complaints.append(f"precision.{key}={_show(values[key])}: choose {' | '.join(allowed)}")
    keep = values.get("keep_fp32")
    several = keep is None or (isinstance(keep, Collection) and not isinstance(keep, (str, Mapping)))
    if not several or not all(isinstance(name, str) for name in keep or ()):
        complaints.append(f"precision.keep_fp32={_show(keep)}: give a list of names, e.g. [softmax,fc]")
    if not isinstance(values.get("master", True), bool):
        complaints.append(f"precision.master={_show(values['master'])}: choose true | false")
    chunk = values.get("chunk", 16)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        complaints.append(f"precision.chunk={_show(chunk)}: give a number of products, 1 or more")
    return complaints or _contradictions(values)


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    get = {f.name: f.default for f in fields(Precision)} | dict(values)
    found = []
    if get["storage"] == "float32" and not get["master"]:
        found.append(
            "precision.master=false contradicts precision.storage=float32: FP32 parameters are their own master copy; "
            "set precision.storage=float16 (or use precision=fp16_nomaster)"
        )
    if get["storage"] != "float32" and get["master"] and get["update"] == "storage":
        found.append(
            f"precision.update=storage contradicts precision.master=true: a master copy is updated in FP32; "
            f"set precision.master=false to update the {get['storage']} parameters themselves"
        )
    if get["accumulate"] == "float16" and get["compute"] != "float16":
        found.append(
            f"precision.accumulate=float16 contradicts precision.compute={get['compute']}: "
            "only FP16 dot products accumulate in FP16; set precision.compute=float16"
        )
    if get["storage"] not in ("float32", get["compute"]):
        found.append(
            f"precision.storage={get['storage']} contradicts precision.compute={get['compute']}: "
            "parameters kept in 16 bits are multiplied in the same 16 bits; make the two equal"
        )
    if get["kernels"] == "emulated" and get["compute"] == "float32":
        found.append("precision.kernels=emulated contradicts precision.compute=float32: FP32 needs no emulation")
    return found


def _show(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
