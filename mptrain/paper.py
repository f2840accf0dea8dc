"""What a recipe says of the paper: what was printed, which runs reproduce it, and what they should show.

A claim is one sentence and one test over named runs. The tests are few, and each can come out either way:

    equal       the metric of `run` lies within a margin of that of `against` (two one-sided tests); the margin is a
                number, or `spread`: one standard deviation over the seeds of `against`
    not_worse   it is worse by less than the margin (one one-sided test); being better is no objection
    worse       it is worse by more than `by`, beyond the noise between seeds
    diverges    every seed of `run` ends as diverged, and no seed of `against` does
    share       a quantity of `run` lies above or below a value
    ratio       a quantity of `run` over that of `against` lies above, below or between values
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mptrain import files
from mptrain.errors import UserError

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

TAKES: dict[str, set[str]] = {
    "equal": {"against", "of", "within"},
    "not_worse": {"against", "of", "within"},
    "worse": {"against", "of", "by"},
    "diverges": {"against"},
    "share": {"of", "above", "below"},
    "ratio": {"against", "of", "above", "below"},
}
"""What each test can be told, `claim`, `run` and `recipes` apart."""

ORDERED = ("metric", "training loss")
"""Quantities of which it is known whether more is better: the only ones that can be worse."""

QUANTITY = (
    r"metric|training loss|throughput|memory|memory\.weights|skipped|final scale|seconds|metrics\.\w+|"
    r"counts\.(input|weight|forward|grad_output|grad_input|grad_weight)\.(zero|flushed|subnormal|overflowed)|"
    r"watch\.(input|output|grad_output|weight|grad_weight)\.(zero|tiny)|watch\.updates\.small|alarms\.[A-Za-z0-9 ]+"
)
"""What a claim can be about; mptrain/results/quantities.py says what each is."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PaperRun(_Model):
    """One way of training the recipe that the paper, or a claim, speaks of."""

    precision: Text
    scale: Positive | Text | None = None
    also: list[Text] = []  # further overrides, as on the command line
    printed: Number | Text | None = None  # what the paper prints
    seconds: Positive | None = None  # what one seed took: one CPU thread, another run beside it, lengths of `quick`
    seeds: Annotated[int, Field(ge=1, le=1000)] | None = None  # fewer than the recipe's, where so many tell all

    @cached_property
    def scale_label(self) -> str:
        """The scale as records name it: none, dynamic or the number."""
        scale = self.scale
        if scale is None:
            scale = str(files.read_yaml(files.config("precision", self.precision)).get("scale", "none"))
        return scale if isinstance(scale, str) else repr(float(scale)).removesuffix(".0")

    @property
    def overrides(self) -> list[str]:
        """As on the command line."""
        scale = [] if self.scale is None else [f"scale={self.scale_label}"]
        return [f"precision={self.precision}", *scale, *self.also]


class Claim(_Model):
    """One sentence, and the test that decides it."""

    claim: Text
    test: Literal["equal", "not_worse", "worse", "diverges", "share", "ratio"]
    run: Text
    against: Text = "fp32"
    of: Annotated[str, Field(pattern=f"^({QUANTITY})$")] = "metric"
    within: Positive | Literal["spread"] | None = None  # the margin; unset: the one that the task states
    by: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    above: Number | None = None
    below: Number | None = None
    recipes: list[Text] = []  # other recipes whose seeds are pooled with those of this one
    headline: Text | None = None  # what the paper says, in short: a line of the first table, which claims may share

    @model_validator(mode="after")
    def _fits_its_test(self) -> Claim:
        fields = {name: field.default for name, field in type(self).model_fields.items()}
        given = {name for name, default in fields.items() if getattr(self, name) != default} - {"claim", "test", "run"}
        given -= {"recipes", "headline"}
        if superfluous := sorted(given - TAKES[self.test]):
            raise ValueError(f"test {self.test} takes {', '.join(sorted(TAKES[self.test]))}, not {superfluous[0]}")
        if self.test in ("share", "ratio") and self.above is None and self.below is None:
            raise ValueError(f"test {self.test} needs above or below")
        if self.within == "spread" and (self.test != "equal" or self.recipes):
            raise ValueError("within: spread is for test equal, of one recipe")
        if self.test in ("not_worse", "worse") and self.of not in ORDERED:
            raise ValueError(f"test {self.test} is of {' or '.join(ORDERED)}; compare {self.of} with test ratio")
        if self.test == "equal" and self.of != "metric" and self.within is None:
            raise ValueError(f"test equal needs within: no task states a margin for {self.of}")
        return self

    @property
    def runs(self) -> list[str]:
        """The names of the runs it needs."""
        return [self.run] if self.test == "share" else [self.run, self.against]


class Paper(_Model):
    """The block `paper:` of a recipe."""

    where: Text | None = None  # table or figure
    metric: Text | None = None  # what its printed values are
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    quick: list[Text] = []  # overrides with which all runs of all small recipes fit into two hours; never at paper size
    runs: dict[str, PaperRun] = {}
    claims: list[Claim] = []

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, values: Any) -> Any:
        """A run set to null is not inherited."""
        if isinstance(values, dict) and isinstance(runs := values.get("runs"), dict):
            return {**values, "runs": {name: run for name, run in runs.items() if run is not None}}
        return values

    @model_validator(mode="after")
    def _runs_are_there(self) -> Paper:
        for claim in self.claims:
            for name in claim.runs:
                if name not in self.runs:
                    raise ValueError(
                        f"the claim '{claim.claim}' needs a run {name}; {files.suggest(name, [*self.runs])}"
                    )
        return self


@cache
def paper_of(recipe: str) -> Paper:
    """The block of a recipe, with what it inherits; raises UserError with every complaint."""
    try:
        return Paper.model_validate(_merged(recipe))
    except ValidationError as error:
        complaints = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise UserError("\n".join(f"recipe={recipe}: paper.{line}" for line in complaints)) from error


def lineage(recipe: str) -> list[str]:
    """The recipe after all those that it inherits from."""
    parents = files.read_yaml(files.config("recipe", recipe)).get("defaults") or []
    return [name for parent in parents if parent != "_self_" for name in lineage(str(parent))] + [recipe]


def _merged(recipe: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in lineage(recipe):
        merged = _merge(merged, files.read_yaml(files.config("recipe", name)).get("paper") or {})
    return merged


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; anything else replaces what is below."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
