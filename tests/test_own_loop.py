"""The documented example of mptrain as a library runs, and its two records make a table."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "own_loop.py"


def test_own_loop_makes_a_table(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "runs")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    summaries = {p.parent.name: json.loads(p.read_text()) for p in tmp_path.glob("runs/*/summary.json")}
    assert set(summaries) == {"fp32-none", "fp16-dynamic"}
    fp32, fp16 = summaries["fp32-none"], summaries["fp16-dynamic"]
    assert fp32["dtypes"]["matmul"] == "float32" and fp16["dtypes"]["matmul"] == "float16"
    assert fp32["backend"] == "native" and fp16["backend"] == "emulated"
    assert fp32["metric"]["value"] > 0.9
    assert abs(fp32["metric"]["value"] - fp16["metric"]["value"]) < 0.02
    assert "own_loop on made up" in done.stdout and "fp16" in done.stdout
