"""A command line into checked configurations, in milliseconds: all complaints at once, before Hydra or torch start.

Hydra composes for training, where its launchers and sweeps are wanted; `config` does the same for a verb that looks at
one run (`mptrain probe +recipe=ssd steps=3`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mptrain import files
from mptrain.config import Config, check
from mptrain.errors import UserError
from mptrain.options import OPTIMIZERS, SCHEDULES

OPEN = ("task", "optimizer", "schedule")
"""Parts of the configuration to which options can be added."""


def config(argv: Sequence[str]) -> Config:
    """The one configuration that `+recipe=NAME KEY=VALUE ...` means; UserError with all complaints."""
    argv = with_plus(argv)
    for text in argv:
        if text.startswith("-"):
            raise UserError(f"{text} is not an option here; give +recipe=NAME and KEY=VALUE")
    checked(argv)
    _, changes, groups = _parse(argv, several=False)
    before = baseline(groups["recipe"][-1], groups.get("precision", ["fp32"])[-1])
    chosen = [(change, _unquote(next(iter(_values(change, [])), None))) for change in changes]
    return typed(_changed(before, chosen), before)


def typed(values: dict[str, Any], before: Mapping[str, Any] | None = None) -> Config:
    """A composed configuration as a Config, with the data's folder made absolute; hub:NAME is none."""
    if isinstance(folder := values.get("data_dir"), str) and folder and not folder.startswith("hub:"):
        values["data_dir"] = str(Path(folder).expanduser().absolute())
    return check(values, before)


def with_plus(argv: Sequence[str]) -> list[str]:
    """`recipe=NAME` is taken for `+recipe=NAME`, which is what Hydra wants, `watch=true` for `watch.enabled=true`."""
    short = {"recipe=": "+recipe=", "watch=": "watch.enabled="}
    return [next((text.replace(a, b, 1) for a, b in short.items() if text.startswith(a)), text) for text in argv]


def readable(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors without their repetitions and traces."""
    text = f"{error}\n{error.__cause__ or ''}"
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("    ")]
    return "\n".join(dict.fromkeys(lines))[:2000]


def checked(argv: list[str]) -> list[str]:
    """Raises UserError with all complaints; returns the arguments in the order that Hydra's parser understands."""
    from hydra._internal.utils import get_args_parser
    from hydra.core.utils import setup_globals

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    arguments = parser.parse_intermixed_args(argv)
    options = list(argv)
    for override in arguments.overrides:
        options.remove(override)
    ordered = [*arguments.overrides, *options]
    if arguments.experimental_rerun:
        raise UserError("--experimental-rerun has no use here: the same command resumes a run or says how it ended")
    if arguments.shell_completion and not any("install=" in t or "query=" in t for t in arguments.overrides):
        raise UserError('--shell-completion: give install=bash, fish or zsh: eval "$(mptrain -sc install=bash)"')
    if arguments.hydra_help or arguments.shell_completion or arguments.config_dir or arguments.config_path:
        return ordered
    setup_globals()
    several = arguments.multirun or any(text.startswith("hydra.mode=") for text in arguments.overrides)
    complaints, changes, groups = _parse(arguments.overrides, several)
    known = {kind: files.names(kind) for kind in ("recipe", "precision")}
    for kind, chosen in groups.items():
        given = [text for text in arguments.overrides if text.lstrip("+").startswith(f"{kind}=")]
        if len(given) > 1:
            complaints.append(f"{kind} is given {len(given)} times ({', '.join(given)}); give it once")
        complaints += [
            f"{kind}={name} is unknown; {files.suggest(name, known[kind])}"
            for name in chosen
            if name not in known[kind]
        ]
    looking = arguments.cfg is not None or arguments.info is not None
    if not looking and not any(text.lstrip("+").startswith(("recipe=", "recipe@")) for text in arguments.overrides):
        complaints.append(f"no recipe is named; write +recipe=NAME, {files.suggest('', known['recipe'])}")
    recipes: list[str | None] = [name for name in groups.get("recipe", []) if name in known["recipe"]]
    precisions = [name for name in groups.get("precision", []) if name in known["precision"]]
    for recipe, precision in itertools.product(recipes or [None], precisions or ["fp32"]):
        complaints += _complaints(recipe, precision, changes)
    if complaints := list(dict.fromkeys(complaints)):
        raise UserError("\n".join(complaints))
    return ordered


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}; see mptrain --help")


