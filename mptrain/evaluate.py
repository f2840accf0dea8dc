"""The metric of a run that exists, from its newest checkpoint: `mptrain eval +recipe=NAME KEY=VALUE ...`."""

from __future__ import annotations

import argparse

from mptrain import compose
from mptrain.errors import UserError
from mptrain.results.record import Record


def evaluate(argv: list[str]) -> int:
    """Runs the command; returns the exit status.

    Raises UserError if the command line that trained is not the one given, or left no checkpoint.
    """
    parser = argparse.ArgumentParser(
        prog="mptrain eval",
        description="Evaluates the newest checkpoint of the run that the same words after `mptrain` train.",
        allow_abbrev=False,
    )
    parser.add_argument("--batch-size", type=int, help="samples at a time; the metric does not depend on it")
    parser.add_argument("overrides", nargs="*", metavar="+recipe=NAME KEY=VALUE ...")
    try:
        options = parser.parse_intermixed_args(argv)
    except SystemExit as stop:  # --help, or an option that argparse has explained already
        return int(stop.code or 0)
    if options.batch_size is not None and options.batch_size < 1:
        raise UserError(f"--batch-size {options.batch_size}: give a whole number of 1 or more")
    config = compose.config(options.overrides)
    record = Record(config.folder())
    if not record.config.exists():
        raise UserError(
            f"{record.folder} holds no run; train it first: mptrain {' '.join(options.overrides)} "
            "(or name its folder: out=FOLDER)"
        )
    from mptrain.train import scores

    step, found = scores(config, record, options.batch_size)
    print(f"after step {step} of {config.steps}: " + "  ".join(f"{k} {v:.6g}" for k, v in found.items()))
    return 0
