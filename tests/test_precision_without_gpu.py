"""What a GPU would be given, without one: tensors that say they lie on a GPU and hold no numbers, under real regions.

Forward passes only: torch's backward pass asks the driver for the device.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mptrain import compose, files
from mptrain.config import check
from mptrain.errors import UserError
from mptrain.layout import compile_networks
from mptrain.precision import dispatch, policy
from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanDtypes, RanOperations

REMARK = "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted"
NATIVE = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "bf16_pure": "bfloat16", "fp16": "float16"}
NATIVE |= {"fp16_master": "float16", "fp16_nomaster": "float16"}


@pytest.fixture
def hopper(monkeypatch):
    """Every tensor made inside pretends; the device is one of capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda t: False)  # or weights are laid out, by address
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        yield


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 5)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.layer_norm = nn.LayerNorm(32)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(2).mT
        x = self.middle(self.first(x))
        x = self.layer_norm(x + self.attention(x, x, x)[0])
        return self.last(x.mean(1))


@pytest.mark.parametrize("name", files.names("precision"))
def test_formats_of_every_precision(hopper, name):
    precision, network = Precision.load(name), Network()
    precision.prepare(network)
    with precision.arithmetic("cuda"), RanDtypes() as ran, RanOperations() as operations:
        logits = network(torch.randn(8, 3, 8, 8))
        loss = F.cross_entropy(logits.float(), torch.zeros(8, dtype=torch.long))
        caches = torch.is_autocast_cache_enabled()
    native = precision.backend("cuda") == "native"
    assert caches is native  # or torch would make the copy of a weight anew wherever it is used
    assert native is (name not in ("fp16_acc16", "pseudo_fp16"))
    product = NATIVE.get(name, "float16")
    expected = "bfloat16 and float8_e4m3fn" if name == "fp8" else product
    assert ran.table()["matmul"] == expected
    assert ran.table()["softmax"] == "float32" and loss.dtype == torch.float32
    assert operations.table()["layer_norm"] == "float32"
    assert logits.device.type == "cuda"


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "pseudo_fp16"])
def test_rms_norm_is_fp32_on_every_torch(hopper, name):
    """On torch's own list since 2.12; before, it stayed in 16 bits and torch remarked on the FP32 weight."""
    x = torch.randn(3, 16).to(torch.bfloat16 if name in ("bf16", "fp8") else torch.float16)
    with Precision.load(name).arithmetic("cuda"):
        assert F.rms_norm(x, (16,), torch.ones(16)).dtype == torch.float32
        assert x.abs().dtype == x.dtype


# cuDNN's recurrent layers. Without a driver torch cannot call them, so what they are given is caught before.


def caught(arithmetic, layer, x):
    """The tensors that the handler of an LSTM hands to torch, and whether autocast is off there."""
    found = []

    def lstm(*args, **kwargs):
        found.extend(dispatch.tensors(args))
        off.append(torch._C._dispatch_tls_is_dispatch_key_excluded(dispatch.KEY["cuda"]))
        warnings.warn(REMARK, stacklevel=1)
        return found[0].clone(), *found[1:3]

    off = []
    lstm._schema = torch.ops.aten.lstm.input._schema
    handler = arithmetic.handlers["lstm.input"]
    state = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    with arithmetic:
        result = handler(lstm, None, (x, state, list(layer.parameters()), True, 1, 0.0, True, False, False), {})
    return found, off, result


@pytest.mark.parametrize("name", ["bf16", "bf16_pure", "fp8"])
def test_recurrent_layers_are_cast_to_bfloat16(hopper, name):
    """By us: torch's own kernel of autocast's key knows FP16 alone for cuDNN's recurrent layers."""
    precision, layer = Precision.load(name), nn.LSTM(16, 8)
    precision.prepare(layer)
    found, off, _ = caught(precision.arithmetic("cuda"), layer, torch.randn(5, 2, 16))
    assert len(found) == 7 and {t.dtype for t in found} == {torch.bfloat16} and off == [True]


def test_recurrent_layers_of_fp16_are_left_to_torch(hopper):
    for name in ("fp16", "fp16_master", "fp32", "tf32"):
        assert not policy.RECURRENT & Precision.load(name).arithmetic("cuda").handlers.keys()


def test_a_recurrent_layer_can_be_kept_in_fp32(hopper):
    precision = Precision.load("bf16", keep_fp32=["lstm"])
    found, off, result = caught(precision.arithmetic("cuda"), nn.LSTM(16, 8), torch.randn(5, 2, 16).bfloat16())
    assert {t.dtype for t in found} == {torch.float32} == {t.dtype for t in result} and off == [True]


def test_emulated_recurrent_layers_get_fp32_images_without_a_remark(hopper):
    found, off, result = caught(Precision.load("pseudo_fp16").arithmetic("cuda"), nn.LSTM(16, 8), torch.randn(5, 2, 16))
    assert {t.dtype for t in found} == {torch.float32} and off == [True]
    assert {t.dtype for t in result} == {torch.float16}


def test_other_warnings_of_recurrent_layers_stay(hopper):
    def lstm(*args):
        warnings.warn("another", stacklevel=1)

    handler = Precision.load("bf16").arithmetic("cuda").handlers["lstm.input"]
    with pytest.warns(UserWarning, match="another"):
        handler(lstm, None, (torch.ones(1),), {})


# What is torch's own may be compiled.


def configured(name):
    return check(compose.baseline("resnet", name) | {"compile": True})


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "fp16_master"])
def test_what_a_gpu_does_natively_may_be_compiled(hopper, name):
    arithmetic = Precision.load(name).arithmetic("cuda")
    compile_networks({}, configured(name), arithmetic, 1)
    assert arithmetic.handlers.keys() - {"rms_norm"} == (policy.RECURRENT if name == "bf16" else set())


@pytest.mark.parametrize(
    "name, changes",
    [("fp8", {}), ("pseudo_fp16", {}), ("bf16", {"keep_fp32": ["lstm"]}), ("bf16", {"keep_fp32": ["softmax"]})],
)
def test_what_is_ours_may_not(hopper, name, changes):
    with pytest.raises(UserError, match="compile=true needs torch's own arithmetic"):
        compile_networks({}, configured(name), Precision.load(name, **changes).arithmetic("cuda"), 1)
