"""Alarms: what rows of watch.parquet say that a loss curve does not say yet. Needs rows only, no torch.

A loss scaler watches infinities and never zeros. Runs that end in divergence after days had layers whose gradients
became zero within the first thousand steps; under 1 % of lost gradients and flat is healthy, 5 % and more, or a share
that rises, is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mptrain.watch.underflow import LOST, Alarm, Rows, advice, flushed_share, gradients, histogram, products, underflow

HEALTHY = 0.01
TREND_STEPS, TREND_POINTS, TREND_P = 1000, 8, 0.01
SPAN = 40
NEAR_OVERFLOW = 65504 / 4
COLLAPSE = 1024
USUAL = 0.9, 0.999
Betas = Mapping[tuple[str, str], tuple[float, float]]
PATIENCE = 3
"""Looks in a row before zeros or a scale at its floor are an alarm."""


class Alarms:
    """Looks at collection after collection and tells what is new.

    floor: of the loss scale. betas: of the optimizer, per layer and parameter, where they are not Adam's usual ones.
    """

    def __init__(self, floor: float = 1.0, betas: Betas | None = None):
        self.floor, self.betas = floor, betas or {}
        self.rate = 0.0
        self.found: list[Alarm] = []
        self.rates: list[tuple[int, float]] = []
        self.scales: list[tuple[int, float]] = []
        self._zeros: dict[tuple[str, str], tuple[int, int] | None] = {}
        self._overflowed: dict[str, None] = {}

    def look(self, rows: Rows) -> list[Alarm]:
        """The alarms that the rows of one step raise and no earlier ones did (another layer is new)."""
        if not rows:
            return []
        step = rows[0]["step"]
        rules = (underflow, span, near_overflow, buffers, lost_updates)
        found = [alarm for rule in rules for alarm in rule(rows)]
        found += self._trend(step, rows)
        found += self._scale(step, rows)
        found += self._zero_gradients(step, rows)
        known: dict[tuple[str, int], set[str]] = {}
        for alarm in self.found:
            known.setdefault((alarm.rule, alarm.grade), set()).update(alarm.layers or ("",))
        new = [a for a in found if not set(a.layers or ("",)) <= known.get((a.rule, a.grade), set())]
        self.found += new
        return new

    def verdict(self) -> str:
        """ "healthy", or the rules that were broken; without any, what keeps a run from being called healthy."""
        if self.found:
            return ", ".join(dict.fromkeys(alarm.rule for alarm in self.found))
        return "healthy" if self.rate < HEALTHY else f"no alarm ({self.rate:.1%} of the gradients are rounded to zero)"

    def _trend(self, step: int, rows: Rows) -> Iterator[Alarm]:
        if (rate := flushed_share(rows)) is None:
            return
        self.rate = rate
        if step > TREND_STEPS:
            return
        self.rates.append((step, rate))
        if rate >= HEALTHY and len(self.rates) >= TREND_POINTS and rising([r for _, r in self.rates]) < TREND_P:
            yield Alarm(
                "rising underflow",
                step,
                (),
                f"the share of gradients rounded to zero rose from {self.rates[0][1]:.2%} to {rate:.2%} since step "
                f"{self.rates[0][0]}, by {slope(self.rates) * 100:.2%} in 100 steps (Mann-Kendall p < {TREND_P:g})",
                advice(rows),
            )

    def _scale(self, step: int, rows: Rows) -> Iterator[Alarm]:
        scale = next((row["scale"] for row in rows if row["scale"] is not None), None)
        if scale is None:
            return
        self.scales.append((step, scale))
        settled = self.scales[len(self.scales) // 4 :]
        highest = max(s for _, s in settled)
        self._overflowed |= {row["layer"]: None for row in gradients(rows) if row["inf"] or row["nan"]}
        where = tuple(self._overflowed)
        if len(self.scales) > PATIENCE and all(s <= self.floor < self.scales[0][1] for _, s in self.scales[-PATIENCE:]):
            since = next(at for at, s in self.scales if s <= self.floor)
            yield Alarm(
                "scale at its floor",
                step,
                where,
                f"the loss scale is {scale:g} since step {since}",
                "gradients overflow whatever the scale: move to BF16, or find what makes NaN (provenance.json; in a "
                "loop of your own Watch.explain)",
            )
        elif highest / scale >= COLLAPSE and len(self.scales) > PATIENCE:
            since = max(at for at, s in settled if s == highest)
            yield Alarm(
                "scale collapsed",
                step,
                where,
                f"the loss scale fell from {highest:g} after step {since} to {scale:g}",
                "a smaller scaling.interval brings it back sooner; BF16 needs none",
            )

    def _zero_gradients(self, step: int, rows: Rows) -> Iterator[Alarm]:
        adam = {(row["layer"], row["name"].split(".")[0]) for row in rows if row["name"].endswith("exp_avg_sq")}
        layers, longest, peak = [], 0, 0.0
        for row in rows:
            key = row["layer"], row["name"]
            if row["kind"] != "grad_weight" or key not in adam or row["name"] == "products":
                continue
            if row["zero"] < row["sampled"]:
                self._zeros[key] = None
            elif key in self._zeros:  # it has been seen alive
                since, looks = self._zeros[key] or (step, 0)
                self._zeros[key] = since, looks + 1
                if looks + 1 >= PATIENCE:
                    layers.append(row["layer"])
                    longest = max(longest, step - since + 1)
                    peak = max(peak, adam_overshoot(step - since + 1, *self.betas.get(key, USUAL)))
        if layers:
            yield Alarm(
                "gradients are zero",
                step,
                tuple(dict.fromkeys(layers)),
                f"all of them for {longest} steps; once they return, Adam's update peaks at "
                f"{peak:.2f} times the learning rate, since its second moment fades meanwhile",
                "raise the scale or move to BF16 before that; lower the learning rate if they return",
                max(0, int(math.log10(longest)) - 1),
            )


def span(rows: Rows) -> Iterator[Alarm]:
    """Gradients that span more than 40 binades, which is all that FP16 has, subnormals included.

    What has been rounded to FP16 cannot: there the products tell, as they were before.
    """
    if _bfloat16(rows):
        return
    seen = [*gradients(rows), *(row for row in products(rows) if row["exponents"])]
    wide = {row["layer"]: b for row in seen if (b := histogram(row).binades()) > SPAN}
    if wide:
        yield Alarm(
            "too wide for FP16",
            rows[0]["step"],
            tuple(wide),
            f"gradients span {max(wide.values())} powers of two, the smallest 0.1 % left out; FP16 has {SPAN}",
            "no single loss scale can hold them: use BF16",
        )


def near_overflow(rows: Rows) -> Iterator[Alarm]:
    """Activations within a factor of 4 of FP16's largest number; of an FP32 run, what a move to FP16 would meet."""
    near: dict[str, float] = {}
    if _bfloat16(rows):
        return
    for row in rows:
        if row["kind"] in ("input", "output") and row["name"] != "products" and row["max"] is not None:
            size = math.inf if row["inf"] else max(-row["min"], row["max"])
            if size >= NEAR_OVERFLOW:
                near[row["layer"]] = max(size, near.get(row["layer"], 0.0))
    if near:
        yield Alarm(
            "activations near overflow",
            rows[0]["step"],
            tuple(near),
            f"values up to {max(near.values()):.4g}; FP16 ends at 65504",
            "no loss scale changes this: use BF16, normalise, or keep these layers in FP32 (precision.keep_fp32)",
        )


