"""The spectral step against the equation it was made of: full spectrum, general scheme, nothing cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.fourier import dealias_mask
from ergoflow.numerics.imex import crank_nicolson_rk4
from ergoflow.numerics.trajectory import repeat
from ergoflow.ops.spectral_step import SpectralFlow, choose_impl, make_spectral_step
from ergoflow.solvers.kolmogorov import KolmogorovConfig, make_equation, make_step

BOX = KolmogorovConfig(grid=(20, 30), length=(3.0, 5.0), forcing_wavenumber=3, forcing_amplitude=1.7, dt=0.01)


def noise(config: KolmogorovConfig, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, *config.grid, dtype=torch.float64, generator=generator)


def cut(field: Tensor, config: KolmogorovConfig, keep: Tensor | None = None) -> Tensor:
    mask = dealias_mask(config.grid) if keep is None else keep
    return torch.fft.irfft2(torch.fft.rfft2(field) * mask, s=config.grid)


def by_equation(config: KolmogorovConfig, vorticity: Tensor, steps: int) -> Tensor:
    equation = make_equation(config, dtype=torch.float64)
    advance = repeat(crank_nicolson_rk4(equation, config.dt), steps)
    return torch.fft.irfft2(advance(torch.fft.rfft2(vorticity)), s=config.grid)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def a_flow(**changes: object) -> SpectralFlow:
    flow = SpectralFlow(
        grid=(64, 256),
        length=(1.0, 2.0),
        linear=torch.zeros(64, 129),
        forcing=1.0,
        forcing_wavenumber=4,
        dt=0.01,
    )
    return dataclasses.replace(flow, **changes)


@pytest.mark.parametrize("grid", [(20, 30), (30, 20), (16, 12), (6, 8)])
def test_step_is_the_equation_for_white_noise_up_to_the_cut_off(grid: tuple[int, int]) -> None:
    # White noise, so that the modes next to the cut-off on both axes count as much as the others.
    config = dataclasses.replace(BOX, grid=grid, forcing_wavenumber=1)
    start = cut(noise(config), config)
    step = make_step(config, substeps=3, dtype=torch.float64)
    assert relative(step(start), by_equation(config, start, 3)) < 1e-13


def test_step_drops_what_lies_outside_the_mask_and_keeps_what_lies_inside() -> None:
    step = make_step(BOX, substeps=2, dtype=torch.float64)
    start = noise(BOX)
    assert relative(cut(start, BOX), start) > 0.1
    assert relative(step(start), step(cut(start, BOX))) < 1e-13
    assert relative(step(start), cut(step(start), BOX)) < 1e-13


def test_a_force_outside_the_mask_drives_its_mode() -> None:
    config = dataclasses.replace(BOX, forcing_wavenumber=12)
    keep = dealias_mask(config.grid).clone()
    assert not keep[0, 12]
    keep[0, 12] = True
    start = cut(noise(config), config, keep)
    step = make_step(config, substeps=3, dtype=torch.float64)
    assert relative(step(start), by_equation(config, start, 3)) < 1e-13
    assert step(torch.zeros_like(start)).abs().max() > 0.01


def test_leading_axes_are_trajectories() -> None:
    step = make_step(BOX, substeps=2, dtype=torch.float64)
    start = noise(BOX, 6)
    stacked = step(start.reshape(2, 3, 1, *BOX.grid))
    torch.testing.assert_close(stacked.reshape(start.shape), step(start), rtol=0, atol=1e-13)


def test_factors_are_rounded_once() -> None:
    # The decay over many steps sees a factor that was computed, not only stored, in single precision.
    config = dataclasses.replace(BOX, forcing_amplitude=0.0, viscosity=0.05, drag=0.0)
    y = torch.arange(30, dtype=torch.float64) * 2 * torch.pi / 30
    start = torch.cos(4 * y).expand(1, 1, 20, 30).contiguous()
    exact = make_step(config, substeps=200, dtype=torch.float64)(start)
    assert relative(make_step(config, substeps=200)(start.float()).double(), exact) < 1000 * 3e-8


def test_torch_is_chosen_without_a_gpu() -> None:
    assert choose_impl(a_flow(), "cpu", torch.float32, "auto") == "torch"
    assert choose_impl(a_flow(), "cpu", torch.float32, "torch") == "torch"
    assert choose_impl(a_flow(), "cuda", torch.float64, "auto") == "torch"
    assert choose_impl(a_flow(grid=(96, 64)), "cuda", torch.float32, "auto") == "torch"
    assert choose_impl(a_flow(forcing_wavenumber=86), "cuda", torch.float32, "auto") == "torch"


def test_an_implementation_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'torch' or 'triton', got 'cuda'"):
        make_spectral_step(a_flow(), impl="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose impl='torch'"):
        make_spectral_step(a_flow(), impl="triton")
