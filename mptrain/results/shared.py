"""Runs that were made at the same time on the same CPUs: their times say little, and their results as much as ever."""

from collections import defaultdict
from collections.abc import Iterable

from mptrain.results.runs import Run


def side_by_side(runs: Iterable[Run]) -> set[str]:
    """The folders of CPU runs during which another of these runs was being made on a CPU of the same name.

    A run on a GPU has that to itself as a rule. Of runs that were resumed the last process counts.
    """
    by_device: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.device.startswith("cpu") and run.started is not None:
            by_device[run.device_name].append(run)
    found = set()
    for members in by_device.values():
        members.sort(key=lambda run: (run.started, run.folder))
        busy_until = None
        for run, following in zip(members, [*members[1:], None], strict=True):
            assert run.started is not None
            if busy_until is not None and run.started < busy_until:
                found.add(run.folder)
            if following is not None and following.started is not None and following.started < run.finished:
                found.add(run.folder)
            busy_until = run.finished if busy_until is None else max(busy_until, run.finished)
    return found
