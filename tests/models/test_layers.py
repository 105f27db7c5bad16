from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ergoflow.models.layers import (
    GatedMLP,
    ResidualConv,
    at_least_float32,
    convolution,
    linear,
    pad_axes,
    pad_walls,
    precise_linear,
)


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
@pytest.mark.parametrize("periodic", [(True,), (False,), (True, False), (False, True), (True, False, True)])
def test_padding_wraps_periodic_axes_and_continues_the_others(periodic, wall_padding):
    grid = (5, 7, 4)[: len(periodic)]
    x = torch.randn(2, 3, *grid, generator=torch.Generator().manual_seed(0))
    expected = x.numpy()
    for axis, wraps in enumerate(periodic, start=2):
        width = [(3, 3) if a == axis else (0, 0) for a in range(x.ndim)]
        mode = "wrap" if wraps else {"replicate": "edge", "zeros": "constant"}[wall_padding]
        expected = np.pad(expected, width, mode=mode)
    np.testing.assert_array_equal(pad_axes(x, 3, periodic, wall_padding=wall_padding).numpy(), expected)


def test_padding_by_nothing_changes_nothing():
    x = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    assert pad_axes(x, 0, (True,)) is x


def test_padding_of_walls_leaves_periodic_axes_alone():
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    padded = pad_walls(x, 2, (True, False))
    assert padded.shape == (2, 3, 5, 11)
    torch.testing.assert_close(padded, pad_axes(x, 2, (True, False))[:, :, 2:-2], rtol=0, atol=0)


def test_precise_product_rounds_the_matrix_sixteen_bits_down_under_autocast():
    generator = torch.Generator().manual_seed(5)
    x, matrix = torch.randn(50, 40, generator=generator), torch.randn(30, 40, generator=generator)
    x = x.bfloat16().float()  # autocast may round x, but not more than once
    x.requires_grad_(), matrix.requires_grad_()
    exact = x.double() @ matrix.double().mT
    torch.testing.assert_close(precise_linear(x, matrix).double(), exact, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, plain = precise_linear(x, matrix), F.linear(x, matrix)
    # What is left is the rounding of the result itself, half a unit of 2^-8.
    assert (rounded.double() - exact).abs().div(exact.abs() + 1e-3).max() < 2**-8
    assert (rounded.double() - exact).norm() < 0.75 * (plain.double() - exact).norm()
    seed = torch.randn(50, 30, generator=generator)
    for fast, slow in zip(
        torch.autograd.grad(rounded, [x, matrix], seed.bfloat16()),
        torch.autograd.grad(exact, [x, matrix], seed.bfloat16().double()),
        strict=True,
    ):
        assert (fast - slow).norm() < 4e-3 * slow.norm()


def test_wrapping_more_points_than_there_are_is_refused():
    with pytest.raises(ValueError, match="at least 4 points per axis, got 3 on axis 1; use a finer grid"):
        pad_axes(torch.zeros(1, 1, 8, 3), 4, (True, True))


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
@pytest.mark.parametrize("periodic", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("taps", [3, 7])
def test_residual_convolution_is_a_sum_of_two_padded_ones(taps, periodic, wall_padding):
    """Few taps are summed, many multiplied in Fourier space: walls are the same for both."""
    generator = torch.Generator().manual_seed(1)
    layer = ResidualConv(4, 6, taps, periodic, groups=2, wall_padding=wall_padding, generator=generator).double()
    x = torch.randn(8, 4, 8, 9, generator=generator, dtype=torch.float64)
    padded = pad_axes(x, taps // 2, periodic, wall_padding=wall_padding)
    torch.testing.assert_close(layer(x), layer.conv(padded) + layer.shortcut(x))
    torch.testing.assert_close(layer(x, bend=True), layer(F.gelu(x)))


@pytest.mark.parametrize("grid", [(9,), (7, 5), (5, 6, 7)])
def test_residual_convolution_is_the_written_sum_over_neighbours(grid):
    generator = torch.Generator().manual_seed(1)
    layer = ResidualConv(2, 3, 3, (True,) * len(grid), generator=generator).double()
    x = torch.randn(1, 2, *grid, generator=generator, dtype=torch.float64)
    dims = list(range(2, 2 + len(grid)))
    expected = torch.zeros(1, 3, *grid, dtype=torch.float64)
    for offset in np.ndindex(*(3,) * len(grid)):
        # Cross-correlation: weight at offset o multiplies x at i + o − 1.
        neighbour = torch.roll(x, [1 - o for o in offset], dims)
        expected += torch.einsum("oc,bc...->bo...", layer.conv.weight[(..., *offset)], neighbour)
    point = layer.shortcut.weight.flatten(1)
    bias = (layer.conv.bias + layer.shortcut.bias).reshape(1, 3, *[1] * len(grid))
    expected = expected + torch.einsum("oc,bc...->bo...", point, x) + bias
    torch.testing.assert_close(layer(x), expected)


def test_grouped_convolution_does_not_mix_groups():
    generator = torch.Generator().manual_seed(2)
    layer = ResidualConv(4, 6, 3, (True, False), groups=2, generator=generator)
    x = torch.randn(1, 4, 5, 7, generator=generator)
    y = x.clone()
    y[:, 2:] += 1
    change = (layer(y) - layer(x)).abs().amax((0, 2, 3))
    assert change[:3].max() == 0
    assert change[3:].min() > 1e-3


def test_gated_mlp_is_the_written_formula():
    mlp = GatedMLP(5, generator=torch.Generator().manual_seed(3))
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(4))
    a, b = (x @ mlp.expand.weight.T + mlp.expand.bias).split(5, dim=-1)
    expected = (F.gelu(a) * b) @ mlp.contract.weight.T + mlp.contract.bias
    torch.testing.assert_close(mlp(x), expected)


def test_layers_are_functions_of_the_generator_and_leave_the_global_one_alone():
    before = torch.random.get_rng_state()

    def layers(seed):
        generator = torch.Generator().manual_seed(seed)
        return linear(3, 4, generator=generator), convolution(4, 6, 3, 2, groups=2, generator=generator)

    for first, second, other in zip(layers(5), layers(5), layers(6), strict=True):
        torch.testing.assert_close(first.weight, second.weight, rtol=0, atol=0)
        torch.testing.assert_close(first.bias, second.bias, rtol=0, atol=0)
        assert not torch.equal(first.weight, other.weight)
    assert torch.equal(before, torch.random.get_rng_state())


def test_weights_follow_the_law_of_torch():
    generator = torch.Generator().manual_seed(7)
    for layer, fan_in in (
        (linear(50, 400, generator=generator), 50),
        (convolution(64, 64, 3, 2, groups=8, generator=generator), 72),
    ):
        bound = fan_in**-0.5
        assert 0.97 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


def test_statistics_are_never_taken_below_float32():
    assert at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert at_least_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
