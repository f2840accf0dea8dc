"""Meters for the GPU check: FLOP/s of a large product in each format, energy, and what is there."""

from __future__ import annotations

import atexit
import ctypes
import re
import statistics
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
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
    """What a GPU draws: NVML's energy counter, else nvidia-smi's power over the time, else nothing."""

    def __init__(self, device: str):
        self.how = "not measured"
        self.counter: Callable[[], int] | None = None
        self.power: Power | None = None
        if torch.device(device).type != "cuda":
            return
        with suppress(Exception):  # no library, no such GPU (a part of one, for instance), or no counter on it
            counter = nvml_counter(_uuid(device))
            counter()
            self.counter = counter
            self.how = "NVML's counter, which moves some ten times a second"
            return
        with suppress(Exception):
            self.power = Power(_uuid(device))
            self.how = "nvidia-smi's power, ten times a second"

    @contextmanager
    def drawn(self) -> Iterator[Drawn]:
        """Its `joules` are there afterwards."""
        result = Drawn()
        if self.counter is not None:
            before = self.counter()
            yield result
            result.joules = (self.counter() - before) / 1e3 or None
        elif self.power is not None:
            start = time.perf_counter()
            yield result
            end = time.perf_counter()
            watts = self.power.mean(start, end)
            result.joules = None if watts is None else watts * (end - start)
        else:
            yield result


def _uuid(device: str) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def nvml_counter(uuid: str) -> Callable[[], int]:
    """Millijoules since the driver was loaded, by the driver's own library; an error where that cannot be had."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle = ctypes.c_void_p()

    def call(function: Any, *arguments: Any) -> None:
        if status := function(*arguments):
            raise RuntimeError(f"NVML answers {status}")

    call(library.nvmlInit_v2)
    call(library.nvmlDeviceGetHandleByUUID, ctypes.c_char_p(uuid.encode()), ctypes.byref(handle))

    def read() -> int:
        total = ctypes.c_ulonglong()
        call(library.nvmlDeviceGetTotalEnergyConsumption, handle, ctypes.byref(total))
        return total.value

    return read


class Power:
    """Watts as nvidia-smi prints them, ten times a second, from now until this process ends."""

    def __init__(self, uuid: str) -> None:
        query = ["nvidia-smi", f"--id={uuid}", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-lms", "100"]
        self.asked = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        atexit.register(self.asked.terminate)
        self.samples: list[tuple[float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.asked.stdout or ():
            with suppress(ValueError):  # [N/A]
                self.samples.append((time.perf_counter(), float(line)))

    def mean(self, start: float, end: float) -> float | None:
        """Of what was printed in between; None if nothing was."""
        watts = [watt for at, watt in list(self.samples) if start <= at <= end]
        return statistics.mean(watts) if watts else None


def missing_packages() -> list[str]:
    """Of pyproject.toml's, those that are not installed."""
    wanted = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    names = [re.match(r"[\w.-]+", text).group() for text in wanted]  # type: ignore[union-attr]
    installed = {found.metadata["Name"].lower().replace("_", "-") for found in metadata.distributions()}
    return [name for name in names if name.lower() not in installed]


def memory_of(device: str) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.total_memory / 2**30:.0f} GiB, capability {properties.major}.{properties.minor}"