def _parse(overrides: list[str], several: bool) -> tuple[list[str], list[Any], dict[str, list[str]]]:
    """Sorts overrides into complaints, changes of values, and choices of groups (with all values of a sweep)."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    complaints, changes = [], []
    groups: dict[str, list[str]] = {}
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            complaints.append(
                f"'{text}' cannot be read as key=value; put a value with signs of its own in two pairs of quotes: "
                "'key=\"a, b\"'"
            )
            continue
        key = override.key_or_group
        if override.package is not None:
            complaints.append(f"{text}: @ has no use here, {key} has one place; leave out @{override.package}")
            continue
        if override.is_sweep_override() and not several:
            complaints.append(
                f"{text} is a sweep; give one value, or each a run of its own by mptrain -m; "
                f"a comma in a name takes two pairs of quotes: '{key}=\"a,b\"'"
            )
        if key.split(".")[0].split("/")[0] == "hydra":
            continue
        if key in ("recipe", "precision") and not override.is_delete():
            values = _values(override, files.names(key))
            if not values:
                complaints.append(f"{text} names no {key} at all; {files.suggest('', files.names(key))}")
            groups[key] = groups.get(key, []) + [str(value) for value in values]
        else:
            changes.append(override)
    return complaints, changes, groups


def _values(override: Any, names: list[str]) -> list[Any]:
    """All values of a sweep, or the one there is; `names` are what a glob chooses from."""
    from hydra.core.override_parser.types import Glob

    if isinstance(override.value(), Glob):
        return override.value().filter(names)
    if not override.is_sweep_override():
        return [override.value()]
    if override.is_discrete_sweep() or override.is_choice_sweep() or override.is_range_sweep():
        return list(override.sweep_iterator())
    return []


def _complaints(recipe: str | None, precision: str, changes: list[Any]) -> list[str]:
    """Without a recipe, what a recipe would set is not missed and its options are not looked at."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        before = baseline(recipe, precision)
    except (UserError, OmegaConfBaseException) as error:
        return [f"recipe={recipe} with precision={precision}: {readable(error)}"]
    names = _names(changes, before)
    about = [(change, _about_key(change, before, names)) for change in changes]
    complaints = [complaint for _, complaint in about if complaint is not None]
    settable = [change for change, complaint in about if complaint is None]
    complaints += [_about_no_value(change) for change in settable if _is_empty(change)]
    settable = [change for change in settable if not _is_empty(change)]
    values = [[(change, _unquote(value)) for value in _values(change, [])] or [(change, None)] for change in settable]
    for chosen in _combinations(values):
        try:
            check(_changed(before, chosen), before)
        except UserError as error:
            complaints += [line for line in str(error).splitlines() if recipe or " is not set" not in line]
        except OmegaConfBaseException as error:
            complaints.append(readable(error))
    return complaints


def _combinations(values: list[list[Any]]) -> Iterator[Sequence[Any]]:
    """What a sweep comes to; of a large one the beginning, and each value of each key beside the others' first."""
    yield from itertools.islice(itertools.product(*values), 200)
    if math.prod(map(len, values)) > 200:
        for i, several in enumerate(values):
            for value in [*several[:100], several[-1]]:
                yield [*(other[0] for other in values[:i]), value, *(other[0] for other in values[i + 1 :])]


def _is_empty(override: Any) -> bool:
    return bool(override.is_sweep_override()) and not _values(override, [])


def _about_no_value(override: Any) -> str:
    if override.is_interval_sweep():
        return f"{override.input_line} is an interval, of which a sweep here takes no values; give a,b,c"
    return f"{override.input_line} names no value at all"


