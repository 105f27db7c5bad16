from __future__ import annotations

import itertools
import logging
import math

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.lattice import VELOCITIES, density_excess, equilibrium, first_moment, from_moments
from ergoflow.ops import lbm
from ergoflow.ops.lbm import Collision, stream_collide
from ergoflow.ops.lbm_compiled import fused_update

BOX = (5, 7, 6)  # (Y, X, Z)
OPERATORS = [("bgk", False), ("bgk", True), ("regularized", False), ("regularized", True)]
# (τ − ½)² = 3/16: the relaxation time at which half-way bounce-back puts the wall exactly half-way.
MAGIC_TAU = 0.5 + math.sqrt(3) / 4


def random_populations(box: tuple[int, ...] = BOX, *, seed: int = 0, size: float = 2e-3) -> Tensor:
    return size * torch.randn((19, *box), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advance(populations: Tensor, collision: Collision, steps: int) -> Tensor:
    for _ in range(steps):
        populations = stream_collide(populations, collision, impl="torch")
    return populations


def poiseuille(rows: int, force: float, viscosity: float) -> Tensor:
    y = torch.arange(rows, dtype=torch.float64) + 0.5
    return force / (2 * viscosity) * y * (rows - y)


def shear_wave(box: tuple[int, ...], flow: int, along: int, speed: float, collision: Collision) -> Tensor:
    """Return the state whose velocity component `flow` is a sine along axis `along` (x, y, z), with its stress."""
    dim = (1, 0, 2)[along]
    shape = [-1 if d == dim else 1 for d in range(3)]
    k = 2 * math.pi / box[dim]
    phase = (k * (torch.arange(box[dim], dtype=torch.float64) + 0.5)).reshape(shape)
    velocity = torch.zeros(3, *box, dtype=torch.float64)
    velocity[flow] = speed * torch.sin(phase)
    slope = speed * k * torch.cos(phase)
    tau = collision.tau + 3 * collision.smagorinsky**2 * slope.abs()
    flux = velocity[:, None] * velocity[None]
    # Π = −(2/3)τS, of which the collision leaves (1 − 1/τ).
    flux[flow, along] -= (1 - 1 / tau) * tau * slope / 3
    flux[along, flow] -= (1 - 1 / tau) * tau * slope / 3
    return from_moments(torch.zeros(box, dtype=torch.float64), velocity, flux)


def turned(populations: Tensor, order: tuple[int, ...], signs: tuple[int, ...]) -> Tensor:
    """Return the state seen after the axes (x, y, z) are permuted and reflected: component i becomes signs·order[i]."""
    fields = populations.transpose(1, 2)  # (19, X, Y, Z)
    source = [VELOCITIES.index(unturn(c, order, signs)) for c in VELOCITIES]
    fields = fields[source].permute(0, *(1 + axis for axis in order))
    fields = fields.flip([1 + axis for axis in range(3) if signs[axis] < 0])
    return fields.transpose(1, 2).contiguous()


def unturn(c: tuple[int, ...], order: tuple[int, ...], signs: tuple[int, ...]) -> tuple[int, int, int]:
    old = [0, 0, 0]
    for new, axis in enumerate(order):
        old[axis] = signs[new] * c[new]
    return old[0], old[1], old[2]


@pytest.mark.parametrize(("operator", "traceless"), OPERATORS)
@pytest.mark.parametrize("walls", [True, False])
def test_every_collision_conserves_mass(operator: str, traceless: bool, walls: bool) -> None:
    collision = Collision(
        tau=0.53,
        force=1e-3,
        smagorinsky=0.2,
        operator=operator,  # type: ignore[arg-type]
        trace_removal=traceless,
        walls=walls,
    )
    before = random_populations()
    after = advance(before, collision, 1)
    assert float(after.sum() - before.sum()) == pytest.approx(0, abs=1e-15)
    assert float((after - before).abs().max()) > 1e-3


@pytest.mark.parametrize(("operator", "traceless"), OPERATORS)
def test_momentum_grows_by_exactly_the_force_without_walls(operator: str, traceless: bool) -> None:
    collision = Collision(
        tau=0.53,
        force=1e-3,
        smagorinsky=0.2,
        operator=operator,  # type: ignore[arg-type]
        trace_removal=traceless,
        walls=False,
    )
    before = random_populations()
    gained = (first_moment(advance(before, collision, 1)) - first_moment(before)).sum(dim=(1, 2, 3))
    expected = torch.tensor([1e-3 * math.prod(BOX), 0, 0], dtype=torch.float64)
    torch.testing.assert_close(gained, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("operator", "traceless"), OPERATORS)
def test_collision_alone_conserves_density_and_adds_the_force_in_each_cell(operator: str, traceless: bool) -> None:
    collision = Collision(tau=0.6, force=2e-3, smagorinsky=0.1, operator=operator, trace_removal=traceless)  # type: ignore[arg-type]
    before = random_populations()
    after = lbm.collide(before, collision)
    torch.testing.assert_close(density_excess(after), density_excess(before), rtol=0, atol=1e-16)
    change = first_moment(after) - first_moment(before)
    expected = torch.zeros_like(change)
    expected[0] = 2e-3
    torch.testing.assert_close(change, expected, rtol=0, atol=1e-16)


def test_fluid_at_rest_between_walls_stays_at_rest() -> None:
    box = (4, 3, 5)
    rest = equilibrium(torch.full(box, 0.03, dtype=torch.float64), torch.zeros(3, *box, dtype=torch.float64))
    after = advance(rest, Collision(tau=0.51, smagorinsky=0.1), 5)
    torch.testing.assert_close(after, rest, rtol=0, atol=1e-16)


def test_streaming_moves_each_population_by_its_velocity() -> None:
    populations = torch.zeros(19, *BOX, dtype=torch.float64)
    populations[:, 2, 3, 4] = torch.arange(1, 20, dtype=torch.float64)
    moved = lbm.stream(populations, walls=False)
    for q, (x, y, z) in enumerate(VELOCITIES):
        assert moved[q, (2 + y) % 5, (3 + x) % 7, (4 + z) % 6] == q + 1


def test_a_wall_returns_populations_reversed_to_the_cell_they_left() -> None:
    populations = torch.zeros(19, *BOX, dtype=torch.float64)
    populations[:, 0, 3, 4] = torch.arange(1, 20, dtype=torch.float64)
    populations[:, -1, 1, 2] = torch.arange(101, 120, dtype=torch.float64)
    moved = lbm.stream(populations, walls=True)
    for q, (x, y, z) in enumerate(VELOCITIES):
        back = VELOCITIES.index((-x, -y, -z))
        if y == -1:
            assert moved[back, 0, 3, 4] == q + 1
        if y == 1:
            assert moved[back, -1, 1, 2] == q + 101
    assert moved.sum() == populations.sum()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_update_commutes_with_the_symmetries_of_the_cube(order: tuple[int, ...]) -> None:
    collision = Collision(tau=0.53, smagorinsky=0.2, walls=False)
    state = random_populations((5, 4, 3))
    for signs in itertools.product((1, -1), repeat=3):
        first = turned(advance(state, collision, 2), order, signs)
        then = advance(turned(state, order, signs), collision, 2)
        torch.testing.assert_close(first, then, rtol=0, atol=1e-16)


@pytest.mark.parametrize(("operator", "traceless"), OPERATORS)
def test_forced_channel_commutes_with_reflection_and_translation(operator: str, traceless: bool) -> None:
    collision = Collision(
        tau=0.53,
        force=1e-3,
        smagorinsky=0.2,
        damping_length=2.0,
        operator=operator,  # type: ignore[arg-type]
        trace_removal=traceless,
    )
    state = random_populations()
    after = advance(state, collision, 2)
    for signs in ((1, -1, 1), (1, 1, -1)):
        then = advance(turned(state, (0, 1, 2), signs), collision, 2)
        torch.testing.assert_close(turned(after, (0, 1, 2), signs), then, rtol=0, atol=1e-16)
    moved = advance(state.roll((2, 3), (2, 3)), collision, 2)
    torch.testing.assert_close(after.roll((2, 3), (2, 3)), moved, rtol=0, atol=1e-16)


def test_unforced_channel_commutes_with_exchange_of_x_and_z() -> None:
    collision = Collision(tau=0.53, smagorinsky=0.2)
    state = random_populations()
    first = turned(advance(state, collision, 2), (2, 1, 0), (1, 1, 1))
    then = advance(turned(state, (2, 1, 0), (1, 1, 1)), collision, 2)
    torch.testing.assert_close(first, then, rtol=0, atol=1e-16)


def test_poiseuille_profile_is_exact_at_the_magic_relaxation_time() -> None:
    # Any other wall position than half-way would change the parabola by a per cent or more.
    rows, force = 5, 1e-5
    collision = Collision(tau=MAGIC_TAU, force=force)
    viscosity = (MAGIC_TAU - 0.5) / 3
    velocity = torch.zeros(3, rows, 1, 1, dtype=torch.float64)
    velocity[0, :, 0, 0] = 0.9 * poiseuille(rows, force, viscosity)
    state = advance(equilibrium(torch.zeros(rows, 1, 1, dtype=torch.float64), velocity), collision, 300)
    profile = lbm.velocity(state, force=force)[0, :, 0, 0]
    torch.testing.assert_close(profile, poiseuille(rows, force, viscosity), rtol=1e-6, atol=0)


def test_poiseuille_error_is_second_order_in_the_cell() -> None:
    errors = []
    for rows in (4, 8):
        tau, force = 0.9, 1e-2 / rows**3  # the same flow on both grids
        viscosity = (tau - 0.5) / 3
        velocity = torch.zeros(3, rows, 1, 1, dtype=torch.float64)
        velocity[0, :, 0, 0] = poiseuille(rows, force, viscosity)
        state = equilibrium(torch.zeros(rows, 1, 1, dtype=torch.float64), velocity)
        state = advance(state, Collision(tau=tau, force=force), 6 * rows**2)
        exact = poiseuille(rows, force, viscosity)
        errors.append(float((lbm.velocity(state, force=force)[0, :, 0, 0] - exact).norm() / exact.norm()))
    assert 1.8 < math.log2(errors[0] / errors[1]) < 2.2


@pytest.mark.parametrize(("operator", "traceless"), OPERATORS)
@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (2, 0)])
def test_taylor_green_vortex_decays_with_the_viscosity(operator: str, traceless: bool, axes: tuple[int, int]) -> None:
    sides, tau, steps = [2, 2, 2], 0.6, 60
    sides[axes[0]], sides[axes[1]] = 32, 24
    box = (sides[1], sides[0], sides[2])
    grids = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in box), indexing="ij")
    a, b = (grids[(1, 0, 2)[axis]] for axis in axes)
    k_a, k_b = 2 * math.pi / 32, 2 * math.pi / 24
    velocity = torch.zeros(3, *box, dtype=torch.float64)
    velocity[axes[0]] = 0.01 * torch.cos(k_a * a) * torch.sin(k_b * b)
    velocity[axes[1]] = -0.01 * k_a / k_b * torch.sin(k_a * a) * torch.cos(k_b * b)
    collision = Collision(tau=tau, operator=operator, trace_removal=traceless, walls=False)  # type: ignore[arg-type]
    early = advance(equilibrium(torch.zeros(box, dtype=torch.float64), velocity), collision, 20)
    late = advance(early, collision, steps)
    amplitudes = [float((lbm.velocity(s, force=0.0) * velocity).sum()) for s in (early, late)]
    measured = math.log(amplitudes[0] / amplitudes[1]) / steps / (k_a**2 + k_b**2)
    assert measured == pytest.approx((tau - 0.5) / 3, rel=0.01)


