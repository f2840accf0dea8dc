"""What this machine computes natively, and the TF32 switches.

On a CPU, FP16 counts as emulated even where the processor has FP16 units: the emulation is exact, follows CUDA's
op policy and is the same on every CPU. BF16 is native where oneDNN has BF16 kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mptrain.errors import UserError

if TYPE_CHECKING:
    from mptrain.precision.modes import Precision


def is_native(precision: Precision, device_type: str) -> bool:
    """Whether the device has kernels for this precision's dot products."""
    if precision.accumulate == "float16" and precision.compute == "float16":
        return False
    if precision.compute == "float32":
        return True
    if precision.compute == "float8":
        return device_type == "cuda" and _capability() >= (8, 9)
    if precision.compute == "tf32" and precision.keep_fp32:
        return False  # a GPU's switches are for all operations at once
    if device_type == "cpu":
        return precision.compute == "bfloat16" and cpu_has_bfloat16()
    if device_type == "cuda":
        return _capability() >= {"float16": (5, 3), "bfloat16": (8, 0), "tf32": (8, 0)}[precision.compute]
    return False


def _capability() -> tuple[int, int]:
    try:
        return torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError) as error:  # no driver, no GPU, or a torch that was built without CUDA
        raise UserError("device=cuda: torch finds no CUDA GPU here; give cpu, or see mptrain doctor") from error


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN has BF16 kernels for this processor."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def kind(device: str | torch.device) -> str:
    """cpu or cuda, of a device or its name; raises UserError for any other."""
    name = str(device).partition(":")[0]
    if name not in ("cpu", "cuda"):
        raise UserError(f"device={device}: give cpu or cuda")
    return name


def resolve(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` as a device that is there; raises UserError if it is not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name} is unknown; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device={name}: torch finds no CUDA GPU here; use device=cpu or device=auto, or see mptrain doctor"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    return device


OPERATIONS = ("matmul", "conv", "rnn")
REDUCED_SUMS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
_HOLDERS: dict[tuple[str, str], Any] = {
    ("cuda", "matmul"): lambda: torch.backends.cuda.matmul,
    ("cuda", "conv"): lambda: torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    ("cuda", "rnn"): lambda: torch.backends.cudnn.rnn,  # type: ignore[attr-defined]
    ("cpu", "matmul"): lambda: torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    ("cpu", "conv"): lambda: torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    ("cpu", "rnn"): lambda: torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
}


def tf32_flags(device_type: str) -> dict[str, str]:
    """What a device's matmul, convolution and RNN kernels may do to FP32: "ieee", "tf32", or "bf16" (oneDNN)."""
    return {name: _HOLDERS[device_type, name]().fp32_precision for name in OPERATIONS}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32 on GPUs for matmul, convolution and RNN alike; puts back what was set before.

    The CPU's switches (oneDNN may use TF32 or BF16 inside "FP32") are held at "ieee" either way. torch has two sets
    of switches and refuses to read an old one after a new one was written: only the new ones are touched here.
    By default cuBLAS may add the parts of a long 16-bit product in 16 bits; inside, all sums are FP32 (section 3.3).
    """
    before = {place: holder().fp32_precision for place, holder in _HOLDERS.items()}
    sums = {name: getattr(torch.backends.cuda.matmul, name) for name in REDUCED_SUMS}
    try:
        for (device_type, _), holder in _HOLDERS.items():
            holder().fp32_precision = "tf32" if allowed and device_type == "cuda" else "ieee"
        for name in sums:
            setattr(torch.backends.cuda.matmul, name, False)
        yield
    finally:
        for place, holder in _HOLDERS.items():
            holder().fp32_precision = before[place]
        for name, reduced in sums.items():
            setattr(torch.backends.cuda.matmul, name, reduced)
