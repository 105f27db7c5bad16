from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ergoflow.models.factformer import FactFormer, FactFormerConfig, rotary_kernel, rotary_phases, rotate
from ergoflow.models.positions import axis_coordinates
from ergoflow.ops.choice import use_impl

SMALL = FactFormerConfig(dim=8, latent=16, depth=2, heads=4, head_dim=4, sigma=1.0, norm_groups=4, conv_groups=2)
GRIDS = [(13,), (9, 11), (5, 7, 6)]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def small_model(grid, *, periodic=None, seed=0, **changes):
    periodic = periodic or (True,) * len(grid)
    config = replace(SMALL, **changes)
    return FactFormer(config, 2, 2, grid, periodic=periodic, generator=seeded(seed))


def state(grid, *, channels=2, dtype=torch.float32):
    return torch.randn(2, channels, *grid, generator=seeded(1), dtype=dtype)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


# Size


@pytest.mark.parametrize(("channels", "expected"), [(1, 6_083_009), (3, 6_083_395)])
def test_model_has_the_printed_number_of_parameters(channels, expected):
    assert count(FactFormer(FactFormerConfig(), channels, channels, (256, 256), periodic=(True, True))) == expected


def test_every_part_has_the_number_of_parameters_of_the_authors_code():
    model = FactFormer(FactFormerConfig(), 1, 1, (256, 256), periodic=(True, True))
    assert count(model.lift) == 256
    assert [count(block) for block in model.blocks] == [1_492_608] * 4
    assert [count(axis) for axis in model.blocks[0].attention.axes] == [66_176 + 2 * 262_144] * 2
    assert count(model.expand) == 32_768
    assert model.step.numel() == 256
    assert count(model.propagator) == 66_432
    decoder = model.decoder
    assert [count(part) for part in (decoder.norm, decoder.first, decoder.second, decoder.head)] == [
        512,
        4096,
        8192,
        65,
    ]


# Shapes and borders


