"""mptrain probe: a few FP32 steps, and what FP16 would have made of their gradients at every loss scale."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from mptrain import compose, files
from mptrain.config import Config
from mptrain.errors import UserError
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanDtypes
from mptrain.process import same_random_state
from mptrain.results.record import Record, write_atomically
from mptrain.train import Run
from mptrain.watch.census import SCALES, Advice, Census, recommend, rows

STEPS = 3
HELP = f"""mptrain probe +recipe=NAME [KEY=VALUE ...] [steps={STEPS}]

Trains a few steps in FP32 and counts every activation and weight gradient by exponent: the share of exact zeros, and
what FP16 would flush to zero or overflow at each loss scale from 1 to 2^24. Recommends a precision and a scale, and
shows in which format each class of operation runs under every precision with FP32 parameters. Own networks:
task.model=package.module:function. Writes probe.json and probe.csv to out=FOLDER, or a folder in results/probes."""


def probe(argv: Sequence[str]) -> int:
    """The verb; returns the exit status."""
    if "--help" in argv or "-h" in argv:
        print(HELP)
        return 0
    if not any(text.startswith("steps=") for text in argv):
        argv = [*argv, f"steps={STEPS}"]
    config = compose.config(argv)
    if config.numbers.name != "fp32" or config.scale_name != "none":
        raise UserError("probe looks at FP32 gradients; leave out precision= and scale=, it recommends them")
    folder = Path(config.out) if config.out else Path(config.results).parent / "probes" / config.folder().name
    folder = folder.expanduser().absolute()
    device = hardware.resolve(config.device)
    with hardware.tf32(False):
        run = Run(config, Record(folder))
        formats = _formats(run)
        census = Census()
        with census.taking(run.models, run.optimizers.values()):
            for window in itertools.islice(run.loader.windows(), config.steps):
                run.step(window)
    advice = recommend(census)
    print(_report(config, str(device), census, advice, formats))
    _write(folder, config, str(device), census, advice, formats)
    print(f"\nwritten: {folder / 'probe.json'}, probe.csv")
    return 0


def _formats(run: Run) -> dict[str, dict[str, str]]:
    """{precision: {class of operation: format}} of one forward pass under each precision with FP32 parameters."""
    found = {}
    window = next(run.loader.windows())
    state = run.task.state_dict()
    run.buffers.keep()
    for name in files.names("precision"):
        numbers = Precision.load(name)
        if numbers.storage != "float32":
            continue
        numbers.prepare(run.models)
        region = numbers.arithmetic(run.device.type, None)
        with same_random_state(run.device), torch.no_grad(), RanDtypes() as ran, region:
            next(run.task.losses(run.to_device(window[0])))
        found[name] = ran.table()
        run.task.load_state_dict(state)
    run.buffers.restore()
    return found


def _report(config: Config, device: str, census: Census, advice: Advice, formats: dict[str, dict[str, str]]) -> str:
    lines = [f"{config.recipe}: {config.steps} FP32 steps, batch {config.batch_size}, seed {config.seed}, {device}", ""]
    kinds = {kind: census.whole(kind) for kind in ("activation gradient", "weight gradient")}
    lines.append(f"{'scale':>10}  " + "  ".join(f"{k + 's':>30}" for k in kinds))
    lines.append(f"{'':>10}  " + "  ".join(f"{'flushed':>14} {'overflowed':>15}" for _ in kinds))
    for scale in SCALES:
        shares = "  ".join(f"{h.flushed(scale):>14.2%} {h.overflowed(scale):>15.3%}" for h in kinds.values())
        lines.append(f"{scale:>10.0f}  {shares}")
    lines.append("(shares of the nonzero values)")
    for kind, h in kinds.items():
        zero = h.zero / max(1, h.zero + h.nonzero)
        lines.append(f"exact zeros among {kind}s: {zero:.1%}")
    lines += ["", f"{'flushed, activation gradients of':<44} {'zeros':>7} {'at 1':>8} {'at 8':>8} {'at 1024':>8}"]
    for layer, h in census.layers("activation gradient").items():
        zero = h.zero / max(1, h.zero + h.nonzero)
        at = " ".join(f"{h.flushed(s):>8.2%}" for s in (1.0, 8.0, 1024.0))
        lines.append(f"{layer:<44} {zero:>7.1%} {at}")
    lines.append("")
    for name, largest in census.outputs.items():
        if largest > 0:
            n = 1 / largest
            lines.append(
                f"{name}: the largest gradient the loss gives to one number is 1/{n:,.0f}; with N = {n:,.3g} terms "
                f"in its mean, a class probability below N x 2^-25 / scale = {n * 2.0**-25:.2g} / scale gets "
                "no gradient"
            )
    if not census.outputs:
        lines.append("the number of terms in the loss's mean is not visible: the network returns the loss itself")
    lost, weights = census.lost
    lines.append(f"updates below 1/2048 of their weight, lost in FP16 weights: {lost / max(1, weights):.1%}")
    lines += ["", f"{'precision':<14} " + " ".join(f"{c:>20}" for c in next(iter(formats.values())))]
    lines += [f"{name:<14} " + " ".join(f"{f:>20}" for f in table.values()) for name, table in formats.items()]
    choice = f"precision={advice.precision}" + ("" if advice.precision == "bf16" else f" scale={advice.scale}")
    lines += ["", f"recommended: {choice}: {advice.reason}", f"  mptrain +recipe={config.recipe} {choice}"]
    return "\n".join(lines)


def _write(
    folder: Path, config: Config, device: str, census: Census, advice: Advice, formats: dict[str, dict[str, str]]
) -> None:
    table = list(rows(census))
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "recipe": config.recipe,
        "steps": config.steps,
        "seed": config.seed,
        "device": device,
        "recommended": advice._asdict(),
        "terms": {name: 1 / largest for name, largest in census.outputs.items() if largest > 0},
        "updates_lost": census.lost[0] / max(1, census.lost[1]),
        "largest_output": dict(census.largest),
        "formats": formats,
        "census": table,
    }
    write_atomically(folder / "probe.json", json.dumps(content, indent=1) + "\n")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(table[0]["flushed"])
    writer.writerow(
        ["layer", "kind", "values", "zero", *(f"flushed_{n}" for n in names), *(f"overflowed_{n}" for n in names)]
    )
    for row in table:
        shares = [*row["flushed"].values(), *row["overflowed"].values()]
        writer.writerow([row["layer"], row["kind"], row["values"], row["zero"], *shares])
    write_atomically(folder / "probe.csv", out.getvalue())
