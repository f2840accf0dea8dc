"""The typed configuration of a run, and every complaint about a command line in one message.

Nothing here imports torch: a wrong command line is answered before anything slow happens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mptrain.errors import UserError
from mptrain.files import names, suggest
from mptrain.options import OPTIMIZERS, SCHEDULES
from mptrain.paper import Paper
from mptrain.precision import modes
from mptrain.precision.modes import Precision

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Whole = Annotated[int, Field(ge=0, le=10**12)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Open(_Model):
    """Takes further keys: options of the thing it names."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TaskConfig(_Open):
    name: str


class OptimizerConfig(_Open):
    name: Literal[tuple(OPTIMIZERS)]  # type: ignore[valid-type]
    lr: NotNegative


class ScheduleConfig(_Open):
    name: Literal[tuple(SCHEDULES)]  # type: ignore[valid-type]
    warmup: Whole = 0


class EvalConfig(_Model):
    every: Count | None
    batch_size: Count
    precision: Literal["fp32", "same"]


class ScalingConfig(_Model):
    init: Positive = 65536.0
    growth: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    interval: Count = 2000
    floor: NotNegative = 1.0
    ceiling: Positive | None = None
    hysteresis: Count = 1
    consecutive: bool = False
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0


class LayerwiseConfig(_Model):
    target: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    every: Count = 10


class WatchConfig(_Model):
    enabled: bool = False
    every: Count = 10
    layers: list[Text] = []
    sample: Count | None = 8192


class ParallelConfig(_Model):
    batchnorm: Literal["sync", "local"] = "sync"
    shard: bool = False


class Config(_Model):
    """One run. Fields are explained in configs/config.yaml.

    A field with a default came later than the others: folders that lack it were made under the default, which
    therefore leaves names and keys of runs as they were.
    """

    recipe: Text
    task: TaskConfig
    data: Text
    data_dir: Text | None
    steps: Count
    batch_size: Count
    accumulate: Count
    clip: Positive | None
    ema: Share | None
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    eval: EvalConfig
    paper: Paper
    precision: dict[str, Any]
    scale: float | str | None
    scaling: ScalingConfig
    max_skips: Count
    count: bool
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    workers: Annotated[int, Field(ge=0, le=256)]
    results: Text
    out: Text | None
    warmup: Whole
    log_every: Count
    checkpoint_every: Count
    tensorboard: bool
    progress: bool | Literal["auto"]
    parallel: ParallelConfig = ParallelConfig()
    layerwise: LayerwiseConfig = LayerwiseConfig()
    watch: WatchConfig = WatchConfig()
    compile: bool | Literal["reduce-overhead"] = False
    channels_last: bool = False

    @cached_property
    def numbers(self) -> Precision:
        """The precision as the object that acts."""
        return Precision.from_mapping(self.precision)

    @property
    def scale_name(self) -> str:
        """ "none", "dynamic", "layerwise" or the static number."""
        scale = self.numbers.scale if self.scale is None else self.scale
        return scale if isinstance(scale, str) else repr(float(scale)).removesuffix(".0")

    @property
    def scale_label(self) -> str:
        """The scale as tables print it, with what differs from the default settings."""
        if self.scale_name not in MOVING:
            return self.scale_name
        changed = _changed(self.scaling) + (_changed(self.layerwise) if self.scale_name == "layerwise" else [])
        return " ".join([self.scale_name, *changed])

    def decisive(self) -> dict[str, Any]:
        """All that decides what is computed: a run's folder holds one value of this."""
        return self.without_later_defaults(COSMETIC)

    def identity(self) -> str:
        """Eight digits that stand for `decisive`, in the name of the run's folder."""
        return _digest(self.decisive())

    def comparable(self) -> str:
        """Stands for the settings that runs in one table have in common.

        Where the data lies and the device that was asked for are left out: a record names both as they were found.
        """
        apart = {
            "precision",
            "scale",
            "scaling",
            "layerwise",
            "max_skips",
            "seed",
            "count",
            "data_dir",
            "device",
            "threads",
        }
        return _digest(self.without_later_defaults(COSMETIC | apart))

    @classmethod
    def later_defaults(cls) -> dict[str, Any]:
        """What folders of older versions mean by the fields they lack."""
        fields = {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value.model_dump() if isinstance(value, BaseModel) else value for name, value in fields.items()}

    def without_later_defaults(self, exclude: set[str]) -> dict[str, Any]:
        defaults = self.later_defaults()
        values = self.model_dump(exclude=exclude)
        for section, _, key in (name.partition(".") for name in exclude if "." in name):
            values.get(section, {}).pop(key, None)
            defaults.get(section, {}).pop(key, None)
        return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}

    def silent(self) -> Config:
        """The same run as shown by a process that is not the first of its job."""
        return self.model_copy(update={"progress": False, "tensorboard": False})

    def folder(self) -> Path:
        """Where the run goes, as an absolute path."""
        if self.out is not None:
            return Path(self.out).expanduser().absolute()
        scale = self.scale_label.replace(" ", "-").replace("=", "")
        name = f"{self.recipe}-{self.numbers.name}-scale_{scale}-seed{self.seed}-{self.identity()}"
        return Path(self.results).expanduser().absolute() / name


