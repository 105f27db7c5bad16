"""What every model promises: each truth once, for all of them. What is special to one is in the file of its name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch

from ergoflow.models import build_model
from ergoflow.models.a3m import A3MConfig
from ergoflow.models.advection import Pace
from ergoflow.models.build import ModelConfig
from ergoflow.models.convnext import ConvNeXtConfig
from ergoflow.models.ergoformer import ErgoformerConfig
from ergoflow.models.factformer import FactFormerConfig
from ergoflow.models.mno import MNOConfig
from ergoflow.models.mwt import MWTConfig
from ergoflow.models.performer import PerformerConfig
from ergoflow.models.uno import UNOConfig
from ergoflow.training.checkpoint import load_weights, save_weights

A3M = A3MConfig(
    dim=8,
    latent=16,
    depth=2,
    heads=4,
    head_dim=4,
    decoder_widths=(8, 8, 4),
    decoder_kernels=(7, 3, 3),
    groups=4,
    sigma=8.0,
)
FACTFORMER = FactFormerConfig(dim=16, latent=16, depth=2, heads=4, head_dim=4, sigma=8.0, norm_groups=4, conv_groups=2)
PERFORMER = PerformerConfig(
    dim=8,
    latent=16,
    depth=2,
    heads=4,
    head_dim=4,
    features=12,
    mlp_width=24,
    decoder_widths=(8, 8, 4),
    decoder_kernels=(5, 3, 3),
    groups=4,
)
MNO = MNOConfig(width=8, modes=4)
UNO = UNOConfig(hidden=8, lifting=7, projection=5, widths=(6, 8, 7, 6), modes=4)
MWT = MWTConfig(order=2, copies=4, modes=3, depth=2, hidden=12)
CONVNEXT = ConvNeXtConfig(widths=(12, 16), blocks=(1, 1, 1), kernel=3)
ERGOFORMER = ErgoformerConfig(
    unet=replace(CONVNEXT, blocks=(0, 1, 1)), attention="lines", attention_levels=(0,), frequencies=2, flow=None
)
MODELS = [A3M, FACTFORMER, PERFORMER, MNO, UNO, MWT, CONVNEXT, ERGOFORMER]


@dataclass(frozen=True)
class Case:
    """A model and the states it is given. Sides differ: equal ones hide swapped axes."""

    config: ModelConfig
    grid: tuple[int, ...]
    wall: int | None = None
    """The axis between walls; None where all are periodic."""
    channels: int = 2


CASES = {
    "a3m": Case(A3M, (9, 11)),
    "a3m-exact": Case(replace(A3M, operator="exact", fusion="sum"), (9, 11), wall=1),
    "a3m-line": Case(A3M, (13,), wall=0),
    "a3m-volume": Case(A3M, (5, 7, 6)),
    "factformer": Case(FACTFORMER, (9, 11)),
    "factformer-line": Case(FACTFORMER, (13,)),
    "factformer-volume": Case(FACTFORMER, (5, 7, 6)),
    "performer": Case(PERFORMER, (9, 11)),
    "performer-line": Case(PERFORMER, (13,)),
    "performer-volume": Case(PERFORMER, (5, 7, 6)),
    "mno": Case(MNO, (12, 15)),
    "mno-wall": Case(MNO, (12, 15), wall=0),
    "uno": Case(UNO, (12, 15)),
    "uno-wall": Case(UNO, (12, 15), wall=0),
    "uno-bicubic": Case(replace(UNO, resampling="bicubic"), (12, 15)),
    "mwt": Case(MWT, (9, 11)),
    "mwt-wall": Case(MWT, (13, 32), wall=1),
    "mwt-powers-of-two": Case(MWT, (16, 8)),
    "convnext": Case(CONVNEXT, (16, 12)),
    "convnext-wall": Case(CONVNEXT, (16, 12), wall=0),
    "ergoformer": Case(replace(ERGOFORMER, flow="carried"), (16, 12), channels=1),
    "ergoformer-attention": Case(
        replace(ERGOFORMER, kernel="free", attention="a3m", codes="random", operator="exact"), (16, 12), wall=0
    ),
}
# Weights that start as constants. The spectral models have none.
UNSEEDED = {
    A3MConfig: r"\.norm\.|angles",
    FactFormerConfig: r"\.norm\.",
    PerformerConfig: r"norm\.",
    ConvNeXtConfig: r"norm\.|head\.",
    ErgoformerConfig: r"norm\.|head\.|merge\.|angles|log_rates|frequencies",
}
# Under bfloat16 autocast, of eight to twenty-five roundings of 2^-9 in a row: .02; a3m stays closer.
ROUNDING = {A3MConfig: 0.01}
# a3m is compiled together with its gradients in its own file.
COMPILED = [
    "factformer",
    "performer",
    "mno-wall",
    "uno-wall",
    "mwt",
    "convnext",
    "ergoformer",
    "ergoformer-attention",
]

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def fresh(case, *, seed=0, out_channels=None):
    """A model as it is drawn; a step moves white noise by a grid point, for the one that knows how a flow moves."""
    return build_model(
        case.config,
        case.channels,
        out_channels or case.channels,
        case.grid,
        periodic=tuple(axis != case.wall for axis in range(len(case.grid))),
        pace=Pace(turn=2.0, change=0.5),
        generator=seeded(seed),
    )


def awake(case):
    """A model with weights of order one: near zero, where some start, it would agree with anything."""
    model, generator = fresh(case), seeded(9)
    spectral = any(parameter.is_complex() for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif spectral and parameter.ndim > 1:
                parameter.mul_(1.75)
    return model


def state(case, *, batch=2, seed=1, dtype=torch.float32):
    return torch.randn(batch, case.channels, *case.grid, generator=seeded(seed), dtype=dtype)


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


# Shapes and borders


# `performer` learns a code for each point of its grid, and refuses others (in its own file).
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("performer")])
def test_one_model_runs_on_other_grids_than_it_was_built_for(name):
    case = CASES[name]
    finer = replace(case, grid=tuple(2 * size for size in case.grid))
    output = awake(case)(state(finer))
    assert output.shape == (2, case.channels, *finer.grid)
    assert output.isfinite().all()


# A vorticity that is carried stays one.
@pytest.mark.parametrize("name", [name for name in CASES if name != "ergoformer"])
def test_channels_out_may_differ_from_channels_in(name):
    case = replace(CASES[name], channels=3)
    assert fresh(case, out_channels=1)(state(case)).shape == (2, 1, *case.grid)


@every_case
def test_states_of_another_shape_are_refused(case):
    model, (batch, channels, *grid) = fresh(case), state(case).shape
    message = rf"must be \(B, {channels}, \*grid\) with {len(grid)} grid axes, got .*; build the model"
    for shape in ((batch, channels, *grid[1:]), (batch, channels, *grid, 9), (batch, channels + 1, *grid)):
        with pytest.raises(ValueError, match=message):
            model(torch.zeros(shape))


# The map


@every_case
def test_samples_of_a_batch_do_not_see_each_other(case):
    model, z = awake(case).double(), state(case, batch=3, dtype=torch.float64)
    torch.testing.assert_close(model(z)[1:2], model(z[1:2]))


@every_case
def test_forward_changes_neither_input_nor_model(case):
    model, z = awake(case), state(case)
    tensors = [z, *model.parameters(), *model.buffers()]
    kept = [tensor.clone() for tensor in tensors]
    model(z)
    assert all(torch.equal(a, b) for a, b in zip([z, *model.parameters(), *model.buffers()], kept, strict=True))


# torch loads its forward rules with torch.jit.script, which it reports as deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@every_case
def test_derivatives_of_both_modes_are_those_of_finite_differences(case):
    """Lyapunov exponents push tangents through a model."""
    model = awake(case).double()
    z, direction, weights = (state(case, seed=seed, dtype=torch.float64) for seed in (1, 2, 3))
    _, pushed = torch.func.jvp(model, (z,), (direction,))
    _, pull = torch.func.vjp(model, z)
    with torch.no_grad():
        quotient = (model(z + 1e-6 * direction) - model(z - 1e-6 * direction)) / 2e-6
    assert (pushed - quotient).abs().max() < 3e-8 * quotient.abs().max()
    torch.testing.assert_close((pull(weights)[0] * direction).sum(), (pushed * weights).sum())


# Training


@every_case
def test_every_parameter_receives_a_gradient(case):
    model = awake(case)
    (model(state(case)) - state(case, seed=2)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        size = parameter.grad.abs()
        assert size.isfinite().all(), name
        # Every entry of a vector, row of a matrix, wave of a spectral weight and pair of channels of a convolution.
        each = size.flatten(min(2, size.ndim - 1)).amax(-1) if size.ndim > 1 else size
        assert each.min() > 0, name


@pytest.mark.parametrize("config", MODELS, ids=lambda config: type(config).__name__)
def test_model_can_fit_one_step_of_a_travelling_wave(config):
    model = fresh(Case(config, (16, 12), channels=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = seeded(6), []
    x, y = torch.meshgrid(*(math.tau * torch.arange(size) / size for size in (16, 12)), indexing="ij")
    for _ in range(50):
        a, b = math.tau * torch.rand(2, 8, 1, 1, generator=generator)
        z = (torch.sin(x + a) + torch.cos(y + b))[:, None]
        target = z.roll(1, 2)
        loss = (model(z) - target).square().mean() / target.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5
    # The wave left where it was would be .076.
    assert sum(losses[-5:]) / 5 < 0.03


# Reproducibility


@every_case
def test_equal_seeds_give_equal_models_and_leave_the_global_generator_alone(case):
    before = torch.random.get_rng_state()
    first, second, other = (fresh(case, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    constant = {name for name in first if torch.equal(first[name], other[name])}
    assert all(re.search(UNSEEDED.get(type(case.config), "nothing"), name) for name in constant)


@every_case
def test_weights_survive_a_round_trip_to_disk(case, tmp_path):
    model, other, z = awake(case), fresh(case, seed=1), state(case)
    assert not torch.allclose(model(z), other(z))
    save_weights(model, tmp_path / "weights.safetensors", metadata={})
    load_weights(other, tmp_path / "weights.safetensors")
    assert torch.equal(other(z), model(z))


# Precision and compilation


# Of complex weights torch's own `double` takes none and its `to` the real part.
@pytest.mark.parametrize(
    "cast", [lambda model: model.double(), lambda model: model.to(torch.float64)], ids=["double", "to"]
)
@every_case
def test_double_precision_agrees_with_single(case, cast):
    model, z = awake(case), state(case)
    single = model(z)
    double = cast(model)(z.double())
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.float64, torch.complex128}
    assert double.dtype == torch.float64
    assert 0 < relative(single.double(), double) < 1e-5


@every_case
def test_bfloat16_autocast_stays_close_to_float32_with_gradients_of_full_precision(case):
    model, z = awake(case), state(case)
    expected = model(z).detach()
    with torch.autocast("cpu", torch.bfloat16):
        result = model(z)
    assert 0 < relative(result.float(), expected) < ROUNDING.get(type(case.config), 0.02)
    result.float().square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.abs().isfinite().all()


# torch warns about itself while it imports its compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_model_compiles_into_one_graph(name):
    model, z = awake(CASES[name]), state(CASES[name])
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(z), model(z))
