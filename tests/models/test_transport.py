from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ergoflow.models.axial import AxisKernel
from ergoflow.models.transport import Transport
from ergoflow.ops.choice import use_impl
from ergoflow.ops.transport import skew_part

D, H, F = 8, 2, 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def field(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def layer(
    periodic: tuple[bool, ...] = (True, True), *, pooling=(), gain: float = 30.0, mode="unitary", dissipation=False
) -> Transport:
    """A layer whose kernels turn the features by angles of order one."""
    kernels = nn.ModuleList(
        AxisKernel(
            D, axis, periodic=wraps, pooling=pooling, heads=H, frequencies=F, codes="complex", generator=seeded(axis)
        )
        for axis, wraps in enumerate(periodic)
    )
    for kernel in kernels:
        with torch.no_grad():
            kernel.project.weight.mul_(math.sqrt(gain))
    return Transport(D, kernels, periodic, heads=H, mode=mode, dissipation=dissipation).double()


# The layer


@pytest.mark.parametrize("pooling", [(), ("mean",)])
@pytest.mark.parametrize("grid", [(9,), (8, 7), (6, 7, 5)])
def test_transport_preserves_the_norm_of_every_head_and_moves_the_features(
    grid: tuple[int, ...], pooling: tuple[str, ...]
) -> None:
    periodic = (True,) * (len(grid) - 1) + (False,)
    x = field(2, *grid, D)
    moved = layer(periodic, pooling=pooling)(x)
    axes = tuple(range(1, len(grid) + 1))

    def norms(y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(-1, (H, -1)).square().sum((*axes, -1))  # (B, H)

    torch.testing.assert_close(norms(moved), norms(x), rtol=1e-9, atol=0)
    assert (moved - x).norm() > 0.05 * x.norm()


def test_map_with_its_kernel_held_is_orthogonal() -> None:
    """The whole (d·N)² matrix of one sample and head."""
    transport = layer()
    normed = transport.norm(field(1, 5, 6, D))
    kernels = [kernel(normed)[:, :1].expand(60, H, *[-1] * 3) for kernel in transport.kernels]
    basis = torch.eye(60, dtype=torch.float64).reshape(60, 1, 5, 6, 2).expand(-1, H, -1, -1, -1)
    moved = basis
    for axis, kernel in enumerate(kernels):
        moved = transport.move(moved, kernel, axis)
    matrix = moved[:, 0].reshape(60, 60)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(60, dtype=torch.float64), rtol=0, atol=1e-9)


def test_layer_by_lines_is_the_layer_whose_kernels_are_made_one_by_one() -> None:
    x = field(2, 6, 7, D)
    for dissipation in (True, False):
        transport = layer((True, False), dissipation=dissipation)
        heads = x.unflatten(-1, (H, -1)).movedim(-2, 1)
        for axis, kernel in enumerate(transport.kernels):
            heads = transport.move(heads, kernel(transport.norm(x)), axis)
        with use_impl("reference"):
            torch.testing.assert_close(transport(x), heads.movedim(1, -2).flatten(-2))


def test_linear_transport_with_the_same_kernels_preserves_no_norm() -> None:
    x = field(2, 8, 7, D)
    ratio = layer(mode="linear")(x).norm() / x.norm()
    assert abs(ratio - 1) > 1e-2


def test_modes_agree_to_first_order_in_a_skew_kernel() -> None:
    x, k = field(2, H, 6, 5, 4), 1e-4 * field(2, H, 6, 6)
    skewed = skew_part(k)
    unitary, linear = (layer(mode=mode).move(x, skewed, 0) for mode in ("unitary", "linear"))
    torch.testing.assert_close(unitary, linear, rtol=0, atol=1e-6)
    assert (unitary - x).abs().max() > 1e-5


@pytest.mark.parametrize("periodic", [(True, True), (False, True)])
def test_dissipation_never_expands_and_starts_small(periodic: tuple[bool, bool]) -> None:
    x = field(2, 8, 12, D)
    damped = layer(periodic, dissipation=True)
    start = damped(x).norm() / x.norm()
    assert 0.9 < start < 1
    with torch.no_grad():
        damped.log_rates.fill_(9.0)
    assert damped(x).norm() < 0.5 * x.norm()


@pytest.mark.parametrize("pooling", [(), ("mean",)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("head", range(H))
def test_each_head_and_axis_has_a_rate_of_its_own(pooling: tuple[str, ...], axis: int, head: int) -> None:
    """At a large rate the heat kernel leaves the mean along the axis, and at a small one everything."""
    still = layer(pooling=pooling, gain=0.0, dissipation=True)
    with torch.no_grad():
        still.log_rates.fill_(-99.0)
        still.log_rates[axis * H + head] = 14.0
    x = field(2, 8, 7, D)
    expected = x.unflatten(-1, (H, -1)).clone()
    expected[..., head, :] = expected[..., head, :].mean(1 + axis, keepdim=True)
    torch.testing.assert_close(still(x), expected.flatten(-2))


def test_fresh_layer_is_close_to_the_identity() -> None:
    x = field(2, 32, 32, D)
    fresh = layer(gain=1.0, dissipation=True)
    assert 1e-3 < (fresh(x) - x).norm() / x.norm() < 0.15


def test_layer_commutes_with_translations_along_periodic_axes_only() -> None:
    transport = layer((True, False), dissipation=True)
    x = field(2, 8, 7, D)
    torch.testing.assert_close(transport(x.roll(3, 1)), transport(x).roll(3, 1))
    assert (transport(x.roll(3, 2)) - transport(x).roll(3, 2)).norm() > 1e-2 * x.norm()


def test_norm_survives_autocast() -> None:
    transport = layer().float()
    x = field(2, 8, 7, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        moved = transport(x)
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved.norm(), x.norm(), rtol=1e-5, atol=0)


def test_every_parameter_receives_a_gradient() -> None:
    transport = layer(dissipation=True)
    x = field(2, 8, 7, D)
    (transport(x) - field(2, 8, 7, D, seed=2)).square().sum().backward()
    for name, parameter in transport.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
