"""Rounded weights hold only the values their format has, channel by channel."""

from __future__ import annotations

import pytest
import torch

from p3o_launch.runtime.rollout.quantize import Scheme, channel_amax, rounded


def a_weight(out: int = 6, inputs: int = 40) -> torch.Tensor:
    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(3))
    return weight * torch.logspace(-3, 2, out)[:, None]


@pytest.mark.parametrize(("scheme", "levels"), [("int8", 255), ("int4", 15)])
def test_integer_rounding_uses_the_codes_of_each_channel(scheme: Scheme, levels: int) -> None:
    weight = a_weight()
    result = rounded(weight, scheme)
    largest = (levels - 1) // 2
    scale = channel_amax(weight)[:, None] / largest
    codes = result / scale
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    assert codes.abs().max() <= largest + 1e-4
    assert ((result - weight).abs() <= scale / 2 * (1 + 1e-5)).all()
    torch.testing.assert_close(channel_amax(result), channel_amax(weight))


def test_fp8_rounding_keeps_three_mantissa_bits() -> None:
    weight = a_weight()
    result = rounded(weight, "fp8_e4m3")
    large = weight.abs() > channel_amax(weight)[:, None] / 448 * 2.0**-5  # above the format's subnormal range
    relative = ((result - weight).abs() / weight.abs())[large]
    assert relative.max() <= 2.0**-4 * (1 + 1e-5)
    assert relative.max() > 2.0**-6


def test_fewer_bits_mean_a_larger_error() -> None:
    weight = a_weight()
    errors = [(rounded(weight, scheme) - weight).norm().item() for scheme in ("none", "int8", "int4")]
    assert errors[0] == 0.0 < errors[1] < errors[2]


@pytest.mark.parametrize("scheme", ["none", "int8", "int4", "fp8_e4m3"])
def test_the_original_is_untouched_and_zero_channels_stay_zero(scheme: Scheme) -> None:
    weight = a_weight()
    weight[2] = 0
    before = weight.clone()
    result = rounded(weight, scheme)
    assert torch.equal(weight, before)
    assert result.data_ptr() != weight.data_ptr()
    assert torch.equal(result[2], torch.zeros_like(result[2]))


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8_e4m3"])
def test_slices_along_the_input_round_like_the_whole_when_given_its_amax(scheme: Scheme) -> None:
    weight = a_weight()
    whole, amax = rounded(weight, scheme), channel_amax(weight)
    left, right = weight.chunk(2, dim=1)
    assert torch.equal(torch.cat([rounded(left, scheme, amax), rounded(right, scheme, amax)], dim=1), whole)
    assert not torch.equal(torch.cat([rounded(left, scheme), rounded(right, scheme)], dim=1), whole)


def test_the_result_keeps_the_dtype() -> None:
    assert rounded(a_weight().double(), "int4").dtype == torch.float64
    assert rounded(a_weight().bfloat16(), "int8").dtype == torch.bfloat16


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ValueError, match=r"'int3'.*known: none, int8"):
        rounded(a_weight(), "int3")  # type: ignore[arg-type]
