"""The fast pooling against the dense one in float64: values, gradients, ties, precision, compilation."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ergoflow.ops.pool import axial_pool

GRIDS = [(9,), (5, 7), (8, 1), (3, 4, 5)]


def drawn(*shape, seed=0, dtype=torch.float64):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return values.requires_grad_()


def flat(pools):
    return [tensor for pair in pools for tensor in pair]


@pytest.mark.parametrize("grid", GRIDS)
def test_fast_pooling_is_the_dense_one(grid):
    x, weights = drawn(2, *grid, 6), [drawn(8 + axis, 6, seed=axis) for axis in range(len(grid))]
    fast, dense = (flat(axial_pool(x, weights, impl=impl)) for impl in ("torch", "reference"))
    seeds = [torch.randn_like(tensor) for tensor in dense]
    gradients = [torch.autograd.grad(pools, [x, *weights], seeds) for pools in (fast, dense)]
    for first, second in zip([*fast, *gradients[0]], [*dense, *gradients[1]], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


def test_dense_pooling_is_the_written_formula():
    x, weight = drawn(2, 3, 4, 5), drawn(6, 5, seed=1)
    for axis in (0, 1):
        ((mean, largest),) = axial_pool(x, [weight], [axis], impl="reference")
        for s in range(x.shape[1 + axis]):
            points = x.select(1 + axis, s)  # (B, R, D)
            torch.testing.assert_close(mean[:, s], points.sum(1) / points.shape[1])
            torch.testing.assert_close(largest[:, s], (points @ weight.mT).max(1).values)


def test_axes_can_be_pooled_one_at_a_time():
    x, weights = drawn(2, 5, 7, 4), [drawn(3, 4, seed=1), drawn(3, 4, seed=2)]
    together = axial_pool(x, weights)
    for axis in (0, 1):
        (alone,) = axial_pool(x, weights[axis : axis + 1], [axis])
        for first, second in zip(alone, together[axis], strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_first_of_equal_points_gets_the_whole_gradient():
    x = torch.zeros(1, 2, 3, 1, dtype=torch.float64)
    x[0, :, 1:] = 5.0
    x.requires_grad_()
    ((_, largest),) = axial_pool(x, [torch.ones(1, 1, dtype=torch.float64)], [0], impl="torch")
    (gradient,) = torch.autograd.grad(largest.sum(), x)
    assert gradient.flatten().tolist() == [0, 1, 0, 0, 1, 0]


def test_mean_alone_needs_no_maps():
    x = drawn(2, 5, 7, 4)
    ((mean, largest),) = axial_pool(x, [torch.empty(0, 4, dtype=torch.float64)], [1])
    torch.testing.assert_close(mean, x.mean(1))
    assert largest.shape == (2, 7, 0)


def lost_coordinates(impl, dtype=torch.float32):
    """Return for both axes the coordinates whose maxima are NaN, of a field with one such number at (2, 3)."""
    x = torch.randn(1, 4, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 2, 3, 1] = float("nan")
    pools = axial_pool(x, [torch.ones(2, 3, dtype=dtype)] * 2, impl=impl)
    return [largest.isnan().all(-1)[0].nonzero().flatten().tolist() for _, largest in pools]


def test_nan_is_seen_in_its_own_coordinate_alone():
    assert lost_coordinates("torch") == [[2], [3]]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")
def test_nan_is_seen_by_the_kernels(interpret):
    both = "[lost_coordinates('triton', dtype) for dtype in (torch.float32, torch.bfloat16)]"
    assert interpret(__file__, both) == [[[2], [3]], [[2], [3]]]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_derivative_is_the_finite_difference():
    x, weight, direction = drawn(1, 4, 5, 3), drawn(6, 3, seed=1), drawn(1, 4, 5, 3, seed=2)

    def pooled(features):
        return axial_pool(features, [weight], [1])[0][1]

    with torch.no_grad():
        _, tangent = torch.func.jvp(pooled, (x,), (direction,))
        difference = (pooled(x + 1e-7 * direction) - pooled(x - 1e-7 * direction)) / 2e-7
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-6)


def test_autocast_gives_bfloat16_pools_and_float32_gradients():
    x, weight = drawn(2, 5, 7, 4, dtype=torch.float32), drawn(3, 4, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        pools = flat(axial_pool(x, [weight], [0]))
    exact = flat(axial_pool(x, [weight], [0]))
    for rounded, full in zip(pools, exact, strict=True):
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), full, rtol=2e-2, atol=2e-2)
    for gradient in torch.autograd.grad([pool.float().sum() for pool in pools], [x, weight]):
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


def test_compiled_pooling_is_one_graph_with_the_same_gradients():
    x, weights = drawn(2, 5, 7, 4), [drawn(3, 4, seed=1), drawn(3, 4, seed=2)]

    def loss(features, *maps):
        return sum((pool**2).sum() for pool in flat(axial_pool(features, maps)))

    expected = torch.autograd.grad(loss(x, *weights), [x, *weights])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for first, second in zip(torch.autograd.grad(compiled(x, *weights), [x, *weights]), expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_bad_requests_are_refused_in_one_line():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"one weight per axis of \(0, 1\), got 1; give"):
        axial_pool(x, [torch.zeros(2, 4)])
    with pytest.raises(ValueError, match=r"impl must be .*, got 'cuda'; choose"):
        axial_pool(x, [torch.zeros(2, 4)] * 2, impl="cuda")