@pytest.mark.parametrize("size", [128, 192, 256])
def test_full_model_maps_the_grids_of_the_data_sets(size):
    model = FactFormer(FactFormerConfig(), 3, 3, (size, size), periodic=(False, True)).to("meta")
    assert model(torch.empty(1, 3, size, size, device="meta")).shape == (1, 3, size, size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0; choose"),
        ({"conv_groups": 0}, "conv_groups must be at least 1, got 0; choose"),
        ({"dim": 7}, "dim must be even .*, got 7; choose 8"),
        ({"head_dim": 3, "kernel_multiplier": 1}, "must be even .rotary pairs., got 3 × 1; make one"),
        ({"sigma": -1.0}, "sigma must not be negative, got -1.0; choose"),
        ({"rotary_scale": -1.0}, "rotary_scale must not be negative, got -1.0; choose"),
        ({"coordinate_range": (1.0, 1.0)}, "start < stop, got .*; choose"),
        ({"latent": 18}, "latent must be a multiple of norm_groups = 4, got 18; change"),
        ({"conv_groups": 16}, "dim must be a multiple of conv_groups = 16, got 8; change"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


# The rotary code


def kernel_at(xi, *, scale=64.0):
    queries, keys = torch.randn(2, 1, 3, 1, 8, generator=seeded(2), dtype=torch.float64)
    ones = torch.ones(len(xi), 1, dtype=torch.float64)
    return rotary_kernel(queries * ones, keys * ones, rotary_phases(xi, 8, scale))  # (1, 3, S, S)


def test_rotary_inner_products_depend_on_coordinate_differences_only():
    xi = torch.rand(7, generator=seeded(3), dtype=torch.float64) * 6
    torch.testing.assert_close(kernel_at(xi + 1.7), kernel_at(xi))
    assert relative(kernel_at(xi * 1.01), kernel_at(xi)) > 1e-2


def test_rotary_kernel_of_constant_sequences_is_a_toeplitz_matrix():
    xi = axis_coordinates(9, (0.0, 2 * math.pi), device=torch.device("cpu"), dtype=torch.float64)
    kernel = kernel_at(xi)
    torch.testing.assert_close(kernel[..., 1:, 1:], kernel[..., :-1, :-1])
    assert relative(kernel[..., 0, 1:], kernel[..., 1:, 0]) > 1e-2


def test_rotation_keeps_lengths_and_turns_each_pair_by_its_own_rate():
    xi = torch.tensor([0.3], dtype=torch.float64)
    x = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=torch.float64)[None, None, None]
    turned = rotate(x, rotary_phases(xi, 6, 64.0))[0, 0, 0]
    slow, fast = 64 * 0.3 * 10_000 ** (-2 / 6), 64 * 0.3
    expected = torch.tensor([math.cos(fast), -math.sin(slow), 0, math.sin(fast), math.cos(slow), 0])
    torch.testing.assert_close(turned, expected.double())


def test_rotary_kernel_is_the_written_sum_of_cosines_and_sines():
    queries, keys = torch.randn(2, 2, 3, 5, 8, generator=seeded(4), dtype=torch.float64)
    phases = torch.rand(5, 4, generator=seeded(5), dtype=torch.float64) * 7
    angle = phases[:, None] - phases[None]  # (S, S, m/2)
    (a, b), (c, d) = queries.chunk(2, -1), keys.chunk(2, -1)
    even = torch.einsum("bhic,bhjc,ijc->bhij", a, c, angle.cos()) + torch.einsum(
        "bhic,bhjc,ijc->bhij", b, d, angle.cos()
    )
    odd = torch.einsum("bhic,bhjc,ijc->bhij", a, d, angle.sin()) - torch.einsum(
        "bhic,bhjc,ijc->bhij", b, c, angle.sin()
    )
    torch.testing.assert_close(rotary_kernel(queries, keys, phases), (even + odd) / 8**0.5)


# Attention and the chain after it


@pytest.mark.parametrize("grid", [(4, 5), (3, 4, 2)])
def test_factorised_attention_is_dense_attention_with_the_product_kernel(grid):
    attention = small_model(grid).double().blocks[0].attention
    x = torch.randn(2, *grid, 8, generator=seeded(6), dtype=torch.float64)
    normed = F.layer_norm(x, (8,), attention.norm.weight, attention.norm.bias)
    kernels = attention.kernels(normed)
    dense = kernels[0]  # (B, H, N, N) after the loop: the Kronecker product of the axes
    for kernel in kernels[1:]:
        dense = torch.einsum("bhij,bhkl->bhikjl", dense, kernel).flatten(4, 5).flatten(2, 3)
    values = F.linear(normed, attention.value.weight).reshape(2, -1, 4, 4)  # (B, N, H, d)
    mixed = torch.einsum("bhij,bjhc->bihc", dense, values)  # (B, N, H, d)
    mean = mixed.mean((1, 3), keepdim=True)
    mixed = (mixed - mean) / mixed.var((1, 3), correction=0, keepdim=True).sqrt()
    merged = F.linear(mixed.flatten(2), attention.merge.weight)
    expected = F.linear(F.gelu(merged), attention.mix.weight).reshape(x.shape)
    torch.testing.assert_close(attention(x), expected)


def test_kernels_of_an_axis_see_the_mean_over_the_other_axis():
    """A ripple along y without mean leaves K_x alone and changes K_y."""
    attention = small_model((6, 8)).double().blocks[0].attention
    context, ripple = torch.randn(2, 2, 6, 8, 8, generator=seeded(7), dtype=torch.float64)
    rippled = context + ripple - ripple.mean(2, keepdim=True)
    torch.testing.assert_close(attention.axes[0](rippled), attention.axes[0](context))
    assert relative(attention.axes[1](rippled), attention.axes[1](context)) > 1e-2


def test_kernel_of_an_axis_is_that_of_its_queries_and_keys_at_its_coordinates():
    axis = small_model((6, 8), coordinate_range=(1.0, 4.0)).double().blocks[0].attention.axes[1]
    context = torch.randn(2, 6, 8, 8, generator=seeded(7), dtype=torch.float64)
    sequence = axis.reducer(context)
    q, k = ((sequence @ layer.weight.T).reshape(2, 8, 4, 8).permute(0, 2, 1, 3) for layer in (axis.query, axis.key))
    xi = 1 + 3 * torch.arange(8, dtype=torch.float64) / 8
    torch.testing.assert_close(axis(context), rotary_kernel(q, k, rotary_phases(xi, 8, 64.0)))


@pytest.mark.parametrize("positions", [{"sigma": 0.0}, {"rotary_scale": 0.0}])
def test_both_codes_live_on_the_configured_coordinates(positions):
    z = state((9, 11))
    near, far = (small_model((9, 11), coordinate_range=(0.0, stop), **positions)(z) for stop in (1.0, 2.0))
    assert relative(near, far) > 1e-3


def test_model_after_the_blocks_is_the_written_chain():
    model = small_model((9, 11)).double()
    with torch.no_grad():
        model.step.normal_(generator=seeded(9))
    z = state((9, 11), dtype=torch.float64)
    x = model.lift(z.permute(0, 2, 3, 1))
    for block in model.blocks:
        x = x + block.position((9, 11))
        x = x + block.attention(x)
    features = x @ model.expand.weight.T + model.step
    move = F.linear(F.layer_norm(features, (16,)), model.propagator.contract.weight, model.propagator.contract.bias)
    features = features + F.linear(F.gelu(move), model.propagator.expand.weight, model.propagator.expand.bias)
    grouped = features.permute(0, 3, 1, 2).reshape(2, 4, -1)
    grouped = (grouped - grouped.mean(-1, keepdim=True)) / (grouped.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    y = F.gelu(F.conv2d(grouped.reshape(2, 16, 9, 11), model.decoder.first.weight[..., None], groups=2))
    y = F.gelu(F.conv2d(y, model.decoder.second.weight[..., None, None]))
    expected = F.conv2d(y, model.decoder.head.weight[..., None, None], model.decoder.head.bias)
    torch.testing.assert_close(model(z), expected)


@pytest.mark.parametrize("grid", GRIDS)
def test_fast_model_and_its_gradients_are_those_of_the_model_as_it_is_written(grid):
    model = small_model(grid).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(9), dtype=torch.float64), alpha=0.1)
    z, parameters = state(grid, dtype=torch.float64), dict(model.named_parameters())
    results = {}
    for impl in ("reference", "torch"):
        with use_impl(impl):
            out = model(z)
            results[impl] = dict(
                zip(["", *parameters], [out, *torch.autograd.grad(out.pow(3).sum(), parameters.values())], strict=True)
            )
    for name, expected in results["reference"].items():
        assert relative(results["torch"][name], expected) < 1e-9, name


