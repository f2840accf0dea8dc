"""The door: verbs, Hydra's command line, and every complaint about it before anything slow is imported.

mptrain                                    lists the recipes
mptrain +recipe=resnet precision=fp16      trains
mptrain compare [FOLDER...]                verbs: one function each, found in VERBS
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from mptrain import __version__, files
from mptrain.errors import UserError

VERBS = {
    "compare": ("mptrain.results.compare:compare", "tables of finished runs beside their FP32 baseline"),
    "doctor": ("mptrain.doctor:doctor", "what runs natively here, what is emulated, and how fast"),
}

HELP = """mptrain: mixed precision training experiments, every precision beside FP32

  mptrain                          list the recipes
  mptrain +recipe=NAME [KEY=VALUE ...]
                                   train; for example
      mptrain +recipe=resnet precision=fp16 scale=8 seed=1 steps=200
      mptrain -m +recipe=resnet precision=fp32,bf16,fp16 seed=0,1,2
  mptrain VERB --help
{verbs}
keys (all of them, with their values: mptrain +recipe=NAME --cfg job)
  precision=   {precisions}
  scale=       a number (static) | dynamic | none; unset: what the precision needs
  seed= steps= batch_size= accumulate= clip= ema= device= threads=
  data=        the recipe's data set, or synthetic; data_dir= where it lies
  precision.keep_fp32=[softmax,fc]   functions and modules that stay in FP32
  out=FOLDER   where this run goes; unset: a folder of its own in results/runs

