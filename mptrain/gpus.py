"""Data sheets of GPUs: what a roofline needs, dense (without structured sparsity), SXM modules.

Sources: NVIDIA V100 data sheet (2020: 32 GB HBM2), A100 80GB data sheet (2021), H100 data sheet (2023) and H200 data
sheet (2024). The last two count sparsity in the figures of tensor cores, which are halved here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Peaks in FLOP/s by format of the operands; memory in bytes, if known; bandwidth in bytes/s."""

    name: str
    peaks: dict[str, float]
    memory: float | None
    bandwidth: float

    def runs(self, matmul: str) -> bool:
        """Whether there are units for products in this format."""
        return matmul in self.peaks


_HOPPER = {"float32": 67e12, "tf32": 494.7e12, "float16": 989.4e12, "bfloat16": 989.4e12, "float8": 1978.9e12}

GPUS = (
    Machine("V100", {"float32": 15.7e12, "float16": 125e12}, 32e9, 900e9),
    Machine("A100", {"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12}, 80e9, 2039e9),
    Machine("H100", _HOPPER, 80e9, 3350e9),
    Machine("H200", _HOPPER, 141e9, 4800e9),
)
