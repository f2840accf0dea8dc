"""The alarm that a loss scaler never raises: gradients that rounding made zero, in which layers, and what would help.

Needs rows of watch.parquet only, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mptrain.watch.histogram import Histogram

Rows = Sequence[dict[str, Any]]

UNDERFLOW = 0.05
LOST = 0.5


@dataclass(frozen=True)
class Alarm:
    """One thing that is wrong, with the step it was first seen, where, by what evidence, and what to do.

    grade: of what is told again when it has become ten times worse, how often it has.
    """

    rule: str
    step: int
    layers: tuple[str, ...]
    evidence: str
    advice: str
    grade: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers[:20])}

    def __str__(self) -> str:
        some = ", ".join(self.layers[:5]) + (f" and {len(self.layers) - 5} more" if len(self.layers) > 5 else "")
        return f"{self.rule} at step {self.step}{f' in {some}' if some else ''}: {self.evidence}; {self.advice}"


def products(rows: Rows) -> list[dict[str, Any]]:
    """Rows that count what rounding did, of gradients."""
    return [row for row in rows if row["flushed"] is not None and row["kind"].startswith("grad_")]


def gradients(rows: Rows) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] in ("grad_output", "grad_weight") and row["name"] != "products"]


def flushed_share(rows: Rows) -> float | None:
    """Of all gradients' products that were not zero, the share that rounding made zero; None if none were counted."""
    counted = [(row, row["count"] / row["sampled"]) for row in products(rows) if row["sampled"]]
    nonzero = sum((row["sampled"] - row["zero"]) * of for row, of in counted)
    return sum(row["flushed"] * of for row, of in counted) / nonzero if nonzero else None


def underflow(rows: Rows) -> Iterator[Alarm]:
    """Layers whose gradients rounding made zero: 5 % or more of their own, or all of what reaches them.

    A layer is silenced if its gradients are all zero and a layer that comes later in the forward pass, earlier in the
    backward pass, lost half or more of the gradient it hands on. Zeros alone are no sign of that: unused rows of an
    embedding, dead ReLUs and padding have them too.
    """
    if silent := _silent(rows):
        yield silent
        return
    share = {
        (row["layer"], row["kind"]): row["flushed"] / (row["sampled"] - row["zero"])
        for row in products(rows)
        if row["sampled"] > row["zero"]
    }
    order = {row["layer"]: row["order"] for row in rows if row["kind"] == "output"}
    cut = {
        layer: order[layer]
        for (layer, kind), lost in share.items()
        if kind == "grad_input" and lost >= LOST and layer in order
    }
    own: dict[str, list[dict[str, Any]]] = {}
    for row in gradients(rows):
        own.setdefault(row["layer"], []).append(row)
    silenced = {
        layer
        for layer, found in own.items()
        if layer in order
        and any(order[layer] < place for place in cut.values())
        and all(row["zero"] == row["sampled"] > 0 for row in found)
    }
    lossy = {
        layer: lost
        for (layer, kind), lost in share.items()
        if lost >= UNDERFLOW and not (kind == "grad_input" and layer in cut and silenced)
    }
    layers = sorted(silenced | set(lossy), key=lambda layer: order.get(layer, 0))
    if not layers:
        return
    of = len({layer for layer, _ in share} | set(own))
    worst = 1.0 if silenced else max(lossy.values())
    yield Alarm(
        "underflow",
        rows[0]["step"],
        tuple(layers),
        f"{len(layers)} of {of} layers ({len(layers) / of:.0%}) lose gradients to zero, up to {worst:.1%} of a layer's"
        + (f"; nothing reaches {', '.join(sorted(silenced)[:5])}" if silenced else ""),
        advice(rows),
    )


def _silent(rows: Rows) -> Alarm | None:
    """FP16 gradients that are zero in every layer although there is a loss: nothing was left to lose in products."""
    own = gradients(rows)
    loss = next((row for row in rows if row["kind"] == "loss"), None)
    if not any(row["dtype"] == "float16" and row["kind"] == "grad_output" for row in own) or any(
        row["zero"] < row["sampled"] for row in own
    ):
        return None
    if loss is not None and loss["zero"]:
        return None
    layers = tuple(dict.fromkeys(row["layer"] for row in reversed(own)))
    scale = next((row["scale"] for row in own if row["scale"] is not None), None) or 1.0
    return Alarm(
        "underflow",
        rows[0]["step"],
        layers,
        f"no gradient reaches any of {len(layers)} layers, all are zero: what the loss hands to the network is rounded "
        "to zero where it becomes FP16, or is zero itself",
        f"raise the loss scale (now {scale:g}) until there is a gradient, or move to BF16",
    )


def advice(rows: Rows) -> str:
    """Raise the scale if the largest gradient leaves room for it and that brings back what is lost, else BF16."""
    lossy = [row for row in products(rows) if row["flushed"]]
    if lossy and all(row["dtype"].startswith("float8") for row in lossy):
        return (
            "leave these layers to wider formats (precision.keep_fp32): FP8 has units of its own, no loss scale helps"
        )
    room = sum((histogram(row) for row in gradients(rows)), Histogram()).best_scale()
    scale = next((row["scale"] for row in rows if row["scale"] is not None), None) or 1.0
    if room < 8:
        return "move to BF16: the largest gradient leaves no room for a higher loss scale"
    left = _left(rows, room)
    if left is not None and left[0] >= UNDERFLOW:
        return (
            f"move to BF16: at {scale * room:g}, the highest loss scale that the largest gradient leaves room for, "
            f"{left[1]} would still lose {left[0]:.1%}"
        )
    return f"raise the loss scale: the largest gradient leaves room for {scale * room:g} (now {scale:g})"


def _left(rows: Rows, factor: float) -> tuple[float, str] | None:
    """What the worst layer would still lose under a loss scale so many times as high; None if that was not seen."""
    lossy = [row for row in products(rows) if row["flushed"]]
    if not lossy or not any(row["exponents"] for row in lossy):
        return None
    return max((histogram(row).flushed(factor), row["layer"]) for row in lossy if row["exponents"])


def histogram(row: dict[str, Any]) -> Histogram:
    return Histogram.from_bins(row["first_exponent"] or 0, row["exponents"] or (), row["zero"])
