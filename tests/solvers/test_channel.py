from __future__ import annotations

import dataclasses
import io
import math

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.lattice import first_moment
from ergoflow.numerics.trajectory import rollout
from ergoflow.ops import lbm
from ergoflow.solvers.channel import (
    ChannelConfig,
    block,
    initial_populations,
    make_step,
    moments,
    plane_velocities,
    populations_from_velocity,
    refine,
    reichardt_profile,
)

SMALL = ChannelConfig(box=(10, 12, 8), collision="regularized", trace_removal=True)
HALF = dataclasses.replace(SMALL, storage="float16")


def velocity_plus(populations: Tensor, config: ChannelConfig) -> Tensor:
    return lbm.velocity(populations, force=config.units.force) / config.units.friction_velocity


def saved_and_loaded(state: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded


def test_shape_is_y_x_z_and_pairs_in_half_storage() -> None:
    assert SMALL.shape == (19, 12, 10, 8)
    assert HALF.shape == (19, 12, 10, 4, 2)
    assert initial_populations(SMALL, seed=0).shape == SMALL.shape
    assert initial_populations(HALF, seed=0).shape == HALF.shape
    assert initial_populations(HALF, seed=0).dtype == torch.float16


def test_collision_carries_the_units_of_the_channel() -> None:
    config = ChannelConfig(box=(512, 192, 192), van_driest=True, collision="regularized", trace_removal=True)
    collision = config.lattice_collision()
    assert collision.tau == pytest.approx(0.510204, abs=5e-7)
    assert collision.force == pytest.approx(4.2368e-7, rel=1e-4)
    assert collision.damping_length == pytest.approx(26 / 1.875)
    assert (collision.operator, collision.trace_removal, collision.walls) == ("regularized", True, True)
    assert ChannelConfig(van_driest=False).lattice_collision().damping_length == 0


def test_start_is_reichardts_profile_with_solenoidal_modes_at_rest_on_the_walls() -> None:
    config = ChannelConfig(box=(64, 48, 48))
    state = initial_populations(config, seed=3, dtype=torch.float64)
    assert float(state.sum()) == pytest.approx(0, abs=1e-9)
    velocity = velocity_plus(state, config)  # (3, Y, X, Z)
    mean = velocity.mean(dim=(2, 3))
    torch.testing.assert_close(mean[0], reichardt_profile(config), rtol=0, atol=1e-9)
    assert float(mean[0].mean()) == pytest.approx(15.7, abs=0.4)
    fluctuation = velocity - mean[:, :, None, None]
    assert 1 < float(fluctuation.square().sum(dim=0).mean().sqrt()) < 6
    # v grows as the square of the distance from the wall: 9 times as fast from ½ to 1½ cells.
    assert float(fluctuation[1, 1].norm() / fluctuation[1, 0].norm()) == pytest.approx(9, rel=0.25)
    along_y = (fluctuation[1, 2:] - fluctuation[1, :-2]) / 2
    others = [(f.roll(-1, d) - f.roll(1, d))[1:-1] / 2 for f, d in ((fluctuation[0], 1), (fluctuation[2], 2))]
    divergence = along_y + others[0] + others[1]
    # Central differences see sin(k)/k of a derivative: 10 % less at the largest wavenumber.
    assert float(divergence.norm()) < 0.2 * float(along_y.norm())


def test_start_depends_on_its_seed_alone() -> None:
    first, again, other = (initial_populations(SMALL, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_populations_carry_the_velocity_they_were_made_of() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, z = SMALL.box
    velocity = 0.05 * torch.randn((3, y, x, z), generator=generator, dtype=torch.float64)
    excess = 0.01 * torch.randn((y, x, z), generator=generator, dtype=torch.float64)
    stress = 1e-3 * torch.randn((3, 3, y, x, z), generator=generator, dtype=torch.float64)
    stress = stress + stress.transpose(0, 1)
    state = populations_from_velocity(velocity, SMALL, excess=excess, stress=stress)
    found_excess, found_velocity, relaxed = moments(state, SMALL)
    torch.testing.assert_close(found_excess, excess, rtol=0, atol=1e-15)
    torch.testing.assert_close(found_velocity, velocity, rtol=0, atol=1e-15)
    torch.testing.assert_close(relaxed / (1 - 1 / SMALL.units.tau), stress, rtol=0, atol=1e-14)
    torch.testing.assert_close(lbm.velocity(state, force=SMALL.units.force), velocity, rtol=0, atol=1e-15)
    torch.testing.assert_close(lbm.density(state), 1 + excess, rtol=0, atol=1e-15)


@pytest.mark.parametrize("config", [SMALL, HALF], ids=["float32", "float16"])
def test_a_run_saved_loaded_and_continued_is_the_same_run(config: ChannelConfig) -> None:
    step = make_step(config, substeps=3)
    start = initial_populations(config, seed=5)
    kept = start.clone()
    straight = list(rollout(step, start, 4))[-1]
    middle = saved_and_loaded(list(rollout(step, start, 2))[-1])
    resumed = list(rollout(make_step(config, substeps=3), middle, 2))[-1]
    assert torch.equal(resumed, straight)
    assert torch.equal(start, kept)
    assert not torch.equal(straight, start)


def test_substeps_are_steps() -> None:
    state = initial_populations(SMALL, seed=0, dtype=torch.float64)
    one = make_step(SMALL)
    assert torch.equal(make_step(SMALL, substeps=2)(state), one(one(state)))


def test_wall_friction_takes_what_the_force_gives_in_a_laminar_channel() -> None:
    # Re_τ = 1: a parabola with its wall gradient u_τ²/ν; momentum of the box stays as it is.
    config = ChannelConfig(box=(4, 8, 4), reynolds_tau=1.0, smagorinsky=0.0)
    units = config.units
    y = torch.arange(8, dtype=torch.float64) + 0.5
    velocity = torch.zeros(3, 8, 4, 4, dtype=torch.float64)
    velocity[0] = (units.force / (2 * units.viscosity) * y * (8 - y))[:, None, None]
    state = make_step(config, substeps=500)(populations_from_velocity(velocity, config))
    momentum = first_moment(state)[0].sum()
    later = first_moment(make_step(config)(state))[0].sum()
    assert float((later - momentum).abs()) < 1e-3 * units.force * 8 * 16
    # BGK slips at the wall by a constant of order (Δx/δ)² of the flow.
    profile = velocity_plus(state, config)[0].mean(dim=(1, 2))
    torch.testing.assert_close(profile, y * (8 - y) / 32, rtol=0, atol=0.01)


def test_plane_velocities_are_columns_in_units_of_u_tau() -> None:
    for config in (SMALL, HALF):
        state = initial_populations(config, seed=0)
        planes = plane_velocities(state, (7, 2), config)
        assert planes.shape == (2, 3, 12, 8)
        for plane, x in zip(planes, (7, 2), strict=True):
            torch.testing.assert_close(plane, velocity_plus(state, config)[:, :, x])
            assert float(plane[0].mean()) == pytest.approx(15.7, abs=4)


def test_half_storage_follows_single_storage() -> None:
    single = initial_populations(SMALL, seed=0)
    half = initial_populations(HALF, seed=0)
    for _ in range(10):
        single, half = make_step(SMALL)(single), make_step(HALF)(half)
    # Each step rounds populations of about 0.02 to 11 bits: noise of some 1e-5, u_τ is 6e-3.
    assert float((velocity_plus(single, SMALL) - velocity_plus(half, HALF)).abs().max()) < 0.05


def test_refined_state_continues_the_coarse_one() -> None:
    coarse = ChannelConfig(box=(16, 24, 12), smagorinsky=0.0)
    fine = dataclasses.replace(coarse, box=(32, 48, 24))
    y, x, z = (torch.arange(n, dtype=torch.float64) + 0.5 for n in (24, 16, 12))
    velocity = torch.zeros(3, 24, 16, 12, dtype=torch.float64)
    slope = 1e-3
    velocity[0] = (slope * torch.minimum(y, 24 - y))[:, None, None]
    velocity[2] = 1e-3 * torch.sin(2 * math.pi * x / 16)[None, :, None] * torch.ones(24, 1, 12)
    stress = torch.zeros(3, 3, 24, 16, 12, dtype=torch.float64)
    stress[0, 1] = stress[1, 0] = -coarse.units.tau / 3 * (slope * torch.sign(12 - y))[:, None, None]
    excess = 1e-3 * torch.cos(2 * math.pi * z / 12) * torch.ones(24, 16, 1)
    refined = refine(populations_from_velocity(velocity, coarse, excess=excess, stress=stress), coarse, fine)
    assert refined.shape == fine.shape
    found_excess, found, relaxed = moments(refined, fine)
    # The linear profile vanishes at the wall and is met exactly, at half the slope per cell; so is its stress.
    rows = torch.arange(48, dtype=torch.float64) + 0.5
    expected = slope / 2 * torch.minimum(rows, 48 - rows)
    away = (rows - 24).abs() > 2
    torch.testing.assert_close(found[0, away], expected[away, None, None].expand(-1, 32, 24), rtol=0, atol=1e-15)
    found_stress = relaxed[0, 1] / (1 - 1 / fine.units.tau)
    exact = (-fine.units.tau / 3 * slope / 2 * torch.sign(24 - rows))[away, None, None]
    torch.testing.assert_close(found_stress[away], exact.expand(-1, 32, 24), rtol=1e-12, atol=0)
    x_fine = (torch.arange(32, dtype=torch.float64) + 0.5) / 2
    wave = 1e-3 * torch.sin(2 * math.pi * x_fine / 16)
    # Linear interpolation errs by (kΔ)²/8 of the wave, 2 %, and more towards the wall, where it is drawn to zero.
    torch.testing.assert_close(found[2, 24], wave[:, None].expand(-1, 24), rtol=0, atol=3e-5)
    # Density does not bend at the wall.
    z_fine = (torch.arange(24, dtype=torch.float64) + 0.5) / 2
    wave = 1e-3 * torch.cos(2 * math.pi * z_fine / 12)
    torch.testing.assert_close(found_excess, wave.expand(48, 32, -1), rtol=0, atol=3e-5)
    assert float(found_excess.mean()) == pytest.approx(float(excess.mean()), abs=1e-15)


def test_refine_wants_twice_the_cells_of_the_same_flow() -> None:
    state = initial_populations(SMALL, seed=0)
    with pytest.raises(ValueError, match="fine box must be twice"):
        refine(state, SMALL, dataclasses.replace(SMALL, box=(20, 24, 15)))
    with pytest.raises(ValueError, match="must share"):
        refine(state, SMALL, dataclasses.replace(SMALL, box=(20, 24, 16), bulk_velocity=0.05))


def test_the_papers_block_has_its_size_and_place() -> None:
    solid = block(ChannelConfig())
    assert solid.shape == (192, 1024, 192)
    assert int(solid.sum()) == 20 * 20 * 100
    y, x, z = torch.nonzero(solid, as_tuple=True)
    assert (int(x.min()), int(x.max())) == (192, 211)
    assert (int(y.min()), int(y.max())) == (86, 105)
    assert (int(z.min()), int(z.max())) == (46, 145)
    assert int(block(ChannelConfig(box=(512, 96, 96))).sum()) == 10 * 10 * 50


def test_block_start_is_at_rest_and_the_block_holds_the_flow_back() -> None:
    config = ChannelConfig(box=(24, 20, 16), init="block", reynolds_tau=20.0)
    start = initial_populations(config, seed=0, dtype=torch.float64)
    assert float(velocity_plus(start, config).abs().max()) < 1e-2
    solid = block(config)
    free, blocked = make_step(config, substeps=60), make_step(config, substeps=60, obstacle=solid)
    fluid = ~solid
    speeds = [float(velocity_plus(step(start), config)[0][fluid].mean()) for step in (free, blocked)]
    assert 0 < speeds[1] < 0.99 * speeds[0]
    assert float(blocked(start).sum()) == pytest.approx(float(start.sum()), abs=1e-12)


@pytest.mark.parametrize(
    "bad",
    [
        {"box": (10, 12)},
        {"box": (10, 3, 8)},
        {"box": (10, 12, 9), "storage": "float16"},
        {"storage": "bfloat16"},
        {"init": "rest"},
        {"collision": "mrt"},
        {"smagorinsky": -1.0},
        {"reynolds_tau": 0.0},
    ],
)
def test_impossible_configs_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        ChannelConfig(**bad)  # type: ignore[arg-type]


def test_other_states_than_the_configs_are_refused() -> None:
    step = make_step(SMALL)
    for bad in (torch.zeros(19, 12, 10, 9), initial_populations(HALF, seed=0), torch.zeros(12, 10, 8)):
        with pytest.raises(ValueError, match="populations must be"):
            step(bad)
    with pytest.raises(ValueError, match="x must lie in"):
        plane_velocities(initial_populations(SMALL, seed=0), (3, 10), SMALL)
    with pytest.raises(ValueError, match="substeps"):
        make_step(SMALL, substeps=0)
