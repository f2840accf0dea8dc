"""Full disks, foreign places, terminals: one message, nothing lost."""

import contextlib
import errno
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import yaml
from tiny.runs import lasting, lines, same_bits, settings, started, weights

from mptrain import cli
from mptrain.config import check
from mptrain.results.record import Record
from mptrain.train import train

pytestmark = pytest.mark.usefixtures("tiny")
OPTIONS = ["+recipe=tiny", "precision=fp16", "steps=12", "checkpoint_every=4", "log_every=1", "out=run"]


def command(arguments, said, full=None):
    """The command line in a forked process, on a disk that is full once this file is to be written."""
    with open(said, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    real = os.fsync

    def fsync(number):
        path = os.readlink(f"/proc/self/fd/{number}")
        if full is not None and path.endswith((f"/{full}", f"/.{full}.{os.getpid()}.tmp")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    os.fsync = fsync
    sys.exit(cli.main(arguments))


@pytest.mark.parametrize(
    "file", ["config.yaml", "metrics.jsonl", "step-00000004.pt.sha256", "step-00000008.pt", "summary.json"]
)
def test_a_full_disk(tmp_path, file):
    """One message that names the file; with room again the same command ends as if nothing had happened."""
    arguments = [*OPTIONS, "tensorboard=false"]
    process = started(command, arguments, "said", file)
    process.join(60)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 1 and said.count("\n") <= 2 and "Traceback" not in said
    assert f"{file}: No space left on device; once this is mended the same command goes on" in said
    process = started(command, arguments, "again")
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "again").read_text()
    train(settings("tiny", "fp16", out="whole", steps=12, checkpoint_every=4, log_every=1))
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert lasting(tmp_path / "run") == lasting(tmp_path / "whole")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def points(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_point_once(tmp_path):
    train(settings(out="whole", tensorboard=True, log_every=1, eval__every=3, steps=12))
    config = settings(
        out="cut", tensorboard=True, log_every=1, eval__every=3, steps=12, checkpoint_every=4, task__crash_at=1001
    )
    with pytest.raises(RuntimeError, match="crash"):
        train(config)
    values = {**config.model_dump(), "task": {**config.model_dump()["task"], "crash_at": -1}}
    (tmp_path / "cut" / "config.yaml").write_text(yaml.safe_dump(values))
    train(check(values))
    whole, cut = points(tmp_path / "whole"), points(tmp_path / "cut")
    assert [step for step, _ in whole["train/loss"]] == list(range(1, 13))
    assert [step for step, _ in whole["eval/accuracy"]] == [3, 6, 9, 12]
    assert whole == cut
    logged = [line["loss"] for line in lines(tmp_path / "whole") if "loss" in line]
    assert [value for _, value in whole["train/loss"]] == pytest.approx(logged)


def test_a_progress_bar_on_a_terminal(tmp_path):
    terminal, end = pty.openpty()
    path = os.pathsep.join([str(Path(cli.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(Path(tiny.__path__[0])), *OPTIONS, "task.sleep=0.01", "tensorboard=false"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TERM": "xterm"},
        stdout=end,
        stderr=end,
    )
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed when the process ends
        while some := os.read(terminal, 4096):
            shown += some
    os.close(terminal)
    assert process.wait(60) == 0, shown.decode()
    assert b"12/12" in shown and b"loss" in shown and b"finished: accuracy" in shown
    assert Record(tmp_path / "run").state() == "finished"


def test_workers_change_no_bit(tmp_path):
    options = {
        "task__noise": 0.1,
        "task__norm": True,
        "task__dropout": 0.2,
        "accumulate": 2,
        "steps": 12,
        "log_every": 1,
    }
    for workers in (0, 2):
        train(settings(out=str(tmp_path / str(workers)), workers=workers, **options))
    assert same_bits(weights(tmp_path / "0"), weights(tmp_path / "2"))
    assert (tmp_path / "0" / "metrics.jsonl").read_bytes() == (tmp_path / "2" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read(tmp_path, workers):
    process = started(command, [*OPTIONS, "task.broken=3", f"workers={workers}", "tensorboard=false"], "said")
    process.join(60)
    assert process.exitcode == 1
    assert (tmp_path / "said").read_text() == "mptrain: sample 3 cannot be read; replace it\n"


def test_a_killed_loader_process(tmp_path):
    """One message; the next time it goes on from the checkpoint."""
    arguments = [*OPTIONS, "workers=1", "tensorboard=false", "steps=60", "task.sleep=0.05"]
    process = started(command, arguments, "said")
    while not list(tmp_path.glob("run/checkpoints/*.pt")):
        assert process.is_alive()
        time.sleep(0.01)
    for worker in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(worker), signal.SIGKILL)
    process.join(60)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 1 and "a loader process was killed" in said and "Traceback" not in said, said
    process = started(command, arguments, "again")
    process.join(60)
    assert process.exitcode == 0 and "resuming after step" in (tmp_path / "again").read_text()


def no_room_for_points(arguments, said):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events.out.tfevents")

    RecordWriter.write = write
    command(arguments, said)


def test_tensorboard_on_a_full_disk(tmp_path):
    """Its thread's error is told once, by the process."""
    process = started(no_room_for_points, OPTIONS, "said")
    process.join(60)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 1 and "Traceback" not in said and "No space left on device" in said, said