def _names(changes: list[Any], baseline: Mapping[str, Any]) -> dict[str, set[str]]:
    """What optimizer and schedule are called, as the recipe has it and as the command line does."""
    found = {section: {str(baseline[section].get("name"))} for section in ("optimizer", "schedule")}
    for section, names in found.items():
        for change in changes:
            if change.key_or_group == f"{section}.name":
                names.update(str(_unquote(value)) for value in _values(change, []))
    return found


def _changed(baseline: dict[str, Any], chosen: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The composed configuration with values set, merged or deleted as Hydra does it."""
    from omegaconf import OmegaConf

    config = copy.deepcopy(baseline)
    interpolated = False
    for override, value in chosen:
        *path, last = override.key_or_group.split(".")
        at = config
        for part in path:
            at = at.setdefault(part, {})
        if override.is_delete():
            at.pop(last, None)
        elif isinstance(value, dict) and isinstance(at.get(last), dict):
            at[last] |= {key: _unquote(item) for key, item in value.items()}
        elif "${hydra" not in str(value):  # known only once Hydra runs
            at[last] = value
            interpolated = interpolated or "${" in str(value)
    return OmegaConf.to_container(OmegaConf.create(config), resolve=True) if interpolated else config  # type: ignore


def _unquote(value: Any) -> Any:
    if isinstance(value, list):
        return [_unquote(item) for item in value]
    return value.text if type(value).__name__ == "QuotedString" else value


def _about_key(override: Any, baseline: dict[str, Any], names: Mapping[str, set[str]]) -> str | None:
    """What is wrong with the key of an override, or None; `names`: of optimizers and schedules."""
    key = override.key_or_group
    section, *rest = key.split(".")
    at: Any = baseline
    for part in (section, *rest):
        if isinstance(at, Mapping) and part in at:
            at = at[part]
            if override.is_delete() and not (rest and section in OPEN):
                return f"{key} cannot be taken out, only set: {key}=..."
            continue
        if section in OPEN and len(rest) == 1:
            if override.is_add() or not baseline["recipe"]:
                return None
            options = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}.get(section, {})
            if any(part in options.get(name, {}) for name in names.get(section, ())):
                return f"{key} is not set by recipe={baseline['recipe']}; add it with a plus sign: +{key}=..."
        near = files.suggest(key, sorted(_keys(baseline))).partition("there are")[0]
        show = f"mptrain +recipe={baseline['recipe'] or 'NAME'} --cfg job"
        return f"{key or 'an empty key'} is unknown; {near}all keys: {show}"
    plus = override.is_add() and not override.is_force_add()
    if plus and at is not None and not isinstance(override.value(), (dict, list)):
        return f"{key} is there already; set it without a plus sign: {override.input_line.removeprefix('+')}"
    return None


def _keys(mapping: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in mapping.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += _keys(value, f"{prefix}{key}.")
    return found


def baseline(recipe: str | None, precision: str) -> dict[str, Any]:
    """What Hydra would compose, as plain data and without Hydra's start-up."""
    numbers = files.config("precision", precision)
    return copy.deepcopy(
        _composed(files.folder("configs"), numbers, files.config("recipe", recipe) if recipe else None)
    )


@functools.cache
def _composed(configs: Path, numbers: Path, recipe: Path | None) -> dict[str, Any]:
    """Once for each choice: `mptrain reproduce` asks for the same few many times over."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.load(configs / "config.yaml")
    for key in ("defaults", "hydra"):
        config.pop(key, None)
    config = OmegaConf.merge(
        config, {"precision": OmegaConf.load(numbers)}, _recipe(recipe.stem) if recipe is not None else {}
    )
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def _recipe(name: str) -> Any:
    from omegaconf import OmegaConf

    own: Any = OmegaConf.load(files.config("recipe", name))
    parents = [entry for entry in own.pop("defaults", []) if entry != "_self_"]
    return OmegaConf.merge(*(_recipe(str(parent)) for parent in parents), own)
