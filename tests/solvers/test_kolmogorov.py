"""The Kolmogorov solver against exact solutions, conservation laws and symmetries.

Each physical truth is asked for on the standard box and on one with other sides, other lengths and an odd
aspect ratio: a box of side 2π cannot see a missing 2π/L.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.fourier import dealias_mask, derivative_wavenumbers, velocity_from_vorticity
from ergoflow.numerics.imex import crank_nicolson_rk4
from ergoflow.numerics.trajectory import SimulationDiverged, checked, repeat, rollout
from ergoflow.solvers.kolmogorov import KolmogorovConfig, budget, initial_vorticity, make_equation, make_step

STANDARD = KolmogorovConfig(grid=(64, 64))
UNEQUAL = KolmogorovConfig(grid=(40, 72), length=(3.0, 5.0), forcing_wavenumber=3, forcing_amplitude=1.7)
both_boxes = pytest.mark.parametrize("box", [STANDARD, UNEQUAL], ids=["standard", "unequal"])


def mesh(config: KolmogorovConfig) -> tuple[Tensor, Tensor]:
    x, y = (
        torch.arange(size, dtype=torch.float64) * side / size
        for size, side in zip(config.grid, config.length, strict=True)
    )
    return x[:, None], y[None, :]


def wave(config: KolmogorovConfig, axis: int, mode: int) -> float:
    return 2 * math.pi * mode / config.length[axis]


def start_of(config: KolmogorovConfig, count: int = 1, seed: int = 3) -> Tensor:
    return initial_vorticity(config, count, seed=seed, dtype=torch.float64)


def advance(config: KolmogorovConfig, vorticity: Tensor, steps: int) -> Tensor:
    return make_step(config, substeps=steps, dtype=torch.float64)(vorticity)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def laminar(config: KolmogorovConfig) -> tuple[Tensor, float, float]:
    """Return the vorticity (1, 1, X, Y) of u = U sin(k_f y), with U and k_f."""
    _, y = mesh(config)
    k_f = wave(config, 1, config.forcing_wavenumber)
    speed = config.forcing_amplitude / (config.viscosity * k_f**2 + config.drag)
    return (-speed * k_f * torch.cos(k_f * y)).expand(1, 1, *config.grid).contiguous(), speed, k_f


def taylor_green_error(config: KolmogorovConfig, time: float) -> float:
    x, y = mesh(config)
    kx, ky = wave(config, 0, 4), wave(config, 1, 4)
    start = (torch.cos(kx * x) * torch.cos(ky * y))[None, None]
    decay = math.exp(-(config.viscosity * (kx**2 + ky**2) + config.drag) * time)
    return relative(advance(config, start, round(time / config.dt)), decay * start)


@both_boxes
def test_taylor_green_vortex_decays_at_the_viscous_and_drag_rate(box: KolmogorovConfig) -> None:
    config = dataclasses.replace(box, forcing_amplitude=0.0, dt=0.01)
    assert taylor_green_error(config, 1.0) < 1e-6


@both_boxes
def test_viscosity_and_drag_are_second_order_in_dt(box: KolmogorovConfig) -> None:
    errors = [
        taylor_green_error(dataclasses.replace(box, forcing_amplitude=0.0, viscosity=0.02, dt=dt), 1.0)
        for dt in (0.1, 0.05, 0.025)
    ]
    for coarse, fine in pairwise(errors):
        assert 1.95 < math.log2(coarse / fine) < 2.05


@both_boxes
def test_laminar_flow_is_a_fixed_point(box: KolmogorovConfig) -> None:
    config = dataclasses.replace(box, viscosity=0.05)
    start, _, _ = laminar(config)
    assert relative(advance(config, start, 200), start) < 1e-11


@both_boxes
def test_forcing_turns_rest_into_the_laminar_profile(box: KolmogorovConfig) -> None:
    # From rest, U(t) = U∞ (1 − exp(−(ν k_f² + drag) t)): sees the sign and the size of the forcing.
    config = dataclasses.replace(box, viscosity=0.05, dt=0.005)
    final, _, k_f = laminar(config)
    growth = 1 - math.exp(-(config.viscosity * k_f**2 + config.drag) * 1.0)
    assert relative(advance(config, torch.zeros_like(final), 200), growth * final) < 1e-5


@both_boxes
def test_scheme_is_fourth_order_from_a_turbulent_state(box: KolmogorovConfig) -> None:
    config = dataclasses.replace(box, viscosity=1e-3, dt=0.005)
    start = advance(config, start_of(config), 100)
    results = [advance(dataclasses.replace(config, dt=0.08 / n), start, n) for n in (8, 16, 128)]
    errors = [relative(result, results[-1]) for result in results[:-1]]
    assert 3.8 < math.log2(errors[0] / errors[1]) < 4.2


@both_boxes
def test_inviscid_unforced_flow_conserves_energy_and_enstrophy(box: KolmogorovConfig) -> None:
    config = dataclasses.replace(box, viscosity=0.0, drag=0.0, forcing_amplitude=0.0, dt=0.002, max_speed=5.0)
    start = start_of(config)
    end = advance(config, start, 500)
    assert relative(end, start) > 0.1
    before, after = budget(start, config), budget(end, config)
    assert relative(after["energy"], before["energy"]) < 1e-5
    assert relative(after["enstrophy"], before["enstrophy"]) < 1e-4


@both_boxes
def test_energy_changes_by_input_minus_dissipation(box: KolmogorovConfig) -> None:
    config = dataclasses.replace(box, viscosity=5e-3, drag=0.3, dt=0.002)
    step = make_step(config, dtype=torch.float64)
    states = torch.cat(list(rollout(step, start_of(config), 500, include_initial=True)))
    terms = budget(states, config)
    rate = terms["input"] - terms["viscous"] - terms["drag"]
    change = terms["energy"][-1] - terms["energy"][0]
    for name in ("input", "viscous", "drag"):
        assert torch.trapezoid(terms[name], dx=config.dt).abs() > 0.01 * change.abs()
    assert abs(change - torch.trapezoid(rate, dx=config.dt)) < 1e-5 * terms["energy"][0]


@both_boxes
def test_budget_of_the_laminar_flow_is_analytic(box: KolmogorovConfig) -> None:
    start, speed, k_f = laminar(box)
    terms = {name: float(value) for name, value in budget(start, box).items()}
    assert terms == pytest.approx(
        {
            "energy": speed**2 / 4,
            "enstrophy": (speed * k_f) ** 2 / 4,
            "input": box.forcing_amplitude * speed / 2,
            "viscous": box.viscosity * (speed * k_f) ** 2 / 2,
            "drag": box.drag * speed**2 / 2,
        },
        rel=1e-12,
    )


def test_budget_is_per_trajectory_and_takes_leading_axes() -> None:
    states = start_of(UNEQUAL, 6)
    flat = budget(states, UNEQUAL)["energy"]
    assert torch.equal(budget(states.reshape(2, 3, 1, 40, 72), UNEQUAL)["energy"], flat.reshape(2, 3))
    assert len(set(flat.tolist())) == 6


@both_boxes
def test_mean_vorticity_and_divergence_stay_zero(box: KolmogorovConfig) -> None:
    end = advance(box, start_of(box, 2), 200)
    assert end.mean(dim=(-2, -1)).abs().max() < 1e-14 * end.abs().max()
    dx, dy = derivative_wavenumbers(box.grid, box.length)
    flow = torch.fft.rfft2(velocity_from_vorticity(end, box.length))
    divergence = torch.fft.irfft2(1j * (dx * flow[:, 0] + dy * flow[:, 1]), s=box.grid)
    assert divergence.abs().max() < 1e-12 * end.abs().max()


@both_boxes
def test_translation_along_x_and_by_one_forcing_period_along_y_commute_with_the_step(
    box: KolmogorovConfig,
) -> None:
    start = start_of(box)
    end = advance(box, start, 50)
    period = box.grid[1] // box.forcing_wavenumber
    assert period * box.forcing_wavenumber == box.grid[1]
    for shift in ((7, 0), (0, period), (3, 2 * period)):
        moved = advance(box, start.roll(shift, dims=(-2, -1)), 50)
        assert relative(moved, end.roll(shift, dims=(-2, -1))) < 1e-12
    elsewhere = advance(box, start.roll(period // 2, dims=-1), 50)
    assert relative(elsewhere, end.roll(period // 2, dims=-1)) > 1e-3


@both_boxes
def test_half_turn_and_shifted_reflection_commute_with_the_step(box: KolmogorovConfig) -> None:
    def half_turn(field: Tensor) -> Tensor:
        return field.flip(dims=(-2, -1)).roll((1, 1), dims=(-2, -1))

    def reflection(field: Tensor) -> Tensor:
        # x -> −x flips the force; half a forcing period along y restores it. The curl changes sign.
        return -field.flip(dims=(-2,)).roll((1, box.grid[1] // box.forcing_wavenumber // 2), dims=(-2, -1))

    start = start_of(box)
    end = advance(box, start, 50)
    for symmetry in (half_turn, reflection):
        assert relative(advance(box, symmetry(start), 50), symmetry(end)) < 1e-12


@both_boxes
def test_tendency_is_the_advective_form_inside_the_mask(box: KolmogorovConfig) -> None:
    # White noise cut by the mask, so that the modes next to the cut-off count as much as the others.
    noise = torch.randn(2, 1, *box.grid, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = dealias_mask(box.grid)
    state = torch.fft.rfft2(noise) * mask
    state[..., 0, 0] = 0
    vorticity = torch.fft.irfft2(state, s=box.grid)
    dx, dy = derivative_wavenumbers(box.grid, box.length)
    gradient = torch.fft.irfft2(torch.cat((1j * dx * state, 1j * dy * state), dim=1), s=box.grid)
    advection = (velocity_from_vorticity(vorticity, box.length) * gradient).sum(dim=1, keepdim=True)
    _, y = mesh(box)
    k_f = wave(box, 1, box.forcing_wavenumber)
    forcing = (-box.forcing_amplitude * k_f * torch.cos(k_f * y)).expand(box.grid)
    expected = torch.fft.rfft2(forcing) - torch.fft.rfft2(advection) * mask
    tendency = make_equation(box, dtype=torch.float64).explicit_terms(state)
    assert float((tendency - expected).abs().max() / expected.abs().max()) < 1e-13


@both_boxes
def test_step_is_the_equation_under_the_general_scheme(box: KolmogorovConfig) -> None:
    start = start_of(box, 2)
    equation = make_equation(box, dtype=torch.float64)
    spectrum = repeat(crank_nicolson_rk4(equation, box.dt), 10)(torch.fft.rfft2(start))
    assert relative(advance(box, start, 10), torch.fft.irfft2(spectrum, s=box.grid)) < 1e-13


def test_substeps_are_repeated_steps_and_the_input_stays() -> None:
    start = start_of(UNEQUAL, 2)
    before = start.clone()
    step = make_step(UNEQUAL, dtype=torch.float64)
    assert relative(advance(UNEQUAL, start, 8), repeat(step, 8)(start)) < 1e-13
    assert torch.equal(start, before)


def test_trajectories_of_a_batch_do_not_see_each_other() -> None:
    start = start_of(UNEQUAL, 3)
    together = advance(UNEQUAL, start, 20)
    alone = torch.cat([advance(UNEQUAL, one, 20) for one in start.split(1)])
    assert relative(together, alone) < 1e-13


def test_single_precision_follows_double_precision() -> None:
    start = start_of(STANDARD)
    single = make_step(STANDARD, substeps=60)(start.float())
    assert single.dtype == torch.float32
    assert relative(single.double(), advance(STANDARD, start, 60)) < 1e-4


def test_step_lets_gradients_through() -> None:
    config = KolmogorovConfig(grid=(8, 12), length=(3.0, 5.0), forcing_wavenumber=1, dt=0.01)
    step = make_step(config, substeps=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(step, (start_of(config).requires_grad_(),))


# torch's own forward-mode rules are still scripted, and say so on first use.
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")
def test_tangent_of_the_step_is_the_limit_of_differences() -> None:
    step = make_step(UNEQUAL, substeps=3, dtype=torch.float64)
    start, direction = start_of(UNEQUAL), start_of(UNEQUAL, seed=9)
    value, tangent = torch.func.jvp(step, (start,), (direction,))
    difference = (step(start + 1e-5 * direction) - step(start - 1e-5 * direction)) / 2e-5
    assert relative(value, step(start)) < 1e-13
    assert relative(tangent, difference) < 1e-8


@pytest.mark.gpu
def test_cuda_gives_the_numbers_of_the_cpu() -> None:
    start = start_of(UNEQUAL, 2)
    step = make_step(UNEQUAL, substeps=50, device="cuda", dtype=torch.float64)
    assert relative(step(start.cuda()).cpu(), advance(UNEQUAL, start, 50)) < 1e-12


def test_too_large_a_step_raises_with_step_and_time() -> None:
    config = dataclasses.replace(STANDARD, dt=0.2)
    step = checked(make_step(config, dtype=torch.float64), dt=config.dt)
    with pytest.raises(SimulationDiverged) as caught:
        list(rollout(step, start_of(config), 1000))
    assert 1 < caught.value.step < 1000
    assert caught.value.time == caught.value.step * config.dt


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grid": (256, 255)}, "grid must be even for the real FFT, got 255; choose 254 or 256"),
        ({"grid": (2, 64)}, "at least 4 points a side, got 2"),
        ({"grid": (64, 64, 64)}, "2 sides"),
        ({"length": (0.0, 1.0)}, "length must be positive, got 0.0"),
        ({"viscosity": -1e-3}, "viscosity must not be negative, got -0.001"),
        ({"viscosity": math.nan}, "viscosity must not be negative, got nan"),
        ({"drag": -0.1}, "drag must not be negative"),
        ({"dt": 0.0}, "dt must be positive, got 0.0"),
        ({"dt": math.inf}, "dt must be positive, got inf"),
        ({"max_speed": 0.0}, "max_speed must be positive"),
        ({"peak_wavenumber": -4.0}, "peak_wavenumber must be positive"),
        ({"forcing_wavenumber": 0}, "forcing_wavenumber must lie in 1 .. 127, got 0"),
        ({"forcing_wavenumber": 128}, "forcing_wavenumber must lie in 1 .. 127, got 128"),
        ({"forcing_amplitude": math.inf}, "forcing_amplitude must be finite"),
    ],
)
def test_config_refuses_what_the_solver_cannot_do(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        KolmogorovConfig(**change)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_step_refuses_another_grid_or_dtype() -> None:
    step = make_step(STANDARD)
    with pytest.raises(ValueError, match=r"\(\.\.\., 1, 64, 64\), got \(1, 1, 32, 64\)"):
        step(torch.zeros(1, 1, 32, 64))
    with pytest.raises(ValueError, match=r"got \(1, 64, 64\)"):
        step(torch.zeros(1, 64, 64))
    with pytest.raises(ValueError, match=r"must be torch.float32, got torch.float64"):
        step(torch.zeros(1, 1, 64, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least 1"):
        make_step(STANDARD, substeps=0)
