from __future__ import annotations

import math

import pytest
import torch

from ergoflow.metrics import energy_spectrum
from ergoflow.training.losses import (
    log_spectrum_loss,
    mirrored,
    mirrored_shells,
    relative_l2_loss,
    sobolev_loss,
    unitary_loss,
)

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


def wave(grid: tuple[int, ...], modes: tuple[float, ...], *, phase: float = 0.4) -> torch.Tensor:
    """cos(2 pi sum_i modes_i x_i / L_i + phase) at x_i = (j + 1/2) L_i / N_i, (1, 1, *grid)."""
    angle = torch.tensor(phase, dtype=torch.float64)
    for axis, (size, mode) in enumerate(zip(grid, modes, strict=True)):
        x = (torch.arange(size, dtype=torch.float64) + 0.5) / size
        angle = angle + (2 * math.pi * mode * x).reshape([-1 if a == axis else 1 for a in range(len(grid))])
    return angle.cos()[None, None]


def wavenumber(modes: tuple[float, ...], length: tuple[float, ...]) -> float:
    return math.hypot(*(2 * math.pi * n / side for n, side in zip(modes, length, strict=True)))


@pytest.mark.parametrize("periodic", [(True, True), (False, True), (True, False), (False, False)])
def test_sobolev_loss_of_order_zero_is_the_relative_l2_error(periodic: tuple[bool, bool]) -> None:
    pred, true = torch.randn(2, 3, 2, 7, 10, generator=seeded(), dtype=torch.float64)
    loss = sobolev_loss(pred, true, order=0, periodic=periodic)
    assert loss.item() == pytest.approx(relative_l2_loss(pred, true).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("grid", "length", "true_modes", "error_modes"),
    [
        ((9, 14), (3.0, 5.0), (2, 3), (-3, 1)),
        ((14, 9), (3.0, 5.0), (0, 4), (6, 0)),
        ((11,), (0.7,), (1,), (5,)),
        ((6, 5, 7), (1.0, 2.0, 3.0), (1, 0, 2), (2, -2, 1)),
    ],
)
def test_sobolev_loss_of_single_modes_has_its_closed_form(grid, length, true_modes, error_modes) -> None:
    """|cos(k x)|_j is |k|^j times its L2 norm, so an error of amplitude a has the ratios a (|q| / |k|)^j."""
    true, amplitude = wave(grid, true_modes), 0.3
    pred = true + amplitude * wave(grid, error_modes, phase=1.1)
    ratio = wavenumber(error_modes, length) / wavenumber(true_modes, length)
    for order, factor in ((1, (1 + ratio) / 2), (2, (1 + ratio + ratio**2) / 3)):
        loss = sobolev_loss(pred, true, order=order, periodic=(True,) * len(grid), length=length)
        assert loss.item() == pytest.approx(amplitude * factor, rel=1e-10)
    # Sides of 2 pi are the default, and with unequal sides they are another answer.
    default = sobolev_loss(pred, true, order=1, periodic=(True,) * len(grid))
    expected = wavenumber(error_modes, (2 * math.pi,) * len(grid)) / wavenumber(true_modes, (2 * math.pi,) * len(grid))
    assert default.item() == pytest.approx(amplitude * (1 + expected) / 2, rel=1e-10)


@pytest.mark.parametrize("walls", [(True, False), (False, True), (True, True)])
def test_sobolev_loss_between_walls_takes_cosines_of_half_the_wavenumber(walls: tuple[bool, bool]) -> None:
    """cos(pi n y / L), nodes half a cell inside the walls, has the derivative pi n / L."""
    length = (2.0, 3.0)
    along = [0.5 if wall else 1.0 for wall in walls]
    true_modes, error_modes = (3 * along[0], 2 * along[1]), (4 * along[0], 1 * along[1])

    def product(modes: tuple[float, float]) -> torch.Tensor:
        first, second = wave((9,), modes[:1], phase=0.0), wave((12,), modes[1:], phase=0.0)
        return first[..., :, None] * second[..., None, :]

    true = product(true_modes)
    pred = true + 0.2 * product(error_modes)
    ratio = wavenumber(error_modes, length) / wavenumber(true_modes, length)
    loss = sobolev_loss(pred, true, order=1, periodic=tuple(not wall for wall in walls), length=length)
    assert loss.item() == pytest.approx(0.2 * (1 + ratio) / 2, rel=1e-10)


def test_sobolev_loss_takes_the_slope_of_a_profile_between_walls_and_no_jump() -> None:
    """A linear profile on [0, 1] has slope 1; wrapped around it would have a slope that grows with the grid."""
    profile = ((torch.arange(256, dtype=torch.float64) + 0.5) / 256)[None, None]
    pred = profile + 0.1 * wave((256,), (1.5,), phase=0.0)
    loss = sobolev_loss(pred, profile, order=1, periodic=(False,), length=(1.0,))
    value = 0.1 * math.sqrt(1 / 2) / math.sqrt(1 / 3)
    slope = 0.1 * 3 * math.pi * math.sqrt(1 / 2)
    assert loss.item() == pytest.approx((value + slope) / 2, rel=2e-3)


