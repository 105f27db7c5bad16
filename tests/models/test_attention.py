from __future__ import annotations

import math

import pytest
import torch

from ergoflow.models.attention import (
    AxialAttention,
    AxialKernel,
    AxialReducer,
    low_rank_kernel,
    reduce_axes,
    split_heads,
)
from ergoflow.models.layers import GatedMLP, gated_mlps
from ergoflow.models.positions import axis_coordinates, draw_frequencies, fourier_phases
from ergoflow.ops.axial import apply_kernels, head_norm

DOUBLE = {"device": torch.device("cpu"), "dtype": torch.float64}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def small_kernel(*, fusion="heads", axis=0, heads=3, seed=0):
    return AxialKernel(
        4,
        axis,
        heads=heads,
        kernel_dim=6,
        pooling=("mean", "max", "min"),
        fusion=fusion,
        sigma=2.0,
        coordinate_range=(0.0, 1.0),
        generator=seeded(seed),
    ).double()


def test_sixteen_heads_split_into_six_five_five():
    assert split_heads(16, 3) == [6, 5, 5]
    assert split_heads(8, 3) == [3, 3, 2]
    assert split_heads(4, 1) == [4]


def test_kernel_is_the_sum_over_channels_of_cosines_of_differences():
    q, k, b = randn(2, 3, 5, 4, seed=1), randn(2, 3, 5, 4, seed=2), randn(1, 4, seed=3)
    kernel = low_rank_kernel(q, k, fourier_phases((5,), b))
    xi = axis_coordinates(5, (0.0, 1.0), **DOUBLE)
    for i in range(5):
        for j in range(5):
            cosines = torch.cos(2 * math.pi * b[0] * (xi[i] - xi[j]))
            expected = (q[:, :, i] * k[:, :, j] * cosines).sum(-1) / 2  # √m = 2
            torch.testing.assert_close(kernel[:, :, i, j], expected)


def test_kernel_is_in_expectation_a_gaussian_times_the_inner_product():
    """Eq. 5 of the paper, with the Gaussian that the frequencies' law really has."""
    sigma, draws, size, channels = 0.7, 6000, 5, 3
    q, k = randn(1, 1, size, channels, seed=1), randn(1, 1, size, channels, seed=2)
    generator = seeded(3)
    phases = [
        fourier_phases((size,), draw_frequencies(1, channels, sigma, generator=generator).double())
        for _ in range(draws)
    ]
    mean = torch.stack([low_rank_kernel(q, k, phase) for phase in phases]).mean(0)
    xi = axis_coordinates(size, (0.0, 1.0), **DOUBLE)
    gauss = torch.exp(-2 * math.pi**2 * sigma**2 * (xi[:, None] - xi[None]).square())
    # The channels' cosines are independent: the deviation is that of one draw over √draws; five of these.
    bound = 5 * torch.einsum("...ic,...jc->...ij", q.square(), k.square()).sqrt() / math.sqrt(channels * draws)
    assert ((mean - gauss * (q @ k.mT) / math.sqrt(channels)).abs() <= bound).all()


@pytest.mark.parametrize("grid", [(7,), (5, 7), (3, 5, 2)])
def test_factorised_product_is_the_dense_sum_over_all_pairs_of_points(grid):
    kernels = [randn(2, 3, size, size, seed=axis) for axis, size in enumerate(grid)]
    values = randn(2, 3, *grid, 4, seed=9)
    dense = torch.ones(2, 3, 1, 1, dtype=torch.float64)
    for kernel in kernels:
        dense = torch.einsum("bhij,bhkl->bhikjl", dense, kernel).flatten(4).flatten(2, 3)
        dense = dense.reshape(2, 3, dense.shape[2], -1)  # (B, H, N, N)
    expected = dense @ values.flatten(2, -2) / math.prod(grid)  # (B, H, N, d)
    result = apply_kernels(kernels, values)
    assert result.shape == (2, 3, 4, *grid)
    torch.testing.assert_close(result.flatten(3).mT, expected)


