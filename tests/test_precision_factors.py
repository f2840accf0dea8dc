"""The rule of layerwise scaling, against numbers worked out by hand and against rounding itself."""

import math

import pytest
import torch

from mptrain.precision.factors import Moments, cast_factor, merged_scale, product_factor


def test_nothing_seen_changes_nothing():
    assert product_factor(None, None, None, 64, 8.0, 1e-3, 2.0).factor == 1
    assert cast_factor(None, 8.0, 1e-3, 2.0) == 1


def test_the_factor_by_hand():
    # sigma = 1e-6 * 0.05 * sqrt(512 / 2) = 8e-7; erfinv(1e-3) = 8.8623e-4; 2^-24 / (sqrt 2 * 8.8623e-4 * 8e-7) = 59.4
    layer = product_factor(Moments(1e-6, 4e-6), Moments(0.05, 0.2), None, 512, 1.0, 1e-3, 2.0)
    assert layer.wanted == pytest.approx(59.4, rel=2e-3)
    assert layer.allowed == pytest.approx(65504 / (512 * 4e-6 * 0.2) / 2)
    assert layer.factor == 32 and layer.fits


def test_a_layer_may_be_scaled_down():
    layer = product_factor(Moments(10.0, 100.0), Moments(1.0, 4.0), None, 1024, 1.0, 1e-3, 2.0)
    assert layer.factor == 2.0 ** math.floor(math.log2(65504 / (1024 * 400) / 2)) == 2.0**-4


def test_small_weight_gradients_ask_for_a_factor_of_their_own():
    without = product_factor(Moments(1e-2, 1e-1), Moments(0.1, 0.4), None, 64, 1.0, 1e-3, 2.0)
    small = product_factor(Moments(1e-2, 1e-1), Moments(0.1, 0.4), Moments(1e-6, 1e-5), 64, 1.0, 1e-3, 2.0)
    assert without.factor == 1 and small.factor == 32


def test_what_no_factor_fits_is_said():
    layer = product_factor(Moments(1e-9, 1e3), Moments(0.1, 1.0), None, 64, 1.0, 1e-3, 2.0)
    assert not layer.fits


def test_the_cast_meets_its_target():
    torch.manual_seed(0)
    gradient = torch.randn(200_000) * 1e-9
    square, largest = gradient.square().mean().sqrt().item(), gradient.abs().max().item()
    factor = cast_factor(Moments(square, largest), 1.0, 1e-3, 2.0)
    flushed = ((gradient * factor).half() == 0).double().mean().item()
    assert (gradient.half() == 0).all() and flushed < 1e-3 and factor == 2.0 ** round(math.log2(factor))


def test_branches_meet_at_the_largest_safe_scale():
    assert merged_scale(None, {1.0, 64.0}, 2.0) == 1
    assert merged_scale(Moments(1.0, 100.0), {1.0, 64.0, 4096.0}, 2.0) == 64
