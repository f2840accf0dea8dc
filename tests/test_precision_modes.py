"""Named precisions: what the files say, and what contradicts itself."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mptrain import files
from mptrain.errors import UserError
from mptrain.precision.modes import Precision, complaints_about

EXPECTED = {
    # compute, storage, master, update, accumulate, kernels, scale
    "fp32": ("float32", "float32", True, "float32", "float32", "auto", "none"),
    "tf32": ("tf32", "float32", True, "float32", "float32", "auto", "none"),
    "bf16": ("bfloat16", "float32", True, "float32", "float32", "auto", "none"),
    "fp16": ("float16", "float32", True, "float32", "float32", "auto", "dynamic"),
    "pseudo_fp16": ("float16", "float32", True, "float32", "float32", "emulated", "none"),
    "fp16_acc16": ("float16", "float32", True, "float32", "float16", "auto", "dynamic"),
    "fp16_master": ("float16", "float16", True, "float32", "float32", "auto", "dynamic"),
    "fp16_nomaster": ("float16", "float16", False, "float32", "float32", "auto", "dynamic"),
    "fp8": ("float8", "float32", True, "float32", "float32", "auto", "none"),
    "bf16_pure": ("bfloat16", "bfloat16", False, "storage", "float32", "auto", "none"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_fields_of_ours(name):
    p = Precision.load(name)
    assert (p.compute, p.storage, p.master, p.update, p.accumulate, p.kernels, p.scale) == EXPECTED[name]
    assert p.keep_fp32 == ()


@pytest.mark.parametrize("name", files.names("precision"))
def test_every_file_has_its_name_and_says_why(name):
    p = Precision.load(name)
    assert p.name == name == p.label
    lines = files.config("precision", name).read_text().splitlines()
    assert lines[0].startswith("# ") and len(lines[0]) > 40


def test_round_trip():
    p = Precision.load("fp16_acc16", keep_fp32=["fc", "softmax"], chunk=4)
    assert Precision.from_mapping(p.as_dict()) == p and p.keep_fp32 == ("fc", "softmax")
    assert p.label == "fp16_acc16 chunk=4 keep_fp32=[fc,softmax]"
    assert p.with_changes(chunk=16, keep_fp32=[]) == Precision.load("fp16_acc16")
    assert hash(p) != hash(Precision.load("fp16_acc16"))


def test_unknown_names():
    with pytest.raises(UserError, match="did you mean fp16"):
        Precision.load("fp61")


WRONG = [
    ({"compute": "int8"}, "precision.compute=int8: choose float32 | tf32 | bfloat16 | float16 | float8"),
    ({"compute": "float8", "storage": "bfloat16"}, "precision.storage=bfloat16 contradicts precision.compute=float8"),
    ({"storage": "tf32"}, "precision.storage=tf32: choose"),
    ({"chunk": 0}, "precision.chunk=0"),
    ({"chunk": True}, "precision.chunk=True"),
    ({"chunk": 2.5}, "precision.chunk=2.5"),
    ({"master": "yes"}, "precision.master=yes: choose true | false"),
    ({"keep_fp32": "fc"}, "precision.keep_fp32=fc: give a list"),
    ({"keep_fp32": [1]}, "give a list"),
    ({"sale": 8}, "precision.sale is unknown"),
    ({"master": False}, "precision.master=false contradicts precision.storage=float32"),
    ({"storage": "float16", "update": "storage"}, "precision.update=storage contradicts precision.master=true"),
    ({"compute": "bfloat16", "accumulate": "float16"}, "precision.accumulate=float16 contradicts"),
    ({"storage": "bfloat16"}, "precision.storage=bfloat16 contradicts precision.compute=float16"),
    ({"compute": "float32", "kernels": "emulated"}, "precision.kernels=emulated contradicts"),
]


@pytest.mark.parametrize("changes, complaint", WRONG)
def test_complaints(changes, complaint):
    with pytest.raises(UserError) as error:
        Precision.load("fp16", **changes)
    assert complaint in str(error.value)
    with pytest.raises(UserError):
        Precision.load("fp16").with_changes(**changes)


def test_all_complaints_come_at_once():
    found = complaints_about({"name": "fp16", "compute": "half", "chunk": -1, "kernels": "fast"})
    assert len(found) == 3


def test_a_configuration_is_checked_without_torch():
    code = (
        "import sys; from mptrain.precision.modes import Precision, complaints_about;"
        "Precision.load('fp16').label; complaints_about({'compute': 'x'}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_backends_on_a_cpu():
    for name in EXPECTED:
        backend = Precision.load(name).backend("cpu")
        if name == "fp32":
            assert backend == "native"
        elif not name.startswith("bf16"):
            assert backend == "emulated"
    assert Precision.load("bf16", kernels="emulated").backend("cpu") == "emulated"


def test_emulated_and_native_bfloat16_give_the_same_formats():
    import torch

    x = torch.randn(4, 8)
    for kernels in ("auto", "emulated"):
        with Precision.load("bf16", kernels=kernels).arithmetic():
            y = torch.nn.functional.linear(x, torch.ones(3, 8))
            assert y.dtype == torch.bfloat16 and y.softmax(-1).dtype == torch.float32
    with Precision.load("bf16", kernels="emulated").arithmetic():
        assert torch.equal(torch.mm(x, x.t()), (x.bfloat16().float() @ x.bfloat16().float().t()).bfloat16())


def test_devices_by_any_of_their_names():
    fp16 = Precision.load("fp16")
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert fp16.backend(device) == "emulated" and fp16.arithmetic(device).device_type == "cpu"
    for device in ("gpu", "mps", None):
        with pytest.raises(UserError, match=f"device={device}: give cpu or cuda"):
            fp16.arithmetic(device)
