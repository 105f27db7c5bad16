from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ergoflow.numerics.multiwavelets import (
    analyse,
    plane_filters,
    scaling_functions,
    synthesise,
    two_scale_matrix,
    wavelet_functions,
)

ORDERS = [1, 2, 3, 4, 6]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def quadrature(cells, points=12):
    """Gauss-Legendre nodes and weights, (cells, points), on equal cells of [0, 1]: exact to degree 23 on each."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    left = torch.arange(cells, dtype=torch.float64)[:, None] / cells
    return left + torch.from_numpy(nodes + 1) / (2 * cells), torch.from_numpy(weights / (2 * cells)).expand(cells, -1)


def project(function, basis, order, cells):
    """Coefficients (cells, order) of a function of x on √cells · basis(cells·x − cell), by quadrature."""
    x, w = quadrature(2 * cells)
    x, w = x.reshape(cells, -1), w.reshape(cells, -1)  # (cells, points): a jump in mid-cell does no harm
    local = cells * x - torch.arange(cells, dtype=torch.float64)[:, None]
    return math.sqrt(cells) * torch.einsum("kcp,cp,cp->ck", basis(order, local), w, function(x))


def all_bands(order):
    return plane_filters(order).flatten(0, 1)  # (4, k², 4k²)


# The line


@pytest.mark.parametrize("order", [*ORDERS, 12, 20])
def test_two_scale_matrix_is_orthogonal(order):
    matrix = two_scale_matrix(order)
    assert matrix.dtype == torch.float64
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(2 * order, dtype=torch.float64), rtol=0, atol=2e-14)


def test_order_one_is_haar():
    expected = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(two_scale_matrix(1), expected)


def test_order_two_has_the_smooth_filters_of_alpert():
    """By hand: φ₁(x) = √3 (2x − 1), so ∫ φ₁(t/2) dt = −√3/2 and ∫ φ₁(t/2) φ₁(t) dt = 1/2."""
    root = math.sqrt(3)
    expected = torch.tensor([[2, 0, 2, 0], [-root, 1, root, 1]], dtype=torch.float64) / (2 * math.sqrt(2))
    torch.testing.assert_close(two_scale_matrix(2)[:2], expected)


@pytest.mark.parametrize("order", ORDERS)
def test_wavelets_are_the_gram_schmidt_ones(order):
    """ψ_i is orthogonal to √2 φ_j(2x), j < i, and has a positive product with √2 φ_i(2x): no other basis does."""
    left = two_scale_matrix(order)[order:, :order]
    assert torch.tril(left, -1).abs().max() < 1e-14
    assert left.diagonal().min() > 0


@pytest.mark.parametrize("order", ORDERS)
def test_scaling_functions_are_orthonormal_legendre_polynomials(order):
    x, w = quadrature(1)
    phi = scaling_functions(order, x[0])
    expected = [
        math.sqrt(2 * i + 1) * np.polynomial.Legendre.basis(i, domain=[0, 1])(x[0].numpy()) for i in range(order)
    ]
    np.testing.assert_allclose(phi, expected, atol=1e-13)
    torch.testing.assert_close(phi * w[0] @ phi.T, torch.eye(order, dtype=torch.float64))
    assert scaling_functions(order, torch.tensor([-0.1, 1.0])).abs().max() == 0


@pytest.mark.parametrize("order", ORDERS)
def test_scaling_functions_are_sums_of_halved_ones(order):
    x = torch.rand(50, generator=seeded(1), dtype=torch.float64)
    halves = torch.cat([scaling_functions(order, 2 * x), scaling_functions(order, 2 * x - 1)])
    torch.testing.assert_close(math.sqrt(2) * two_scale_matrix(order)[:order] @ halves, scaling_functions(order, x))


@pytest.mark.parametrize("order", ORDERS)
def test_wavelets_are_orthonormal_and_their_moments_vanish(order):
    x, w = (part.flatten() for part in quadrature(2))
    psi = wavelet_functions(order, x)
    torch.testing.assert_close(psi * w @ psi.T, torch.eye(order, dtype=torch.float64))
    powers = x ** torch.arange(order)[:, None]
    assert (psi * w @ powers.T).abs().max() < 1e-14
    # ... and the moment after the last one does not, for some wavelet.
    assert (psi * w @ x**order).abs().max() > 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_filtered_coefficients_are_the_projections_on_the_coarser_level(order):
    def function(x):
        return torch.exp(-x) * torch.sin(7 * x + 0.3)

    fine = project(function, scaling_functions, order, 8)
    smooth, detail = (fine.reshape(4, 2 * order) @ two_scale_matrix(order).T).split(order, dim=1)
    torch.testing.assert_close(smooth, project(function, scaling_functions, order, 4), rtol=0, atol=1e-13)
    torch.testing.assert_close(detail, project(function, wavelet_functions, order, 4), rtol=0, atol=1e-13)
    assert detail.abs().max() > 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_line_is_reconstructed_from_all_levels(order):
    matrix, x = two_scale_matrix(order), noise(16, order)
    smooth, details = x, []
    while len(smooth) > 1:
        smooth, detail = (smooth.reshape(-1, 2 * order) @ matrix.T).split(order, dim=1)
        details.append(detail)
    energy = smooth.square().sum() + sum(detail.square().sum() for detail in details)
    torch.testing.assert_close(energy, x.square().sum())
    for detail in reversed(details):
        smooth = (torch.cat([smooth, detail], dim=1) @ matrix).reshape(-1, order)
    torch.testing.assert_close(smooth, x, rtol=0, atol=1e-13)


def test_orders_below_one_are_refused():
    with pytest.raises(ValueError, match="order must be at least 1, got 0; choose"):
        two_scale_matrix(0)


# The plane


@pytest.mark.parametrize("order", ORDERS)
def test_plane_filters_are_orthogonal(order):
    matrix = all_bands(order).flatten(0, 1)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(4 * order**2, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", ORDERS)
def test_plane_bands_are_the_transforms_of_the_lines(order):
    x = noise(2, 8, 4, 3 * order**2)
    line = two_scale_matrix(order).reshape(2, order, 2, order)
    # (B, X/2, half, Y/2, half, copies, i, j)
    cells = x.reshape(2, 4, 2, 2, 2, 3, order, order)
    expected = torch.einsum("aihj,bmgn,BxhygCjn->abBxyCim", line, line, cells)
    bands = analyse(x, all_bands(order))
    torch.testing.assert_close(bands, expected.reshape(4, 2, 4, 2, 3 * order**2))


@pytest.mark.parametrize("order", ORDERS)
def test_plane_is_reconstructed_from_all_levels_and_bands(order):
    filters, x = all_bands(order), noise(2, 16, 8, 2 * order**2)
    smooth, details = x, []
    for _ in range(3):
        smooth, *detail = analyse(smooth, filters)
        details.append(detail)
    assert smooth.shape == (2, 2, 1, 2 * order**2)
    for detail in reversed(details):
        smooth = synthesise((smooth, *detail), filters)
    torch.testing.assert_close(smooth, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bands", [(0,), (0, 3), (1, 2, 3)])
def test_fewer_bands_give_the_orthogonal_projection(bands):
    filters = all_bands(3)[list(bands)]
    x, y = noise(1, 4, 6, 9), noise(1, 4, 6, 9, seed=1)

    def projected(f):
        return synthesise(tuple(analyse(f, filters)), filters)

    torch.testing.assert_close(projected(projected(x)), projected(x))
    torch.testing.assert_close((projected(x) * y).sum(), (x * projected(y)).sum())
    share = projected(torch.eye(4 * 9, dtype=torch.float64).reshape(36, 2, 2, 9)).reshape(36, 36).trace()
    assert share.item() == pytest.approx(9 * len(bands))


def test_synthesis_is_the_transpose_of_analysis():
    filters = all_bands(2)[[0, 3]]
    x, bands = noise(3, 4, 8, 8), noise(2, 3, 2, 4, 8, seed=1)
    left, right = (analyse(x, filters) * bands).sum(), (x * synthesise(tuple(bands), filters)).sum()
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_details_of_polynomials_of_lower_degree_vanish(order):
    """f(x, y) = p(x) q(y), degrees below the order: all details are zero on all levels; of degree = order not."""

    def coefficients(degree):
        along_x = project(lambda x: (x - 0.3) ** degree, scaling_functions, order, 8)
        along_y = project(lambda y: (y + 0.2) ** (order - 1), scaling_functions, order, 4)
        return torch.einsum("xi,yj->xyij", along_x, along_y).reshape(1, 8, 4, order**2)

    smooth = coefficients(order - 1)
    for _ in range(2):
        smooth, *details = analyse(smooth, all_bands(order))
        assert max(detail.abs().max().item() for detail in details) < 1e-14
    _, _, rough, _ = analyse(coefficients(order), all_bands(order))
    assert rough.abs().max() > 1e-6


def test_copies_do_not_see_each_other():
    filters, x = all_bands(2), noise(1, 4, 4, 12)
    y = x.clone()
    y[..., 4:8] += 1
    changed = (analyse(y, filters) - analyse(x, filters)).abs().amax((0, 1, 2, 3))
    assert changed[4:8].max() > 0.1
    assert changed[:4].max() == 0
    assert changed[8:].max() == 0
