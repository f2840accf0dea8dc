"""Number formats: their limits, and rounding to them.

FP16, BF16: torch's casts round to nearest, ties to even, keep subnormals and overflow to infinity; they are exact
and fast. TF32 has no dtype: it is FP32 with 10 mantissa bits, rounded here as NVIDIA's `cvt.rna.tf32.f32` does, to
nearest with ties away from zero (one tie in about 2^13 random values tells it from ties to even).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating point format."""

    name: str
    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max(self) -> float:
        """Largest finite value (65,504 for FP16)."""
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

OF_DTYPE = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def round_tf32(x: Tensor) -> Tensor:
    """FP32 values rounded to TF32, kept in FP32; infinities and NaN stay what they are."""
    rounded = (x.view(torch.int32) + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)
