from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ergoflow.models import A3MConfig, attention, build_model
from ergoflow.ops.axial import axial_mix
from ergoflow.ops.choice import use_impl

SMALL = A3MConfig(
    dim=8,
    latent=16,
    depth=2,
    heads=4,
    head_dim=4,
    sigma=1.0,
    decoder_widths=(8, 8, 4),
    decoder_kernels=(5, 3, 3),
    groups=4,
)
GRIDS = [(13,), (9, 11), (5, 7, 6)]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def small_model(grid, *, periodic=None, seed=0, **changes):
    config = replace(SMALL, **changes)
    return build_model(config, 2, 2, grid, periodic=periodic, generator=seeded(seed))


def state(grid, *, dtype=torch.float32):
    return torch.randn(2, 2, *grid, generator=seeded(1), dtype=dtype)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


# Size


@pytest.mark.parametrize(("heads", "channels", "printed"), [(16, 1, 7_325_665), (16, 3, 7_325_987), (8, 1, 4_704_225)])
@pytest.mark.parametrize("fusion", ["heads", "sum"])
def test_model_has_the_printed_number_of_parameters(heads, channels, printed, fusion):
    assert count(build_model(A3MConfig(heads=heads, fusion=fusion), channels, channels, (256, 256))) == printed


def test_every_part_has_the_inferred_number_of_parameters():
    model = build_model(A3MConfig(), 1, 1, (256, 256))
    assert count(model.lift) == 256
    assert len(model.blocks) == 4
    for block in model.blocks:
        assert count(block.position) == 16_512
        assert count(block.attention.norm) == 256
        assert count(block.attention.value) == 131_072
        assert count(block.attention.context) == 16_384
        assert len(block.attention.axes) == 2
        for axis in block.attention.axes:
            assert [count(reducer) for reducer in axis.reducers] == [66_176] * 3
            assert (count(axis.query), count(axis.key)) == (262_144, 262_144)
        assert count(block.attention.merge) == 131_072
        assert count(block.attention.mix) == 16_384
    assert count(model.expand) == 32_768
    assert count(model.operator) == 65_536
    assert count(model.decoder.norm) == 512
    assert [count(conv) for conv in model.decoder.convs] == [168_192, 25_728, 3_392]
    assert count(model.decoder.head) == 33


def test_exact_operator_has_as_many_parameters_as_the_orthogonal_group():
    assert count(small_model((8, 8), operator="exact").operator) == 16 * 15 // 2


