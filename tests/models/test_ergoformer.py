from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.flop_counter import FlopCounterMode

from ergoflow.models.advection import Pace, carried
from ergoflow.models.convnext import ConvNeXt, ConvNeXtConfig
from ergoflow.models.ergoformer import (
    WALL_MODES,
    Ergoformer,
    ErgoformerConfig,
    GlobalAttention,
    global_layer,
    wall_cosines,
)
from ergoflow.models.operator import LatentOperator
from ergoflow.models.transport import Transport
from ergoflow.models.velocity import VELOCITY_GAIN, scaled_velocity
from ergoflow.numerics.fourier import TWO_PI, velocity_from_vorticity
from ergoflow.training.ensemble import ensemble_loss
from ergoflow.training.objectives import ObjectiveConfig, make_objective
from ergoflow.training.stepper import NormalizedStep

UNET = ConvNeXtConfig(widths=(8, 12, 16), blocks=(1, 2, 1, 2, 1), kernel=3)
SMALL = ErgoformerConfig(unet=UNET, attention="lines", frequencies=2)
# A step that moves white noise by a grid point.
PACE = Pace(turn=2.0, change=0.5)
PLAIN = replace(SMALL, attention=None, flow=None)
# Every kind of global layer on a level of its own, and on two.
LAYERS = [
    {"kernel": "unitary"},
    {"kernel": "linear", "attention_levels": (0, 2)},
    {"kernel": "free", "attention_blocks": 2},
    {"kernel": "free", "attention": "a3m"},
    {"kernel": "unitary", "attention": "a3m", "attention_levels": (2,)},
    {"kernel": "free", "attention": "mean", "codes": "cosine"},
    {"kernel": "unitary", "attention": "mean", "codes": None, "dissipation": False},
]
# Multiply-adds of `a3m` with 8 heads on 128².
A3M_MULTIPLY_ADDS = 50.2e9


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(config: ErgoformerConfig, grid: tuple[int, ...], *, channels: int = 1, periodic=None) -> Ergoformer:
    periodic = periodic or (True,) * len(grid)
    return Ergoformer(config, channels, channels, grid, periodic=periodic, pace=PACE, generator=seeded())


def awake(model: nn.Module) -> nn.Module:
    """The model with random numbers where it starts at zero: there it would agree with anything."""
    generator = seeded(9)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "head." in name or "merge." in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
            if "kernels" in name and "project" in name:
                p.mul_(4)
    return model


def field(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Size


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 4_472_228),
        ({"attention": "lines"}, 4_620_468),
        ({"kernel": "free", "attention": "lines"}, 4_472_228 + 2 * (74_112 + 73_728)),
        ({"kernel": "free", "attention": "a3m"}, 4_472_228 + 2 * (74_112 + 73_728 + 6 * 148_416)),
        ({"attention": "mean"}, 4_472_228 + 2 * (74_120 + 2 * 148_416)),
        ({"operator": "penalty"}, 4_472_228 + 256**2),
    ],
)
def test_model_has_the_parameters_of_its_budget(changes: dict, parameters: int) -> None:
    model = build(ErgoformerConfig(**changes), (128, 128))
    assert count(model) == parameters <= 10_000_000


def test_default_model_needs_less_than_a_tenth_of_the_operations_of_a3m() -> None:
    model = build(ErgoformerConfig(), (128, 128))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 1, 128, 128))
    assert counter.get_total_flops() / 2 == pytest.approx(4.47e9, rel=1e-2)
    assert counter.get_total_flops() / 2 < 0.1 * A3M_MULTIPLY_ADDS


# The U-Net inside


def test_without_additions_the_model_is_the_plain_unet_bit_for_bit() -> None:
    model = build(PLAIN, (16, 24), channels=2)
    plain = ConvNeXt(UNET, 2, 2, (16, 24), periodic=(True, True), generator=seeded())
    weights = {name.removeprefix("unet."): value for name, value in model.state_dict().items()}
    assert list(weights) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(weights[name], value), name
    z = field(2, 2, 16, 24)
    assert torch.equal(awake(model)(z), awake(plain)(z))


