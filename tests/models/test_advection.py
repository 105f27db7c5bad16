"""A vorticity on its own flow: steady flows stay, the solver without viscosity agrees, norms are kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ergoflow.models.advection import carried
from ergoflow.models.velocity import scaled_velocity
from ergoflow.solvers.kolmogorov import KolmogorovConfig, initial_vorticity, make_step

SIZE = 64


def smooth(seed: int = 0) -> Tensor:
    """A few large vortices, (1, 1, SIZE, SIZE) in float64, of unit spread."""
    flow = KolmogorovConfig(grid=(SIZE, SIZE), peak_wavenumber=2.0, max_speed=1.0)
    omega = initial_vorticity(flow, 1, seed=[seed], dtype=torch.float64)
    spectrum = torch.fft.rfft2(omega)
    spectrum[..., 5:-4, :] = 0
    spectrum[..., 5:] = 0
    omega = torch.fft.irfft2(spectrum, s=(SIZE, SIZE))
    return omega / omega.std()


def inviscid(omega: Tensor, time: float) -> Tensor:
    """The flow without viscosity, drag and force, by the spectral solver with steps too small to matter."""
    steps = 64
    flow = KolmogorovConfig(grid=(SIZE, SIZE), viscosity=0.0, drag=0.0, forcing_amplitude=0.0, dt=time / steps)
    return make_step(flow, substeps=steps, dtype=torch.float64)(omega)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_in_no_time_nothing_moves() -> None:
    omega = smooth()
    there, first, half = carried(omega, 0.0)
    assert torch.equal(there, omega)
    assert torch.equal(first, half)
    assert torch.equal(first, scaled_velocity(omega))


@pytest.mark.parametrize("axis", [2, 3])
def test_shear_flows_are_steady(axis: int) -> None:
    x = 2 * math.pi * torch.arange(SIZE, dtype=torch.float64) / SIZE
    shear = torch.sin(2 * x).view(-1, *[1] * (3 - axis)).expand(1, 1, SIZE, SIZE)
    assert distance(carried(shear, 0.5)[0], shear) < 1e-12


def test_taylor_vortices_are_steady_to_fifth_order() -> None:
    x = 2 * math.pi * torch.arange(SIZE, dtype=torch.float64) / SIZE
    vortices = (torch.cos(x)[:, None] + torch.cos(x))[None, None]
    errors = [distance(carried(vortices, time)[0], vortices) for time in (0.5, 0.25)]
    assert errors[0] < 1e-4
    # The classical rule follows circles with an error of T⁵; where the velocity changes, see below.
    assert errors[0] / errors[1] == pytest.approx(32, rel=0.2)


def test_one_step_has_an_error_of_third_order() -> None:
    """Against the solver. With u₀ alone it would be of second order, and thirty times as large."""
    omega = smooth()
    errors = [distance(carried(omega, time)[0], inviscid(omega, time)) for time in (0.8, 0.4)]
    assert errors[1] < 1.2e-3
    assert 7 < errors[0] / errors[1] < 10


def test_transport_keeps_the_norm_and_the_extremes() -> None:
    omega = smooth(1)
    there, _, _ = carried(omega, 0.5)
    assert distance(there, omega) > 0.1
    assert there.norm().item() == pytest.approx(omega.norm().item(), rel=2e-3)
    assert there.max().item() == pytest.approx(omega.max().item(), rel=1e-2)


def test_the_box_may_be_longer_than_wide() -> None:
    """Two copies of a flow side by side, in a box whose longer side is 2π: half the speed, in units of that side."""
    omega = smooth()
    both = omega.repeat(1, 1, 2, 1)
    there = carried(both, 0.4)[0]
    assert distance(there[:, :, :SIZE], carried(omega, 0.4)[0]) < 1e-10