# Shapes and borders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0; choose"),
        ({"dim": 7}, "dim must be even .*, got 7; choose 8"),
        ({"sigma": -1.0}, "sigma must not be negative, got -1.0; choose"),
        ({"coordinate_range": (1.0, 1.0)}, "start < stop, got .*; choose"),
        ({"fusion": "concat"}, "fusion must be one of .*, got 'concat'; choose"),
        ({"operator": "unitary"}, "operator must be one of .*, got 'unitary'; choose"),
        ({"wall_padding": "reflect"}, "wall_padding must be one of .*, got 'reflect'; choose"),
        ({"pooling": ()}, "distinct kinds out of .*; drop"),
        ({"pooling": ("mean", "mean")}, "distinct kinds out of .*; drop"),
        ({"pooling": ("mean", "median")}, "distinct kinds out of .*; drop"),
        ({"heads": 2}, "needs one head per pooling, 3 or more, got 2; add heads"),
        ({"decoder_widths": (8,)}, r"of one length, at least 1, got \(8,\) and \(5, 3, 3\); give"),
        ({"decoder_kernels": (5, 4, 3)}, "odd and positive, got 4; choose 5"),
        ({"latent": 18}, "latent must be a multiple of groups = 4, got 18; change"),
        ({"decoder_widths": (8, 6, 4)}, "decoder_widths must be a multiple of groups = 4, got 6; change"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


# Symmetries


@pytest.mark.parametrize("grid", GRIDS)
def test_without_positions_a_periodic_model_commutes_with_translations(grid):
    model = small_model(grid, sigma=0.0).double()
    z = state(grid, dtype=torch.float64)
    shifts, dims = tuple(range(2, 2 + len(grid))), tuple(range(2, 2 + len(grid)))
    torch.testing.assert_close(model(z.roll(shifts, dims)), model(z).roll(shifts, dims))


def test_with_positions_translations_are_broken():
    model = small_model((9, 11)).double()
    z = state((9, 11), dtype=torch.float64)
    assert relative(model(z.roll(3, 2)), model(z).roll(3, 2)) > 1e-2


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
def test_walls_break_translations_across_them_only(wall_padding):
    model = small_model((9, 11), periodic=(True, False), sigma=0.0, wall_padding=wall_padding).double()
    z = state((9, 11), dtype=torch.float64)
    torch.testing.assert_close(model(z.roll(4, 2)), model(z).roll(4, 2))
    assert relative(model(z.roll(4, 3)), model(z).roll(4, 3)) > 1e-2


def test_exchanging_axes_and_their_weights_exchanges_the_axes_of_the_output():
    model = small_model((9, 11), periodic=(True, False)).double()
    swapped = small_model((11, 9), periodic=(False, True), seed=5).double()
    weights = {}
    for name, value in model.state_dict().items():
        if "axes.0" in name:
            name = name.replace("axes.0", "axes.1")
        elif "axes.1" in name:
            name = name.replace("axes.1", "axes.0")
        elif name.endswith("position.frequencies"):
            value = value.flip(0)
        elif "convs" in name and value.ndim == 4:
            value = value.mT
        weights[name] = value
    swapped.load_state_dict(weights)
    z = state((9, 11), dtype=torch.float64)
    torch.testing.assert_close(swapped(z.mT), model(z).mT)


def test_decoder_cannot_see_the_scale_of_the_operator():
    """Its group norm divides by the scale, so only the unitary term can fix it."""
    model = small_model((9, 11), operator="free").double()
    z = state((9, 11), dtype=torch.float64)
    before = model(z)
    with torch.no_grad():
        model.operator.weight.mul_(3)
    # Up to the 1e-5 that the group norm adds to variances near one.
    assert relative(model(z), before) < 1e-4


def test_block_with_silent_attention_adds_the_code_alone():
    block = small_model((9, 11)).blocks[0]
    with torch.no_grad():
        block.attention.mix.weight.zero_()
    x = torch.randn(2, 9, 11, 8, generator=seeded(7))
    torch.testing.assert_close(block(x), x + block.position((9, 11)))


def test_blocks_that_end_where_the_next_begins_are_blocks_one_by_one():
    model = small_model((9, 11), depth=3).double()
    z = state((9, 11), dtype=torch.float64)
    x = model.lift(z.movedim(1, -1))
    for block in model.blocks:
        x = block(x)
    torch.testing.assert_close(model.encode(z), model.expand(x))


def test_decoder_is_the_written_chain():
    """GroupNorm, three times GELU(k×k + 1×1), and a last 1×1 without activation."""
    decoder = small_model((9, 11)).decoder
    features = torch.randn(2, 9, 11, 16, generator=seeded(8))
    x = features.permute(0, 3, 1, 2).reshape(2, 4, -1)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    x = x.reshape(2, 16, 9, 11)
    for layer, width in zip(decoder.convs, (2, 1, 1), strict=True):
        padded = F.pad(x, [width] * 4, mode="circular")
        wide = F.conv2d(padded, layer.conv.weight, layer.conv.bias, groups=4)
        x = F.gelu(wide + F.conv2d(x, layer.shortcut.weight, layer.shortcut.bias, groups=4))
    expected = F.conv2d(x, decoder.head.weight, decoder.head.bias)
    torch.testing.assert_close(decoder(features), expected)


# Fast operators


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
@pytest.mark.parametrize("pooling", [("mean", "max", "min"), ("mean",), ("min", "max")])
@pytest.mark.parametrize("grid", GRIDS)
def test_fast_model_is_the_written_one(grid, pooling, wall_padding, monkeypatch):
    """Pooling by places, folded head norm, merged linear maps and convolution in Fourier space change no digit."""
    periodic = (True,) * (len(grid) - 1) + (len(grid) == 1,)
    model = small_model(grid, periodic=periodic, pooling=pooling, wall_padding=wall_padding).double()
    monkeypatch.setattr("ergoflow.ops.conv.DIRECT_TAPS", 2)
    z = state(grid, dtype=torch.float64).requires_grad_()
    results = []
    for impl in ("auto", "reference"):
        with use_impl(impl):
            output = model(z)
        gradients = torch.autograd.grad(output.square().sum(), [z, *model.parameters()])
        results.append([output, *gradients])
    for fast, written in zip(*results, strict=True):
        torch.testing.assert_close(fast, written, rtol=1e-8, atol=1e-10 * written.abs().max().item())


# The operator


def test_operator_mode_does_not_change_the_function_at_initialisation():
    z = state((9, 11))
    outputs = [small_model((9, 11), operator=mode)(z) for mode in ("free", "penalty", "exact")]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


# Compilation and devices


@pytest.mark.parametrize("operator", ["penalty", "exact"])
def test_model_and_its_gradients_compile_into_one_graph(operator, monkeypatch):
    monkeypatch.setattr("ergoflow.ops.conv.DIRECT_TAPS", 2)
    model = small_model((9, 11), operator=operator, depth=1)
    z = state((9, 11))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(z), model(z))
    compiled(z).square().sum().backward()
    traced = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(z).square().sum().backward()
    for first, parameter in zip(traced, model.parameters(), strict=True):
        torch.testing.assert_close(first, parameter.grad, rtol=1e-4, atol=1e-5 * parameter.grad.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["penalty", "exact"])
def test_cuda_agrees_with_cpu_and_autocast_with_both(operator):
    model = small_model((33, 31), operator=operator, periodic=(True, False), sigma=8.0)
    z = state((33, 31))
    expected = model(z)
    model.cuda()
    assert relative(model(z.cuda()).cpu(), expected) < 1e-3
    with torch.autocast("cuda", torch.bfloat16):
        output = model(z.cuda())
    assert relative(output.float().cpu(), expected) < 0.05
    output.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Attention kernels


@pytest.mark.parametrize("grid", GRIDS)
def test_attention_kernels_come_per_block_and_axis(grid):
    kernels = small_model(grid).attention_kernels(state(grid))
    shapes = [tuple(kernel.shape for kernel in block) for block in kernels]
    assert shapes == [tuple((2, 4, size, size) for size in grid)] * 2


def test_attention_kernels_are_those_of_the_forward_pass(monkeypatch):
    model, z, applied = small_model((9, 11)), state((9, 11)), []

    def noting(normed, values, kernels, merge):
        applied.extend(kernels)
        return axial_mix(normed, values, kernels, merge)

    with monkeypatch.context() as patch:
        patch.setattr(attention, "axial_mix", noting)
        model(z)
    shown = [kernel for block in model.attention_kernels(z) for kernel in block]
    for first, second in zip(applied, shown, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
