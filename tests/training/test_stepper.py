from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ergoflow.data.normalize import Normalizer
from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.training.stepper import NormalizedStep, NormalizedWindows, PhysicalStep


class Constant(nn.Module):
    """A model whose output is the same number per channel everywhere."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = values

    def forward(self, state: Tensor) -> Tensor:
        output = torch.tensor(self.values, dtype=state.dtype).reshape(-1, *(1,) * (state.ndim - 2))
        return output.expand(state.shape)


def field(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


NORMALIZER = Normalizer(
    mean=torch.tensor([2.0, -1.0]), std=torch.tensor([3.0, 0.5]), std_delta=torch.tensor([0.6, 0.2])
)


@pytest.mark.parametrize("grid", [(7,), (5, 3), (3, 5, 2)])
def test_state_and_increment_predictions_differ_by_scaled_persistence(grid: tuple[int, ...]) -> None:
    state, model = field(4, 2, *grid), Constant(1.0, 10.0)
    scale = torch.tensor([0.2, 0.4])
    as_state = NormalizedStep(model, "state")(state)
    as_increment = NormalizedStep(model, "increment", scale)(state)
    torch.testing.assert_close(as_state[:, 1], torch.full_like(state[:, 1], 10.0))
    torch.testing.assert_close(as_increment[:, 0], state[:, 0] + 0.2)
    torch.testing.assert_close(as_increment[:, 1], state[:, 1] + 4.0)


def test_zero_increments_are_persistence_bit_for_bit_in_physical_units_too() -> None:
    step = NormalizedStep(Constant(0.0, 0.0), "increment", torch.ones(2))
    state = field(3, 2, 5, 4)
    assert torch.equal(step(state), state)
    torch.testing.assert_close(PhysicalStep(step, NORMALIZER)(state), state)


def test_unit_output_of_an_increment_model_moves_the_physical_state_by_the_increments_spread() -> None:
    """x' = x + std * (std_delta / std) * 1 = x + std_delta."""
    scale = NORMALIZER.std_delta / NORMALIZER.std
    step = PhysicalStep(NormalizedStep(Constant(1.0, 1.0), "increment", scale), NORMALIZER)
    state = field(3, 2, 5, 4)
    torch.testing.assert_close(step(state) - state, NORMALIZER.std_delta.reshape(2, 1, 1).expand(3, 2, 5, 4))


def test_a_bounded_model_that_relaxes_ends_in_a_ball_and_leaves_for_ever_if_it_does_not() -> None:
    """z' = (1 - r) z + s pushes towards s / r, from inside and from outside; without r each step adds s."""
    state, scale = 100 * field(3, 2, 5, 4).double(), torch.tensor([0.2, 0.4])
    pushed, relaxed = state, state
    free = NormalizedStep(Constant(1.0, -1.0), "increment", scale)
    bound = NormalizedStep(Constant(1.0, -1.0), "increment", scale, relaxation=0.05)
    torch.testing.assert_close(bound(state), free(state) - 0.05 * state)
    for _ in range(500):
        pushed, relaxed = free(pushed), bound(relaxed)
    torch.testing.assert_close(
        pushed - state, torch.tensor([100.0, -200.0]).double().reshape(2, 1, 1).expand(3, 2, 5, 4)
    )
    torch.testing.assert_close(relaxed, torch.tensor([4.0, -8.0]).double().reshape(2, 1, 1).expand(3, 2, 5, 4))


@pytest.mark.parametrize("predict", ["state", "increment"])
@pytest.mark.parametrize("grid", [(7,), (5, 3), (3, 5, 2)])
def test_kept_means_stay_and_fluctuations_move_as_the_model_says(predict: str, grid: tuple[int, ...]) -> None:
    state = 3 + field(4, 2, *grid).double()
    scale = torch.tensor([0.2, 0.4])
    free, kept = (
        NormalizedStep(nn.Softplus(), predict, scale, relaxation=0.1, kept_means=means)(state) for means in ((), (1,))
    )
    axes = tuple(range(1, state.ndim - 1))
    torch.testing.assert_close(kept[:, 1].mean(axes), state[:, 1].mean(axes))
    assert (free[:, 1].mean(axes) - state[:, 1].mean(axes)).abs().min() > 0.01
    moved = kept[:, 1] - free[:, 1]
    torch.testing.assert_close(moved, moved.mean(axes, keepdim=True).expand_as(moved))
    assert torch.equal(kept[:, 0], free[:, 0])