@pytest.mark.parametrize("size", [5, 12, 31])
def test_integral_of_a_resolved_kernel_does_not_depend_on_the_grid(size):
    """∫ cos 2π(x − y) cos 2πy dy = cos(2πx)/2, exact for the rectangle rule from three points on."""
    xi = 2 * math.pi * axis_coordinates(size, (0.0, 1.0), **DOUBLE)
    kernel = torch.cos(xi[:, None] - xi[None]).expand(1, 1, size, size)
    result = apply_kernels([kernel], torch.cos(xi).reshape(1, 1, size, 1))
    torch.testing.assert_close(result.flatten(), torch.cos(xi) / 2)


def test_head_norm_is_over_each_heads_channels_and_whole_domain_at_any_scale():
    x = 1e-9 * (3 + randn(2, 3, 4, 5, 7) * torch.tensor([1.0, 10.0, 100.0]).reshape(1, 3, 1, 1, 1))
    y = head_norm(x)
    assert y.shape == x.shape
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    torch.testing.assert_close(y.mean((2, 3, 4)), zeros, rtol=0, atol=1e-10)
    torch.testing.assert_close(y.var((2, 3, 4), correction=0), zeros + 1, rtol=1e-5, atol=0)
    # Only the mean and scale of a head are removed: one affine map per head.
    torch.testing.assert_close(torch.corrcoef(torch.stack([x[1, 2].flatten(), y[1, 2].flatten()]))[0, 1].item(), 1.0)


def test_head_norm_takes_its_statistics_in_float32():
    x = randn(1, 2, 3, 40, 50).to(torch.bfloat16)
    assert head_norm(x).dtype == torch.float32
    torch.testing.assert_close(head_norm(x), head_norm(x.double()).float())


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["mean", "max", "min"])
def test_reducer_pools_its_projection_over_all_other_axes(kind, axis):
    reducer = AxialReducer(4, axis, kind, generator=seeded(0)).double()
    context = randn(2, 3, 5, 6, 4)
    projected = torch.einsum("...d,ed->...e", context, reducer.project.weight).movedim(axis + 1, 1).flatten(2, 3)
    pooled = {"mean": projected.mean(2), "max": projected.max(2).values, "min": projected.min(2).values}[kind]
    torch.testing.assert_close(reducer(context), reducer.mlp(reducer.norm(pooled)))


def test_reducers_of_all_axes_at_once_see_the_features_through_the_first_map():
    groups = [
        [AxialReducer(4, axis, kind, generator=seeded(axis)).double() for kind in kinds]
        for axis, kinds in enumerate((("mean", "max", "min"), ("min", "mean")))
    ]
    features, first = randn(2, 5, 7, 4), randn(4, 4, seed=1)
    together = reduce_axes(groups, features, first)
    for group, sequences in zip(groups, together, strict=True):
        for reducer, sequence in zip(group, sequences, strict=True):
            torch.testing.assert_close(sequence, reducer(features @ first.mT))


