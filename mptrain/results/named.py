"""Which records are the runs that a recipe names in its `paper:` block.

A record is the run `fp16_scaled` if it was made with that run's precision, scale and overrides. Overrides are looked up
in the record's own config.yaml. Runs that name the same overrides are compared only if everything else is equal too, as
in the table; of several such sets, and of several devices, the one with the most seeds is taken, then the newest.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain.paper import PaperRun
from mptrain.results.runs import Excluded, Run

LARGEST_CONFIG = 1_000_000  # bytes
APART = ("precision.", "scaling.", "max_skips=", "count=")
"""Overrides by which runs of one comparison may differ."""

Seeds = dict[int, Run]


class Records:
    """All runs that were found, and the configurations they were made with, each read once."""

    def __init__(self, runs: Iterable[Run], excluded: Iterable[Excluded] = ()):
        self._runs: dict[str, list[Run]] = defaultdict(list)
        for run in runs:
            self._runs[run.recipe].append(run)
        self._excluded = [each for each in excluded if each.status != "duplicate"]
        self._configs: dict[str, dict[str, Any]] = {}

    def of(self, recipe: str) -> list[Run]:
        """The runs of a recipe that have a result."""
        return self._runs.get(recipe, [])

    def names(self, run: Run, known: Mapping[str, PaperRun]) -> list[str]:
        """Which named runs a record is; not those that name less of what it was told than another does."""
        fits = [name for name, wanted in known.items() if _fits(run, wanted, self)]
        told = [set(known[name].also) for name in fits]
        return [name for name in fits if not any(set(known[name].also) < other for other in told)]

    def without_result(self, recipe: str, run: PaperRun) -> int:
        """How many folders of this recipe, precision and scale are failed, unfinished or unreadable."""
        wanted = (recipe, run.precision, run.scale_label)
        return sum((each.recipe, each.precision.split(" ")[0], each.scale) == wanted for each in self._excluded)

    def config(self, run: Run) -> dict[str, Any]:
        """The run's config.yaml; empty if it cannot be read."""
        if run.folder not in self._configs:
            self._configs[run.folder] = _read_config(Path(run.folder) / "config.yaml")
        return self._configs[run.folder]


@dataclass(frozen=True)
class Named:
    """The runs of one comparison.

    runs: for each name its seeds. apart: those made with other settings or elsewhere, which may not be compared with
    them. without_result: how many folders of that precision and scale have no result.
    """

    runs: dict[str, Seeds]
    apart: dict[str, int]
    without_result: dict[str, int]

    @property
    def all(self) -> list[Run]:
        """Every run, in the order of names and seeds."""
        return [run for seeds in self.runs.values() for _, run in sorted(seeds.items())]


def named_runs(recipe: str, known: Mapping[str, PaperRun], names: Sequence[str], found: Records) -> Named:
    """The records of the recipe that are these runs; a run that was not made has no seeds."""
    of = [(run, found.names(run, known)) for run in found.of(recipe)]
    matched = {name: [run for run, meant in of if name in meant] for name in names}
    contexts = {_context(run) for runs in matched.values() for run in runs}
    choices = [_in_context(matched, known, context) for context in sorted(contexts)]
    nothing: dict[str, Seeds] = {name: {} for name in names}
    best = max(choices, key=_worth, default=nothing)
    apart = {name: len(matched[name]) - len(best[name]) for name in names}
    return Named(best, apart, {name: found.without_result(recipe, known[name]) for name in names})


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        if path.is_symlink() or path.stat().st_size > LARGEST_CONFIG:
            return {}
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _fits(run: Run, wanted: PaperRun, found: Records) -> bool:
    if run.precision != wanted.precision or run.scale.split(" ")[0] != wanted.scale_label:
        return False
    if run.precision_label != run.precision and not any(text.startswith("precision.") for text in wanted.also):
        return False
    return all(_was_told(found.config(run), text) for text in wanted.also)


def _was_told(config: dict[str, Any], override: str) -> bool:
    key, _, text = override.lstrip("+~").partition("=")
    at: Any = config
    for part in key.split("."):
        at = at.get(part) if isinstance(at, dict) else None
    return bool(at == _value(text))


def _value(text: str) -> Any:
    import yaml

    try:
        return float(text)  # yaml would read 1e-4 as a text
    except ValueError:
        return yaml.safe_load(text)


def _context(run: Run) -> str:
    """What all runs of a comparison share, whatever they were told."""
    same = [run.device_name, run.data, run.data_kind, run.metric, run.margin, run.higher_is_better, run.eval_precision]
    return json.dumps([*same, *(run.key.get(name) for name in ("device", "threads", "torch"))])


def _in_context(matched: Mapping[str, list[Run]], known: Mapping[str, PaperRun], context: str) -> dict[str, Seeds]:
    """Of each set of equal overrides, the one configuration that has the most seeds, then the newest."""
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in matched:
        together[tuple(sorted(text for text in known[name].also if not text.startswith(APART)))].append(name)
    chosen: dict[str, Seeds] = {name: {} for name in matched}
    for names in together.values():
        candidates: dict[str, dict[str, Seeds]] = {}
        for name in names:
            for run in sorted(matched[name], key=lambda run: (run.finished, run.folder)):
                if _context(run) == context:
                    settings = json.dumps(run.key, sort_keys=True)
                    candidates.setdefault(settings, {each: {} for each in names})[name][run.seed] = run
        if candidates:
            best: dict[str, Seeds] = max(candidates.values(), key=_worth)
            chosen.update(best)
    return chosen


def _worth(runs: Mapping[str, Seeds]) -> tuple[int, int, str]:
    newest = max((run.finished.isoformat() for seeds in runs.values() for run in seeds.values()), default="")
    return min(map(len, runs.values())), sum(map(len, runs.values())), newest