def test_zero_output_of_a_state_model_is_the_climatological_mean() -> None:
    step = PhysicalStep(NormalizedStep(Constant(0.0, 0.0), "state"), NORMALIZER)
    result = step(field(3, 2, 5, 4))
    assert torch.equal(result[:, 0], torch.full((3, 5, 4), 2.0))
    assert torch.equal(result[:, 1], torch.full((3, 5, 4), -1.0))


def test_physical_step_shows_the_model_exactly_what_the_normaliser_makes() -> None:
    class Recorder(nn.Module):
        seen: Tensor

        def forward(self, state: Tensor) -> Tensor:
            Recorder.seen = state
            return state

    state = field(3, 2, 5, 4)
    result = PhysicalStep(NormalizedStep(Recorder(), "state"), NORMALIZER)(state)
    assert torch.equal(Recorder.seen, NORMALIZER.normalize(state))
    assert torch.equal(result, NORMALIZER.denormalize(NORMALIZER.normalize(state)))


def test_step_returns_the_precision_of_its_input_under_autocast() -> None:
    state = field(2, 2, 5)
    for predict in ("state", "increment"):
        step = NormalizedStep(nn.Conv1d(2, 2, 1), predict, torch.ones(2))
        with torch.autocast("cpu", torch.bfloat16):
            assert step(state).dtype == torch.float32


def test_physical_step_computes_in_the_precision_of_its_model_and_returns_that_of_its_input() -> None:
    step = PhysicalStep(NormalizedStep(nn.Conv1d(2, 2, 1), "state"), NORMALIZER)
    state = field(2, 2, 5)
    moved = step(state.double())
    assert moved.dtype == torch.float64
    torch.testing.assert_close(moved.float(), step(state))
    assert step(state.bfloat16()).dtype == torch.bfloat16


def test_a_state_of_whole_numbers_is_refused_rather_than_rounded() -> None:
    step = PhysicalStep(NormalizedStep(Constant(0.0, 0.0), "state"), NORMALIZER)
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64; use state\.float\(\)"):
        step(torch.ones(1, 2, 5, dtype=torch.int64))


def test_a_step_says_when_it_is_given_another_grid_than_it_was_trained_on() -> None:
    step = PhysicalStep(NormalizedStep(Constant(0.0, 0.0), "state"), NORMALIZER, grid=(5, 4))
    step(field(1, 2, 5, 4))  # warnings are errors here
    with pytest.warns(UserWarning, match=r"trained on a grid \(5, 4\), given \(10, 8\)"):
        step(field(1, 2, 10, 8))


def test_step_leaves_its_input_unchanged() -> None:
    state = field(2, 2, 5)
    before = state.clone()
    PhysicalStep(NormalizedStep(Constant(1.0, 2.0), "increment", torch.ones(2)), NORMALIZER)(state)
    assert torch.equal(state, before)


def test_normalized_windows_are_the_normalised_frames_of_the_same_windows() -> None:
    data = field(3, 9, 2, 5, 4)
    sampler = WindowSampler(3, 9, window=2, stride=2, batch_size=4, seed=1)
    source = ResidentWindows(data, sampler)
    windows = NormalizedWindows(source, NORMALIZER)
    assert windows.sampler is sampler
    pairs = list(zip(windows.epoch(2, start=1), source.epoch(2, start=1), strict=True))
    assert len(pairs) == sampler.batches_per_epoch - 1 > 0
    for normalized, physical in pairs:
        for frame in range(2):
            assert torch.equal(normalized[:, frame], NORMALIZER.normalize(physical[:, frame]))


@pytest.mark.parametrize(
    ("predict", "scale", "message"),
    [
        ("delta", None, 'must be "state" or "increment"'),
        ("increment", None, "got none"),
        ("increment", torch.ones(2, 1), r"got shape \(2, 1\)"),
    ],
)
def test_step_refuses_unknown_predictions_and_missing_scales(predict: str, scale: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormalizedStep(Constant(0.0), predict, scale)


def test_step_refuses_a_state_of_another_number_of_channels() -> None:
    step = NormalizedStep(Constant(0.0), "increment", torch.ones(2))
    with pytest.raises(ValueError, match=r"must be \(B, 2, \*grid\)"):
        step(field(2, 1, 5))
