from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ergoflow.models.operator import LatentOperator
from ergoflow.training.losses import relative_l2_loss, unitary_loss
from ergoflow.training.objectives import ObjectiveConfig, make_objective
from ergoflow.training.stepper import NormalizedStep


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Gain(nn.Module):
    """z -> w z: the unrolled state after k steps is w^k z."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, state: Tensor) -> Tensor:
        return self.weight * state


class WithOperator(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.operator = LatentOperator(2, mode, generator=seeded())

    def forward(self, state: Tensor) -> Tensor:
        return torch.einsum("ij,bjx->bix", self.operator.matrix, state)


def geometric_windows(ratio: float, frames: int) -> Tensor:
    """Windows whose frame k is ratio^k times the first, (B=3, frames, C=1, X=5)."""
    first = torch.randn(3, 1, 1, 5, generator=seeded(), dtype=torch.float64)
    return first * ratio ** torch.arange(frames, dtype=torch.float64).reshape(1, -1, 1, 1)


def test_unrolled_loss_and_gradient_equal_their_pencil_and_paper_values() -> None:
    """Truth (-1)^k z, forecast w^k z, w = 0.3: the error of step k is |w^k - (-1)^k|."""
    config = ObjectiveConfig(unroll=3, unitary_weight=0)
    model = Gain(0.3)
    losses = make_objective(config, generator=seeded())(NormalizedStep(model), geometric_windows(-1.0, 4))
    losses.total.backward()
    # errors 1 + w, 1 - w^2, 1 + w^3; derivatives 1, -2w, 3w^2
    assert losses.total.item() == pytest.approx((1.3 + 0.91 + 1.027) / 3, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx((1 - 0.6 + 0.27) / 3, rel=1e-12)
    assert losses.parts["relative_l2"].item() == losses.total.item()


def test_pushforward_keeps_the_loss_and_cuts_the_gradient_between_steps() -> None:
    config = ObjectiveConfig(unroll=3, pushforward=True, unitary_weight=0)
    model = Gain(0.3)
    losses = make_objective(config, generator=seeded())(NormalizedStep(model), geometric_windows(-1.0, 4))
    losses.total.backward()
    assert losses.total.item() == pytest.approx((1.3 + 0.91 + 1.027) / 3, rel=1e-12)
    # the input of step k is a constant w^(k-1): derivatives 1, -w, w^2
    assert model.weight.grad.item() == pytest.approx((1 - 0.3 + 0.09) / 3, rel=1e-12)


def test_one_step_training_looks_at_the_first_two_frames_alone() -> None:
    batch = geometric_windows(2.0, 4)
    batch[:, 2:] = float("nan")
    objective = make_objective(ObjectiveConfig(unitary_weight=0), generator=seeded())
    assert objective(NormalizedStep(Gain(2.0)), batch).total.item() == 0


def test_total_is_the_forward_error_plus_the_weighted_unitary_term() -> None:
    model = WithOperator("penalty")
    with torch.no_grad():
        model.operator.weight.mul_(1.5)  # gain 2.25 in every direction, so the term is 1.25
    batch = torch.randn(4, 2, 2, 5, generator=seeded())
    config = ObjectiveConfig(unitary_weight=0.3, unitary_samples=10)
    losses = make_objective(config, generator=seeded())(NormalizedStep(model), batch)
    error = relative_l2_loss(model(batch[:, 0]), batch[:, 1])
    assert losses.parts["unitary"].item() == pytest.approx(1.25, rel=1e-5)
    assert losses.total.item() == pytest.approx(error.item() + 0.3 * 1.25, rel=1e-5)


def test_unitary_term_uses_the_form_samples_and_generator_of_its_objective() -> None:
    model = WithOperator("penalty")
    with torch.no_grad():
        model.operator.weight.copy_(torch.tensor([[1.0, 0.7], [0.0, 0.4]]))
    batch = torch.randn(4, 2, 2, 5, generator=seeded())
    for form, samples in (("algorithm", 3), ("trace", 64), ("frobenius", 64)):
        config = ObjectiveConfig(unitary_form=form, unitary_samples=samples)
        losses = make_objective(config, generator=seeded(2))(NormalizedStep(model), batch)
        expected = unitary_loss(model.operator.matrix, num_samples=samples, form=form, generator=seeded(2))
        assert losses.parts["unitary"].item() == expected.item(), form


@pytest.mark.parametrize("mode", ["free", "exact"])
def test_unitary_term_leaves_free_and_exact_operators_alone(mode: str) -> None:
    model = WithOperator(mode)
    batch = torch.randn(4, 2, 2, 5, generator=seeded())
    losses = make_objective(ObjectiveConfig(unitary_weight=1.0), generator=seeded())(NormalizedStep(model), batch)
    assert list(losses.parts) == ["relative_l2"]


def test_unitary_term_on_a_model_without_operator_is_refused() -> None:
    objective = make_objective(ObjectiveConfig(), generator=seeded())
    with pytest.raises(ValueError, match=r"got Gain; set objective\.unitary_weight=0"):
        objective(NormalizedStep(Gain(1.0)), geometric_windows(1.0, 2))


def test_windows_shorter_than_the_unrolling_are_refused() -> None:
    objective = make_objective(ObjectiveConfig(unroll=3, unitary_weight=0), generator=seeded())
    with pytest.raises(ValueError, match="unroll=3 needs windows of 4 frames, got 3"):
        objective(NormalizedStep(Gain(1.0)), geometric_windows(1.0, 3))


@pytest.mark.parametrize(
    "settings",
    [
        {"unroll": 0},
        {"unitary_weight": -0.1},
        {"unitary_weight": float("nan")},
        {"unitary_form": "spectral"},
        {"unitary_samples": 0},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ObjectiveConfig(**settings)
