"""What a step that was looked at shows in TensorBoard: norms, lost shares, and histograms over powers of two."""

from __future__ import annotations

import operator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any


def writer(folder: Path, start: int = 0) -> Any:
    """TensorBoard's writer of a folder; what a killed process showed beyond step `start` comes again."""
    from torch.utils.tensorboard import SummaryWriter

    _errors_are_told_once()
    return SummaryWriter(str(folder), purge_step=start + 1)


def show(to: Any, step: int, rows: list[dict[str, Any]]) -> None:
    """Gives the rows of a step to a writer, as one event: hundreds of them would cost more than what they tell."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    whole = Summary()
    for row in rows:
        tag = "/".join(part for part in (f"watch_{row['kind']}", row["layer"], row["name"]) if part)
        if row["norm"] is not None:
            whole.value.add(tag=f"{tag}/norm", simple_value=row["norm"])
        if row["flushed"] is not None:
            share = row["flushed"] / max(1, row["sampled"] - row["zero"])
            whole.value.add(tag=f"{tag}/flushed", simple_value=share)
        if counts := row["exponents"]:
            first, end = row["first_exponent"], row["first_exponent"] + len(counts)
            weighted = list(map(operator.mul, range(first, end), counts))
            histogram = HistogramProto(
                min=first,
                max=end,
                num=sum(counts),
                sum=sum(weighted),
                sum_squares=sum(map(operator.mul, range(first, end), weighted)),
                bucket_limit=range(first + 1, end + 1),
                bucket=counts,
            )
            whole.value.add(tag=f"{tag}/log2", histo=histogram)
    to._get_file_writer().add_summary(whole, step)


@cache
def _errors_are_told_once() -> None:
    """TensorBoard writes from a thread, which keeps an error for the next point or flush and prints it as well."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    plain = _AsyncWriterThread.run

    def run(self: Any) -> None:
        with suppress(OSError):
            plain(self)

    _AsyncWriterThread.run = run