@pytest.mark.parametrize(("flow", "along"), list(itertools.permutations(range(3), 2)))
def test_smagorinsky_damps_a_shear_wave_as_its_closed_form(flow: int, along: int) -> None:
    # u = U sin(ks): ν_t = Cs²|U k cos(ks)|, so the energy decays as U' = −νk²U − (8/3π) Cs² k³ U².
    sides = [2, 2, 2]
    sides[along] = 48
    box = (sides[1], sides[0], sides[2])
    tau, cs, k = 0.504, 0.3, 2 * math.pi / 48
    collision = Collision(tau=tau, smagorinsky=cs, walls=False)
    start = advance(shear_wave(box, flow, along, 0.08, collision), collision, 20)
    steps = 40
    end = advance(start, collision, steps)
    speeds = [math.sqrt(2 * float(lbm.velocity(s, force=0.0).square().sum()) / math.prod(box)) for s in (start, end)]
    linear, eddy = (tau - 0.5) / 3 * k**2, 8 / (3 * math.pi) * cs**2 * k**3
    mean = sum(speeds) / 2
    measured = (speeds[0] - speeds[1]) / steps / mean
    assert measured == pytest.approx(linear + eddy * mean, rel=0.01)
    assert eddy * mean > 0.5 * linear  # the test would see a wrong constant


