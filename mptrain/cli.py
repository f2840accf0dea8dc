"""The door: verbs, Hydra's command line, and every complaint about it before anything slow is imported.

mptrain                                    lists the recipes
mptrain +recipe=resnet precision=fp16      trains
mptrain compare [FOLDER...]                verbs: one function each, found in VERBS
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from mptrain import __version__, about, files
from mptrain.errors import UserError

VERBS = {
    "eval": ("mptrain.evaluate:evaluate", "the metric of a trained run again, from its newest checkpoint"),
    "compare": ("mptrain.results.compare:compare", "tables of finished runs beside their FP32 baseline"),
    "reproduce": (
        "mptrain.reproduce:reproduce",
        "every run of the paper's tables and figures, and verdicts on its claims",
    ),
    "report": (
        "mptrain.results.report.verb:report",
        "claims, tables, curves and pages to try things on as one file, from records",
    ),
    "probe": ("mptrain.probe:probe", "a few FP32 steps: what FP16 would lose at each loss scale, and what to use"),
    "estimate": ("mptrain.estimate:estimate", "memory, operations and a roofline time per step, without a GPU"),
    "doctor": ("mptrain.doctor:doctor", "what runs natively here, what is emulated, and how fast"),
}

LOOKING = {"probe": about.PROBE, "estimate": about.ESTIMATE}
"""Verbs of one run whose modules import torch: help and mistakes are answered before."""

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
  scale=       a number (static) | dynamic | layerwise | none; unset: what the precision needs
  seed= steps= batch_size= accumulate= clip= ema= device= threads=
  data=        the recipe's data set, or synthetic; data_dir= where it lies
  precision.keep_fp32=[softmax,classifier]   functions and modules that stay in FP32
  watch=true   look inside the tensors: watch.parquet, alarms, TensorBoard (watch.every=10 watch.layers=[classifier])
  out=FOLDER   where this run goes; unset: a folder of its own in results/runs

The same command resumes an interrupted run and does not repeat a finished one.
Hydra's own options work too: --multirun (-m), --cfg job, --info, --hydra-help.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # of a folder's name, where the terminal knows no such letter
    try:
        status = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # an error of the last lines is to be told as well
        return status
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
    except OSError as error:
        if error.filename or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _complain(f"what is printed cannot be written: {error.strerror}; give it another place (> FILE)")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 1


def _complain(message: object) -> None:
    print(f"mptrain: {message}".replace("\n", "\n         "), file=sys.stderr)


def _run(argv: list[str]) -> int:
    if not argv:
        print(_recipes())
        return 0
    if argv[0] == "--version":
        print(f"mptrain {__version__}")
        return 0
    if argv[0] == "help" and argv[1:2] and argv[1] in VERBS:
        argv = [argv[1], "--help"]
    if argv[0] in LOOKING:
        if "--help" in argv or "-h" in argv:
            print(LOOKING[argv[0]])
            return 0
        from mptrain import compose

        compose.config(argv[1:])
    _refuse_a_folder_that_is_gone()
    if argv[0] in VERBS:
        module, _, function = VERBS[argv[0]][0].partition(":")
        try:
            return getattr(importlib.import_module(module), function)(argv[1:])
        except BrokenPipeError:
            raise
        except OSError as error:
            if not error.filename:  # not about a file, so not the user's to mend
                raise
            raise UserError(f"{error.filename}: {error.strerror}") from error
    if argv[0] == "help" or "--help" in argv or "-h" in argv:
        print(_help())
        return 0
    if argv[0] == "train":
        argv = argv[1:]
    elif not argv[0].startswith(("-", "~")) and "=" not in argv[0]:
        if (recipe := argv[0].lstrip("+")) in files.names("recipe"):
            raise UserError(f"'{argv[0]}' is a recipe; to train it type mptrain +recipe={recipe}")
        raise UserError(f"'{argv[0]}' is neither a verb nor key=value; {files.suggest(argv[0], ['train', *VERBS])}")
    return _train(argv)


def _refuse_a_folder_that_is_gone() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the folder you are in is not there any more; go to one that is (cd FOLDER)") from error


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
    from mptrain import compose

    argv = compose.checked(compose.with_plus(argv))
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and not {"-m", "--multirun"}.isdisjoint(argv):
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

    from mptrain import compose

    values: Any = OmegaConf.to_container(composed, resolve=True)
    config = compose.typed(values)
    from mptrain import process
    from mptrain.train import train

    process.keep_freed_memory()
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

        from mptrain import compose

        try:
            return function()
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(compose.readable(error)) from error
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


def _store_recipes() -> None:
    """Makes recipes/*.yaml the group `recipe`, each at the root of the configuration."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for name in files.names("recipe"):
        node = OmegaConf.load(files.config("recipe", name))
        ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")


if __name__ == "__main__":
    sys.exit(main())
