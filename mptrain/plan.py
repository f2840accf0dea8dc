"""Which runs reproduce a recipe: every named run with every seed, its command line, its folder and its state."""

from __future__ import annotations

from dataclasses import dataclass

from mptrain import compose
from mptrain.config import Config
from mptrain.errors import UserError
from mptrain.jobs import Job
from mptrain.paper import paper_of
from mptrain.results.record import Record


@dataclass(frozen=True)
class Planned:
    """One run: where it comes from, how it is started, and absent | resumable | finished | diverged | failed."""

    recipe: str
    run: str
    seed: int
    steps: int
    quick: bool
    job: Job
    state: str


def plan(recipes: list[str], seeds: int | None, common: list[str], quick: bool) -> list[Planned]:
    """All runs of the recipes; raises UserError with the complaints about every command line."""
    planned: list[Planned] = []
    complaints: list[str] = []
    for recipe in recipes:
        paper = paper_of(recipe)
        short = quick and not recipe.endswith("_paper")
        for name, run in paper.runs.items():
            argv = [f"+recipe={recipe}", *(paper.quick if short else []), *run.overrides, *common]
            try:
                config = compose.config(argv)
            except UserError as error:
                complaints += [f"{recipe}, run {name}: {line}" for line in str(error).splitlines()]
                continue
            for seed in range(min(seeds or paper.seeds, run.seeds or 1000)):
                planned.append(_planned(recipe, name, config.model_copy(update={"seed": seed}), argv, short))
    if complaints:
        raise UserError("\n".join(complaints))
    return planned


def _planned(recipe: str, name: str, config: Config, argv: list[str], quick: bool) -> Planned:
    job = Job(f"{recipe} {name} seed {config.seed}", (*argv, f"seed={config.seed}"), config.folder())
    try:
        state = Record(job.folder).state()
    except UserError:  # an unreadable summary: the run itself will say so
        state = "failed"
    return Planned(recipe, name, config.seed, config.steps, quick, job, state)