def test_attention_has_full_strength_in_a_fresh_model_at_any_resolution():
    """An epsilon above the variance of the mixed values would switch it off."""
    attention = (
        FactFormer(FactFormerConfig(), 1, 1, (8, 8), periodic=(True, True), generator=seeded(0)).blocks[0].attention
    )
    for size in (6, 24):
        x = torch.randn(1, size, size, 128, generator=seeded(10))
        with torch.no_grad():
            before = attention(x)
            for axis in attention.axes:
                axis.query.weight.mul_(0.5)
            assert relative(attention(x), before) < 1e-4
            for axis in attention.axes:
                axis.query.weight.mul_(2)


def test_smooth_fields_give_the_same_answer_on_a_finer_grid():
    """First order in the spacing: the rotary integrand is not periodic."""
    model = small_model((8, 8), rotary_scale=2.0, sigma=0.2).double()

    def answer(size):
        xi = torch.arange(size, dtype=torch.float64) / size * 2 * math.pi
        z = torch.stack([xi[:, None].sin() + xi.cos(), (xi[:, None] + xi).sin()])[None]
        step = size // 16
        return model(z)[..., ::step, ::step].detach()

    exact = answer(256)
    errors = [relative(answer(size), exact) for size in (16, 32, 64)]
    assert errors[0] < 0.2
    assert 1.6 < errors[0] / errors[1] < 3
    assert 1.6 < errors[1] / errors[2] < 3


# Symmetries


@pytest.mark.parametrize("grid", GRIDS)
def test_without_positions_the_model_commutes_with_permutations_of_every_axis(grid):
    model = small_model(grid, sigma=0.0, rotary_scale=0.0, periodic=(False,) * len(grid)).double()
    z = state(grid, dtype=torch.float64)

    def shuffle(field):
        for axis, size in enumerate(grid):
            field = field.index_select(2 + axis, torch.randperm(size, generator=seeded(axis)))
        return field

    torch.testing.assert_close(model(shuffle(z)), shuffle(model(z)))


@pytest.mark.parametrize("positions", [{"sigma": 0.0}, {"rotary_scale": 0.0}])
def test_either_code_breaks_translations(positions):
    model = small_model((9, 11), **positions).double()
    z = state((9, 11), dtype=torch.float64)
    assert relative(model(z.roll(3, 2)), model(z).roll(3, 2)) > 1e-3


def test_walls_change_nothing():
    z = state((9, 11))
    walled, wrapped = (small_model((9, 11), periodic=periodic) for periodic in ((False, True), (True, True)))
    torch.testing.assert_close(walled(z), wrapped(z), rtol=0, atol=0)


def test_exchanging_axes_and_their_weights_exchanges_the_axes_of_the_output():
    model = small_model((9, 11)).double()
    swapped = small_model((11, 9), seed=5).double()
    weights = {}
    for name, value in model.state_dict().items():
        if "axes.0" in name:
            name = name.replace("axes.0", "axes.1")
        elif "axes.1" in name:
            name = name.replace("axes.1", "axes.0")
        elif name.endswith("position.frequencies"):
            value = value.flip(0)
        weights[name] = value
    swapped.load_state_dict(weights)
    z = state((9, 11), dtype=torch.float64)
    torch.testing.assert_close(swapped(z.mT), model(z).mT)


# On a GPU


@pytest.mark.gpu
def test_kernels_on_a_gpu_agree_with_float64_within_the_rounding_of_bfloat16():
    model = FactFormer(FactFormerConfig(), 1, 1, (64, 64), periodic=(True, True), generator=seeded(0)).cuda()
    z = state((64, 64), channels=1).cuda()
    exact = copy.deepcopy(model).double()
    with use_impl("reference"):
        expected = exact(z.double())
        gradients = torch.autograd.grad(expected.square().sum(), list(exact.parameters()))
    with torch.autocast("cuda", torch.bfloat16):
        result = model(z)
    assert relative(result.double(), expected) < 0.02
    found = torch.autograd.grad(result.float().square().sum(), list(model.parameters()))
    flat, wanted = (torch.cat([g.double().flatten() for g in of]) for of in (found, gradients))
    assert relative(flat, wanted) < 0.08
