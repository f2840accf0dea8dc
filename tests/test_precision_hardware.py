"""Devices, and the TF32 switches."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mptrain.errors import UserError
from mptrain.precision import hardware
from mptrain.precision.modes import Precision

ALL = {"matmul", "conv", "rnn"}


def flags():
    return {device: hardware.tf32_flags(device) for device in ("cuda", "cpu")}


def everywhere(value):
    return dict.fromkeys(ALL, value)


def test_switches_are_set_for_every_operation_and_restored():
    before = flags()
    for allowed in (False, True, False):
        with hardware.tf32(allowed):
            assert flags() == {"cuda": everywhere("tf32" if allowed else "ieee"), "cpu": everywhere("ieee")}
        assert flags() == before


@pytest.mark.parametrize("before", [True, False])
def test_sums_of_16_bit_products_stay_fp32_inside(before):
    matmul = torch.backends.cuda.matmul
    default = [getattr(matmul, name) for name in hardware.REDUCED_SUMS]
    try:
        for name in hardware.REDUCED_SUMS:
            setattr(matmul, name, before)
        for allowed in (False, True):
            with hardware.tf32(allowed):
                assert not any(getattr(matmul, name) for name in hardware.REDUCED_SUMS)
            assert all(getattr(matmul, name) is before for name in hardware.REDUCED_SUMS)
    finally:
        for name, value in zip(hardware.REDUCED_SUMS, default, strict=True):
            setattr(matmul, name, value)


def test_switches_nest_and_survive_errors():
    before = flags()
    with pytest.raises(KeyError), hardware.tf32(True):
        with hardware.tf32(False):
            assert flags()["cuda"] == everywhere("ieee")
        assert flags()["cuda"] == everywhere("tf32")
        raise KeyError
    assert flags() == before


PRESETS = {
    "nothing": "",
    "legacy": "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True",
    "legacy off": "torch.backends.cuda.matmul.allow_tf32 = False; torch.backends.cudnn.allow_tf32 = False",
    "legacy precision": "torch.set_float32_matmul_precision('medium')",
    "new": "torch.backends.cudnn.conv.fp32_precision = 'tf32'; torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "new for all": "torch.backends.fp32_precision = 'tf32'",
}
CODE = """
import os, sys, traceback, warnings
warnings.simplefilter('error')
import torch
from mptrain.precision import hardware

LEGACY = [lambda: torch.backends.cuda.matmul.allow_tf32, lambda: torch.backends.cudnn.allow_tf32,
          torch.get_float32_matmul_precision]

def read():
    found = [hardware.tf32_flags('cuda'), hardware.tf32_flags('cpu')]
    for legacy in LEGACY:
        try:
            found.append(legacy())
        except RuntimeError:
            found.append('mixed')
    return found

def check(preset):
    exec(preset)
    before = read()
    for allowed in (False, True, False):
        with hardware.tf32(allowed):
            cuda, cpu = hardware.tf32_flags('cuda'), hardware.tf32_flags('cpu')
            assert set(cuda.values()) == {'tf32' if allowed else 'ieee'} and set(cpu.values()) == {'ieee'}
    assert read() == before, (preset, before, read())

for preset in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            check(preset)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, preset
"""


def test_switches_set_before_through_either_interface():
    subprocess.run([sys.executable, "-c", CODE, *PRESETS.values()], check=True, cwd=Path(__file__).parent.parent)


def test_what_is_native():
    assert hardware.is_native(Precision.load("fp32"), "cpu")
    for name in ("fp16", "fp16_master", "fp16_nomaster", "fp16_acc16", "tf32", "pseudo_fp16", "fp8"):
        assert not hardware.is_native(Precision.load(name), "cpu")
    assert hardware.is_native(Precision.load("bf16"), "cpu") is hardware.cpu_has_bfloat16()


def test_what_is_native_on_gpus(monkeypatch):
    ampere = {"fp16", "bf16", "tf32", "bf16_pure"}
    for capability, native in (
        ((7, 0), {"fp16"}), ((5, 2), set()), ((8, 0), ampere), ((8, 6), ampere), ((8, 9), {*ampere, "fp8"}),
        ((9, 0), {*ampere, "fp8"}),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        for name in ("fp16", "bf16", "tf32", "bf16_pure", "fp8"):
            assert hardware.is_native(Precision.load(name), "cuda") is (name in native)
        assert not hardware.is_native(Precision.load("fp16_acc16"), "cuda")
        assert hardware.is_native(Precision.load("fp32"), "cuda")
        # the switches are for all operations at once, so what is kept in FP32 needs the emulation
        assert not hardware.is_native(Precision.load("tf32", keep_fp32=["conv2d"]), "cuda")
    assert Precision.load("pseudo_fp16").backend("cuda") == "emulated"


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.resolve("auto") == hardware.resolve("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match="no CUDA GPU"):
            hardware.resolve(name)
    for name in ("gpu", "meta", "mps", "cuda:x", ""):
        with pytest.raises(UserError, match="choose auto, cpu, cuda or cuda:N"):
            hardware.resolve(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.resolve("auto").type == "cuda" and hardware.resolve("cuda:1").index == 1
    with pytest.raises(UserError, match="there are 2 GPUs"):
        hardware.resolve("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "fp8"])
def test_an_arithmetic_for_a_gpu_that_is_not_there(name):
    with pytest.raises(UserError, match="device=cuda: torch finds no CUDA GPU here; give cpu"):
        Precision.load(name).arithmetic("cuda")