def test_batched_mlps_are_the_mlps_one_by_one():
    mlps = [GatedMLP(4, generator=seeded(seed)).double() for seed in range(3)]
    x = randn(3, 7, 4).requires_grad_()
    inputs = [x, *(parameter for mlp in mlps for parameter in mlp.parameters())]
    together, alone = gated_mlps(mlps, x), torch.stack([mlp(part) for mlp, part in zip(mlps, x, strict=True)])
    torch.testing.assert_close(together, alone)
    gradients = [torch.autograd.grad(result.square().sum(), inputs) for result in (together, alone)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_each_group_of_heads_sees_its_own_pooling():
    """A point that is the largest in no channel can move without moving the max heads; likewise for min."""
    kernel = small_kernel()
    context = randn(1, 6, 11, 4, seed=5)
    _, largest, smallest = (reducer.project(context)[0] for reducer in kernel.reducers)  # (X, Y, D)
    margin_max = (largest.amax(1, keepdim=True) - largest).amin(-1)
    margin_min = (smallest - smallest.amin(1, keepdim=True)).amin(-1)
    before = kernel(context)
    for margin, frozen, moving in ((margin_max, 1, 2), (margin_min, 2, 1)):
        # Safe for the frozen heads, while some channel of the other heads is extremal there.
        other = margin_min if moving == 2 else margin_max
        x, y = ((margin > 1e-2) & (other == 0)).nonzero()[0].tolist()
        moved = context.clone()
        moved[0, x, y] += 1e-3
        change = (kernel(moved) - before).abs().amax((0, 2, 3))  # (H,)
        assert change[frozen] == 0
        assert change[moving] > 1e-6
        assert change[0] > 1e-6


def test_summed_fusion_feeds_every_head_with_the_sum_of_the_poolings():
    kernel = small_kernel(fusion="sum", axis=1)
    context = randn(2, 5, 7, 4)
    reduced = sum(reducer(context) for reducer in kernel.reducers)
    q, k = (layer(reduced).reshape(2, 7, 3, 6).transpose(1, 2) for layer in (kernel.query, kernel.key))
    phases = fourier_phases((7,), kernel.frequencies)
    torch.testing.assert_close(kernel(context), low_rank_kernel(q, k, phases))


def test_fusion_does_not_change_the_parameters():
    first, second = (small_kernel(fusion=fusion).state_dict() for fusion in ("heads", "sum"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def small_attention(num_axes, sigma):
    return AxialAttention(
        6,
        num_axes,
        heads=3,
        head_dim=4,
        kernel_dim=8,
        pooling=("mean", "max", "min"),
        fusion="heads",
        sigma=sigma,
        coordinate_range=(0.0, 1.0),
        generator=seeded(11),
    ).double()


def smooth_features(size):
    xi = 2 * math.pi * axis_coordinates(size, (0.0, 1.0), **DOUBLE)
    x, y = xi[:, None], xi[None]
    waves = [torch.cos(x + 2 * y), torch.sin(2 * x - y), torch.cos(x) * torch.sin(y)]
    waves += [torch.sin(x + y + 1), torch.cos(2 * y + 0.3) + 0 * x, torch.sin(x - 0.7) + 0 * y]
    return torch.stack(waves, dim=-1)[None]  # (1, S, S, 6)


def test_attention_converges_at_first_order_when_the_grid_is_refined():
    """The error of the rectangle rule for a non-periodic integrand f is (f(0) − f(1))/(2S): it halves."""
    attention = small_attention(2, sigma=1.0)
    with torch.no_grad():
        on = {size: attention(smooth_features(size))[:, :: size // 32, :: size // 32] for size in (32, 64, 128, 256)}
    gaps = [((on[s] - on[2 * s]).norm() / on[256].norm()).item() for s in (32, 64, 128)]
    # h/2 = 1/64 per axis and about two jumps of the size of the result.
    assert gaps[0] < 0.06
    assert gaps[0] / gaps[1] == pytest.approx(2, rel=0.25)
    assert gaps[1] / gaps[2] == pytest.approx(2, rel=0.15)


def test_attention_does_not_see_the_scale_and_mean_of_a_points_features():
    """The layer norm comes before both the values and the kernels."""
    attention = small_attention(2, sigma=3.0)
    x = randn(2, 5, 7, 6)
    scale, shift = 1 + randn(2, 5, 7, 1, seed=1).square(), randn(2, 5, 7, 1, seed=2)
    torch.testing.assert_close(attention(scale * x + shift), attention(x), rtol=1e-3, atol=1e-4)


def test_attention_applies_the_kernels_it_shows():
    attention = small_attention(2, sigma=3.0)
    x = randn(2, 5, 7, 6)
    normed = attention.norm(x)
    values = attention.value(normed).reshape(2, 5, 7, 3, 4).permute(0, 3, 1, 2, 4)
    mixed = head_norm(apply_kernels(attention.kernels(normed), values)).flatten(1, 2).movedim(1, -1)  # (B, X, Y, H·d)
    expected = attention.mix(torch.nn.functional.gelu(attention.merge(mixed)))
    torch.testing.assert_close(attention(x), expected)