def _bfloat16(rows: Rows) -> bool:
    """Whether 16-bit tensors are BF16's, which has FP32's range."""
    kept = {row["dtype"] for row in rows if row["kind"] in ("input", "output", "grad_output", "weight")}
    return "bfloat16" in kept and "float16" not in kept


def buffers(rows: Rows) -> Iterator[Alarm]:
    """Statistics that are not finite: a skipped step left them behind, and every evaluation will be wrong."""
    bad = [row for row in rows if row["kind"] == "buffer" and (row["nan"] or row["inf"])]
    if bad:
        yield Alarm(
            "buffers not finite",
            rows[0]["step"],
            tuple(dict.fromkeys(row["layer"] for row in bad)),
            f"{', '.join(dict.fromkeys(row['name'] for row in bad))} hold NaN or inf",
            "restore buffers when a step is skipped (mptrain.MovingBuffers), and go on from an earlier checkpoint",
        )


def lost_updates(rows: Rows) -> Iterator[Alarm]:
    """Weights kept in 16 bits that did not move although their gradient was not zero."""
    share = {
        (row["layer"], row["name"]): row["lost"] / row["sampled"]
        for row in rows
        if row["kind"] == "weight" and row["lost"] is not None and row["sampled"]
    }
    lossy = {key: lost for key, lost in share.items() if lost >= LOST}
    if lossy:
        yield Alarm(
            "updates lost to rounding",
            rows[0]["step"],
            tuple(dict.fromkeys(layer for layer, _ in lossy)),
            f"up to {max(lossy.values()):.0%} of a tensor's weights are so large beside their update that it rounds "
            "away (FP16: 2048 times, BF16: 256)",
            "keep an FP32 master copy (precision=fp16_master or fp16)",
        )


def rising(values: Sequence[float]) -> float:
    """One-sided p of the Mann-Kendall test for a rising trend: Kendall's tau between values and their order."""
    from scipy.stats import kendalltau  # slow to import, and only a run that is watched for long needs it

    p = float(kendalltau(range(len(values)), values, alternative="greater").pvalue)
    return 1.0 if math.isnan(p) else p


def slope(points: Sequence[tuple[int, float]]) -> float:
    """The median slope between any two points (Theil and Sen)."""
    from scipy.stats import theilslopes

    return float(theilslopes([y for _, y in points], [x for x, _ in points]).slope)


def adam_overshoot(steps: int, beta1: float = USUAL[0], beta2: float = USUAL[1]) -> float:
    """The largest update, in learning rates, after a constant gradient was zero for so many steps and came back."""
    m, v, peak = beta1**steps, beta2**steps, 1.0
    for _ in range(math.ceil(20 / (1 - beta1)) if beta1 < 1 else 1):
        m, v = beta1 * m + 1 - beta1, beta2 * v + 1 - beta2
        peak = max(peak, m / math.sqrt(v))
    return peak


def replay(rows: Iterable[dict[str, Any]], floor: float = 1.0, betas: Betas | None = None) -> Alarms:
    """The alarms of a whole table, for a run that goes on and for a report."""
    alarms = Alarms(floor, betas)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    for step in sorted(by_step):
        alarms.look(by_step[step])
    return alarms
