"""Meters for gpu_speed.py: FLOP/s of a large product in each format, and energy."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mptrain import measure
from mptrain.precision import hardware


def peaks(device: str, size: int, tries: int = 5) -> dict[str, float]:
    """FLOP/s of a square product in each format that the device has, the median of some; by Precision.compute."""
    found: dict[str, float] = {}
    wait = measure.waiter(torch.device(device))

    def rate(product: Any) -> float:
        product()
        times = []
        for _ in range(tries):
            wait()
            start = time.perf_counter()
            product()
            wait()
            times.append(time.perf_counter() - start)
        return 2 * size**3 / statistics.median(times)

    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    for name, allowed in (("float32", False), ("tf32", True)):
        if name == "float32" or device != "cpu":
            with hardware.tf32(allowed):
                found[name] = rate(lambda: a @ b)
    for name in ("bfloat16", "float16") if device != "cpu" else ("bfloat16",):
        x, y = (t.to(getattr(torch, name)) for t in (a, b))
        found[name] = rate(lambda x=x, y=y: x @ y)
    if device != "cpu" and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        scaled = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": False}
        with suppress(RuntimeError):  # then no row of FP8 has a share of the peak
            found["float8"] = rate(lambda: torch._scaled_mm(x, y, **scaled))
    return found


class Drawn:
    joules: float | None = None


class Energy:
    """What a GPU draws: NVML's energy counter, else the mean of nvidia-smi's power times the time, else nothing."""

    def __init__(self, device: str):
        self.how = "not measured"
        self.handle: Any = None
        self.index = 0
        if torch.device(device).type != "cuda":
            return
        self.index = torch.cuda._get_nvml_device_index(device)
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(self.index)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)
            self.how = "NVML's energy counter"
        except Exception:  # no package, no library, or no counter on this GPU
            self.handle = None
            self.how = "nvidia-smi's power, 5 times a second"

    @contextmanager
    def drawn(self) -> Iterator[Drawn]:
        """Its `joules` are there afterwards."""
        result = Drawn()
        if self.how == "not measured":
            yield result
        elif self.handle is not None:
            before = self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)  # in millijoules
            yield result
            result.joules = (self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) - before) / 1e3 or None
        else:
            yield from self._by_nvidia_smi(result)

    def _by_nvidia_smi(self, result: Drawn) -> Iterator[Drawn]:
        query = ["nvidia-smi", f"--id={self.index}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.Popen([*query, "-lms", "200"], stdout=subprocess.PIPE, text=True)
        except OSError:
            yield result
            return
        start = time.perf_counter()
        try:
            yield result
        finally:
            seconds = time.perf_counter() - start
            asked.terminate()
            lines = asked.communicate()[0].split()
        watts = [float(line) for line in lines if line.replace(".", "", 1).isdigit()]
        result.joules = statistics.mean(watts) * seconds if watts else None
