from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ergoflow.models.axial import AxisKernel
from ergoflow.models.transport import MAX_ANGLE, Transport, heat_kernel, rotation_minus_identity, skew_part

D, H, F = 8, 2, 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def field(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def skew(size: int, angle: float, *, batch: tuple[int, ...] = (), seed: int = 1) -> torch.Tensor:
    """A random skew matrix of spectral norm `angle`."""
    a = skew_part(field(*batch, size, size, seed=seed))
    return a * (angle / torch.linalg.matrix_norm(a, 2))[..., None, None]


def rotation(a: torch.Tensor) -> torch.Tensor:
    return rotation_minus_identity(a) + torch.eye(a.shape[-1], dtype=a.dtype)


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


# The rotation


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize("angle", [1e-3, 0.5, 2.0])
def test_rotation_is_the_matrix_exponential(size: int, angle: float) -> None:
    a = skew(size, angle, batch=(2, 3)) if size > 1 else torch.zeros(2, 3, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(rotation(a), torch.linalg.matrix_exp(a), rtol=0, atol=1e-9)


@pytest.mark.parametrize("angle", [0.0, 1e-6, 1.0, MAX_ANGLE, 1e6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 3e-6)])
def test_rotation_is_orthogonal_for_every_skew_matrix(angle: float, dtype: torch.dtype, tolerance: float) -> None:
    u = rotation(skew(32, angle, batch=(4,)).to(dtype))
    torch.testing.assert_close(u.mT @ u, torch.eye(32, dtype=dtype).expand(4, -1, -1), rtol=0, atol=tolerance)


def test_small_rotation_keeps_its_digits_in_single_precision() -> None:
    a = skew(16, 1e-4)
    exact = torch.linalg.matrix_exp(a) - torch.eye(16, dtype=torch.float64)
    error = (rotation_minus_identity(a.float()).double() - exact).norm()
    assert error < 1e-6 * exact.norm()


def test_largest_rotation_is_bounded_and_its_direction_kept() -> None:
    a = skew(8, 1e4)
    limited = rotation(a)
    # The bound on the norm is not sharp for a random matrix: the angles are between a third of MAX_ANGLE and all of it.
    angles = torch.linspace(MAX_ANGLE / 3, MAX_ANGLE, 201, dtype=torch.float64).tolist()
    errors = [(torch.linalg.matrix_exp(a / 1e4 * angle) - limited).abs().max().item() for angle in angles]
    assert min(errors) < 2e-2


@pytest.mark.parametrize("cells", [0.3, 1.0])
@pytest.mark.parametrize("size", [15, 16])
def test_rotation_by_a_uniform_advection_moves_a_wave_by_that_many_cells(size: int, cells: float) -> None:
    points = torch.arange(size, dtype=torch.float64)
    n = torch.arange(1, (size + 1) // 2, dtype=torch.float64)
    offset = points[:, None] - points
    spectral = -(2 / size) * (n * torch.sin(2 * math.pi * n * offset[..., None] / size)).sum(-1)
    u = rotation(-cells * 2 * math.pi / size * spectral)
    wave = torch.sin(2 * math.pi * 3 * points / size)
    torch.testing.assert_close(u @ wave, torch.sin(2 * math.pi * 3 * (points - cells) / size), rtol=0, atol=1e-9)


def test_rotation_has_the_gradient_of_the_exponential_and_a_finite_one_at_zero() -> None:
    a = field(2, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda k: rotation_minus_identity(skew_part(k)), (a,))
    assert torch.autograd.gradcheck(lambda k: rotation_minus_identity(skew_part(20 * k)), (a,))
    zero = torch.zeros(4, 4, requires_grad=True)
    rotation_minus_identity(skew_part(zero)).sum().backward()
    assert zero.grad.isfinite().all()


# The heat kernel


@pytest.mark.parametrize("size", [8, 9])
def test_heat_kernel_damps_waves_by_the_square_of_their_number(size: int) -> None:
    rates = torch.tensor([0.0, 0.02, 0.3], dtype=torch.float64)
    points = torch.arange(size, dtype=torch.float64)
    for n in range(size // 2 + 1):
        around = torch.cos(2 * math.pi * n * points / size + 0.4)
        expected = torch.exp(-rates * n**2)[:, None] * around
        torch.testing.assert_close(heat_kernel(size, rates, periodic=True) @ around, expected)
    for n in range(size):
        across = torch.cos(math.pi * n * (points + 0.5) / size)
        expected = torch.exp(-rates * (n / 2) ** 2)[:, None] * across
        torch.testing.assert_close(heat_kernel(size, rates, periodic=False) @ across, expected)


@pytest.mark.parametrize("periodic", [True, False])
def test_heat_kernel_is_a_symmetric_contraction_that_keeps_the_mean(periodic: bool) -> None:
    heat = heat_kernel(11, torch.tensor([0.01, 1.0], dtype=torch.float64), periodic=periodic)
    torch.testing.assert_close(heat, heat.mT)
    values = torch.linalg.eigvalsh(heat)
    assert values.min() > -1e-12
    assert values.max() < 1 + 1e-12
    torch.testing.assert_close(heat.sum(-1), torch.ones(2, 11, dtype=torch.float64))


def test_heat_spreads_around_a_periodic_axis_and_stops_at_walls() -> None:
    rate = torch.tensor([0.05], dtype=torch.float64)
    around, across = (heat_kernel(16, rate, periodic=p)[0] for p in (True, False))
    torch.testing.assert_close(around[0, 15], around[0, 1])
    assert across[0, 15].abs() < 1e-3 * across[0, 1]


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