def test_sobolev_loss_is_the_mean_of_the_errors_of_values_and_gradients() -> None:
    """Against gradients taken in physical space, on odd sides where they hold every mode."""
    pred, true = torch.randn(2, 4, 2, 7, 9, generator=seeded(), dtype=torch.float64)

    def gradient(field: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.fft2(field)
        kx = 2 * math.pi / 3.0 * torch.fft.fftfreq(7, 1 / 7, dtype=torch.float64)[:, None]
        ky = 2 * math.pi / 5.0 * torch.fft.fftfreq(9, 1 / 9, dtype=torch.float64)
        return torch.cat([torch.fft.ifft2(1j * k * modes).real for k in (kx, ky)], dim=1)

    expected = (relative_l2_loss(pred, true) + relative_l2_loss(gradient(pred), gradient(true))) / 2
    loss = sobolev_loss(pred, true, order=1, periodic=(True, True), length=(3.0, 5.0))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_sobolev_loss_of_a_perfect_forecast_is_zero_with_a_zero_gradient() -> None:
    pred = torch.randn(2, 1, 6, 5, generator=seeded()).requires_grad_()
    loss = sobolev_loss(pred, pred.detach().clone(), order=2, periodic=(True, False))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(pred.grad, torch.zeros_like(pred))


@pytest.mark.parametrize("name", ["sobolev", "spectral"])
def test_spectral_terms_are_not_rounded_to_half_precision_under_autocast(name: str) -> None:
    true = torch.randn(2, 1, 9, 12, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        pred = true * 1.001
        if name == "sobolev":
            loss, expected = sobolev_loss(pred, true, order=1, periodic=(True, True)), 1e-3
        else:
            loss, expected = log_spectrum_loss(pred, true), (2 * math.log(1.001)) ** 2
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=2e-3)


def test_log_spectrum_loss_of_a_scaled_field_is_the_square_of_its_log_energy() -> None:
    true = torch.randn(3, 2, 9, 14, generator=seeded(), dtype=torch.float64)
    assert log_spectrum_loss(1.3 * true, true).item() == pytest.approx((2 * math.log(1.3)) ** 2, rel=1e-12)


@pytest.mark.parametrize("grid", [(12, 12), (9, 14), (15, 7), (13,), (6, 7, 8)])
def test_log_spectrum_loss_compares_the_spectra_that_the_metrics_report(grid: tuple[int, ...]) -> None:
    pred, true = torch.randn(2, 4, 2, *grid, generator=seeded(), dtype=torch.float64)
    spectra = [energy_spectrum(field[:, None])[:, 0, 1 : min(grid) // 3 + 1] for field in (pred, true)]
    expected = (spectra[0].log() - spectra[1].log()).square().mean()
    assert log_spectrum_loss(pred, true).item() == pytest.approx(expected.item(), rel=1e-12)


def test_log_spectrum_loss_sees_energy_and_not_position_and_nothing_beyond_a_third() -> None:
    true = torch.randn(1, 1, 12, 15, generator=seeded(), dtype=torch.float64)
    assert log_spectrum_loss(true.roll((3, -4), (2, 3)), true).item() == pytest.approx(0, abs=1e-24)
    beyond = true + 5 * wave((12, 15), (5, 0))
    assert log_spectrum_loss(beyond, true).item() == pytest.approx(0, abs=1e-24)
    # One shell of four gains energy.
    assert log_spectrum_loss(true + 5 * wave((12, 15), (4, 0)), true).item() > 0.1


def test_log_spectrum_loss_lets_gradients_through_to_every_point() -> None:
    pred, true = torch.randn(2, 1, 1, 6, 7, generator=seeded(), dtype=torch.float64)
    assert torch.autograd.gradcheck(log_spectrum_loss, (pred.requires_grad_(), true))


def test_log_spectrum_loss_needs_a_shell() -> None:
    with pytest.raises(ValueError, match=r"at least 3 points per side, got \(2, 8\); use a finer grid"):
        log_spectrum_loss(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8))


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


@pytest.mark.parametrize(("waves", "columns"), [(0, 3), (1, 0), (2, 0), (3, 2), (5, 4), (7, 6)])
def test_waves_between_walls_are_on_the_shell_of_their_length(waves: int, columns: int) -> None:
    """cos(πm(i + ½)/8) has m/2 waves per side; a `mirrored` field has no other modes than those of its waves."""
    across = torch.cos(math.pi * waves * (torch.arange(8, dtype=torch.float64) + 0.5) / 8)
    along = torch.cos(2 * math.pi * columns * torch.arange(12, dtype=torch.float64) / 12)
    field = (across[:, None] * along).reshape(1, 1, 8, 12)
    modes = torch.fft.rfftn(mirrored(field, (False, True)), dim=(2, 3))[0, 0].abs()
    shells = mirrored_shells((8, 12), (False, True), device=field.device)
    assert modes.shape == shells.shape
    assert shells[modes > 1e-9 * modes.max()].unique().tolist() == [int(math.hypot(waves / 2, columns) + 0.5)]
