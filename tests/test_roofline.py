"""Operations counted against sums done by hand, and the line a benchmark prints."""

import pytest
import torch

from mptrain.gpus import GPUS, Machine
from mptrain.precision.modes import Precision
from mptrain.roofline import Operations, Work, counted, line, this_cpu


def bytes_of(function):
    return sum(size for _, _, size in counted(function).operations)


def test_operations_of_a_product_are_counted_exactly():
    found = []
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    with Operations(found):
        (a @ b).t()
    assert found == [("float32", 2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7))]


def test_bytes_are_those_that_are_read_and_written():
    x, y, table, rows = torch.zeros(100), torch.ones(100), torch.zeros(1000, 8), torch.tensor([3, 5])
    assert bytes_of(lambda: x + y) == 3 * 400
    assert bytes_of(lambda: x.add_(y)) == 3 * 400
    assert bytes_of(lambda: x.copy_(y)) == 2 * 400
    assert bytes_of(lambda: x.zero_()) == 400
    assert bytes_of(lambda: torch.empty_like(x)) == 0
    assert bytes_of(lambda: table[rows]) == 2 * (2 * 8 * 4)
    assert bytes_of(lambda: torch._foreach_add_([x, y], [y, x])) == 2 * 3 * 400
    assert bytes_of(lambda: torch._foreach_copy_([x], [y])) == 2 * 400


def test_an_lstm_has_two_products_a_step():
    lstm = torch.nn.LSTM(6, 4)
    with torch.no_grad():
        work = counted(lambda: lstm(torch.randn(5, 3, 6)))
    assert work.flops == 5 * 3 * 2 * (4 * 4 * 6 + 4 * 4 * 4)
    x = torch.randn(5, 3, 6, requires_grad=True)
    assert counted(lambda: lstm(x)[0].sum().backward()).flops == 3 * work.flops


def test_roofline_takes_the_slower_of_peak_and_bandwidth():
    machine = Machine("made up", {"float32": 10.0, "tf32": 40.0, "float16": 100.0}, 1e9, 2.0)
    found = Work([("float32", 100.0, 4.0), ("float32", 0.0, 6.0), ("float16", 100.0, 2.0)])
    assert found.seconds(machine) == 10 + 3 + 1
    assert found.seconds(machine, tf32=True) == 2.5 + 3 + 1


def test_tensor_cores_beat_fp32_by_the_paper_s_factor():
    v100, a100, h100, h200 = GPUS
    assert round(v100.peaks["float16"] / v100.peaks["float32"]) == 8  # section 5: "2x to 8x"
    assert a100.peaks["float16"] == 2 * a100.peaks["tf32"] == 16 * a100.peaks["float32"]
    assert h100.peaks == h200.peaks
    assert h100.peaks["float8"] == pytest.approx(2 * h100.peaks["float16"], rel=1e-3)
    assert h100.peaks["float16"] == pytest.approx(2 * h100.peaks["tf32"], rel=1e-3)


def test_a_benchmark_says_how_far_it_is_from_the_limits():
    machine = Machine("this CPU", {"float32": 100e9}, None, 10e9)
    said = line(Work([("float32", 50e9, 1e9), ("float32", 0.0, 5e9)]), machine, 2.0)
    assert "50.00 GFLOP and 6.00 GB" in said
    assert "at least 1000.0 ms, 50% of the 2000.0 ms" in said
    assert said.endswith("25% MFU")


def test_this_cpu_is_measured():
    machine = this_cpu([Precision.load("fp16")])
    assert set(machine.peaks) == {"float32", "float16"}
    assert all(1e8 < peak < 1e14 for peak in machine.peaks.values())
    assert 1e8 < machine.bandwidth < 1e13
