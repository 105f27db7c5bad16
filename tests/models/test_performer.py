from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ergoflow.models.performer import (
    LinearAttention,
    Performer,
    PerformerConfig,
    ScaleNorm,
    linear_attention,
    orthogonal_gaussian,
)

SMALL = PerformerConfig(
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
GRIDS = [(13,), (9, 11), (5, 7, 6)]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def small_model(grid, *, periodic=None, **changes):
    periodic = periodic or (True,) * len(grid)
    config = replace(SMALL, **changes)
    return Performer(config, 2, 2, grid, periodic=periodic, generator=seeded(0))


def full_model():
    return Performer(PerformerConfig(), 3, 3, (192, 192), periodic=(False, True))


def state(grid, *, dtype=torch.float32):
    return torch.randn(2, 2, *grid, generator=seeded(1), dtype=dtype)


def queries_keys_values(points, dim, *, seed=2, scale=1.0):
    q, k, v = torch.randn(3, 2, 3, points, dim, generator=seeded(seed), dtype=torch.float64)
    return q * scale, k * scale, v


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


# Size


def test_model_has_the_size_and_the_work_of_the_rebuttal():
    """7,717,931 parameters and 271 G multiply-adds are printed, for the channel's plane."""
    model = full_model()
    assert count(model) == 7_717_931
    assert count(model.lift) + model.code.numel() == 4_719_104
    assert [count(block) for block in model.blocks] == [659_202] * 4
    assert count(model.expand) + count(model.operator) == 98_304
    assert count(model.mix) + count(model.decoder) == 263_715
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 192, 192))
    assert round(counter.get_total_flops() / 2e9) == 271


# Linear attention


def test_linear_attention_is_the_dense_formula_with_the_same_features():
    q, k, v = queries_keys_values(10, 6, scale=1.5)
    projection = orthogonal_gaussian(16, 6, generator=seeded(3))

    def features(x):
        x = x / 6**0.25
        return (x @ projection.T - x.square().sum(-1, keepdim=True) / 2).exp() / 4

    matrix = features(q) @ features(k).mT
    expected = matrix @ v / matrix.sum(-1, keepdim=True)
    torch.testing.assert_close(linear_attention(q, k, v, projection), expected)


def test_linear_attention_is_stable_where_the_features_overflow():
    q, k, v = queries_keys_values(10, 6)
    projection = orthogonal_gaussian(16, 6, generator=seeded(3))
    for scale in (1e-3, 30.0, 300.0):
        exact = linear_attention(scale * q, scale * k, v, projection)
        single = linear_attention(*(x.float() for x in (scale * q, scale * k, v, projection)))
        # A weighted mean of values, whatever the logits.
        assert exact.isfinite().all()
        assert (exact.abs().amax((2, 3)) <= v.abs().amax((2, 3)) * (1 + 1e-12)).all()
        # Logits of order scale² carry an error of 2^-24 of themselves.
        assert relative(single.double(), exact) < 1e-5 * max(1, scale**2)


def test_gradient_of_linear_attention_is_that_of_the_formula():
    q, k, v = (x.requires_grad_() for x in queries_keys_values(5, 3))
    projection = orthogonal_gaussian(4, 3, generator=seeded(4))
    torch.autograd.gradcheck(linear_attention, (q, k, v, projection))


def test_equal_values_are_returned_unchanged():
    q, k, v = queries_keys_values(10, 6)
    same = v[:, :, :1].expand_as(v)
    torch.testing.assert_close(linear_attention(q, k, same, orthogonal_gaussian(5, 6, generator=seeded(5))), same)


def test_linear_attention_converges_to_softmax_attention_at_the_monte_carlo_rate():
    """The relative variance of one feature is exp(|x + y|²) − 1, so the rate shows once m is far above that."""
    q, k, v = queries_keys_values(12, 4, scale=0.3)
    x, y = q / 4**0.25, k / 4**0.25
    assert (x[:, :, :, None] + y[:, :, None]).square().sum(-1).max().exp() < 4
    exact = F.scaled_dot_product_attention(q, k, v)
    errors = []
    for size in (64, 256, 1024, 4096):
        projections = [orthogonal_gaussian(size, 4, generator=seeded(seed)) for seed in range(8)]
        misses = [relative(linear_attention(q, k, v, projection), exact) for projection in projections]
        errors.append(sum(misses) / len(misses))
    rate = (torch.tensor(errors).log2().diff() / 2).mean().item()
    assert rate == pytest.approx(-0.5, abs=0.1)
    assert errors[-1] < 0.01


def test_random_features_are_gaussian_and_orthogonal_in_blocks():
    rows = orthogonal_gaussian(20, 8, generator=seeded(6))
    for block in rows.split(8):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-12, rtol=0)
    assert rows[0] @ rows[8] != pytest.approx(0, abs=1e-3)
    many = orthogonal_gaussian(40_000, 8, generator=seeded(7))
    torch.testing.assert_close(many.mean(0), torch.zeros(8).double(), atol=0.02, rtol=0)
    torch.testing.assert_close(many.T @ many / len(many), torch.eye(8).double(), atol=0.02, rtol=0)
    # Chi with 8 degrees of freedom: the fourth moment of the length is 8·10.
    assert many.norm(dim=1).pow(4).mean().item() == pytest.approx(80, rel=0.03)