The same command resumes an interrupted run and does not repeat a finished one.
Hydra's own options work too: --multirun (-m), --cfg job, --info, --hydra-help.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except UserError as error:
        print(f"mptrain: {error}".replace("\n", "\n         "), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmptrain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _run(argv: list[str]) -> int:
    if not argv:
        print(_recipes())
        return 0
    if argv[0] in ("--help", "-h", "help"):
        print(_help())
        return 0
    if argv[0] == "--version":
        print(f"mptrain {__version__}")
        return 0
    if argv[0] in VERBS:
        module, _, function = VERBS[argv[0]][0].partition(":")
        return getattr(importlib.import_module(module), function)(argv[1:])
    if argv[0] == "train":
        argv = argv[1:]
    elif not argv[0].startswith("-") and "=" not in argv[0] and not argv[0].startswith("~"):
        raise UserError(f"'{argv[0]}' is neither a verb nor key=value; {files.suggest(argv[0], ['train', *VERBS])}")
    return _train(argv)


def _help() -> str:
    verbs = "".join(f"      mptrain {verb:<24} {line}\n" for verb, (_, line) in VERBS.items())
    return HELP.format(verbs=verbs, precisions=" | ".join(files.names("precision")))


def _recipes() -> str:
    lines = ["recipes (mptrain +recipe=NAME; mptrain --help for more)", ""]
    for name in files.names("recipe"):
        text = files.config("recipe", name).read_text(encoding="utf-8")
        comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
        about = next((line for line in comments if line and not line.startswith("@")), "")
        lines.append(f"  {name:<24} {about}")
    return "\n".join(lines)


def _train(argv: list[str]) -> int:
    """Checks the command line, then lets Hydra compose it and launch its jobs."""
    argv = [f"+{a}" if a.startswith("recipe=") else a for a in argv]
    _check(argv)
    failures: list[tuple[str, str]] = []
    _store_recipes()
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    def job(composed: Any) -> None:
        from omegaconf import OmegaConf

        from mptrain.config import check

        config = check(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]
        from mptrain.train import train

        many = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            train(config)
        except (UserError, OSError) as error:
            if not many:
                raise
            failures.append((config.folder().name, str(error)))
            print(f"mptrain: {error}", file=sys.stderr)

    run = hydra.main(version_base="1.3", config_path=str(files.folder("configs").resolve()), config_name="config")(job)
    before = sys.argv
    sys.argv = ["mptrain", *argv]
    try:
        with _errors_pass_through():
            run()
    finally:
        sys.argv = before
    if failures:
        listed = "\n".join(f"{name}: {reason}" for name, reason in failures)
        raise UserError(f"{len(failures)} of the runs failed:\n{listed}")
    return 0


def _errors_pass_through():
    """Hydra prints a shortened traceback for errors of a job and exits; ours have their own form."""
    from unittest.mock import patch

    def run_and_report(function: Any) -> Any:
        from hydra.errors import HydraException

        try:
            return function()
        except HydraException as error:
            raise UserError(_first_lines(error)) from error
        except OSError as error:
            raise UserError(str(error)) from error

    return patch("hydra._internal.utils.run_and_report", run_and_report)


def _first_lines(error: Exception) -> str:
    return "\n".join(line for line in str(error).splitlines() if line.strip())[:2000]


def _store_recipes() -> None:
    """Makes recipes/*.yaml the group `recipe`, each at the root of the configuration."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for name in files.names("recipe"):
        node = OmegaConf.load(files.config("recipe", name))
        ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")


# The check before Hydra: all complaints at once, in milliseconds.


def _check(argv: list[str]) -> None:
    from hydra._internal.utils import get_args_parser

    arguments = get_args_parser().parse_args(argv)
    if arguments.hydra_help or arguments.shell_completion:
        return
    complaints, changes, groups = _parse(arguments.overrides)
    recipes = groups.pop("recipe", [])
    precisions = groups.pop("precision", ["fp32"])
    for kind, chosen in (("recipe", recipes), ("precision", precisions)):
        known = files.names(kind)
        complaints += [
            f"{kind}={name} is unknown; {files.suggest(name, known)}" for name in chosen if name not in known
        ]
    if not recipes:
        complaints.append(f"no recipe is named; write +recipe=NAME, there are {', '.join(files.names('recipe'))}")
    recipes = [name for name in recipes if name in files.names("recipe")]
    precisions = [name for name in precisions if name in files.names("precision")]
    chosen_recipes: list[str | None] = [*recipes] or [None]
    for recipe, precision in itertools.product(chosen_recipes, precisions or ["fp32"]):
        complaints += _complaints(recipe, precision, changes)
    if complaints := list(dict.fromkeys(complaints)):
        raise UserError("\n".join(complaints))


def _parse(overrides: list[str]) -> tuple[list[str], list[Any], dict[str, list[str]]]:
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
            complaints.append(f"'{text}' is not key=value; quote values with spaces or commas: 'key=\"a, b\"'")
            continue
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra" or override.is_delete():
            continue
        if key in ("recipe", "precision"):
            groups[key] = [str(value) for value in _values(override)]
        else:
            changes.append(override)
    return complaints, changes, groups


def _values(override: Any) -> list[Any]:
    if not override.is_sweep_override():
        return [override.value()]
    if override.is_discrete_sweep() or override.is_choice_sweep() or override.is_range_sweep():
        return list(override.sweep_iterator())
    return []


def _complaints(recipe: str | None, precision: str, changes: list[Any]) -> list[str]:
    """Without a recipe, what a recipe would set is not missed and its options are not looked at."""
    from omegaconf import OmegaConf

    from mptrain.config import check

    try:
        baseline = _compose(recipe, precision)
    except UserError as error:
        return [str(error)]
    complaints = []
    settable = []
    for override in changes:
        key = override.key_or_group
        if (complaint := _about_key(key, override.is_add(), baseline)) is not None:
            complaints.append(complaint)
        else:
            settable.append((key, _plain_values(override)))
    for values in itertools.islice(itertools.product(*(values for _, values in settable)), 500):
        config = OmegaConf.create(baseline)
        for (key, _), value in zip(settable, values, strict=True):
            OmegaConf.update(config, key, value, merge=False)
        try:
            check(OmegaConf.to_container(config, resolve=True), baseline)  # type: ignore[arg-type]
        except UserError as error:
            complaints += [line for line in str(error).splitlines() if recipe or " is not set" not in line]
    return complaints


def _plain_values(override: Any) -> list[Any]:
    if override.is_sweep_override():
        return [_unquote(value) for value in _values(override)]
    return [_unquote(override.value())]


def _unquote(value: Any) -> Any:
    return value.text if type(value).__name__ == "QuotedString" else value


def _about_key(key: str, added: bool, baseline: dict[str, Any]) -> str | None:
    parts = key.split(".")
    at: Any = baseline
    for depth, part in enumerate(parts):
        if isinstance(at, dict) and part in at:
            at = at[part]
            continue
        if depth and parts[0] in ("optimizer", "schedule", "task") and (added or baseline["recipe"] is None):
            return None
        known = sorted(_keys(baseline))
        near = files.suggest(key, known).partition("there are")[0]
        return f"{key} is unknown; {near}all keys: mptrain +recipe={baseline['recipe'] or 'NAME'} --cfg job"
    return None


def _keys(mapping: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in mapping.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += _keys(value, f"{prefix}{key}.")
    return found


def _compose(recipe: str | None, precision: str) -> dict[str, Any]:
    """What Hydra would compose, as plain data and without Hydra's start-up."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.load(files.folder("configs") / "config.yaml")
    for key in ("defaults", "hydra"):
        config.pop(key, None)
    numbers = OmegaConf.load(files.config("precision", precision))
    config = OmegaConf.merge(config, {"precision": numbers}, _recipe(recipe) if recipe else {})
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def _recipe(name: str) -> Any:
    from omegaconf import OmegaConf

    own: Any = OmegaConf.load(files.config("recipe", name))
    parents = [entry for entry in own.pop("defaults", []) if entry != "_self_"]
    return OmegaConf.merge(*(_recipe(str(parent)) for parent in parents), own)


if __name__ == "__main__":
    sys.exit(main())
