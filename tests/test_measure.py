import subprocess

import pytest
import torch
from torch import nn

from mptrain import measure
from mptrain.measure import Instruments, Throughput
from mptrain.memory import StepMemory


def fake(warmup=1):
    now = [0.0]
    waits = []
    throughput = Throughput("images", warmup, lambda: waits.append(now[0]), lambda: now[0])
    return throughput, now, waits


def test_twenty_samples_in_batches_of_eight():
    throughput, now, waits = fake(warmup=1)
    throughput.begin()
    for units, seconds in ((8, 100.0), (8, 2.0), (4, 1.0)):
        now[0] += seconds
        throughput.step(units)
    assert throughput.result() == {"value": 12 / 3.0, "unit": "images/s", "warmup": 1, "steps": 2}
    assert waits == [100.0, 103.0, 103.0]  # at the window's ends and nowhere else


@pytest.mark.parametrize("steps, warmup", [(0, 0), (1, 1), (3, 5)])
def test_nothing_after_the_warmup_is_no_number(steps, warmup):
    throughput, now, _ = fake(warmup)
    throughput.begin()
    for _ in range(steps):
        now[0] += 1
        throughput.step(8)
    assert throughput.result()["value"] is None


def test_evaluations_and_instruments_do_not_count():
    throughput, now, _ = fake(warmup=0)
    throughput.begin()
    now[0] += 2
    throughput.step(10)
    with throughput.paused():
        now[0] += 1000
    with throughput.paused():
        now[0] += 1000
    throughput.step(10, counted=False)
    now[0] += 3
    throughput.step(10)
    result = throughput.result()
    assert result["value"] == 20 / 5 and result["steps"] == 2
    assert throughput.result() == result


def test_a_resumed_run_adds_up():
    first, now, _ = fake(warmup=1)
    first.begin()
    for _ in range(3):
        now[0] += 2
        first.step(10)
    with first.paused():
        state = first.state_dict()
    second, now, _ = fake(warmup=1)
    second.load_state_dict(state)
    second.begin()
    for seconds in (50, 1):
        now[0] += seconds
        second.step(10)
    assert second.result()["value"] == 30 / 5 and second.result()["steps"] == 3


def test_memory_by_hand():
    kept = torch.ones(1000)  # 4,000 bytes
    memory = StepMemory([kept])
    with memory:
        a = torch.zeros(500)  # 2,000
        b = a + 1  # 2,000
        view = b[3:]
        del b, view
        c = kept[10:] * 2  # 3,960 beside the 6,000
        c += 1
        del a, c
    assert memory.peak() == 4000 + 2000 + 3960


def test_memory_by_kind_adds_up_and_changes_no_peak():
    network = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50))  # 5,050 + 100 weights, 100 numbers of statistics
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    copy = torch.zeros(10)
    x = torch.ones(8, 100)

    def step():
        optimizer.zero_grad()
        network(x).sum().backward()
        optimizer.step()

    step()
    held = [*network.parameters(), *network.buffers(), copy]
    held += [v for state in optimizer.state.values() for v in state.values()]
    peaks = []
    for known in ({}, {"models": [network], "optimizers": [optimizer]}):
        memory = StepMemory(held, **known)
        with memory:
            step()
        peaks.append(memory.peak())
    kinds = memory.kinds()
    assert peaks[0] == peaks[1] == sum(kinds.values())
    assert kinds["weights"] == kinds["optimizer"] == 5150 * 4 and kinds["copies"] == 40
    assert kinds["buffers"] == 100 * 4 + 8 and kinds["gradients"] + kinds["activations"] > 5150 * 4


def test_memory_of_several_passes_of_one_network():
    network = nn.Linear(100, 100)  # 40,400 bytes, gradients as many
    x = torch.ones(1, 100)
    memory = StepMemory(network.parameters())
    with memory:
        for _ in range(3):
            (network(x).sum() + network(x).sum()).backward()
    # weights, gradients so far, those of both passes and their sum
    assert 4.9 * 40400 <= memory.peak() <= 5 * 40400 + 3000


def test_instruments_take_the_larger_of_two_steps():
    instruments = Instruments(torch.device("cpu"))
    for size in (1000, 500):
        with instruments.watching([]):
            nn.functional.softmax(torch.ones(1, size) @ torch.ones(size, 2), -1)
    assert instruments.dtypes == {"matmul": "float32", "softmax": "float32", "norm": "none ran"}
    assert instruments.memory()["peak_mib"] == pytest.approx((4000 + 8000 + 8) / 2**20)
    assert Instruments(torch.device("cpu")).memory()["peak_mib"] is None


def test_environment():
    found = measure.environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    assert found["cuda"] is None and found["device_name"]


def test_commit(monkeypatch):
    here = measure.commit()
    assert here is None or len(here.removesuffix("+")) == 12

    def no_git(*args, **kwargs):
        raise subprocess.SubprocessError

    monkeypatch.setattr(subprocess, "run", no_git)
    assert measure.commit() is None
