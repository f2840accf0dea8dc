"""Sweeps through Hydra's launchers for several processors and for clusters, the latter by its local executor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mptrain import cli
from mptrain.results.record import Record

LAUNCHERS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
    "submitit": ("hydra_plugins.hydra_submitit_launcher", ["hydra/launcher=submitit_local"]),
}
SMALL = ["task.vocabulary=50", "task.embedding=8", "task.hidden=8", "batch_size=4", "steps=2", "tensorboard=false"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failing_job_stops_no_other_and_all_failures_are_listed(tmp_path, launcher):
    plugin, choice = LAUNCHERS[launcher]
    pytest.importorskip(plugin, reason=f"pip install mptrain[{launcher}]")
    path = os.pathsep.join([str(Path(cli.__file__).parent.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "mptrain", "-m", "+recipe=language", "data=synthetic,nothing", "seed=0,1"]
        + [*SMALL, *choice, "results=runs"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "2 of the runs failed" in done.stderr and done.stderr.count("data=nothing is no running text") == 2
    assert "seed=0" in done.stderr and "seed=1" in done.stderr
    assert [Record(folder).state() for folder in (tmp_path / "runs").iterdir()] == ["finished"] * 2
