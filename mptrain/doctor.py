"""`mptrain doctor`: what this machine runs natively, what is emulated, how fast, and what is missing."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mptrain import files

ABOUT = "What runs natively here, what is emulated and how fast; exits with status 1 if anything is wrong."

SIZE = 512
"""Rows and columns of the measured matrix product."""
PACKAGES = ("torch", "torchvision", "torchaudio", "hydra-core", "omegaconf", "numpy", "datasets", "torchmetrics")
OLDEST_TORCH = (2, 11)
EXACTNESS = """exactness on a CPU the same command gives the same bits, resumed or not, with any number of workers
          not exact on a GPU: sums by atomic additions (gradients of embeddings, of upsampling and of CTC, index_add),
          the convolution that cuDNN picks, and cuBLAS on several streams; two runs differ as two seeds do, if less
          not exact anywhere: other numbers of threads or ranks (they sum in another order), other versions"""


def doctor(argv: Sequence[str]) -> int:
    """Prints the report; returns 0, or 1 with what is wrong named last."""
    parser = argparse.ArgumentParser(prog="mptrain doctor", description=ABOUT)
    parser.add_argument(
        "--data-dir", action="append", default=[], metavar="FOLDER", help="a data folder to look into; may be repeated"
    )
    arguments = parser.parse_args(argv)

    import torch
    from rich.console import Console

    from mptrain import measure
    from mptrain.precision import hardware

    console = Console(width=None if os.isatty(1) else 120)
    problems: list[str] = []
    device = hardware.resolve("auto")
    console.print(f"device    {measure.device_name(device)} ({device})", highlight=False)
    console.print(f"threads   {torch.get_num_threads()} of {os.cpu_count()} cores", highlight=False)
    console.print(f"gpu       {_gpu()}", highlight=False)
    flags = ", ".join(f"{k} {v}" for place in ("cuda", "cpu") for k, v in _labelled(place).items())
    console.print(f"tf32      as torch is set now: {flags}; a run sets all of them and puts them back", highlight=False)
    console.print(f"versions  {_versions(problems)}", highlight=False)
    console.print(_modes_table(device, problems))
    for line in _data_lines(arguments.data_dir, problems):
        console.print(line, highlight=False)
    console.print(EXACTNESS, highlight=False)
    for problem in problems:
        console.print(f"problem: {problem}", style="bold", highlight=False)
    console.print("nothing is wrong" if not problems else f"{len(problems)} problem(s)", highlight=False)
    return 1 if problems else 0


def _labelled(place: str) -> dict[str, str]:
    from mptrain.precision import hardware

    return {f"{place}.{name}": value for name, value in hardware.tf32_flags(place).items()}


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        return f"none that torch can use (torch is built for {built})"
    driver = "driver unknown"
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = (
            "driver " + subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
        )
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        found.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, capability {capability}")
    return f"{'; '.join(found)}; {driver}, CUDA {torch.version.cuda}"


def _versions(problems: list[str]) -> str:
    import platform

    import torch

    shown = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            shown.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{package} is not installed; run make install, or pip install {package}")
    for module in ("torchvision.ops", "torchaudio"):
        try:
            importlib.import_module(module)
        except (ImportError, RuntimeError, OSError) as error:
            package = module.partition(".")[0]
            problems.append(f"{package} does not fit torch {torch.__version__}: {str(error).splitlines()[0]}")
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        problems.append(f"torch {torch.__version__} is too old; 2.11 or newer is needed")
    return ", ".join(shown)


def _modes_table(device: Any, problems: list[str]) -> Any:
    """One row per precision: native or emulated, and the time of a matrix product and of a convolution."""
    from rich.table import Table

    from mptrain import roofline
    from mptrain.precision import hardware
    from mptrain.precision.modes import Precision

    sizes = f"matmul {SIZE}x{SIZE}x{SIZE}, convolution 16x32x32x32 with 32 3x3 filters"
    table = Table(title=f"{sizes}; median milliseconds on {device.type}")
    for column in ("precision", "here", "products", "matmul", "vs fp32", "conv", "vs fp32", "about"):
        table.add_column(column, justify="right" if column in ("matmul", "vs fp32", "conv") else "left")
    baseline: list[float] = []
    names = sorted(files.names("precision"), key=lambda name: (name != "fp32", name))
    for name in names:
        precision = Precision.load(name)
        backend = precision.backend(device.type)
        try:
            with hardware.tf32(precision.compute == "tf32"):
                times = [roofline.milliseconds(operation) for operation in _operations(device, precision)]
        except RuntimeError as error:
            problems.append(f"precision={name} does not run here: {str(error).splitlines()[0]}")
            table.add_row(name, "not at all", precision.compute, "", "", "", "", "")
            continue
        baseline = baseline or times
        cells = [cell for t, base in zip(times, baseline, strict=True) for cell in (f"{t:.2f}", f"{t / base:.2f}x")]
        note = "running sum in FP16" if precision.accumulate == "float16" else ""
        note = "linear layers; the rest as bf16" if precision.compute == "float8" else note
        note = note or (f"parameters in {precision.storage}" if precision.storage != "float32" else "")
        table.add_row(name, backend, precision.compute, *cells, note)
    return table


def _operations(device: Any, precision: Any) -> list[Callable[[], Any]]:
    import torch
    import torch.nn.functional as F

    from mptrain import roofline
    from mptrain.precision.formats import DTYPES

    storage = DTYPES[precision.storage]
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=storage) for _ in range(2))
    x = torch.randn(16, 32, 32, 32, device=device, dtype=storage)
    w = torch.randn(32, 32, 3, 3, device=device, dtype=storage)

    functions = (lambda: F.linear(a, b)), (lambda: F.conv2d(x, w, padding=1))
    return [roofline.under(precision, device.type, function) for function in functions]


def _data_lines(folders: Sequence[str], problems: list[str]) -> list[str]:
    from mptrain.data import samples

    embedded = sorted(path.stem for path in Path(samples.__file__).parent.glob("*.parquet"))
    lines = [f"data      embedded: {', '.join(embedded)}"]
    for folder in folders:
        path = Path(folder).absolute()
        if not path.is_dir():
            problems.append(f"data folder {path} is not there")
            continue
        inside = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir())
        lines.append(f"data      {path}: {', '.join(inside[:12]) or 'empty'}{' ...' if len(inside) > 12 else ''}")
    if not folders:
        lines.append(
            "data      real data sets are named per run: data=NAME data_dir=FOLDER (look into one: --data-dir FOLDER)"
        )
    return lines
