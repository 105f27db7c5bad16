from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.fourier import mode_numbers
from ergoflow.numerics.trajectory import rollout
from ergoflow.solvers.kuramoto import KuramotoConfig, initial_state, make_step

CONFIG = KuramotoConfig(grid=48, length=22.0, dt=0.02)


def advance(config: KuramotoConfig, state: Tensor, steps: int) -> Tensor:
    return make_step(config, substeps=steps, dtype=torch.float64)(state)


def developed(config: KuramotoConfig, count: int = 2) -> Tensor:
    """Return states on the attractor, 60 time units after the start."""
    quick = dataclasses.replace(config, dt=0.1)
    return advance(quick, initial_state(quick, count, seed=0, dtype=torch.float64), 600)


def axis(config: KuramotoConfig) -> Tensor:
    return torch.arange(config.grid, dtype=torch.float64) * config.length / config.grid


@pytest.mark.parametrize(("length", "mode"), [(22.0, 1), (22.0, 3), (22.0, 4), (10.0, 1), (10.0, 2)])
def test_small_modes_grow_at_the_rate_q2_minus_q4(length: float, mode: int) -> None:
    config = KuramotoConfig(grid=48, length=length, dt=0.01)
    q = 2 * math.pi * mode / length
    wave = 1e-9 * torch.cos(q * axis(config))[None, None]
    growth = math.exp((q**2 - q**4) * 1.0)
    # Crank–Nicolson is second order: relative error of about (q² − q⁴)³ dt²/12 per unit of time and stage.
    tolerance = 1e-6 + abs(q**2 - q**4) ** 3 * config.dt**2
    result = advance(config, wave, 100)
    assert float((result / growth - wave).abs().max()) < tolerance * 1e-9


def test_nonlinear_term_is_minus_u_ux() -> None:
    # One short step from u = A sin(qx): the second harmonic appears as −A² q/2 · sin(2qx) · dt.
    config = KuramotoConfig(grid=48, length=10.0, dt=1e-6)
    q = 2 * math.pi / 10.0
    x = axis(config)
    wave = 3.0 * torch.sin(q * x)[None, None]
    tendency = (advance(config, wave, 1) - wave) / config.dt
    expected = -9.0 * q / 2 * torch.sin(2 * q * x) + (q**2 - q**4) * wave
    torch.testing.assert_close(tendency, expected, rtol=0, atol=1e-4)


def test_products_do_not_fold_back_onto_resolved_waves() -> None:
    # Wave 21 squared is wave 42, which 64 points would take for wave 22.
    config = KuramotoConfig(grid=64, length=22.0, dt=1e-4)
    result = advance(config, torch.sin(2 * math.pi * 21 * axis(config) / 22.0)[None, None], 1)
    waves = torch.fft.rfft(result, norm="forward").abs().flatten()
    assert float(waves[21]) > 0.1
    waves[21] = 0
    assert float(waves.max()) < 1e-12


def test_mean_is_conserved() -> None:
    state = developed(CONFIG)
    for offset in (0.0, 0.5):
        result = advance(CONFIG, state + offset, 500)
        assert (result.mean(dim=-1) - state.mean(dim=-1) - offset).abs().max() < 1e-12


def test_a_mean_velocity_only_carries_the_pattern_along() -> None:
    # Galilean invariance: u + c moves by c·t. Whole grid cells, so that the comparison is exact in space.
    config = KuramotoConfig(grid=48, length=24.0, dt=0.01)
    state = developed(config)
    moved = advance(config, state + 1.0, 100)
    expected = advance(config, state, 100).roll(2, dims=-1) + 1.0
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-5)


def test_translation_and_odd_reflection_commute_with_the_step() -> None:
    state = developed(CONFIG)
    result = advance(CONFIG, state, 50)
    torch.testing.assert_close(advance(CONFIG, state.roll(5, -1), 50), result.roll(5, -1), rtol=0, atol=1e-11)
    mirrored = advance(CONFIG, -state.flip(-1), 50)
    torch.testing.assert_close(mirrored, -result.flip(-1), rtol=0, atol=1e-11)


