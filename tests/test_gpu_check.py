"""What the GPU check does on a GPU, as far as it can be told without one."""

import ctypes
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"
UUID = "5c1f0000-0000-0000-0000-000000000001"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))


class Driver:
    """NVML's library, as far as it is called: a counter that moves by 1,500 mJ at every look."""

    def __init__(self, name, status=0):
        assert name == "libnvidia-ml.so.1"
        self.status, self.millijoules, self.asked = status, 0, None

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.asked = uuid.value.decode()
        handle._obj.value = 77
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, total):
        assert handle.value == 77
        self.millijoules += 1500
        total._obj.value = self.millijoules
        return self.status


def test_energy_is_that_of_the_drivers_counter(scripts, monkeypatch):
    import gpu_meters

    drivers = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: drivers.append(Driver(name)) or drivers[-1])
    energy = gpu_meters.Energy("cuda")
    assert energy.how.startswith("NVML") and drivers[0].asked == f"GPU-{UUID}"
    with energy.drawn() as drawn:
        pass
    assert drawn.joules == 1.5


def test_without_the_counter_energy_is_power_over_time(scripts, monkeypatch, tmp_path):
    import gpu_meters

    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\nwhile :; do echo 300.0; echo "[N/A]"; sleep 0.02; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(name, status=3))  # not supported
    energy = gpu_meters.Energy("cuda")
    assert energy.how.startswith("nvidia-smi")
    deadline = time.monotonic() + 20
    while not energy.power.samples and time.monotonic() < deadline:
        time.sleep(0.02)
    with energy.drawn() as drawn:
        start = time.perf_counter()
        time.sleep(0.2)
        seconds = time.perf_counter() - start
    energy.power.asked.terminate()
    energy.power.asked.wait()
    assert drawn.joules == pytest.approx(300 * seconds, rel=0.05)
    assert f"--id=GPU-{UUID}" in (tmp_path / "asked").read_text()
    assert energy.power.mean(0.0, 1e-9) is None


def test_without_either_nothing_is_measured(scripts, monkeypatch):
    import gpu_meters

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(name, status=3))
    monkeypatch.setenv("PATH", "")
    for device in ("cuda", "cpu"):
        energy = gpu_meters.Energy(device)
        with energy.drawn() as drawn:
            pass
        assert (energy.how, drawn.joules) == ("not measured", None)


def test_a_batch_of_any_size_is_made_of_the_first(scripts):
    import gpu_speed

    built = gpu_speed.Built("resnet", "cpu", {"batch_size": 2})
    pictures, labels = built.batch(5)
    assert len(pictures) == len(labels) == 5
    assert torch.equal(pictures[4], pictures[0]) and not torch.equal(pictures[1], pictures[0])
    assert torch.equal(pictures[2:4], built.first[0]) and torch.equal(labels[2:4], built.first[1])
    assert [len(part) for part in built.batch(1)] == [1, 1]


def test_networks_are_copied_once(scripts):
    """On a CPU each run has its own; for a GPU the copy is what is brought there."""
    import gpu_speed

    built = gpu_speed.Built("resnet", "cpu", {"batch_size": 2})
    (first,) = built.task.models.values()
    for device, shared in (("cpu", False), ("cuda", True)):
        built.device = torch.device(device)
        (model,) = built.fresh().models.values()
        for (name, p), (other, q) in zip(model.named_parameters(), first.named_parameters(), strict=True):
            assert name == other and p is not q and torch.equal(p, q) and p.requires_grad == q.requires_grad
            assert (p.data_ptr() == q.data_ptr()) is shared
        model.to(torch.float64)  # as bringing it to a GPU does, this leaves the first as it was
        assert all(p.dtype == torch.float32 for p in first.parameters())


def test_a_share_of_the_peak_counts_every_format(scripts):
    import gpu_speed

    peaks = {"float8": 4e12, "bfloat16": 2e12}
    bench = gpu_speed.Bench(0.0, peaks, gpu_speed.Energy("cpu"), lambda: 60.0)
    run = SimpleNamespace(
        units=10,
        device=torch.device("cpu"),
        precision=SimpleNamespace(backend=lambda kind: "native"),
        task=SimpleNamespace(unit="images"),
    )

    class Steps:
        skipped = 0

        def __init__(self):
            self.run = run

        def __call__(self, count):
            return 2.0 * count

    row = gpu_speed.Speed("r", "fp8", "equal", 10)
    bench.fill(row, Steps(), {"float8": 2e12, "bfloat16": 1e12})
    assert (row.steps, row.step_ms, row.throughput, row.tflops) == (1, 2000.0, 5.0, 1.5)
    assert row.of_peak == pytest.approx((2 / 4 + 1 / 2) / 2)
    bench.fill(row := gpu_speed.Speed("r", "fp32", "equal", 10), Steps(), {"float32": 1e12})
    assert row.of_peak is None


def test_a_lost_device_ends_the_part_and_is_said(scripts, monkeypatch, tmp_path):
    import gpu_check
    import gpu_speed

    def lost(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def dead():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_speed, "Steps", lost)
    dry = ["--device", "cpu", "--tiny", "--recipes", "resnet,language", "--parts", "speed", "--out", str(tmp_path)]
    assert gpu_check.main([*dry, "--commit", "c0ffee"]) == 0  # one kernel failed, and the others go on
    text = (tmp_path / "check.md").read_text()
    assert text.count("illegal memory access") == 4 and "### language" in text and "commit c0ffee" in text
    monkeypatch.setattr(gpu_speed.measure, "waiter", lambda device: dead)
    assert gpu_check.main(dry) == 0
    assert "ended early: RuntimeError: CUDA error" in (tmp_path / "check.md").read_text()
    monkeypatch.setattr(gpu_check, "peaks", lambda *args: {})
    assert gpu_check.main(dry) == 0
    text = (tmp_path / "check.md").read_text()
    assert "The device was lost on the way" in text and "### language" not in text
    assert "resnet" in (tmp_path / "speed.csv").read_text()


def test_time_goes_to_pairs_first(scripts):
    import gpu_check

    found = gpu_check.pairs(["a", "b"], ["fp32", "fp16", "bf16"])
    assert found == [("a", "fp32"), ("a", "fp16"), ("b", "fp32"), ("b", "fp16"), ("a", "bf16"), ("b", "bf16")]


def test_outcomes_are_read_from_a_log_that_breaks_off(scripts):
    import gpu_report

    log = [
        "tests/test_a.py::test_one[a b] PASSED      [ 10%]",
        "tests/test_a.py::test_two FAILED           [ 20%]",
        "tests/test_a.py::test_three SKIPPED (this GPU has none) [ 30%]",
        "tests/test_a.py::test_four[x] PASSED       [ 40%]",
        "tests/test_a.py::test_five",
    ]
    said = gpu_report.outcomes(log)
    assert said == "2 passed, 1 failed, 1 skipped (tests.txt)\n\n- tests/test_a.py::test_two"
    assert gpu_report.outcomes(["python: No module named pytest"]) == "python: No module named pytest (tests.txt)"


def test_without_a_row_of_fp32_there_is_no_ratio(scripts):
    import gpu_report
    from gpu_speed import Speed

    rows = [Speed("r", "fp16", which, 8, "native", 1.0, 100.0, "images/s", 2.0) for which in ("equal", "largest")]
    text = "".join(gpu_report.speed_tables(rows, {}))
    assert "| fp16 native | equal | 8 | 100 |  | 2.00 |  |" in text
