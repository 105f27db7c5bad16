from __future__ import annotations

import pytest
import torch

from ergoflow.models.operator import LatentOperator, cayley, random_orthogonal

MODES = ("free", "penalty", "exact")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def defect(matrix):
    """max |GᵀG − I|, evaluated in float64."""
    matrix = matrix.detach().double()
    return (matrix.mT @ matrix - torch.eye(matrix.shape[0], dtype=torch.float64)).abs().max().item()


def train(operator, *, lr, steps=5):
    """A few steps towards a map that is far from orthogonal."""
    optimizer = torch.optim.Adam(operator.parameters(), lr=lr)
    x = torch.randn(64, operator.dim, generator=seeded(1))
    target = 3 * torch.randn(64, operator.dim, generator=seeded(2))
    for _ in range(steps):
        optimizer.zero_grad()
        (operator(x) - target).square().mean().backward()
        optimizer.step()
    return operator


def test_random_orthogonal_matrices_are_orthogonal_and_of_both_determinants():
    matrices = [random_orthogonal(5, generator=seeded(seed)) for seed in range(20)]
    assert max(defect(matrix) for matrix in matrices) < 1e-13
    assert {round(torch.linalg.det(matrix).item()) for matrix in matrices} == {-1, 1}


def test_random_orthogonal_matrices_have_no_preferred_sign():
    """QR alone favours one sign of the diagonal; the uniform law on O(d) does not."""
    generator = seeded(0)
    mean = torch.stack([random_orthogonal(3, generator=generator) for _ in range(4000)]).mean(0)
    # Entries have variance 1/3, so the mean deviates by (3·4000)^(-1/2) = .009; five of these.
    assert mean.abs().max() < 0.046


@pytest.mark.parametrize("dim", [6, 7])
def test_all_modes_start_from_the_same_orthogonal_matrix(dim):
    matrices = [LatentOperator(dim, mode, generator=seeded(3)).matrix for mode in MODES]
    assert defect(matrices[0]) < 1e-6
    for matrix in matrices[1:]:
        torch.testing.assert_close(matrix, matrices[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("lr", [1e-2, 1.0, 100.0])
def test_exact_mode_stays_orthogonal_after_steps_of_any_size(lr):
    operator = LatentOperator(32, "exact", generator=seeded(4))
    start = operator.matrix.detach().clone()
    train(operator, lr=lr)
    assert (operator.matrix - start).abs().max() > 1e-2
    # 32 products of float32 entries near 32^(-1/2).
    assert defect(operator.matrix) < 1e-6
    assert torch.linalg.det(operator.matrix).item() == pytest.approx(torch.linalg.det(start).item(), abs=1e-4)


def test_free_mode_leaves_the_orthogonal_group():
    assert defect(train(LatentOperator(32, "free", generator=seeded(4)), lr=1e-2).matrix) > 1e-2


def test_exact_mode_can_learn_a_rotation():
    operator = LatentOperator(4, "exact", generator=seeded(5))
    target = (
        operator.matrix @ cayley(torch.tensor([[0.0, 2, 0, 1], [-2, 0, 1, 0], [0, -1, 0, 3], [-1, 0, -3, 0]]))
    ).detach()
    optimizer = torch.optim.Adam(operator.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (operator.matrix - target).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(operator.matrix, target, rtol=0, atol=1e-3)


def test_cayley_transform_is_the_identity_plus_its_argument_to_first_order():
    a = torch.randn(5, 5, generator=seeded(6), dtype=torch.float64)
    skew = a - a.mT
    ratio = [(cayley(h * skew) - torch.eye(5) - h * skew).norm() for h in (1e-2, 5e-3)]
    assert ratio[0] / ratio[1] == pytest.approx(4, rel=0.05)


def test_exact_gradient_matches_finite_differences():
    operator = LatentOperator(4, "exact", generator=seeded(7)).double()
    x = torch.randn(3, 4, generator=seeded(8), dtype=torch.float64)
    angles = torch.randn(6, generator=seeded(9), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda value: torch.func.functional_call(operator, {"angles": value}, (x,)), (angles,)
    )


@pytest.mark.parametrize("mode", MODES)
def test_operator_applies_its_matrix_to_the_last_axis(mode):
    operator = LatentOperator(6, mode, generator=seeded(10))
    x = torch.randn(2, 3, 5, 6, generator=seeded(11))
    torch.testing.assert_close(operator(x), torch.einsum("ij,...j->...i", operator.matrix, x))


@pytest.mark.parametrize("mode", MODES)
def test_matrix_is_differentiable(mode):
    operator = LatentOperator(6, mode, generator=seeded(10))
    weights = torch.randn(6, 6, generator=seeded(12))
    (operator.matrix * weights).sum().backward()
    (parameter,) = operator.parameters()
    assert parameter.grad is not None
    assert (parameter.grad != 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_autocast_does_not_touch_the_operator(mode):
    operator = LatentOperator(8, mode, generator=seeded(10))
    x = torch.randn(4, 8, generator=seeded(13))
    with torch.autocast("cpu", torch.bfloat16):
        inside = operator(x)
    assert torch.equal(inside, operator(x))


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"mode must be one of .*, got 'unitary'; choose"):
        LatentOperator(4, "unitary")  # type: ignore[arg-type]
