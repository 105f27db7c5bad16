from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ergoflow.models.convnext import ConvNeXt, ConvNeXtBlock, ConvNeXtConfig, shuffle, unshuffle
from ergoflow.models.layers import pad_axes
from ergoflow.ops.depthwise import pad_features

SMALL = ConvNeXtConfig(widths=(6, 8, 10), blocks=(1, 1, 1, 1, 1), kernel=3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(config: ConvNeXtConfig, channels: int, grid: tuple[int, ...], periodic=None) -> ConvNeXt:
    return ConvNeXt(config, channels, channels, grid, periodic=periodic or (True,) * len(grid), generator=seeded())


def awake(model: ConvNeXt) -> ConvNeXt:
    """The model with a random head: at its zero start it would agree with anything."""
    with torch.no_grad():
        for p in model.head.parameters():
            p.copy_(torch.randn(p.shape, generator=seeded(9)))
    return model


def field(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


@pytest.mark.parametrize(("channels", "parameters"), [(1, 6_301_796), (3, 6_301_796 + 2 * 4 * 96 + 2 * 4 * 97)])
def test_default_model_has_the_parameters_of_its_budget_and_runs_on_every_grid(channels: int, parameters: int) -> None:
    model = build(ConvNeXtConfig(), channels, (128, 128)).to("meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    for side in (128, 192, 256):
        z = torch.empty(2, channels, side, side, device="meta")
        assert model(z).shape == z.shape


def test_full_resolution_lift_differs_in_the_first_and_last_map_alone() -> None:
    count = sum(p.numel() for p in build(ConvNeXtConfig(patch=1), 1, (16, 16)).parameters())
    assert count == 6_301_796 - 3 * 96 - 3 * 97


@pytest.mark.parametrize("grid", [(24,), (24, 16), (24, 8, 16)])
def test_model_commutes_with_translations_by_its_stride(grid: tuple[int, ...]) -> None:
    model = awake(build(SMALL, 2, grid)).double()
    z = field(2, 2, *grid, dtype=torch.float64)
    dims = tuple(range(2, z.ndim))
    shift = (SMALL.stride, -SMALL.stride, SMALL.stride)[: len(grid)]
    moved = model(z.roll(shift, dims))
    torch.testing.assert_close(moved, model(z).roll(shift, dims), rtol=1e-12, atol=1e-12)
    # Half a patch is no symmetry: the equality above does not hold for want of spatial structure.
    assert not torch.allclose(model(z.roll(1, 2)), model(z).roll(1, 2), atol=1e-3)


def test_levels_are_joined_by_added_skips() -> None:
    """Without blocks the net is its lift, two levels of down and up maps, and the head."""
    model = awake(build(ConvNeXtConfig(widths=(6, 8, 10), blocks=(0, 0, 0, 0, 0)), 2, (24, 32)))
    z = field(1, 2, 24, 32)
    fine = model.lift(unshuffle(z.movedim(1, -1), 2))
    middle = model.down[0](unshuffle(fine, 2))
    coarse = model.down[1](unshuffle(middle, 2))
    middle = middle + shuffle(model.up[0](coarse), 2)
    fine = fine + shuffle(model.up[1](middle), 2)
    expected = shuffle(model.head(model.norm(fine)), 2).movedim(-1, 1)
    torch.testing.assert_close(model(z), expected)


def test_fresh_model_answers_zero_and_leaves_zero_with_the_first_gradient_step() -> None:
    model = build(SMALL, 3, (16, 8))
    z = field(2, 3, 16, 8)
    out = model(z)
    assert torch.equal(out, torch.zeros_like(z))
    (out - z).square().sum().backward()
    assert model.head.weight.grad.abs().min() > 0


def test_one_point_is_felt_everywhere() -> None:
    """Half a grid away, on both axes, in all channels: the levels widen the sight of the 7×7 kernels."""
    config = ConvNeXtConfig(widths=(6, 8, 10), blocks=(1, 1, 2, 1, 1))
    model = awake(build(config, 2, (64, 64))).double()
    z = field(1, 2, 64, 64, dtype=torch.float64)
    poked = z.clone()
    poked[0, 0, 5, 7] += 1
    assert (model(poked) - model(z)).abs().min() > 0


@pytest.mark.parametrize("shape", [(2, 12, 3), (2, 6, 12, 1), (1, 6, 12, 18, 2)])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_shuffle_undoes_unshuffle(shape: tuple[int, ...], factor: int) -> None:
    x = field(*shape)
    folded = unshuffle(x, factor)
    axes = len(shape) - 2
    assert folded.shape == (shape[0], *(side // factor for side in shape[1:-1]), shape[-1] * factor**axes)
    assert torch.equal(shuffle(folded, factor), x)


def test_unshuffle_gathers_patches_as_torch_does() -> None:
    x = field(2, 3, 6, 4)
    ours = unshuffle(x.movedim(1, -1), 2)  # channels in the order (point, C); torch has (C, point)
    theirs = F.pixel_unshuffle(x, 2).unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2)
    assert torch.equal(ours.movedim(-1, 1), theirs)


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
@pytest.mark.parametrize("periodic", [(True,), (False,), (False, True), (True, True, False)])
def test_features_are_padded_like_fields(periodic: tuple[bool, ...], wall_padding: str) -> None:
    x = field(2, 3, *(5, 7, 4)[: len(periodic)])
    expected = pad_axes(x, 3, periodic, wall_padding=wall_padding)
    ours = pad_features(x.movedim(1, -1), 3, periodic, wall_padding=wall_padding)
    assert torch.equal(ours.movedim(-1, 1), expected)
    assert pad_features(x, 0, periodic, wall_padding=wall_padding) is x


def test_block_is_the_written_formula() -> None:
    block = ConvNeXtBlock(ConvNeXtConfig(), 5, (True, True), generator=seeded())
    with torch.no_grad():
        block.norm.weight.copy_(field(5))
        block.norm.bias.copy_(field(5, seed=2))
    x = field(2, 9, 7, 5)
    reference = nn.Conv2d(5, 5, 7, padding=3, padding_mode="circular", groups=5)
    reference.load_state_dict(block.conv.state_dict())
    y = reference(x.movedim(-1, 1)).movedim(1, -1)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + block.norm.eps).sqrt()
    y = y * block.norm.weight + block.norm.bias
    hidden = F.gelu(y @ block.expand.weight.T + block.expand.bias)
    torch.testing.assert_close(block(x), x + hidden @ block.contract.weight.T + block.contract.bias)


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
def test_walls_do_not_touch_each_other(wall_padding: str) -> None:
    """A poke at one wall reaches three points into the domain, and wraps around the periodic axis alone."""
    config = ConvNeXtConfig(widths=(4,), blocks=(1,), patch=1, wall_padding=wall_padding)
    model = awake(build(config, 3, (12, 12), periodic=(False, True)))
    z = field(1, 3, 12, 12)
    poked = z.clone()
    poked[:, :, 0, 0] += 1
    change = (model(poked) - model(z)).abs().amax((0, 1))  # (X, Y)
    assert change[4:].max() == 0
    assert change[:4, [0, 3, 9, 11]].min() > 0
    assert change[:, 4:9].max() == 0


def test_wall_paddings_differ_at_the_wall_alone() -> None:
    replicate, zeros = (
        awake(build(ConvNeXtConfig(widths=(4,), blocks=(1,), patch=1, wall_padding=name), 1, (12, 8), (False, True)))
        for name in ("replicate", "zeros")
    )
    difference = (replicate(field(1, 1, 12, 8)) - zeros(field(1, 1, 12, 8))).abs().amax((0, 1, 3))
    assert difference[[0, 1, 2, -3, -2, -1]].min() > 0
    assert difference[3:-3].max() == 0


def test_output_is_bounded_whatever_goes_in() -> None:
    model = awake(build(SMALL, 1, (16, 16)))
    rows = model.head.weight.detach()
    bound = rows.norm(dim=1).max() * SMALL.widths[0] ** 0.5 + model.head.bias.abs().max()
    assert model(1e6 * field(1, 1, 16, 16)).abs().max() <= bound


def test_residual_stream_is_float32_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert build(SMALL, 2, (16, 16))._lift(field(2, 2, 16, 16)).dtype == torch.float32


def test_model_runs_on_other_grids_than_it_was_built_for() -> None:
    model = awake(build(SMALL, 1, (16, 16)))
    assert model(field(2, 1, 24, 8)).shape == (2, 1, 24, 8)
    with pytest.raises(ValueError, match=r"multiples of the stride 8, got \(12, 16\); resample"):
        model(field(2, 1, 12, 16))


@pytest.mark.parametrize(
    ("config", "grid", "periodic", "message"),
    [
        (ConvNeXtConfig(), (100, 128), (True, True), r"stride 8, got \(100, 128\); resample"),
        (ConvNeXtConfig(), (0, 128), (True, True), r"stride 8, got \(0, 128\); resample"),
        (ConvNeXtConfig(), (64, 16), (False, True), r"at least 3 points on the coarsest .* got \(64, 16\); use"),
    ],
)
def test_grid_that_does_not_fit_is_refused_at_construction(config, grid, periodic, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ConvNeXt(config, 1, 1, grid, periodic=periodic)
    assert "\n" not in str(error.value)


def test_wall_axis_may_be_shorter_than_the_kernel_reaches() -> None:
    assert build(ConvNeXtConfig(widths=(4, 4), blocks=(1, 1, 1)), 1, (4, 16), (False, True))(
        field(1, 1, 4, 16)
    ).shape == (1, 1, 4, 16)


@pytest.mark.parametrize(
    "settings",
    [
        {"widths": ()},
        {"widths": (8, 0), "blocks": (1, 1, 1)},
        {"blocks": (3, 3, 3)},
        {"blocks": (3, 3, -1, 3, 3)},
        {"kernel": 4},
        {"kernel": -1},
        {"patch": 0},
        {"expansion": 0},
        {"wall_padding": "reflect"},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))) as error:
        ConvNeXtConfig(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.gpu
def test_recorded_gradient_of_a_block_is_the_one_launched_kernel_by_kernel() -> None:
    """Training steps are recorded: nothing in a block may wait for the host."""
    block = ConvNeXtBlock(ConvNeXtConfig(), 96, (True, True), generator=seeded()).cuda()
    x = field(2, 32, 16, 96).cuda().requires_grad_()

    def gradients() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = block(x)
        return torch.autograd.grad(out.square().sum(), (x, *block.parameters()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = gradients()
    with torch.no_grad():
        x.copy_(field(2, 32, 16, 96, seed=3))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(recorded, gradients(), strict=True))
