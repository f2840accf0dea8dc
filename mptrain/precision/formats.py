"""Number formats: their limits, and rounding to them.

FP16, BF16, FP8: torch's casts round to nearest, ties to even, and keep subnormals; they are exact and fast. FP16, BF16
and E5M2 overflow to infinity. E4M3 has none: its largest exponent holds numbers, one NaN for each sign apart, and what
a cast makes of larger values differs between versions of torch, so nobody here casts any. TF32 has no dtype: it is FP32
with 10 mantissa bits, rounded here as NVIDIA's `cvt.rna.tf32.f32` does, to nearest with ties away from zero (one tie in
about 2^13 random values tells it from ties to even).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating point format; `finite` if it has no infinities and uses their exponent for numbers."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite: bool = False

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max(self) -> float:
        """Largest finite value (65,504 for FP16, 448 for E4M3)."""
        if self.finite:
            return (2 - 2 * 2.0**-self.mantissa_bits) * 2.0 ** (self.bias + 1)
        return (2 - 2.0**-self.mantissa_bits) * 2.0**self.bias

    @property
    def smallest_normal(self) -> float:
        """2^-14 for FP16."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """2^-24 for FP16."""
        return self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def flushed_below(self) -> float:
        """Values up to this one round to zero: half the smallest subnormal, a tie that goes to the even zero."""
        return self.smallest_subnormal / 2


FLOAT16 = Format("float16", 5, 10)
BFLOAT16 = Format("bfloat16", 8, 7)
TF32 = Format("tf32", 8, 10)
FLOAT32 = Format("float32", 8, 23)
E4M3 = Format("float8_e4m3fn", 4, 3, finite=True)
E5M2 = Format("float8_e5m2", 5, 2)

OF_DTYPE = {
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.float32: FLOAT32,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def round_tf32(x: Tensor) -> Tensor:
    """FP32 values rounded to TF32, kept in FP32; infinities and NaN stay what they are."""
    rounded = (x.view(torch.int32) + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)
