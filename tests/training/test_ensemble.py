from __future__ import annotations

import math

import pytest
import torch

from ergoflow.training.ensemble import ensemble_loss

PLANE = (True, True)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def smooth(*shape: int, seed: int) -> torch.Tensor:
    """Fields whose modes fall off as k^-4."""
    size = shape[-1]
    k = torch.hypot(torch.fft.fftfreq(size, 1 / size)[:, None], torch.fft.rfftfreq(size, 1 / size)).double()
    return torch.fft.irfft2(torch.fft.rfft2(drawn(*shape, seed=seed)) / (1 + k) ** 4, s=(size, size))


@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize("periodic", [PLANE, (False, True), (False, False)])
def test_ensemble_of_the_right_law_has_the_score_of_that_law_whatever_its_size(members: int, periodic) -> None:
    """Of normal numbers: E|x - y| - E|x - x'| / 2 = 1/√π and E|x| = √(2/π); means of n × n are n times less."""
    truth, change = drawn(16, 2, 32, 32, seed=0), drawn(16, 2, 32, 32, seed=2)
    score = ensemble_loss(drawn(members, 16, 2, 32, 32, seed=1), truth, change, periodic=periodic)
    assert score.item() == pytest.approx(((1 + 1 / 2 + 1 / 4 + 1 / 8) / 4 + 1) / math.sqrt(2), rel=0.02)