@pytest.mark.parametrize("changes", LAYERS)
def test_every_setting_starts_from_the_same_unet(changes: dict) -> None:
    without = build(replace(SMALL, attention=None), (32, 32))
    with_layers = build(replace(SMALL, **changes), (32, 32))
    ours = [m for m in with_layers.unet.modules() if type(m).__name__ == "ConvNeXtBlock"]
    theirs = [m for m in without.unet.modules() if type(m).__name__ == "ConvNeXtBlock"]
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
    for model in (with_layers, without):
        model.unet.head.weight.data.copy_(field(4, 8))
    z = field(1, 1, 32, 32)
    difference = (with_layers(z) - without(z)).norm() / without(z).norm()
    if changes["kernel"] == "free":
        assert difference < 1e-6
    else:
        assert 0 < difference < 0.5


def test_fresh_model_that_carries_nothing_answers_zero() -> None:
    z = field(2, 1, 32, 32)
    assert torch.equal(build(replace(SMALL, flow="velocity"), (32, 32))(z), torch.zeros_like(z))


def test_layers_stand_before_the_last_blocks_of_their_stages() -> None:
    def kinds(stage: nn.Module) -> list[str]:
        return [type(module).__name__ for module in stage]

    block, layer = "ConvNeXtBlock", "Transport"
    model = build(replace(SMALL, attention_levels=(1, 2), operator="free"), (32, 32))
    assert [kinds(stage) for stage in model.unet.encoder] == [[block], [block, layer, block]]
    assert kinds(model.unet.middle) == [layer, block, "LatentOperator"]
    assert [kinds(stage) for stage in model.unet.decoder] == [[block, layer, block], [block]]
    both = build(replace(SMALL, attention_levels=(1,), attention_blocks=5), (32, 32))
    assert kinds(both.unet.encoder[1]) == [layer, block, layer, block]
    finest = build(replace(SMALL, attention_levels=(0,)), (32, 32))
    assert [kinds(stage) for stage in finest.unet.decoder] == [[block, block], [layer, block]]


# Inputs


@pytest.mark.parametrize("grid", [(12, 12), (8, 14), (9, 6)])
def test_velocity_is_that_of_the_solver(grid: tuple[int, int]) -> None:
    omega = field(2, 1, *grid, dtype=torch.float64)
    length = [TWO_PI * side / max(grid) for side in grid]
    expected = VELOCITY_GAIN * velocity_from_vorticity(omega, length)
    torch.testing.assert_close(scaled_velocity(omega), expected, rtol=0, atol=1e-12)
    assert scaled_velocity(omega.bfloat16()).dtype == torch.float32


def test_velocity_first_taken_in_a_roll_out_can_be_differentiated_later() -> None:
    omega = field(1, 1, 10, 14)
    with torch.inference_mode():
        before = scaled_velocity(omega)
    after = scaled_velocity(omega.requires_grad_())
    after.square().sum().backward()
    assert torch.equal(before, after)
    assert omega.grad.isfinite().all()


@pytest.mark.parametrize("change", [0.5, None])
def test_untrained_model_predicts_what_the_flow_carries(change: float | None) -> None:
    pace = replace(PACE, change=change)
    model = Ergoformer(SMALL, 1, 1, (32, 40), periodic=(True, True), pace=pace, generator=seeded()).double()
    z = field(2, 1, 32, 40, dtype=torch.float64)
    z = z - z.mean((2, 3), keepdim=True)
    there = carried(z, PACE.turn)[0]
    there = there - there.mean((2, 3), keepdim=True)
    step = NormalizedStep(model, "state") if change is None else NormalizedStep(model, "increment", torch.tensor([0.5]))
    torch.testing.assert_close(step.double()(z), there)
    assert (there - z).norm() > 0.5 * z.norm()


def test_carried_vorticity_keeps_its_mean() -> None:
    z = field(2, 1, 32, 40, dtype=torch.float64)
    change = awake(build(SMALL, (32, 40))).double()(z)
    assert change.mean((2, 3)).abs().max() < 1e-12
    assert change.std() > 0.1