def test_energy_changes_by_production_minus_dissipation() -> None:
    # d/dt ⟨u²⟩/2 = ⟨u_x²⟩ − ⟨u_xx²⟩: the quadratic term does no work.
    config = KuramotoConfig(grid=48, dt=0.005)
    step = make_step(config, dtype=torch.float64)
    states = torch.stack(list(rollout(step, developed(config), 200, include_initial=True)))
    (n,) = mode_numbers((config.grid,))
    q = 2 * math.pi * n / config.length
    power = torch.fft.rfft(states).abs().square() / config.grid**2
    power[..., 1:-1] *= 2
    rate = (power * (q**2 - q**4)).sum(dim=-1)
    energy = power.sum(dim=-1) / 2
    gained = torch.trapezoid(rate, dx=config.dt, dim=0)
    assert rate.abs().mean() > 1e-3
    torch.testing.assert_close(energy[-1] - energy[0], gained, rtol=0, atol=1e-6)


def test_step_converges_at_second_order_once_stiff_terms_act() -> None:
    state = developed(CONFIG)
    results = [advance(KuramotoConfig(grid=48, dt=1.0 / n), state, n) for n in (25, 50, 800)]
    errors = [float((result - results[-1]).norm()) for result in results[:-1]]
    assert 1.9 < math.log2(errors[0] / errors[1]) < 2.1


@pytest.mark.parametrize(("cells", "energy"), [(2, 0.4382), (3, 1.5876)])
def test_cellular_equilibria_have_their_published_energies(cells: int, energy: float) -> None:
    # E2 and E3 of Cvitanović, Davidchack & Siminos (2010) at L = 22 repeat one cell 2 and 3 times. Alone in a
    # box of that length a cell is stable, so any start ends there. Energy is ⟨u²⟩/2.
    config = KuramotoConfig(grid=32, length=22.0 / cells, dt=0.1)
    final = advance(config, initial_state(config, 2, seed=0, dtype=torch.float64), 4000)
    assert (final.square().mean(dim=-1) / 2).flatten().tolist() == pytest.approx([energy, energy], abs=1e-4)


def test_initial_states_have_zero_mean_given_rms_and_independent_seeds() -> None:
    config = KuramotoConfig(initial_rms=0.3)
    states = initial_state(config, 4, seed=2, dtype=torch.float64)
    assert states.shape == (4, 1, 64)
    assert states.mean(dim=-1).abs().max() < 1e-15
    torch.testing.assert_close(states.square().mean(dim=-1).sqrt(), torch.full((4, 1), 0.3, dtype=torch.float64))
    assert torch.equal(initial_state(config, 2, seed=2, dtype=torch.float64), states[:2])
    assert not torch.allclose(initial_state(config, 1, seed=3, dtype=torch.float64), states[1:2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grid": 63}, "grid must be even for the real FFT, got 63; choose 62 or 64"),
        ({"grid": 8}, "got 8; choose 10 or more"),
        ({"length": 0.0}, "length must be positive"),
        ({"dt": -0.1}, "dt must be positive"),
        ({"initial_rms": math.nan}, "initial_rms must be positive"),
    ],
)
def test_config_refuses_what_the_solver_cannot_do(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KuramotoConfig(**change)  # type: ignore[arg-type]


def test_step_and_start_refuse_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(B, 1, 48\), got \(1, 1, 64\)"):
        make_step(CONFIG)(torch.zeros(1, 1, 64))
    with pytest.raises(ValueError, match=r"must be torch.float32, got torch.float64"):
        make_step(CONFIG)(torch.zeros(1, 1, 48, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least 1"):
        initial_state(CONFIG, 0, seed=0)