def test_features_estimate_the_exponential_kernel_without_bias():
    x, y = torch.randn(2, 4, generator=seeded(8), dtype=torch.float64) * 0.5
    w = orthogonal_gaussian(40_000, 4, generator=seeded(9))
    estimate = (w @ (x + y) - (x.square().sum() + y.square().sum()) / 2).exp().mean()
    assert estimate.item() == pytest.approx((x @ y).exp().item(), rel=0.02)


def test_cost_is_linear_in_the_number_of_points():
    attention = LinearAttention(8, heads=4, head_dim=4, features=12, generator=seeded(0))
    work = []
    for size in (16, 32):
        with FlopCounterMode(display=False) as counter:
            attention(torch.zeros(1, size, 16, 8))
        work.append(counter.get_total_flops())
    assert work[1] == 2 * work[0]


# Shapes and borders


def test_states_on_another_grid_are_refused_in_one_line():
    """Its code has a number for every point of one grid, and none for others."""
    model = small_model((9, 11))
    for grid in ((11, 9), (18, 22), (3, 33)):
        with pytest.raises(ValueError, match=r"every point of its grid \(9, 11\), got .*; train one") as caught:
            model(state(grid))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": 0}, "features must be at least 1, got 0; choose"),
        ({"mlp_width": 0}, "mlp_width must be at least 1, got 0; choose"),
        ({"heads": 0}, "heads must be at least 1, got 0; choose"),
        ({"dim": 7}, "dim must be even .*, got 7; choose 8"),
        ({"operator": "unitary"}, "operator must be one of .*, got 'unitary'; choose"),
        ({"latent": 18}, "latent must be a multiple of groups = 4, got 18; change"),
        ({"decoder_kernels": (5, 4, 3)}, "odd and positive, got 4; choose 5"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


# Symmetries


@pytest.mark.parametrize("grid", GRIDS)
def test_permuting_the_points_and_their_codes_permutes_the_features(grid):
    model = small_model(grid).double()
    z = state(grid, dtype=torch.float64)
    order = torch.randperm(z[0, 0].numel(), generator=seeded(10))
    expected = model.encode(z).flatten(1, -2)[:, order].unflatten(1, grid)
    shuffled = z.flatten(2)[..., order].unflatten(2, grid)
    assert relative(model.encode(shuffled), expected) > 1e-3
    with torch.no_grad():
        model.code.copy_(model.code.flatten(1, -2)[:, order].unflatten(1, grid))
    torch.testing.assert_close(model.encode(shuffled), expected)


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
def test_walls_break_translations_across_them_only(wall_padding):
    model = small_model((9, 11), periodic=(True, False), wall_padding=wall_padding).double()
    with torch.no_grad():
        model.code.zero_()
    z = state((9, 11), dtype=torch.float64)
    torch.testing.assert_close(model(z.roll(4, 2)), model(z).roll(4, 2))
    assert relative(model(z.roll(4, 3)), model(z).roll(4, 3)) > 1e-3


def test_model_is_the_written_chain():
    """As in the authors' script: a code once, blocks of attention and MLP behind unit vectors, no norm at the end."""
    model = small_model((9, 11)).double()
    block, attention = model.blocks[0], model.blocks[0].attention
    with torch.no_grad():
        block.attention_norm.gain.fill_(0.7)
        block.mlp_norm.gain.fill_(-0.4)
    x = torch.randn(2, 99, 8, generator=seeded(11), dtype=torch.float64)
    points = 0.7 * x / x.norm(dim=-1, keepdim=True)
    q, k, v = (
        layer(points).reshape(2, 99, 4, 4).permute(0, 2, 1, 3)
        for layer in (attention.query, attention.key, attention.value)
    )
    assert attention.query.bias.abs().min() > 0
    mixed = linear_attention(q, k, v, attention.projection).permute(0, 2, 1, 3).reshape(2, 99, 16)
    y = x + attention.merge(mixed)
    hidden = F.gelu(block.widen(-0.4 * y / y.norm(dim=-1, keepdim=True)))
    torch.testing.assert_close(block(x.unflatten(1, (9, 11))).flatten(1, -2), y + block.narrow(hidden))
    z = state((9, 11), dtype=torch.float64)
    features = F.linear(z.movedim(1, -1), model.lift.weight, model.lift.bias) + model.code
    for block in model.blocks:
        features = block(features)
    latent = model.expand(features)
    torch.testing.assert_close(model.encode(z), latent)
    torch.testing.assert_close(model(z), model.decoder(model.mix(latent @ model.operator.matrix.T)))


def test_features_of_zero_have_a_norm_and_a_gradient():
    x = torch.zeros(3, 5, requires_grad=True)
    out = ScaleNorm()(x)
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()


# Draws and precision


def test_blocks_have_features_of_their_own():
    first, second = (block.attention.projection for block in small_model((8, 8)).blocks)
    assert not torch.equal(first, second)


def test_softmaxes_stay_in_float32_under_autocast():
    """Logits near 300 rounded to bfloat16 would be off by one and the weights by a factor of e."""
    q, k, v = (x.float() for x in queries_keys_values(10, 6))
    projection = orthogonal_gaussian(16, 6, generator=seeded(3)).float()
    expected = linear_attention(12 * q, 12 * k, v, projection)
    with torch.autocast("cpu", torch.bfloat16):
        result = linear_attention(12 * q, 12 * k, v, projection)
    assert relative(result.float(), expected) < 0.01
