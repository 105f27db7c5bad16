"""The Kolmogorov solver against jax-cfd's ForcedNavierStokes2D in double precision."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from ergoflow.numerics.fourier import dealias_mask
from ergoflow.solvers.kolmogorov import KolmogorovConfig, initial_vorticity, make_step

pytestmark = pytest.mark.crosscheck

STEPS = 100
TOLERANCE = 1e-12


def theirs(vorticity: np.ndarray, config: KolmogorovConfig, *, symmetric_mask: bool) -> np.ndarray:
    """Return jax-cfd's vorticity after STEPS steps; with `symmetric_mask`, under our form of the 2/3 rule."""
    jax = pytest.importorskip("jax", reason="jax-cfd is the reference: pip install ergoflow[crosscheck]")
    pytest.importorskip("jax_cfd", reason="jax-cfd is the reference: pip install ergoflow[crosscheck]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax_cfd.base import grids
        from jax_cfd.spectral import equations, time_stepping
    with jax.enable_x64(True):
        grid = grids.Grid(config.grid, domain=((0, config.length[0]), (0, config.length[1])))
        equation = equations.ForcedNavierStokes2D(config.viscosity, grid, smooth=True)
        if symmetric_mask:
            equation.filter_ = jax.numpy.asarray(dealias_mask(config.grid).double().numpy())
        step = jax.jit(time_stepping.crank_nicolson_rk4(equation, config.dt))
        state = jax.numpy.fft.rfft2(jax.numpy.asarray(vorticity))
        for _ in range(STEPS):
            state = step(state)
        return np.asarray(jax.numpy.fft.irfft2(state))


def largest_difference(config: KolmogorovConfig, start: torch.Tensor, *, symmetric_mask: bool) -> float:
    reference = theirs(start[0, 0].numpy(), config, symmetric_mask=symmetric_mask)
    ours = make_step(config, substeps=STEPS, dtype=torch.float64)(start)[0, 0].numpy()
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("grid", [(64, 64), (96, 64), (256, 256)])
def test_solver_is_jax_cfd_under_a_symmetric_mask(grid: tuple[int, int]) -> None:
    config = KolmogorovConfig(grid=grid)
    start = initial_vorticity(config, 1, seed=5, dtype=torch.float64)
    assert largest_difference(config, start, symmetric_mask=True) < TOLERANCE


def test_solver_is_unmodified_jax_cfd_for_a_flow_that_ends_before_the_cut_off() -> None:
    # jax-cfd's own mask keeps one of the two modes n = ±N/3 along x, so only a resolved flow can agree to
    # round-off.
    config = KolmogorovConfig(grid=(96, 128), viscosity=0.02, dt=1e-3)
    x = torch.arange(96, dtype=torch.float64)[:, None] * math.tau / 96
    y = torch.arange(128, dtype=torch.float64)[None, :] * math.tau / 128
    start = torch.sin(x) * torch.cos(y) + 0.5 * torch.cos(2 * x - y) - 0.7 * torch.sin(2 * y + x)
    assert largest_difference(config, start[None, None], symmetric_mask=False) < TOLERANCE
