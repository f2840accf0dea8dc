"""The door: verbs, Hydra's command line, and every complaint about it before anything slow is imported.

mptrain                                    lists the recipes
mptrain +recipe=resnet precision=fp16      trains
mptrain compare [FOLDER...]                verbs: one function each, found in VERBS
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mptrain import __version__, files
from mptrain.errors import UserError

VERBS = {
    "compare": ("mptrain.results.compare:compare", "tables of finished runs beside their FP32 baseline"),
    "reproduce": (
        "mptrain.reproduce:reproduce",
        "every run of the paper's tables and figures, and verdicts on its claims",
    ),
    "doctor": ("mptrain.doctor:doctor", "what runs natively here, what is emulated, and how fast"),
}

OPEN = ("task", "optimizer", "schedule")
"""Parts of the configuration to which options can be added."""

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
        _complain(error)
        return 1
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") != "0":  # of the processes of one job, one speaks
            return 130
        _complain(stop if str(stop) else "interrupted; the same command goes on from the last checkpoint")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _complain(message: object) -> None:
    print(f"mptrain: {message}".replace("\n", "\n         "), file=sys.stderr)


def _run(argv: list[str]) -> int:
    if not argv:
        print(_recipes())
        return 0
    if argv[0] == "--version":
        print(f"mptrain {__version__}")
        return 0
    if argv[0] in VERBS:
        module, _, function = VERBS[argv[0]][0].partition(":")
        return getattr(importlib.import_module(module), function)(argv[1:])
    if argv[0] == "help" or "--help" in argv or "-h" in argv:
        print(_help())
        return 0
    if argv[0] == "train":
        argv = argv[1:]
    elif not argv[0].startswith(("-", "~")) and "=" not in argv[0]:
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
    argv = _check([f"+{a}" if a.startswith("recipe=") else a for a in argv])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not {"-m", "--multirun"}.isdisjoint(argv):
        raise UserError(
            "several processes share one run (torchrun), not a sweep (-m); start torchrun once for each run"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failures: list[tuple[str, Exception]] = []
    _store_recipes()
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    launcher = os.getpid()

    def job(composed: Any) -> None:
        here = HydraConfig.get()
        try:
            with contextlib.chdir(here.runtime.cwd):
                _one_run(composed)
        except Exception as error:
            if os.getpid() != launcher:  # a launcher of another machine or process brings the error home itself
                raise
            many = here.mode == RunMode.MULTIRUN
            failures.append((" ".join(here.overrides.task) if many else "", error))
            if many:
                _complain(_sentence(error))

    run = hydra.main(version_base="1.3", config_path=str(files.folder("configs").resolve()), config_name="config")(job)
    before = sys.argv
    sys.argv = ["mptrain", *argv]
    try:
        with _errors_pass_through(), _failures_come_home(failures):
            run()
    finally:
        sys.argv = before
    for _, error in failures:
        if not isinstance(error, (UserError, OSError)):
            traceback.print_exception(error)
    if failures and not failures[0][0]:
        raise UserError(_sentence(failures[0][1]))
    if failures:
        listed = "\n".join(f"{overrides}: {_sentence(error)}" for overrides, error in failures)
        raise UserError(f"{len(failures)} of the runs failed:\n{listed}")
    return 0


def _one_run(composed: Any) -> None:
    from omegaconf import OmegaConf

    from mptrain.config import check

    values: Any = OmegaConf.to_container(composed, resolve=True)
    if isinstance(folder := values.get("data_dir"), str) and folder:
        values["data_dir"] = str(Path(folder).expanduser().absolute())
    config = check(values)
    from mptrain.train import train

    train(config)


def _sentence(error: BaseException) -> str:
    """An error as one message: ours as it is, the system's with the file it is about, any other with its kind."""
    if isinstance(error, OSError) and error.strerror:
        about = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return f"{about}; once this is mended the same command goes on from the last checkpoint"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _errors_pass_through() -> Any:
    """Hydra prints a shortened traceback for errors and exits; ours have their own form."""
    from unittest.mock import patch

    def run_and_report(function: Any) -> Any:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        try:
            return function()
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_readable(error)) from error
        except OSError as error:
            raise UserError(_sentence(error)) from error

    return patch("hydra._internal.utils.run_and_report", run_and_report)