MOVING = ("dynamic", "layerwise")
"""Scales that move, as `scaling` says."""
COSMETIC = {
    "results",
    "out",
    "log_every",
    "checkpoint_every",
    "tensorboard",
    "progress",
    "workers",
    "warmup",
    "paper",
    "watch",
    "parallel.shard",
}
"""Settings that may change between a run and its resumption: they change no weight."""


def _changed(scaling: ScalingConfig | LayerwiseConfig) -> list[str]:
    default = type(scaling)()
    return [f"{k}={v:g}" for k, v in scaling if v != getattr(default, k)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def check(values: Mapping[str, Any], baseline: Mapping[str, Any] | None = None) -> Config:
    """Plain data as a typed Config; raises UserError with every complaint in one message.

    baseline: the same data before the command line changed it; options of tasks, optimizers and schedules have to
    keep the type they have there.
    """
    complaints: list[str] = []
    config = None
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        complaints += _joined(_sentence(e) for e in error.errors() if e["loc"][0] != "scale")
    precision, scaling, layerwise = (
        values[k] if isinstance(values.get(k), dict) else {} for k in ("precision", "scaling", "layerwise")
    )
    complaints += modes.complaints_about(precision)
    if precision and precision.get("name") not in (known := names("precision")):
        complaints.append(f"precision.name={precision.get('name')} is not the name of a file; {suggest('', known)}")
    complaints += _about_scale(values.get("scale"), precision, scaling, layerwise)
    complaints += _about_shards(values, precision)
    for section in ("task", "optimizer", "schedule"):
        before, now = (baseline or {}).get(section) or {}, values.get(section)
        complaints += _about_options(section, now, before) if isinstance(now, dict) else []
    if complaints or config is None:
        raise UserError("\n".join(complaints))
    return config


def _about_scale(
    scale: Any, precision: dict[str, Any], settings: dict[str, Any], layerwise: dict[str, Any]
) -> list[str]:
    effective = precision.get("scale", "none") if scale is None else scale
    found = []
    for name, value in (("scale", scale), ("precision.scale", precision.get("scale", "none"))):
        known = value in ("none", *MOVING) if isinstance(value, str) else isinstance(value, (int, float, type(None)))
        if isinstance(value, bool) or not known:
            found.append(f"{name}={_quoted(value)}: give a positive number (static), dynamic, layerwise or none")
        elif isinstance(value, (int, float)) and not modes.fits_fp32(value):
            found.append(
                f"{name}={value}: give a positive number (static, from 2^-126 to 2^126; a power of two is exact), "
                "dynamic, layerwise or none"
            )
    if not found:
        found += _without_effect("scaling", settings, effective, MOVING)
        found += _without_effect("layerwise", layerwise, effective, ("layerwise",))
    for key in ("init", "ceiling"):
        value = settings.get(key)
        if isinstance(value, (int, float)) and value > 0 and not modes.fits_fp32(value):
            found.append(f"scaling.{key}={value}: give a scale that FP32 holds with its inverse, 2^-126 to 2^126")
    low, high, init = settings.get("floor"), settings.get("ceiling"), settings.get("init")
    if all(isinstance(v, (int, float)) for v in (low, high)) and low > high:  # type: ignore[operator]
        found.append(f"scaling.floor={low} is above scaling.ceiling={high}")
    if isinstance(init, (int, float)) and isinstance(high, (int, float)) and init > high:
        found.append(f"scaling.init={init} is above scaling.ceiling={high}")
    return found


def _quoted(value: Any) -> str:
    """A value as a complaint shows it: text that looks like a number in quotes."""
    try:
        return f"'{value}', text" if isinstance(value, str) and value and float(value) == float(value) else str(value)
    except ValueError:
        return str(value)


def _without_effect(section: str, settings: dict[str, Any], scale: Any, moving: tuple[str, ...]) -> list[str]:
    """Settings of another kind of scale than this one."""
    default = {"scaling": ScalingConfig, "layerwise": LayerwiseConfig}[section]()
    changed = {k: v for k, v in settings.items() if v != getattr(default, k, v)} if scale not in moving else {}
    return [f"{section}.{k}={v} has no effect with scale={scale}; set scale={moving[0]}" for k, v in changed.items()]


def _about_shards(values: Mapping[str, Any], precision: dict[str, Any]) -> list[str]:
    """What needs whole tensors in every process has no place where each holds a part of them."""
    parallel, watch = ({} if not isinstance(values.get(k), dict) else values[k] for k in ("parallel", "watch"))
    if parallel.get("shard") is not True:
        return []
    scale = precision.get("scale") if values.get("scale") is None else values["scale"]
    storage = precision.get("storage", "float32")
    asked = {
        f"precision={precision.get('name')} (parameters in {storage})": storage != "float32",
        f"precision={precision.get('name')} (products in FP8)": precision.get("compute") == "float8",
        "scale=layerwise": scale == "layerwise",
        "watch=true": watch.get("enabled") is True,
        "count=true": values.get("count") is True,
    }
    cure = "it shards FP32 parameters, under precision=fp32, tf32, bf16 or fp16; give parallel.shard=false, or another"
    return [f"parallel.shard=true does not go with {what}: {cure} value here" for what, is_so in asked.items() if is_so]


def _about_options(section: str, options: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """An option keeps the type it has by default; numbers are finite, and not negative where the default is not."""
    known = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}.get(section, {}).get(str(options.get("name")))
    found = []
    for key, value in options.items():
        name = f"{section}.{key}"
        if key in ("name", "lr", "warmup"):
            continue
        if known is not None and key not in known:
            cure = f"take it out (~{name}); " if key in baseline else ""
            found.append(f"{name} is not an option of {options['name']}; {cure}{suggest(key, list(known))}")
            continue
        default = baseline.get(key) if known is None else known[key]
        items = value if isinstance(value, list) else [value]
        numbers = [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]
        if not all(math.isfinite(number) for number in numbers):
            found.append(f"{name}={value}: give finite numbers")
        elif default is None or (value is None and known is None):
            continue
        elif not _same_type(value, default):
            found.append(f"{name}={value}: give {_kind(default)}, as {default} is")
        elif isinstance(default, list) and default and len(value) != len(default):
            found.append(f"{name}={value}: give {len(default)} numbers, as {default} is")
        elif isinstance(default, (int, float)) and numbers and numbers[0] < 0 <= default:
            found.append(f"{name}={value}: give a number that is not negative")
    if section == "schedule" and options.get("every") == 0:
        found.append("schedule.every=0: give a number of steps, 1 or more")
    milestones = options.get("milestones", []) if section == "schedule" else []
    if isinstance(milestones, list) and not all(type(step) is int and step > 0 for step in milestones):
        found.append(f"schedule.milestones={milestones}: give steps, as [1000,2000] is")
    return found


def _same_type(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, list):
        return isinstance(value, list) and all(_same_type(item, (default or value)[0]) for item in value)
    return isinstance(value, type(default))


def _kind(default: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}
    return names.get(type(default), "a mapping")


def _joined(sentences: Iterable[str]) -> list[str]:
    """Complaints of one value against the branches of a union become one."""
    found: dict[str, list[str]] = {}
    for sentence in sentences:
        about, _, allowed = sentence.partition(": give ")
        found.setdefault(about, []).append(allowed)
    return [about + (": give " + " or ".join(dict.fromkeys(some)) if some[0] else "") for about, some in found.items()]


def _sentence(error: Any) -> str:
    """A pydantic error in our words: what was given, what is allowed."""
    place = [str(part) for part in error["loc"] if not _is_branch(part)]
    name, given, kind, limits = ".".join(place), error["input"], error["type"], error.get("ctx", {})
    named = isinstance(given, str) and name in ("task", "optimizer", "schedule")
    if kind == "missing" or given is None:
        return f"{name} is not set; a recipe sets it (mptrain +recipe=NAME), or give {name}=..."
    if kind == "value_error":
        return f"{name}: {limits['error']}"
    if kind == "extra_forbidden":
        return f"{name} is unknown"
    allowed = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text",
        "string_too_short": "a name, or leave it out",
        "dict_type": "a mapping",
        "list_type": "a list, e.g. [a,b]",
        "model_type": f"a mapping, e.g. {name}.name={given}" if named else "a mapping",
        "greater_than_equal": f"a number of {limits.get('ge')} or more",
        "greater_than": f"a number above {limits.get('gt')}",
        "less_than": f"a number below {limits.get('lt')}",
        "less_than_equal": f"a number of at most {limits.get('le')}",
        "literal_error": f"one of {limits.get('expected', '')}".replace("'", ""),
        "string_pattern_mismatch": "auto, cpu, cuda or cuda:N",
    }.get(kind, error["msg"])
    return f"{name}={given}: give {allowed}"


def _is_branch(part: Any) -> bool:
    """Whether pydantic means a branch of a union by this part of an error's place."""
    return isinstance(part, str) and (
        part in ("bool", "str", "float", "int") or part.startswith(("literal[", "constrained"))
    )
