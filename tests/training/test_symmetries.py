from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ergoflow.data.info import DatasetInfo
from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.solvers import channel, kolmogorov
from ergoflow.solvers.channel import ChannelConfig
from ergoflow.solvers.kolmogorov import KolmogorovConfig
from ergoflow.training.distributed import LaunchContext, RankSampler
from ergoflow.training.symmetries import (
    AugmentedWindows,
    ChannelSymmetries,
    KolmogorovSymmetries,
    Moves,
    Symmetries,
    flow_symmetries,
)

# Unequal sides and lengths, a domain other than 2π, three periods of the force.
FLOW = KolmogorovConfig(grid=(20, 24), length=(3.0, 5.0), forcing_wavenumber=3, viscosity=0.02, dt=0.01)
KOLMOGOROV = KolmogorovSymmetries(grid=FLOW.grid, forcing_wavenumber=FLOW.forcing_wavenumber)
CHANNEL = ChannelSymmetries(grid=(12, 8))


def one(group: KolmogorovSymmetries | ChannelSymmetries, *parameters: int) -> Moves:
    return group.elements(*(np.array([value]) for value in parameters))


def field(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_elements(group: KolmogorovSymmetries | ChannelSymmetries) -> Iterator[tuple[int, ...]]:
    if isinstance(group, ChannelSymmetries):
        return itertools.product(range(group.grid[1]), range(2), range(2))
    half_periods = range(0, 2 * group.forcing_wavenumber, group.half_period_step)
    return itertools.product(range(group.grid[0]), half_periods, range(2))


# The truth: solutions go to solutions


@pytest.mark.parametrize("element", [(7, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1), (3, 5, 1)])
def test_kolmogorov_symmetries_commute_with_the_solver_to_round_off(element: tuple[int, int, int]) -> None:
    step = kolmogorov.make_step(FLOW, substeps=20, dtype=torch.float64)
    start = kolmogorov.initial_vorticity(FLOW, 1, seed=3, dtype=torch.float64)
    move = one(KOLMOGOROV, *element)
    window = torch.stack([start, step(start)], dim=1)  # (1, 2, 1, X, Y)
    moved = move(window)
    torch.testing.assert_close(step(moved[:, 0]), moved[:, 1], rtol=0, atol=1e-11)
    assert (moved[:, 1] - window[:, 1]).abs().max() > 1


@pytest.mark.parametrize("wrong", ["mirror without sign", "sign without mirror", "quarter period", "mirror in y"])
def test_near_misses_of_the_symmetries_do_not_commute_with_the_solver(wrong: str) -> None:
    """So the test above can fail."""
    flips, shifts, signs = {
        "mirror without sign": ((-1, 1), (0, 4), (1,)),
        "sign without mirror": ((1, 1), (0, 4), (-1,)),
        "quarter period": ((-1, 1), (0, 2), (-1,)),
        "mirror in y": ((1, -1), (0, 0), (-1,)),
    }[wrong]
    move = Moves(torch.tensor([flips]), torch.tensor([shifts]), torch.tensor([signs]))
    step = kolmogorov.make_step(FLOW, substeps=20, dtype=torch.float64)
    start = kolmogorov.initial_vorticity(FLOW, 1, seed=3, dtype=torch.float64)
    moved = move(torch.stack([start, step(start)], dim=1))
    assert (step(moved[:, 0]) - moved[:, 1]).abs().max() > 1e-2


@pytest.mark.parametrize("element", [(3, 0, 0), (0, 1, 0), (0, 0, 1), (5, 1, 1)])
def test_channel_symmetries_commute_with_the_lattice_solver_to_round_off(element: tuple[int, int, int]) -> None:
    """All planes of a box are moved alike; then each plane of the moved flow is the image of a plane of the flow."""
    config = ChannelConfig(box=(6, *CHANNEL.grid), collision="regularized", bulk_velocity=0.05)
    step = channel.make_step(config, substeps=10)
    units = config.units.friction_velocity

    def planes(velocity: Tensor) -> Tensor:
        return velocity.permute(2, 0, 1, 3)[:, None]  # (X, 1, 3, Y, Z)

    def advanced(velocity: Tensor) -> Tensor:
        state = step(channel.populations_from_velocity(velocity.contiguous(), config))
        return channel.plane_velocities(state, range(6), config).movedim(0, 2) * units

    def defect(move: Moves) -> float:
        moved = move(planes(start))[:, 0].permute(1, 2, 0, 3)
        return float((planes(advanced(moved)) - move(result)).abs().max())

    start = field(3, 12, 6, 8) * units
    result = planes(advanced(start))
    move = CHANNEL.elements(*(np.full(6, value) for value in element))
    assert defect(move) < 1e-13
    assert (move(result) - result).abs().max() > 1e-3
    if element[1:] != (0, 0):
        assert defect(Moves(move.flips, move.shifts, torch.ones_like(move.signs))) > 1e-4


# Group laws


@pytest.mark.parametrize(
    "group", [KolmogorovSymmetries(grid=(3, 8), forcing_wavenumber=2), ChannelSymmetries(grid=(4, 3))]
)
def test_symmetries_form_a_group_of_distinct_elements(group: KolmogorovSymmetries | ChannelSymmetries) -> None:
    window = field(1, 1, 1 if isinstance(group, KolmogorovSymmetries) else 3, *group.grid)
    elements = [one(group, *parameters) for parameters in all_elements(group)]
    images = {tuple(move(window).flatten().tolist()) for move in elements}
    assert len(images) == len(elements) == (4 * 2 * 3 if isinstance(group, KolmogorovSymmetries) else 4 * 3)
    assert tuple(window.flatten().tolist()) in images
    for first, second in itertools.product(elements, elements):
        assert tuple(second(first(window)).flatten().tolist()) in images


def test_shift_and_reflect_twice_is_a_period_of_the_force() -> None:
    window = field(1, 2, 1, *FLOW.grid)
    shift_reflect = one(KOLMOGOROV, 0, 1, 0)
    period = FLOW.grid[1] // FLOW.forcing_wavenumber
    assert torch.equal(shift_reflect(shift_reflect(window)), window.roll(-period, -1))
    assert torch.equal(shift_reflect(window)[..., 1, 0], -window[..., -1, period // 2])


@pytest.mark.parametrize(("size", "n", "step"), [(24, 3, 1), (128, 4, 1), (4, 4, 2), (9, 3, 2), (25, 3, 6), (10, 3, 3)])
def test_only_half_periods_that_are_whole_numbers_of_points_are_used(size: int, n: int, step: int) -> None:
    group = KolmogorovSymmetries(grid=(5, size), forcing_wavenumber=n)
    assert group.half_period_step == step
    assert step * size % (2 * n) == 0
    moves = group.draw(200, np.random.default_rng(0))
    allowed = {half * size // (2 * n) for half in range(0, 2 * n, step)}
    assert set(moves.shifts[:, 1].tolist()) == allowed


def test_channel_mirrors_turn_the_component_across_and_keep_the_walls_apart() -> None:
    window = field(1, 1, 3, 12, 8)
    mirrored = one(CHANNEL, 0, 1, 0)(window)
    assert torch.equal(mirrored[:, :, 0], window[:, :, 0].flip(-2))
    assert torch.equal(mirrored[:, :, 1], -window[:, :, 1].flip(-2))
    assert torch.equal(mirrored[:, :, 2], window[:, :, 2].flip(-2))
    spanwise = one(CHANNEL, 7, 0, 1)(window)
    assert torch.equal(spanwise[:, :, :2], window[:, :, :2].flip(-1))
    assert torch.equal(spanwise[:, :, 2], -window[:, :, 2].flip(-1))


def test_every_sample_is_moved_by_its_own_symmetry_and_all_its_frames_alike() -> None:
    group, windows = KolmogorovSymmetries(grid=(6, 8), forcing_wavenumber=2), field(32, 3, 1, 6, 8)
    moves = group.draw(32, np.random.default_rng(1))
    result = moves(windows)
    for b in range(32):
        alone = Moves(moves.flips[b : b + 1], moves.shifts[b : b + 1], moves.signs[b : b + 1])
        for t in range(3):
            assert torch.equal(result[b, t], alone(windows[b : b + 1, t : t + 1])[0, 0])
    assert len({tuple(row) for row in torch.cat([moves.flips, moves.shifts], 1).tolist()}) > 16


def test_elements_are_drawn_uniformly() -> None:
    group = KolmogorovSymmetries(grid=(4, 8), forcing_wavenumber=2)
    moves = group.draw(6400, np.random.default_rng(2))
    rows = torch.cat([moves.flips, moves.shifts, moves.signs], 1)
    _, counts = rows.unique(dim=0, return_counts=True)
    assert len(counts) == 32
    # 200 each; four standard deviations.
    assert counts.min() > 143
    assert counts.max() < 257


# Windows


def source(context: LaunchContext | None = None) -> ResidentWindows:
    data = torch.randn(4, 9, 1, 6, 8, generator=torch.Generator().manual_seed(4))
    sampler = WindowSampler(4, 9, window=2, batch_size=8, seed=5)
    return ResidentWindows(data, RankSampler(sampler, context) if context else sampler)


GROUP = KolmogorovSymmetries(grid=(6, 8), forcing_wavenumber=2)


def test_batches_depend_on_seed_epoch_and_number_alone() -> None:
    windows = AugmentedWindows(source(), GROUP, seed=5)
    whole = list(windows.epoch(3))
    assert windows.sampler.batches_per_epoch == len(whole) == 4
    for start in range(4):
        resumed = list(AugmentedWindows(source(), GROUP, seed=5).epoch(3, start))
        assert all(torch.equal(a, b) for a, b in zip(resumed, whole[start:], strict=True))
    assert not torch.equal(next(windows.epoch(4)), whole[0])
    other = AugmentedWindows(source(), GROUP, seed=6)
    assert not torch.equal(next(other.epoch(3)), whole[0])


class Recorder:
    """Symmetries that keep the first number of each stream they draw from."""

    def __init__(self) -> None:
        self.firsts: list[int] = []

    def draw(self, count: int, rng: np.random.Generator) -> Moves:
        self.firsts.append(rng.integers(2**62))
        return GROUP.draw(count, rng)


def test_every_batch_of_every_epoch_and_seed_has_draws_of_its_own() -> None:
    recorder = Recorder()
    for seed, epoch in itertools.product((5, 6), (0, 1, 2)):
        assert len(list(AugmentedWindows(source(), recorder, seed=seed).epoch(epoch))) == 4
    assert len(set(recorder.firsts)) == len(recorder.firsts) == 2 * 3 * 4


def test_draws_of_batch_zero_are_not_those_of_the_sampler() -> None:
    """numpy pads entropy with zeros: [seed, epoch, 0] alone would repeat the stream of [seed, epoch]."""
    recorder = Recorder()
    next(AugmentedWindows(source(), recorder, seed=5).epoch(3))
    assert recorder.firsts[0] != np.random.default_rng(np.random.SeedSequence([5, 3])).integers(2**62)


def test_processes_share_the_moves_of_the_whole_batch() -> None:
    whole = list(AugmentedWindows(source(), GROUP, seed=5).epoch(1))
    for rank in range(2):
        context = LaunchContext(rank=rank, world_size=2)
        share = AugmentedWindows(source(context), GROUP, seed=5, context=context).epoch(1)
        for mine, batch in zip(share, whole, strict=True):
            assert torch.equal(mine, batch[rank::2])


INFO = DatasetInfo(
    name="kf",
    fields=("vorticity",),
    grid=(16, 24),
    length=(1.0, 1.0),
    boundaries=("PERIODIC", "PERIODIC"),
    axes=("x", "y"),
    frame_seconds=0.1,
    parameters={"forcing_wavenumber": 3.0},
)
PLANES = replace(
    INFO,
    fields=("velocity_x", "velocity_y", "velocity_z"),
    boundaries=("WALL", "PERIODIC"),
    axes=("y", "z"),
    parameters={},
)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (INFO, KolmogorovSymmetries(grid=(16, 24), forcing_wavenumber=3)),
        (PLANES, ChannelSymmetries(grid=(16, 24))),
    ],
)
def test_data_set_knows_its_symmetries(info: DatasetInfo, expected: Symmetries) -> None:
    assert flow_symmetries(info) == expected


@pytest.mark.parametrize(
    "info",
    [
        replace(INFO, parameters={}),
        replace(INFO, boundaries=("WALL", "PERIODIC")),
        replace(PLANES, fields=("a", "b", "c")),
    ],
)
def test_unknown_flows_are_refused_in_one_line(info: DatasetInfo) -> None:
    with pytest.raises(ValueError, match=r"symmetries of .* are known, got .*; set training\.augment=false") as caught:
        flow_symmetries(info)
    assert "\n" not in str(caught.value)


def test_groups_without_grid_or_force_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(8, 8\) and 0; take them from the data set"):
        KolmogorovSymmetries(grid=(8, 8), forcing_wavenumber=0)
    with pytest.raises(ValueError, match=r"grid \(Y, Z\) was expected, got \(8,\); take"):
        ChannelSymmetries(grid=(8,))  # type: ignore[arg-type]
