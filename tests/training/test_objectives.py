from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.models.operator import LatentOperator
from ergoflow.training.checkpoint import STATE_FILE, load_state
from ergoflow.training.dissipation import shell_samples, state_norm
from ergoflow.training.ensemble import ensemble_loss
from ergoflow.training.losses import log_spectrum_loss, relative_l2_loss, sobolev_loss, unitary_loss
from ergoflow.training.objectives import Losses, ObjectiveConfig, make_objective
from ergoflow.training.stepper import NormalizedStep
from ergoflow.training.trainer import Progress, TrainingConfig, TrainingInterrupted, train


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


class Widened(nn.Module):
    """A step that keeps a hundred times its input for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 5, generator=seeded(1), dtype=torch.float64))

    def forward(self, state: Tensor) -> Tensor:
        return state + (state.unsqueeze(-2) * self.weight).sin().mean(-2)


def test_recomputed_steps_have_the_same_gradients_and_keep_the_states_alone() -> None:
    def run(recompute: bool) -> tuple[Tensor, Tensor, int]:
        kept = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        config = ObjectiveConfig(unroll=4, noise=0.1, recompute=recompute, unitary_weight=0)
        model, objective = Widened(), make_objective(config, generator=seeded())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = objective(NormalizedStep(model), geometric_windows(-1.0, 5)).total
        held = sum(kept)
        total.backward()
        assert model.weight.grad is not None
        return total.detach(), model.weight.grad, held

    total, gradient, held = run(recompute=True)
    plain_total, plain_gradient, plain_held = run(recompute=False)
    assert torch.equal(total, plain_total)
    assert torch.equal(gradient, plain_gradient)
    assert plain_held > 4 * 3 * 500 > 10 * held


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
    ("settings", "expected"),
    [
        # One step for 40 % of the run, then three equal parts of the rest.
        ({"unroll": 8, "unroll_from": 0.4}, {0.0: 1, 0.39: 1, 0.4: 2, 0.59: 2, 0.61: 4, 0.79: 4, 0.81: 8, 1.0: 8}),
        # A length that is no power of two ends the doubling.
        ({"unroll": 5, "unroll_from": 0.7}, {0.69: 1, 0.7: 2, 0.79: 2, 0.81: 4, 0.89: 4, 0.91: 5, 1.0: 5}),
        ({"unroll": 2, "unroll_from": 0.5}, {0.49: 1, 0.5: 2, 1.0: 2}),
        ({"unroll": 3}, {0.0: 3, 0.5: 3, 1.0: 3}),
        ({"unroll": 1, "unroll_from": 0.5}, {0.0: 1, 0.5: 1, 1.0: 1}),
    ],
)
def test_curriculum_doubles_the_unrolling_in_equal_parts(settings: dict, expected: dict[float, int]) -> None:
    config = ObjectiveConfig(**settings)
    assert {progress: config.unroll_at(progress) for progress in expected} == expected
    assert config.window == config.unroll + 1


def test_loss_averages_the_steps_that_the_curriculum_has_reached() -> None:
    config = ObjectiveConfig(unroll=3, unroll_from=0.5, unitary_weight=0)
    objective, batch = make_objective(config, generator=seeded()), geometric_windows(-1.0, 4)
    step = NormalizedStep(Gain(0.3))
    # errors 1.3, 0.91, 1.027
    for progress, expected in ((0.2, 1.3), (0.6, (1.3 + 0.91) / 2), (0.9, (1.3 + 0.91 + 1.027) / 3)):
        assert objective(step, batch, progress).total.item() == pytest.approx(expected, rel=1e-12)
    assert objective(step, batch).total.item() == pytest.approx((1.3 + 0.91 + 1.027) / 3, rel=1e-12)


def test_noise_disturbs_the_first_frame_and_no_other() -> None:
    """An identity step carries the noise n along: its error is |n| / |window_k| against undisturbed frames."""
    batch = geometric_windows(1.0, 3)
    config = ObjectiveConfig(unroll=2, noise=0.2, unitary_weight=0)
    losses = make_objective(config, generator=seeded(3))(NormalizedStep(Gain(1.0)), batch)
    noise = 0.2 * torch.randn(3, 1, 5, generator=seeded(3), dtype=torch.float64)
    expected = (noise.flatten(1).norm(dim=1) / batch[:, 1].flatten(1).norm(dim=1)).mean()
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_without_noise_the_generator_is_not_touched() -> None:
    generator = seeded()
    make_objective(ObjectiveConfig(unitary_weight=0), generator=generator)(NormalizedStep(Gain(1.0)), windows(2))
    assert torch.equal(generator.get_state(), seeded().get_state())


@pytest.mark.parametrize("walls", [{}, {"periodic": (False, True)}])
def test_members_start_apart_and_are_scored_together_while_the_old_error_stays_in_the_log(walls: dict) -> None:
    config = ObjectiveConfig(unroll=2, noise=0.1, members=3, unitary_weight=0)
    batch = windows(3)
    losses = make_objective(config, generator=seeded(), **walls)(NormalizedStep(Gain(0.9)), batch)
    first = torch.cat([batch[:, 0]] * 3)
    noisy = first + 0.1 * torch.randn(first.shape, generator=seeded(), dtype=first.dtype)
    states = [(0.9**k * noisy).unflatten(0, (3, -1)) for k in (1, 2)]
    change, periodic = batch[:, 1] - batch[:, 0], walls.get("periodic", (True, True))
    scores = [ensemble_loss(state, batch[:, k], change, periodic=periodic) for k, state in enumerate(states, start=1)]
    torch.testing.assert_close(losses.total, torch.stack(scores).mean(), check_dtype=False)
    errors = [relative_l2_loss(state[m], batch[:, k]) for k, state in enumerate(states, start=1) for m in range(3)]
    torch.testing.assert_close(losses.parts["relative_l2"], torch.stack(errors).mean(), check_dtype=False)
    assert losses.total.requires_grad
    assert not losses.parts["relative_l2"].requires_grad


def windows(frames: int, channels: int = 2) -> Tensor:
    """Rough windows (B=3, frames, C, X=7, Y=9)."""
    return torch.randn(3, frames, channels, 7, 9, generator=seeded(), dtype=torch.float64)


@pytest.mark.parametrize(
    "domain",
    [{}, {"length": (1.0, 3.0)}, {"periodic": (False, True)}, {"periodic": (False, True), "length": (1.0, 3.0)}],
)
def test_sobolev_order_replaces_the_error_and_keeps_the_old_one_in_the_log(domain: dict) -> None:
    batch, model = windows(3), Gain(0.7)
    config = ObjectiveConfig(unroll=2, sobolev_order=1, unitary_weight=0)
    losses = make_objective(config, generator=seeded(), **domain)(NormalizedStep(model), batch)
    forecasts = [(0.7 * batch[:, 0], batch[:, 1]), (0.49 * batch[:, 0], batch[:, 2])]
    settings = {"periodic": (True, True), **domain}
    expected = sum(sobolev_loss(pred, true, order=1, **settings) for pred, true in forecasts) / 2
    assert losses.total.item() == losses.parts["sobolev"].item() == pytest.approx(expected.item(), rel=1e-12)
    plain = sum(relative_l2_loss(pred, true) for pred, true in forecasts) / 2
    assert losses.parts["relative_l2"].item() == pytest.approx(plain.item(), rel=1e-12)
    assert not losses.parts["relative_l2"].requires_grad


def test_spectral_weight_adds_the_difference_of_log_spectra() -> None:
    batch = windows(2)
    config = ObjectiveConfig(spectral_weight=0.05, unitary_weight=0)
    losses = make_objective(config, generator=seeded())(NormalizedStep(Gain(0.7)), batch)
    spectral = log_spectrum_loss(0.7 * batch[:, 0], batch[:, 1])
    assert losses.parts["spectral"].item() == pytest.approx(spectral.item(), rel=1e-12)
    expected = losses.parts["relative_l2"] + 0.05 * spectral
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_spectral_term_between_walls_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got periodic=\(False, True\); set objective\.spectral_weight=0"):
        make_objective(ObjectiveConfig(spectral_weight=0.1), generator=seeded(), periodic=(False, True))


def test_dissipativity_term_is_measured_on_a_shell_of_the_training_radius() -> None:
    batch = windows(2)
    config = ObjectiveConfig(
        dissipativity_weight=0.01, dissipativity_scale=0.25, dissipativity_shell=(2.0, 3.0), unitary_weight=0
    )
    losses = make_objective(config, generator=seeded(5), radius=1.5)(NormalizedStep(Gain(0.75)), batch)
    states = shell_samples(batch[:, 0], 3.0, 4.5, generator=seeded(5))
    expected = 0.5**2 * state_norm(states).square().mean().item()
    assert 0.25 * 9 < expected < 0.25 * 4.5**2
    assert losses.parts["dissipativity"].item() == pytest.approx(expected, rel=1e-10)
    total = losses.parts["relative_l2"].item() + 0.01 * expected
    assert losses.total.item() == pytest.approx(total, rel=1e-12)


def test_dissipative_linear_map_has_no_dissipativity_loss() -> None:
    objective = make_objective(
        ObjectiveConfig(dissipativity_weight=1.0, unitary_weight=0), generator=seeded(), radius=1
    )
    assert objective(NormalizedStep(Gain(0.5)), windows(2)).parts["dissipativity"].item() == 0


def test_dissipativity_without_a_radius_is_refused() -> None:
    with pytest.raises(ValueError, match=r"as `radius`, got None; pass it, or set objective\.dissipativity_weight=0"):
        make_objective(ObjectiveConfig(dissipativity_weight=0.01), generator=seeded())


class Tall(nn.Module):
    """A small model with a matrix for Muon, a bias for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(16, 16, generator=seeded()))
        self.bias = nn.Parameter(torch.zeros(16, 1))

    def forward(self, state: Tensor) -> Tensor:
        return self.weight @ state + self.bias