def test_wall_code_tells_every_point_across_the_channel_apart_and_is_the_same_along_it() -> None:
    code = wall_cosines(field(2, 3, 24, 5), 0)
    assert code.shape == (2, WALL_MODES, 24, 5)
    assert torch.equal(code, code[:1, :, :, :1].expand_as(code))
    assert len(code[0, :, :, 0].mT.unique(dim=0)) == 24
    torch.testing.assert_close(code[0, 2, 3, 0].item(), math.cos(math.pi * 3 * 3.5 / 24), rtol=1e-6, atol=0)
    # A wall is a wall: cosines of odd number change sign from one to the other.
    torch.testing.assert_close(code.flip(2)[:, ::2], -code[:, ::2])


# Symmetries


@pytest.mark.parametrize("changes", LAYERS)
@pytest.mark.parametrize("grid", [(32,), (32, 40), (32, 32, 32)])
def test_model_commutes_with_translations_by_its_stride(grid: tuple[int, ...], changes: dict) -> None:
    if len(grid) == 3 and changes["kernel"] == "linear":
        changes = {"kernel": "linear"}
    model = awake(build(replace(SMALL, **changes, flow="carried" if len(grid) == 2 else None), grid)).double()
    z = field(1, 1, *grid, dtype=torch.float64)
    dims = tuple(range(2, z.ndim))
    shift = (8, -16, 24)[: len(grid)]
    out = model(z)
    torch.testing.assert_close(model(z.roll(shift, dims)), out.roll(shift, dims), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(out, out.roll(shift, dims), atol=1e-3)


def test_random_codes_break_translations() -> None:
    model = awake(build(replace(SMALL, codes="random", kernel="free"), (32, 32))).double()
    z = field(1, 1, 32, 32, dtype=torch.float64)
    assert not torch.allclose(model(z.roll(8, 2)), model(z).roll(8, 2), atol=1e-3)


@pytest.mark.parametrize("changes", LAYERS)
def test_walls_break_translations_across_them_only(changes: dict) -> None:
    config = replace(SMALL, **changes, flow=None)
    model = awake(build(config, (32, 32), channels=3, periodic=(False, True))).double()
    z = field(1, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(z.roll(8, 3)), model(z).roll(8, 3), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(model(z.roll(8, 2)), model(z).roll(8, 2), atol=1e-3)


def test_local_part_does_not_see_through_walls() -> None:
    unet = ConvNeXtConfig(widths=(8,), blocks=(2,), kernel=3, patch=1)
    config = ErgoformerConfig(unet=unet, attention=None, flow=None)
    z = field(1, 1, 16, 16, dtype=torch.float64)
    poked = z.clone()
    poked[0, 0, 0, 8] += 1
    reached = []
    for periodic in ((False, True), (True, True)):
        model = awake(build(config, (16, 16), periodic=periodic)).double()
        reached.append((model(poked) - model(z)).abs().amax((0, 1, 3)).nonzero().flatten().tolist())
    assert reached == [[0, 1, 2], [0, 1, 2, 14, 15]]


@pytest.mark.parametrize("changes", LAYERS)
def test_samples_of_a_batch_do_not_see_each_other(changes: dict) -> None:
    model = awake(build(replace(SMALL, **changes), (32, 32))).double()
    z = field(3, 1, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(z)[1:2], model(z[1:2]))


def test_lines_can_shear_and_pooled_kernels_cannot() -> None:
    """Rows that carry different features are moved differently by kernels of lines, alike by a shared kernel."""
    x = field(1, 16, 16, 8, dtype=torch.float64)
    moved = {}
    for attention in ("lines", "mean"):
        config = replace(SMALL, attention=attention, dissipation=False, attention_levels=(0,))
        layer = awake(global_layer(config, 0, (True, True), generator=seeded())).double()
        kernel = layer.kernels[0](layer.norm(x))  # along x, for each y
        moved[attention] = kernel
    assert moved["mean"].shape == (1, 4, 16, 16)
    assert moved["lines"].shape == (1, 4, 16, 16, 16)
    assert moved["lines"].std(dim=2).mean() > 0.5 * moved["lines"].std()


# Other grids, precisions, devices


@pytest.mark.parametrize("changes", LAYERS)
def test_one_model_runs_on_grids_it_was_not_built_for(changes: dict) -> None:
    model = awake(build(replace(SMALL, **changes), (32, 32)))
    for grid in ((48, 32), (16, 24)):
        out = model(field(2, 1, *grid))
        assert out.shape == (2, 1, *grid)
        assert out.isfinite().all()


def test_transport_turns_alike_on_a_finer_grid() -> None:
    """The same smooth features on 32² and on 64² points are moved by the same map."""
    layer = awake(global_layer(replace(SMALL, attention_levels=(0,)), 0, (True, True), generator=seeded())).double()

    def smooth(size: int) -> torch.Tensor:
        xi = TWO_PI * torch.arange(size, dtype=torch.float64) / size
        waves = [torch.sin(xi[:, None] + n * xi + n * n) for n in range(-4, 4)]
        return torch.stack(waves, dim=-1)[None]  # (1, X, Y, D)

    coarse, fine = layer(smooth(32)), layer(smooth(64))
    moved = (coarse - smooth(32)).norm()
    assert moved > 0.05 * coarse.norm()
    # LayerNorm makes waves that 32 points alias.
    assert (fine[:, ::2, ::2] - coarse).norm() < 0.03 * moved


@pytest.mark.parametrize("changes", LAYERS)
def test_bfloat16_autocast_agrees_with_single_precision(changes: dict) -> None:
    model = awake(build(replace(SMALL, **changes), (32, 32)))
    z = field(2, 1, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(z).float()
    assert (rounded - model(z)).norm() < 0.05 * model(z).norm()


@pytest.mark.parametrize("changes", [*LAYERS, {"operator": "exact"}])
def test_every_parameter_receives_a_gradient(changes: dict) -> None:
    config = replace(SMALL, **changes, flow=None)
    model = awake(build(config, (32, 32), channels=3, periodic=(False, True)))
    (model(field(2, 3, 32, 32)) - field(2, 3, 32, 32, seed=2)).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name


# The operator


def test_unitary_term_finds_the_operator() -> None:
    batch = field(2, 2, 1, 32, 32)
    objective = make_objective(ObjectiveConfig(unitary_weight=1.0), generator=seeded())
    penalised = build(replace(SMALL, operator="penalty"), (32, 32))
    assert isinstance(penalised.operator, LatentOperator)
    assert "unitary" in objective(NormalizedStep(penalised), batch).parts
    exact = build(replace(SMALL, operator="exact"), (32, 32))
    assert "unitary" not in objective(NormalizedStep(exact), batch).parts
    without = build(SMALL, (32, 32))
    assert without.operator is None
    with pytest.raises(ValueError, match="needs a model with a latent operator"):
        objective(NormalizedStep(without), batch)


def test_operator_modes_share_their_start() -> None:
    z = field(1, 1, 32, 32)
    outputs = [awake(build(replace(SMALL, operator=mode), (32, 32)))(z) for mode in ("free", "penalty", "exact")]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


# Borders


def test_grids_that_the_stride_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiples of the stride 8, got \(32, 36\); resample"):
        build(SMALL, (32, 32))(torch.zeros(1, 1, 32, 36))
    with pytest.raises(ValueError, match=r"multiples of the stride 8, got \(36, 32\); resample"):
        build(SMALL, (36, 32))
    with pytest.raises(ValueError, match=r"multiples of the stride 8, got \(36, 32\); resample"):
        build(replace(SMALL, flow=None, noise=1), (32, 32))(torch.zeros(1, 1, 36, 32))


@pytest.mark.parametrize(
    ("channels", "periodic"), [(3, (True, True)), (1, (False, True)), (1, (True,)), (1, (True,) * 3)]
)
def test_velocity_of_anything_but_a_vorticity_is_refused(channels: int, periodic: tuple[bool, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs one vorticity .*, got .*; set model\.flow=none"):
        build(SMALL, (32,) * len(periodic), channels=channels, periodic=periodic)


def test_carried_vorticity_is_the_only_channel_out() -> None:
    with pytest.raises(ValueError, match=r"predicts one vorticity, got 2 channels out; set model\.flow=none"):
        Ergoformer(SMALL, 1, 2, (32, 32), periodic=(True, True))


def test_codes_finer_than_the_level_are_refused() -> None:
    with pytest.raises(ValueError, match=r"half the 8 points .* level 1 .*, got 5; set model\.frequencies=4 or"):
        build(replace(SMALL, frequencies=5), (32, 64))
    build(replace(SMALL, frequencies=5, attention=None), (32, 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 0}, "heads must be at least 1, got 0; choose"),
        ({"frequencies": 0}, "frequencies must be at least 1, got 0; choose"),
        ({"attention_blocks": 0}, "attention_blocks must be at least 1, got 0; choose"),
        ({"attention": "axial"}, "attention must be one of .*, got 'axial'; choose"),
        ({"kernel": "orthogonal"}, "kernel must be one of .*, got 'orthogonal'; choose"),
        ({"codes": "rotary"}, "codes must be one of .*, got 'rotary'; choose"),
        ({"operator": "none"}, "operator must be one of .*, got 'none'; choose"),
        ({"noise": -1}, "noise must be 0 channels or more, got -1; 0 is"),
        ({"attention_levels": (3,)}, r"distinct numbers in 0 .. 2, got \(3,\); choose"),
        ({"attention_levels": (1, 1)}, r"distinct numbers in 0 .. 2, got \(1, 1\); choose"),
        ({"heads": 5}, "heads must divide the width 12 of level 1, got 5; choose"),
        ({"heads": 2, "attention": "a3m"}, "needs one head per pooling, got 2; add heads"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


# Learning


@pytest.mark.parametrize(("noise", "low", "high"), [(2, 0.5, 1.1), (0, 0.0, 0.2)])
def test_model_with_noise_learns_to_draw_what_cannot_be_known(noise: int, low: float, high: float) -> None:
    """Each block moves by a normal number: the best members move as far (a thin net nearly), or not at all."""
    config = replace(SMALL, noise=noise, flow=None, attention=None)
    model, generator = build(config, (16, 16), channels=2, periodic=(False, True)), seeded(4)
    optimizer, side = torch.optim.Adam(model.parameters(), lr=1e-2), config.unet.stride
    for _ in range(150):
        z = torch.randn(8, 2, 16, 16, generator=generator)
        moved = interpolate(torch.randn(8, 2, 16 // side, 16 // side, generator=generator), scale_factor=side)
        members = torch.stack([model(z + 1e-3 * torch.randn(z.shape, generator=generator)) for _ in range(2)])
        optimizer.zero_grad()
        ensemble_loss(members, moved, moved, periodic=(False, True)).backward()
        optimizer.step()
    answer = model(field(8, 2, 16, 16))
    assert low < answer.std() < high
    assert torch.equal(answer, model(field(8, 2, 16, 16)))


def test_transport_learns_to_move_what_it_is_given() -> None:
    """A layer alone learns a uniform shift by half a cell, with its norm preserved all along."""
    torch_layer = global_layer(replace(SMALL, dissipation=False, attention_levels=(0,)), 0, (True,), generator=seeded())
    assert isinstance(torch_layer, Transport)
    optimizer = torch.optim.Adam(torch_layer.parameters(), lr=2e-2)
    xi = TWO_PI * torch.arange(16) / 16
    generator, losses = seeded(5), []
    for _ in range(150):
        phase, size = TWO_PI * torch.rand(2, 8, 1, 8, generator=generator)
        x, shifted = (size * torch.cos(xi[:, None] - offset + phase) for offset in (0.0, TWO_PI / 32))
        moved = torch_layer(x)
        loss = (moved - shifted).square().mean() / (x - shifted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.9
    assert losses[-1] < 0.2
    torch.testing.assert_close(moved.norm(), x.norm(), rtol=1e-4, atol=0)


def test_free_attention_is_the_written_formula() -> None:
    config = replace(SMALL, kernel="free", attention_levels=(0,))
    layer = awake(global_layer(config, 0, (True, True), generator=seeded())).double()
    assert isinstance(layer, GlobalAttention)
    x = field(2, 9, 7, 8, dtype=torch.float64)
    normed = nn.functional.layer_norm(x, (8,))
    v = (normed @ layer.value.weight.T).reshape(2, 9, 7, 4, 2)
    along_x, along_y = (kernel(normed) for kernel in layer.kernels)
    v = torch.einsum("bhyij,bjyhd->biyhd", along_x, v)
    v = torch.einsum("bhxij,bxjhd->bxihd", along_y, v)
    v = (v - v.mean((1, 2, 4), keepdim=True)) / v.std((1, 2, 4), keepdim=True, correction=0)
    torch.testing.assert_close(layer(x), x + v.flatten(3) @ layer.merge.weight.T)
