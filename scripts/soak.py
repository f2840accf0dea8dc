"""A long run of a tiny network: memory, open files, step time and metrics.jsonl must not grow with the steps.

    python scripts/soak.py                  # 20,000 steps with dynamic FP16, evaluations, checkpoints and TensorBoard
    python scripts/soak.py --steps 2000

Prints the figures and exits with status 1 if memory in the last quarter is more than 2 % above the second quarter, if
open files differ, if a step takes over 25 % longer (machines are shared), or if a logged step takes over 300 bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from mptrain import compose

SMALL = ["task.vocabulary=50", "task.embedding=8", "task.hidden=8", "batch_size=4", "task.window=5", "device=cpu"]
OFTEN = ["eval.every=1000", "checkpoint_every=500", "log_every=10", "threads=1", "progress=false"]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def last_step(metrics: Path) -> int:
    """The step of the last line; 0 before the first."""
    lines = metrics.read_bytes()[-2000:].splitlines() if metrics.exists() else []
    return max((int(line.split(b":")[1].split(b",")[0]) for line in lines if line.startswith(b'{"step"')), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        call = ["+recipe=language", "precision=fp16", "scaling.interval=50", "data=synthetic", f"steps={steps}"]
        config = compose.config([*call, *SMALL, *OFTEN, f"out={run}"])
        from mptrain.train import train

        seen: list[tuple[float, int, float, int]] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                files = len(os.listdir("/proc/self/fd"))
                seen.append((time.monotonic(), last_step(run / "metrics.jsonl"), resident_mib(), files))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            summary = train(config)
        finally:
            done.set()
            watcher.join()
        logged = (run / "metrics.jsonl").stat().st_size
        lines = len((run / "metrics.jsonl").read_bytes().splitlines())
    return judge(summary["steps"]["attempted"], seen, logged / lines)


def judge(steps: int, seen: list[tuple[float, int, float, int]], bytes_a_line: float) -> int:
    early = [row for row in seen if steps / 4 <= row[1] < steps / 2]
    late = [row for row in seen if row[1] >= 3 * steps / 4]
    if len(early) < 3 or len(late) < 3:
        print("too few steps to judge; give more (--steps)")
        return 1
    figures = {}
    for name, rows in (("early", early), ("late", late)):
        seconds, covered = rows[-1][0] - rows[0][0], rows[-1][1] - rows[0][1]
        figures[name] = (
            statistics.median(row[2] for row in rows),
            statistics.median(row[3] for row in rows),
            1e6 * seconds / max(1, covered),
        )
    (memory, files, step), (memory_late, files_late, step_late) = figures["early"], figures["late"]
    print(f"steps          {steps}")
    print(f"memory         {memory:.1f} -> {memory_late:.1f} MiB ({memory_late / memory - 1:+.2%})")
    print(f"open files     {files:.0f} -> {files_late:.0f}")
    print(f"a step         {step:.0f} -> {step_late:.0f} us ({step_late / step - 1:+.1%})")
    print(f"metrics.jsonl  {bytes_a_line:.0f} bytes a line")
    flat = memory_late <= 1.02 * memory and files == files_late and step_late <= 1.25 * step and bytes_a_line < 300
    print("flat" if flat else "NOT flat")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