def fit(folder: Path, objective, *, resume: bool = False, on_progress=None) -> None:
    data = torch.randn(4, 8, 16, 6, generator=seeded(2))
    config = TrainingConfig(
        epochs=2, batch_size=4, optimizer="muon", learning_rate=1e-2, weight_decay=0.1, log_every=1, tensorboard=False
    )
    train(
        NormalizedStep(Tall(), "increment", torch.ones(16)),
        objective,
        ResidentWindows(data, WindowSampler(4, 8, window=5, batch_size=4, seed=3)),
        config=config,
        folder=folder,
        seed=0,
        resume=resume,
        on_progress=on_progress,
    )


def test_trainer_tells_the_objective_how_far_the_run_is(tmp_path: Path) -> None:
    class Watching:
        generator = seeded()
        seen: tuple[float, ...] = ()

        def __call__(self, step: NormalizedStep, batch: Tensor, progress: float = 1.0) -> Losses:
            self.seen += (progress,)
            loss = step(batch[:, 0]).square().mean()
            return Losses(loss, {"energy": loss})

    watching = Watching()
    fit(tmp_path, watching)
    assert watching.seen == tuple(k / 8 for k in range(8))


def test_run_with_curriculum_noise_and_shell_resumes_bit_for_bit(tmp_path: Path) -> None:
    def objective():
        config = ObjectiveConfig(
            unroll=4, unroll_from=0.3, noise=0.1, sobolev_order=1, dissipativity_weight=0.1, unitary_weight=0
        )
        return make_objective(config, generator=seeded(1), radius=1.2)

    def stop(progress: Progress) -> None:
        if progress.step in (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)

    fit(tmp_path / "whole", objective())
    for _ in range(2):
        with pytest.raises(TrainingInterrupted):
            fit(tmp_path / "parts", objective(), resume=True, on_progress=stop)
    fit(tmp_path / "parts", objective(), resume=True)
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    whole, parts = (load_state(tmp_path / name / STATE_FILE) for name in ("whole", "parts"))
    assert torch.equal(whole["generators"][0], parts["generators"][0])
    for number, buffers in whole["optimizer"]["state"].items():
        for name, value in buffers.items():
            assert torch.equal(parts["optimizer"]["state"][number][name], value), name


@pytest.mark.parametrize(
    "settings",
    [
        {"unroll": 0},
        {"unroll_from": 1.0},
        {"unroll_from": -0.1},
        {"noise": -1.0},
        {"members": 0},
        {"members": 2},
        {"members": 2, "noise": 0.1, "sobolev_order": 1},
        {"sobolev_order": -1},
        {"spectral_weight": float("nan")},
        {"dissipativity_weight": -0.1},
        {"dissipativity_scale": 1.0},
        {"dissipativity_shell": (2.0, 1.0)},
        {"dissipativity_shell": (0.0, 1.0)},
        {"unitary_weight": -0.1},
        {"unitary_weight": float("nan")},
        {"unitary_form": "spectral"},
        {"unitary_samples": 0},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ObjectiveConfig(**settings)
