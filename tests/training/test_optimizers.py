from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from ergoflow.training.muon import MOMENTUM, Muon, is_hidden_matrix, newton_schulz
from ergoflow.training.optimizers import OPTIMIZERS, make_optimizer

BETAS = (0.9, 0.999)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def step_with(optimizer: torch.optim.Optimizer, gradients: dict[nn.Parameter, torch.Tensor]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("name", "expected"), [("adam", 2 - 0.1), ("adamw", 2 * (1 - 0.1 * 0.01))])
def test_adam_adds_decay_to_the_gradient_and_adamw_shrinks_the_weight(name: str, expected: float, dtype) -> None:
    """Without a gradient, Adam's is the decay alone: its first step is the rate, whatever the decay."""
    weight = nn.Parameter(torch.full((3, 3), 2.0, dtype=dtype))
    optimizer = make_optimizer(name, [weight], learning_rate=0.1, betas=BETAS, weight_decay=0.01)
    step_with(optimizer, {weight: torch.zeros_like(weight)})
    torch.testing.assert_close(weight.detach(), torch.full((3, 3), expected, dtype=dtype))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_spares_biases_and_gains(name: str) -> None:
    shapes = {"bias": (20,), "scale": (), "thin": (20, 3), "hidden": (20, 30), "kernel": (20, 16, 3, 3)}
    parameters = {key: nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()}
    parameters["spectral"] = nn.Parameter(torch.ones(20, 20, 4, dtype=torch.complex64))
    optimizer = make_optimizer(name, parameters.values(), learning_rate=0.1, betas=BETAS, weight_decay=0.5)
    step_with(optimizer, {p: torch.zeros_like(p) for p in parameters.values()})
    shrunk = {key for key, p in parameters.items() if p.detach().abs().max() < 1}
    assert shrunk == {"thin", "hidden", "kernel", "spectral"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_weights_follow_their_real_and_imaginary_parts(name: str) -> None:
    weight = nn.Parameter(random(18, 20, dtype=torch.complex64))
    # The same numbers as kernels of one input channel, which are AdamW's also under Muon.
    parts = nn.Parameter(torch.view_as_real(weight.detach()).reshape(18, 1, 20, 2).clone())
    settings = {"learning_rate": 0.1, "betas": BETAS, "weight_decay": 0.1}
    of_complex, of_real = (make_optimizer(name, [p], **settings) for p in (weight, parts))
    for seed in range(1, 4):
        gradient = random(18, 20, seed=seed, dtype=torch.complex64)
        step_with(of_complex, {weight: gradient})
        step_with(of_real, {parts: torch.view_as_real(gradient).reshape(parts.shape)})
    torch.testing.assert_close(torch.view_as_real(weight.detach()).flatten(), parts.detach().flatten())


def test_parameters_that_do_not_train_are_left_out() -> None:
    frozen, weight = nn.Parameter(torch.ones(20, 20), requires_grad=False), nn.Parameter(torch.ones(20, 20))
    for name in OPTIMIZERS:
        optimizer = make_optimizer(name, [frozen, weight], learning_rate=0.1, betas=BETAS, weight_decay=0.0)
        assert [p for group in optimizer.param_groups for p in group["params"]] == [weight]


def test_unknown_optimiser_is_refused() -> None:
    with pytest.raises(ValueError, match="one of adam, adamw, muon, got 'sgd'; correct"):
        make_optimizer("sgd", [nn.Parameter(torch.ones(2))], learning_rate=0.1, betas=BETAS, weight_decay=0.0)


@pytest.mark.parametrize(
    ("shape", "dtype", "hidden"),
    [
        ((32, 64), torch.float32, True),
        ((16, 16), torch.float32, True),
        ((32, 8, 3, 3), torch.float32, True),  # a kernel is the matrix (32, 72)
        ((32, 8, 3), torch.float32, True),
        ((96, 1, 7, 7), torch.float32, False),  # depthwise
        ((96, 4), torch.float32, False),  # a lift
        ((3, 96), torch.float32, False),  # a head
        ((96,), torch.float32, False),
        ((), torch.float32, False),
        ((32, 32, 8, 8), torch.complex64, False),  # spectral
    ],
)
def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw(shape, dtype, hidden: bool) -> None:
    parameter = torch.empty(shape, dtype=dtype)
    assert is_hidden_matrix(parameter) == hidden
    optimizer = make_optimizer("muon", [nn.Parameter(parameter)], learning_rate=0.1, betas=BETAS, weight_decay=0.0)
    assert [group["muon"] for group in optimizer.param_groups] == [hidden]


def with_singular_values(values: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random matrix U S V' and its polar factor U V'."""
    u = torch.linalg.qr(random(rows, len(values), seed=1, dtype=torch.float64))[0]
    v = torch.linalg.qr(random(columns, len(values), seed=2, dtype=torch.float64))[0]
    return u * values @ v.T, u @ v.T


@pytest.mark.parametrize("shape", [(24, 24), (24, 60), (60, 24)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_newton_schulz_brings_all_singular_values_near_one_and_turns_nothing(shape, dtype) -> None:
    """From 1 to 1/100 of the Frobenius norm; the iteration's own band is [.68, 1.14], bfloat16 widens it."""
    values = torch.logspace(0, -1.9, 24, dtype=torch.float64)
    matrix, polar = with_singular_values(1e3 * values, *shape)
    result = newton_schulz(matrix.to(dtype)[None]).double()[0]
    singular = torch.linalg.svdvals(result)
    low, high = (0.68, 1.14) if dtype == torch.float64 else (0.6, 1.2)
    assert low <= singular.min()
    assert singular.max() <= high
    # The singular vectors stay: result' polar is symmetric (and positive).
    product = result.T @ polar if shape[0] >= shape[1] else result @ polar.T
    torch.testing.assert_close(product, product.T, rtol=0, atol=1e-10 if dtype == torch.float64 else 0.05)
    assert torch.linalg.eigvalsh(product).min() > 0.5


def test_newton_schulz_of_a_batch_is_that_of_each_matrix_and_of_zero_is_zero() -> None:
    matrices = random(3, 5, 4, dtype=torch.float64)
    matrices[1] = 0
    results = newton_schulz(matrices)
    for matrix, result in zip(matrices, results, strict=True):
        torch.testing.assert_close(newton_schulz(matrix[None])[0], result)
    assert torch.equal(results[1], torch.zeros(5, 4, dtype=torch.float64))


def test_muon_follows_the_published_algorithm() -> None:
    """Torch's own Muon with the learning rate that matches AdamW's, and torch's AdamW."""
    shapes = [(20, 20), (20, 40), (20, 40), (40, 20)]
    ours = [nn.Parameter(random(*shape, seed=k)) for k, shape in enumerate(shapes)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    thin, reference = (nn.Parameter(random(20, 3, seed=9)) for _ in range(2))
    muon = make_optimizer("muon", [*ours, thin], learning_rate=0.02, betas=BETAS, weight_decay=0.1)
    published = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([reference], lr=0.02, betas=BETAS, weight_decay=0.1)
    for seed in range(6):
        gradients = [random(*shape, seed=100 * seed + k) for k, shape in enumerate(shapes)]
        step_with(published, dict(zip(theirs, gradients, strict=True)))
        step_with(adamw, {reference: random(20, 3, seed=seed)})
        step_with(muon, {**dict(zip(ours, gradients, strict=True)), thin: random(20, 3, seed=seed)})
    for a, b in zip(ours, theirs, strict=True):
        # Six updates of at most 0.02 * 0.2 * sqrt(40) per singular direction, in bfloat16.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    torch.testing.assert_close(thin, reference, rtol=1e-5, atol=1e-6)


def test_muon_moves_every_weight_by_about_a_fifth_of_the_rate() -> None:
    for shape in ((64, 64), (32, 256), (256, 32), (48, 16, 3, 3)):
        weight = nn.Parameter(torch.zeros(shape))
        step_with(Muon([{"params": [weight], "muon": True}], lr=0.1), {weight: random(*shape)})
        assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.15), shape


def test_muon_sees_a_kernel_as_the_matrix_of_its_outputs() -> None:
    kernel, matrix = nn.Parameter(torch.zeros(20, 4, 3, 2)), nn.Parameter(torch.zeros(20, 24))
    gradient = random(20, 24)
    step_with(Muon([{"params": [kernel], "muon": True}], lr=0.1), {kernel: gradient.reshape(20, 4, 3, 2)})
    step_with(Muon([{"params": [matrix], "muon": True}], lr=0.1), {matrix: gradient})
    assert torch.equal(kernel.detach().flatten(1), matrix.detach())


def test_muon_descends_an_ill_conditioned_quadratic() -> None:
    """½‖A (W − W*)‖², curvatures from 1 to 1e-4: the orthogonalised step does not wait for the flat directions.

    Gradient descent at its largest stable rate, 2, would keep 1 − 2e-4 of the flattest error per step: 94 % of it.
    """
    scale = torch.logspace(0, -2, 24)[:, None]
    target, weight = random(24, 32, seed=3), nn.Parameter(torch.zeros(24, 32))
    bias = nn.Parameter(torch.ones(24, 1))
    optimizer = make_optimizer("muon", [weight, bias], learning_rate=0.0, betas=BETAS, weight_decay=0.0)
    steps = 300
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - k / steps)
        optimizer.zero_grad()
        loss = (scale * (weight + bias - target)).square().sum() / 2
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-3 * (scale * target).square().sum().item() / 2
    error = (weight + bias - target).detach().norm(dim=1) / target.norm(dim=1)
    assert error.max() < 0.5


def test_optimiser_loaded_from_its_saved_state_continues_bit_for_bit() -> None:
    def new() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        parameters = [nn.Parameter(random(20, 24)), nn.Parameter(random(20)), nn.Parameter(random(20, 1, 3, 3))]
        parameters.append(nn.Parameter(random(4, 4, dtype=torch.complex64)))
        return parameters, make_optimizer("muon", parameters, learning_rate=0.1, betas=BETAS, weight_decay=0.1)

    def run(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for seed in steps:
            step_with(optimizer, {p: random(*p.shape, seed=seed, dtype=p.dtype) for p in parameters})

    whole, optimizer = new()
    run(whole, optimizer, range(6))
    first, optimizer = new()
    run(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second, optimizer = new()
    with torch.no_grad():
        for old, fresh in zip(first, second, strict=True):
            fresh.copy_(old)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    run(second, optimizer, range(3, 6))
    for a, b in zip(whole, second, strict=True):
        assert torch.equal(a, b)


def test_parameter_without_a_gradient_stays_where_it_is() -> None:
    used, unused = nn.Parameter(random(20, 20)), nn.Parameter(random(20, 20, seed=1))
    before = unused.detach().clone()
    optimizer = make_optimizer("muon", [used, unused], learning_rate=0.1, betas=BETAS, weight_decay=0.5)
    step_with(optimizer, {used: random(20, 20, seed=2)})
    assert torch.equal(unused.detach(), before)


def test_muon_evaluates_a_closure_with_gradients() -> None:
    weight = nn.Parameter(random(20, 20))
    optimizer = Muon([{"params": [weight], "muon": True}], lr=0.1)

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    before = weight.detach().square().sum().item()
    assert optimizer.step(closure) == pytest.approx(before)
    assert weight.detach().square().sum().item() < before