@pytest.mark.parametrize("periodic", [PLANE, (False, True)])
def test_score_is_that_of_its_definition_number_by_number(periodic) -> None:
    members, truth, change = drawn(3, 2, 2, 6, 8, seed=0), drawn(2, 2, 6, 8, seed=1), drawn(2, 2, 6, 8, seed=2)

    def score(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        spread = sum((x[i] - x[j]).abs() for i in range(3) for j in range(3))
        return sum((x[i] - y).abs() for i in range(3)) / 3 - spread / (2 * 3 * 2)

    def modes(z: torch.Tensor) -> torch.Tensor:
        z = z if periodic[0] else torch.cat((z, z.flip(-2)), -2)
        return torch.view_as_real(torch.fft.rfft2(z))

    waves = torch.fft.fftfreq(6, 1 / 6) if periodic[0] else torch.fft.fftfreq(12, 1 / 12) / 2
    length = torch.hypot(waves[:, None], torch.fft.rfftfreq(8, 1 / 8))
    expected = 0.0
    for c in range(2):
        x, y, d = members[:, :, c], truth[:, c], change[:, c]
        means = [v.unflatten(-2, (3, 2)).mean(-2).unflatten(-1, (4, 2)).mean(-1) for v in (x, y)]
        expected += (score(x, y).mean() + score(*means).mean()) / 2 / d.abs().mean() / 2
        for n in (1, 2, 3):
            on = (length >= n - 0.5) & (length < n + 0.5)
            expected += score(modes(x), modes(y))[:, on].mean() / modes(d).abs()[:, on].mean() / 6
    torch.testing.assert_close(ensemble_loss(members, truth, change, periodic=periodic), torch.as_tensor(expected))


def test_score_and_its_gradient_are_not_rounded_to_half_precision_under_autocast() -> None:
    truth, change = drawn(2, 2, 16, 24, seed=1).float(), drawn(2, 2, 16, 24, seed=2).float()
    members = drawn(2, 2, 2, 16, 24, seed=0).float().requires_grad_()
    score = ensemble_loss(members, truth, change, periodic=PLANE)
    (gradient,) = torch.autograd.grad(score, members)
    with torch.autocast("cpu", torch.bfloat16):
        under = ensemble_loss(members, truth, change, periodic=PLANE)
    assert torch.equal(under, score)
    assert torch.equal(torch.autograd.grad(under, members)[0], gradient)


def test_ensemble_too_narrow_too_wide_or_beside_the_truth_scores_worse() -> None:
    truth, forecasts = drawn(8, 2, 32, 32, seed=0), drawn(2, 8, 2, 32, 32, seed=1)
    right = ensemble_loss(forecasts, truth, truth, periodic=PLANE)
    for wrong in (0 * forecasts, 0.5 * forecasts, 1.5 * forecasts, forecasts + 0.5):
        assert ensemble_loss(wrong, truth, truth, periodic=PLANE) > 1.03 * right


def test_ensemble_that_is_right_point_by_point_alone_scores_worse() -> None:
    truth, forecasts, change = (
        smooth(16, 1, 32, 32, seed=0),
        smooth(2, 16, 1, 32, 32, seed=1),
        smooth(16, 1, 32, 32, seed=2),
    )
    scrambled = truth.std() * drawn(2, 16, 1, 32, 32, seed=3)
    right, wrong = (ensemble_loss(x, truth, change, periodic=PLANE) for x in (forecasts, scrambled))
    assert wrong > 10 * right


def test_fine_scales_count_though_they_hold_little() -> None:
    """White noise of a twentieth of the field's size changes the law of its points by a thousandth."""
    truth, forecasts, change = (
        smooth(16, 1, 32, 32, seed=0),
        smooth(2, 16, 1, 32, 32, seed=1),
        smooth(16, 1, 32, 32, seed=2),
    )
    rough = forecasts + 0.05 * truth.std() * drawn(2, 16, 1, 32, 32, seed=3)
    right, wrong = (ensemble_loss(x, truth, change, periodic=PLANE) for x in (forecasts, rough))
    assert wrong > 1.5 * right


def test_waves_that_the_truth_never_has_count_up_to_the_finest_and_rounding_does_not() -> None:
    """A checkerboard along one axis is on shell 16 of 32 points. It counts where the flow has little there, a
    ten-thousandth of its strongest shell. Where the flow has only rounding there, as a solver's mask leaves it, no unit
    is left to count it in."""
    truth, forecasts, change = (smooth(*shape, 1, 32, 32, seed=s) for s, shape in enumerate([(16,), (2, 16), (16,)]))
    stripes = 5e-3 * truth.std() * (-1.0) ** torch.arange(32)
    full, striped = (ensemble_loss(x, truth, change, periodic=PLANE) for x in (forecasts, forecasts + stripes))
    assert striped > 1.2 * full
    fine = torch.hypot(torch.fft.fftfreq(32, 1 / 32)[:, None], torch.fft.rfftfreq(32, 1 / 32)) >= 12.5
    weak, masked = (torch.fft.irfft2(torch.fft.rfft2(change) * torch.where(fine, part, 1.0)) for part in (0.03, 1e-6))
    plain, striped = (ensemble_loss(x, truth, weak, periodic=PLANE) for x in (forecasts, forecasts + stripes))
    assert striped > 1.2 * plain
    # Nor do shells without a unit count as shells without an error.
    score = ensemble_loss(forecasts + stripes, truth, masked, periodic=PLANE)
    assert score.item() == pytest.approx(full.item(), rel=0.05)


def test_score_has_the_units_of_each_channel() -> None:
    fields = drawn(3, 4, 2, 16, 16, seed=1), drawn(4, 2, 16, 16, seed=0), drawn(4, 2, 16, 16, seed=2)
    units = torch.tensor([1.0, 1000.0]).reshape(2, 1, 1)
    scaled = (units * field for field in fields)
    torch.testing.assert_close(ensemble_loss(*scaled, periodic=PLANE), ensemble_loss(*fields, periodic=PLANE))


def test_two_members_on_both_sides_of_the_truth_are_as_good_as_a_fair_score_can_be() -> None:
    change = drawn(1, 1, 5, 7, seed=0)
    truth = torch.zeros_like(change)
    forecasts = torch.stack([truth + 1, truth - 3])
    # (1 + 3) / 2 - 4 / 2 = 0, and (5 + 1) / 2 - 4 / 2 = 1; a constant has no modes.
    assert ensemble_loss(forecasts, truth, change, periodic=PLANE).item() == pytest.approx(0, abs=1e-6)
    expected = (1 / change.abs().mean()).item()
    assert ensemble_loss(forecasts + 4, truth, change, periodic=PLANE).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("members", "grid", "message"),
    [(1, (8,), r"two members or more.*\(M, B, C, \*grid\)"), (2, (1, 8), "at least 2 points per side, got")],
)
def test_what_cannot_be_scored_is_refused(members: int, grid: tuple[int, ...], message: str) -> None:
    truth = torch.zeros(2, 1, *grid)
    with pytest.raises(ValueError, match=message):
        ensemble_loss(torch.zeros(members, *truth.shape), truth, truth, periodic=(True,) * len(grid))
