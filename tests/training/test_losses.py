from __future__ import annotations

import math

import pytest
import torch

from ergoflow.training.losses import relative_l2_loss, unitary_loss

FORMS = ("algorithm", "trace", "frobenius")


def random_orthogonal(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def test_relative_l2_is_the_mean_of_ratios_and_not_the_ratio_of_means() -> None:
    true = torch.ones(2, 3, 5, 7)
    true[1] *= 100
    pred = true.clone()
    pred[0] *= 1.5  # error 0.5 on the small sample
    pred[1] *= 0.9  # error 0.1 on the large one
    assert relative_l2_loss(pred, true).item() == pytest.approx(0.3, rel=1e-6)


def test_relative_l2_takes_one_norm_over_all_channels() -> None:
    true, pred = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    true[0, 0], true[0, 1] = 3, 4
    pred[0, 0], pred[0, 1] = (
        3,
        9,
    )  # error norm 5 sqrt 4, true norm 5 sqrt 4; per channel it would be (0 + 5/4) / 2
    assert relative_l2_loss(pred, true).item() == pytest.approx(1.0)


def test_relative_l2_of_a_perfect_forecast_is_zero_with_a_zero_gradient() -> None:
    pred = torch.randn(2, 1, 5, generator=seeded()).requires_grad_()
    loss = relative_l2_loss(pred, pred.detach().clone())
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(pred.grad, torch.zeros_like(pred))


def test_relative_l2_is_not_rounded_to_half_precision_under_autocast() -> None:
    true = torch.randn(4, 1, 9, 5, generator=seeded())
    pred = true * 1.001
    with torch.autocast("cpu", torch.bfloat16):
        loss = relative_l2_loss(pred, true)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1e-3, rel=1e-3)


def test_relative_l2_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        relative_l2_loss(torch.zeros(2, 1, 4), torch.ones(2, 3, 4))


@pytest.mark.parametrize("form", FORMS)
def test_unitary_loss_of_an_orthogonal_matrix_is_zero(form: str) -> None:
    loss = unitary_loss(random_orthogonal(17), form=form, generator=seeded())
    assert loss.item() == pytest.approx(0, abs=1e-13)


@pytest.mark.parametrize("gain", [0.5, 1.3])
def test_unitary_loss_of_a_scaled_orthogonal_matrix_is_its_excess_energy(gain: float) -> None:
    matrix, excess = gain * random_orthogonal(9), abs(gain**2 - 1)
    for form, expected in (("algorithm", excess), ("trace", excess), ("frobenius", 3 * excess)):
        loss = unitary_loss(matrix, num_samples=5, form=form, generator=seeded())
        assert loss.item() == pytest.approx(expected, rel=1e-12), form


def test_unitary_loss_is_positive_for_non_unitary_matrix_of_unit_mean_gain() -> None:
    matrix = torch.diag(torch.tensor([math.sqrt(1.75), 0.5], dtype=torch.float64))
    assert unitary_loss(matrix, form="trace", generator=seeded()).item() == pytest.approx(0, abs=1e-15)
    # v = (cos a, sin a): gain - 1 = 0.75 cos 2a, whose mean absolute value is 0.75 * 2 / pi
    algorithm = unitary_loss(matrix, num_samples=200_000, form="algorithm", generator=seeded())
    assert algorithm.item() == pytest.approx(1.5 / math.pi, rel=5e-3)
    exact = unitary_loss(matrix, form="frobenius", generator=seeded())
    assert exact.item() == pytest.approx(0.75 * math.sqrt(2), rel=1e-12)


def test_unitary_loss_of_one_sample_is_the_gain_of_the_drawn_vector() -> None:
    """||G v||^2, not ||G'v||^2: the two have one distribution, but not one value."""
    shear = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    x, y = torch.randn(1, 2, generator=seeded())[0].tolist()
    gain = ((x + 2 * y) ** 2 + y**2) / (x**2 + y**2)
    loss = unitary_loss(shear, num_samples=1, generator=seeded())
    assert loss.item() == pytest.approx(abs(gain - 1), rel=1e-5)


def test_unitary_loss_measures_gains_of_the_matrix_and_not_of_its_diagonal() -> None:
    shear = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    assert unitary_loss(shear, generator=seeded()).item() > 0.5
    rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    assert unitary_loss(rotation, generator=seeded()).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_descending_the_unitary_loss_shrinks_an_expanding_matrix(form: str) -> None:
    matrix = (1.2 * random_orthogonal(6)).requires_grad_()
    unitary_loss(matrix, form=form, generator=seeded()).backward()
    shrunk = (matrix - 1e-3 * matrix.grad).detach()
    assert torch.linalg.svdvals(shrunk).max() < 1.2


def test_unitary_loss_stays_in_full_precision_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = unitary_loss(random_orthogonal(64).float(), generator=seeded())
    assert loss.dtype == torch.float32
    assert loss.item() < 1e-5


def test_unitary_loss_depends_on_its_generator_alone() -> None:
    matrix = torch.randn(5, 5, generator=seeded())
    first = unitary_loss(matrix, generator=torch.Generator().manual_seed(1))
    torch.rand(3)
    assert torch.equal(first, unitary_loss(matrix, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(first, unitary_loss(matrix, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    ("matrix", "settings", "message"),
    [
        (torch.ones(3, 4), {}, "square"),
        (torch.ones(3), {}, "square"),
        (torch.eye(3), {"form": "nuclear"}, "one of algorithm"),
        (torch.eye(3), {"num_samples": 0}, "at least 1"),
    ],
)
def test_unitary_loss_refuses_what_it_cannot_measure(matrix: torch.Tensor, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unitary_loss(matrix, generator=seeded(), **settings)