def test_eddy_relaxation_time_solves_its_definition() -> None:
    # τ = τ₀ + 3Cs²√(2S:S) with S = −3Π/(2ρτ), for stresses with every component.
    stress = torch.randn((3, 3, 2, 3, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-3
    stress = stress + stress.transpose(0, 1)
    excess = torch.full((2, 3, 4), 0.05, dtype=torch.float64)
    collision = Collision(tau=0.51, smagorinsky=0.17)
    tau = lbm.relaxation_time(stress, excess, collision)
    strain = -3 * stress / (2 * (1 + excess) * tau)
    torch.testing.assert_close(tau, 0.51 + 3 * 0.17**2 * (2 * strain.square().sum(dim=(0, 1))).sqrt())


def test_van_driest_damps_by_the_distance_to_the_nearer_wall() -> None:
    cells = torch.zeros(5, 1, 1, dtype=torch.float64)
    damped = lbm.smagorinsky_by_row(cells, Collision(tau=0.6, smagorinsky=0.1, damping_length=2.0))
    expected = [0.1 * (1 - math.exp(-d / 2)) for d in (0.5, 1.5, 2.5, 1.5, 0.5)]
    assert damped.tolist() == pytest.approx(expected)
    assert lbm.smagorinsky_by_row(cells, Collision(tau=0.6, smagorinsky=0.1)).tolist() == [0.1] * 5


def test_a_shear_wave_decays_alike_in_a_moving_frame() -> None:
    # u_y(x) carried along x by U: the lattice's cubic error changes the viscosity by 3U² = 0.75 %.
    box, tau, drift, steps = (1, 32, 1), 0.6, 0.05, 160
    k = 2 * math.pi / 32
    x = torch.arange(32, dtype=torch.float64)
    velocity = torch.zeros(3, *box, dtype=torch.float64)
    velocity[0] = drift
    velocity[1, 0, :, 0] = 1e-3 * torch.sin(k * x)
    state = equilibrium(torch.zeros(box, dtype=torch.float64), velocity)
    state = advance(state, Collision(tau=tau, walls=False), steps)
    wave = torch.fft.rfft(lbm.velocity(state, force=0.0)[1, 0, :, 0])[1]
    expected = -1j * 16 * 1e-3 * complex(math.cos(k * drift * steps), -math.sin(k * drift * steps))
    ratio = complex(wave) / expected
    rate = -math.log(abs(ratio)) / steps / k**2
    assert rate == pytest.approx((tau - 0.5) / 3, rel=0.015)
    assert abs(math.atan2(ratio.imag, ratio.real)) < 0.02


def test_an_obstacle_across_the_channel_makes_two_channels() -> None:
    rows, force = 4, 1e-5
    solid = torch.zeros(2 * rows + 1, 1, 1, dtype=torch.bool)
    solid[rows] = True
    indices = lbm.obstacle_indices(solid, half=False)
    collision = Collision(tau=MAGIC_TAU, force=force)
    viscosity = (MAGIC_TAU - 0.5) / 3
    velocity = torch.zeros(3, 2 * rows + 1, 1, 1, dtype=torch.float64)
    state = equilibrium(torch.zeros(2 * rows + 1, 1, 1, dtype=torch.float64), velocity)
    for _ in range(250):
        stepped = stream_collide(state, collision, impl="torch")
        lbm.reflect(state, stepped, indices)
        state = stepped
    profile = lbm.velocity(state, force=force)[0, :, 0, 0]
    expected = poiseuille(rows, force, viscosity)
    torch.testing.assert_close(profile[:rows], expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(profile[rows + 1 :], expected, rtol=1e-4, atol=0)
    assert float(state.sum()) == pytest.approx(0, abs=1e-12)


def test_obstacles_reflect_alike_in_both_storages() -> None:
    solid = torch.zeros(BOX, dtype=torch.bool)
    solid[2:4, 5:7, 1:5] = True  # touches the periodic edge in x, crosses the middle in z
    single = lbm.from_half_storage(lbm.to_half_storage(random_populations()))
    out, half = torch.zeros_like(single), lbm.to_half_storage(single)
    out_half = torch.zeros_like(half)
    lbm.reflect(single, out, lbm.obstacle_indices(solid, half=False))
    lbm.reflect(half, out_half, lbm.obstacle_indices(solid, half=True))
    assert out.any()
    assert torch.equal(lbm.from_half_storage(out_half), out)
    with pytest.raises(ValueError, match="walls free"):
        lbm.obstacle_indices(torch.ones(BOX, dtype=torch.bool), half=False)


def test_half_storage_pairs_cells_half_a_box_apart_and_keeps_eleven_bits() -> None:
    populations = random_populations().float()
    half = lbm.to_half_storage(populations)
    assert half.shape == (19, 5, 7, 3, 2)
    assert half.dtype == torch.float16
    assert float(half[4, 2, 3, 1, 1]) == pytest.approx(float(populations[4, 2, 3, 4]) * lbm.HALF_SCALE, rel=2**-11)
    torch.testing.assert_close(lbm.from_half_storage(half), populations, rtol=2**-11, atol=1e-9)
    assert torch.equal(lbm.to_half_storage(lbm.from_half_storage(half)), half)
    with pytest.raises(ValueError, match="even Z"):
        lbm.to_half_storage(populations[..., :5])


def test_half_storage_steps_as_the_reference_with_rounding() -> None:
    collision = Collision(tau=0.53, force=1e-4, smagorinsky=0.1)
    half = lbm.to_half_storage(random_populations())
    stepped = stream_collide(half, collision, impl="torch")
    expected = lbm.reference_update(lbm.from_half_storage(half), collision)
    assert torch.equal(stepped, lbm.to_half_storage(expected))


@pytest.mark.parametrize(("operator", "traceless"), OPERATORS)
@pytest.mark.parametrize("walls", [True, False])
def test_fused_update_is_the_reference(operator: str, traceless: bool, walls: bool) -> None:
    collision = Collision(
        tau=0.51,
        force=1e-3,
        smagorinsky=0.1,
        damping_length=3.0 if walls else 0.0,
        operator=operator,  # type: ignore[arg-type]
        trace_removal=traceless,
        walls=walls,
    )
    state = other = random_populations()
    eddy = lbm.EDDY_FACTOR * lbm.smagorinsky_by_row(state[0], collision).square()[:, None, None]
    for _ in range(5):
        state, other = lbm.reference_update(state, collision), fused_update(other, eddy, collision)
    torch.testing.assert_close(other, state, rtol=0, atol=1e-15)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_compiled_update_is_the_reference_over_many_steps() -> None:
    collision = Collision(tau=0.51, force=1e-5, smagorinsky=0.1)
    state = other = random_populations()
    for _ in range(50):
        state = stream_collide(state, collision, impl="torch")
        other = stream_collide(other, collision, impl="compiled")
    torch.testing.assert_close(other, state, rtol=0, atol=1e-15)


def test_step_leaves_its_input_alone_and_writes_into_out() -> None:
    state = random_populations()
    kept = state.clone()
    out = torch.full_like(state, math.nan)
    collision = Collision(tau=0.6)
    result = stream_collide(state, collision, impl="torch", out=out)
    assert result is out
    assert torch.equal(state, kept)
    assert torch.equal(out, stream_collide(state, collision, impl="torch"))


def test_auto_says_once_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    lbm._choose_automatically.cache_clear()
    with caplog.at_level(logging.INFO, logger="ergoflow.ops.lbm"):
        for _ in range(3):
            stream_collide(random_populations(), Collision(tau=0.6), impl="auto")
    assert [record.getMessage() for record in caplog.records] == [
        "lattice Boltzmann on cpu: impl torch (the tensors are not on a GPU)"
    ]


def test_triton_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="'triton' must be able to run here"):
        stream_collide(random_populations().float(), Collision(tau=0.6), impl="triton")


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(18, 4, 4, 4),
        torch.zeros(19, 4, 4),
        torch.zeros(19, 4, 4, 4, dtype=torch.float16),
        torch.zeros(19, 4, 4, 4, dtype=torch.int32),
        torch.zeros(19, 4, 4, 8)[..., ::2],
    ],
)
def test_other_arrays_than_populations_are_refused(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="populations must be"):
        stream_collide(bad, Collision(tau=0.6))


def test_out_must_be_another_lattice_of_the_same_kind() -> None:
    state = random_populations()
    for out in (state, state.float(), torch.empty(19, 5, 7, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="out must"):
            stream_collide(state, Collision(tau=0.6), out=out)


@pytest.mark.parametrize(
    "bad",
    [
        {"tau": 0.5},
        {"tau": 0.6, "smagorinsky": -0.1},
        {"tau": 0.6, "force": math.nan},
        {"tau": 0.6, "operator": "mrt"},
        {"tau": 0.6, "damping_length": 2.0, "walls": False},
    ],
)
def test_impossible_collisions_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        Collision(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="impl must be"):
        stream_collide(random_populations(), Collision(tau=0.6), impl="cuda")  # type: ignore[arg-type]
