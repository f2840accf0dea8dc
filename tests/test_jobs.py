"""Commands side by side: how many at once, what happens to the failed, and that a signal leaves nothing running."""

import os
import signal
import subprocess
import sys

import pytest

from mptrain import jobs
from mptrain.jobs import Job, run_all

SHELL = ["sh", "-c"]


def ignore(*anything):
    pass


def test_all_run_in_order_and_the_failed_one_is_named(tmp_path):
    record = tmp_path / "a" / "summary.json"
    finish = (
        f'mkdir -p {record.parent}; echo \'{{"schema": 1, "status": "diverged"}}\' > {record}; echo first; echo last'
    )
    todo = [Job("a", (finish,), record.parent), Job("b", ("echo no disk >&2; exit 3",), tmp_path / "b")]
    seen = []
    outcomes = run_all(todo, 1, SHELL, seen.append, ignore)
    assert outcomes == seen
    assert [(each.job.name, each.status, each.message) for each in outcomes] == [
        ("a", "diverged", "last"),
        ("b", "failed", "no disk"),
    ]


def test_so_many_at_a_time(tmp_path):
    most = []
    waits = f"for i in $(seq 200); do [ -e {tmp_path}/two ] && break; sleep 0.05; done"
    todo = [Job(str(number), (waits,), tmp_path / str(number)) for number in range(4)]

    def waiting(running):
        most.append(len(running))
        if len(running) == 2:
            (tmp_path / "two").touch()

    run_all(todo, 2, SHELL, ignore, waiting)
    assert max(most) == 2


def test_a_held_folder_is_waited_for(tmp_path):
    held = tmp_path / "held"
    held.mkdir()
    lock = f"f = open({str(held / 'lock')!r}, 'a'); fcntl.lockf(f, fcntl.LOCK_EX)"
    hold = f"import fcntl, time; {lock}; print(1, flush=True); time.sleep(1)"
    other = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    other.stdout.read(1)
    todo = [Job("held", (f"ls {tmp_path}",), held), Job("free", (f"touch {tmp_path}/free",), tmp_path / "none")]
    outcomes = run_all(todo, 1, SHELL, ignore, ignore)
    other.communicate()
    assert [each.job.name for each in outcomes] == ["free", "held"]
    assert outcomes[1].seconds < 1 and outcomes[1].message == "held"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_waited_for(tmp_path, number):
    saves = f"trap 'sleep 0.3; echo saved >> {tmp_path}/saved; exit 130' INT; while :; do sleep 0.05; done"
    todo = [Job(str(each), (saves,), tmp_path / str(each)) for each in range(3)]

    def interrupt(running):
        if len(running) == 2 and min(running.values()) > 0.3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_all(todo, 2, SHELL, ignore, interrupt)
    assert (tmp_path / "saved").read_text() == "saved\nsaved\n"  # the third was not started
    assert signal.getsignal(number) is before


def test_what_takes_too_long_to_stop_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PATIENCE", 0.2)
    deaf = f"trap '' INT; echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"

    def interrupt(running):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_all([Job("deaf", (deaf,), tmp_path / "deaf")], 1, SHELL, ignore, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