def _failures_come_home(failures: list[tuple[str, Exception]]) -> Any:
    """Hydra raises the first failure among jobs that ran in other processes; all of them are to be told."""
    from unittest.mock import patch

    from hydra.core.utils import JobReturn, JobStatus

    def return_value(self: JobReturn) -> Any:
        if self.status == JobStatus.FAILED:
            failures.append((" ".join(self.overrides or []), self._return_value))
            return None
        return self._return_value

    setter = JobReturn.return_value.fset  # type: ignore[attr-defined]
    return patch.object(JobReturn, "return_value", property(return_value, setter))


def _readable(error: BaseException) -> str:
    text = f"{error}\n{error.__cause__ or ''}"
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("    ")]
    return "\n".join(dict.fromkeys(lines))[:2000]


def _store_recipes() -> None:
    """Makes recipes/*.yaml the group `recipe`, each at the root of the configuration."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for name in files.names("recipe"):
        node = OmegaConf.load(files.config("recipe", name))
        ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")


# The check before Hydra: all complaints at once, in milliseconds.


def _check(argv: list[str]) -> list[str]:
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
    if arguments.hydra_help or arguments.shell_completion or arguments.config_dir or arguments.config_path:
        return ordered
    setup_globals()
    complaints, changes, groups = _parse(arguments.overrides)
    known = {kind: files.names(kind) for kind in ("recipe", "precision")}
    for kind, chosen in groups.items():
        complaints += [
            f"{kind}={name} is unknown; {files.suggest(name, known[kind])}"
            for name in chosen
            if name not in known[kind]
        ]
    looking = arguments.cfg is not None or arguments.info is not None
    if not groups.get("recipe") and not looking:
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
            complaints.append(
                f"'{text}' cannot be read as key=value; put a value with signs of its own in two pairs of quotes: "
                "'key=\"a, b\"'"
            )
            continue
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra":
            continue
        if key in ("recipe", "precision") and not override.is_delete():
            groups[key] = groups.get(key, []) + [str(value) for value in _values(override, files.names(key))]
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

    from mptrain.config import check

    try:
        baseline = _compose(recipe, precision)
    except (UserError, OmegaConfBaseException) as error:
        return [f"recipe={recipe} with precision={precision}: {_readable(error)}"]
    complaints = [found for change in changes if (found := _about_key(change, baseline)) is not None]
    settable = [change for change in changes if _about_key(change, baseline) is None]
    values = [[(change, _unquote(value)) for value in _values(change, [])] or [(change, None)] for change in settable]
    for chosen in itertools.islice(itertools.product(*values), 200):
        try:
            check(_changed(baseline, chosen), baseline)
        except UserError as error:
            complaints += [line for line in str(error).splitlines() if recipe or " is not set" not in line]
        except OmegaConfBaseException as error:
            complaints.append(_readable(error))
    return complaints


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


def _about_key(override: Any, baseline: dict[str, Any]) -> str | None:
    """What is wrong with the key of an override, or None."""
    from mptrain.options import OPTIMIZERS, SCHEDULES

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
            if part in options.get(baseline[section].get("name"), {}):
                return f"{key} is not set by recipe={baseline['recipe']}; add it with a plus sign: +{key}=..."
        near = files.suggest(key, sorted(_keys(baseline))).partition("there are")[0]
        show = f"mptrain +recipe={baseline['recipe'] or 'NAME'} --cfg job"
        return f"{key or 'an empty key'} is unknown; {near}all keys: {show}"
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
