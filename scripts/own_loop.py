"""mptrain as a library: precision, loss scale, record and table in a training loop of your own, without the runner.

    python scripts/own_loop.py [FOLDER]      (10 s on a CPU; the default folder is results/own_loop)

Trains one small network on made-up data in FP32 and FP16 and compares the two records.
"""

import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import mptrain
from mptrain import measure
from mptrain.results.compare import compare


def train(precision_name: str, scale: str, folder: Path, steps: int = 200) -> None:
    device = torch.device("cpu")
    torch.manual_seed(0)
    x = torch.randn(2048, 32)
    y = (x[:, :16].sum(1) * x[:, 16:].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 2)).to(device)

    precision = mptrain.Precision.load(precision_name)  # configs/precision/fp16.yaml
    arithmetic = precision.arithmetic(device.type)  # the autocast region: exact FP16 on a CPU, native on a GPU
    weights = precision.prepare(model)  # refuses parameters that are not FP32; makes master copies if asked to
    optimizer = torch.optim.SGD(weights.of("model"), lr=0.1, momentum=0.9)
    scaler = mptrain.loss_scaler(scale)  # "none", "dynamic" or a number
    buffers = mptrain.MovingBuffers([model])  # protects BatchNorm's statistics from skipped steps

    instruments = measure.Instruments(device)  # what really ran, and peak memory

    record = mptrain.Record(folder / f"{precision_name}-{scale}")
    skipped = 0
    started = datetime.now(UTC)
    with record.opened({"precision": precision.as_dict(), "scale": scale, "steps": steps}, cosmetic=set()):
        begin = time.perf_counter()
        for step in range(1, steps + 1):
            picked = torch.randint(0, len(x), (128,))
            weights.zero_grad()
            buffers.keep()
            with instruments.watching([*model.parameters(), *model.buffers(), x, y]) if step == 1 else nullcontext():
                with arithmetic:
                    loss = F.cross_entropy(model(x[picked]).float(), y[picked])
                scaler.scale(loss).backward()
                weights.gather("model")
                if scaler.unscale_(optimizer):
                    nn.utils.clip_grad_norm_(weights.of("model"), 1.0)
                if scaler.step(optimizer):
                    weights.publish("model")
            if scaler.update():
                buffers.restore()
                skipped += 1
            record.log({"step": step, "loss": loss.item(), "scale": scaler.value})
        seconds = time.perf_counter() - begin
        model.eval()
        with torch.no_grad(), weights.evaluating(fp32=True):
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        environment = measure.environment(device)
        record.finish(
            "finished",
            None,
            {
                "recipe": "own_loop",
                "precision": precision.name,
                "precision_label": precision.label,
                "scale": scale,
                "seed": 0,
                "device": device.type,
                "backend": precision.backend(device.type),
                "dtypes": {**instruments.dtypes, "loss": str(loss.dtype).removeprefix("torch.")},
                "metric": {"name": "accuracy", "value": accuracy, "higher_is_better": True, "margin": 0.01},
                "metrics": {},
                "throughput": {"value": steps * 128 / seconds, "unit": "rows/s", "warmup": 0, "steps": steps},
                "memory": instruments.memory(),
                "steps": {"attempted": steps, "applied": steps - skipped, "skipped": skipped},
                "final_scale": None if scale == "none" else scaler.value,
                "data": {"name": "made up", "kind": "synthetic"},
                "eval_precision": "fp32",
                "environment": environment,
                "started": started.isoformat(),
                "finished": datetime.now(UTC).isoformat(),
                "wall_s": seconds,
                "key": {
                    "recipe": "own_loop",
                    "data": "made up",
                    "steps": steps,
                    "batch_size": 128,
                    "accumulate": 1,
                    "settings": "sgd 0.1",
                    "device": environment["device_name"],
                    "torch": environment["torch"],
                },
            },
        )


def main(folder: Path) -> int:
    for precision_name, scale in (("fp32", "none"), ("fp16", "dynamic")):
        train(precision_name, scale, folder)
    return compare([str(folder)])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/own_loop")))
