import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "soak.py"


@pytest.mark.slow
def test_twenty_thousand_steps_leave_everything_flat(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_growth_is_seen(capsys):
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("soak", SCRIPT)
    soak = module_from_spec(spec)
    spec.loader.exec_module(soak)
    flat = [(0.1 * i, 100 * i, 300.0, 12) for i in range(100)]
    assert soak.judge(10_000, flat, 90.0) == 0
    assert soak.judge(10_000, [(t, s, 300.0 + s / 100, f) for t, s, _, f in flat], 90.0) == 1
    assert soak.judge(10_000, [(t, s, m, 12 + s // 2000) for t, s, m, _ in flat], 90.0) == 1
    assert soak.judge(10_000, [(t * t, s, m, f) for t, s, m, f in flat], 90.0) == 1
    assert soak.judge(10_000, flat, 400.0) == 1
    assert "NOT flat" in capsys.readouterr().out
