from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ergoflow.models.mwt import (
    MWT,
    FourierModes,
    LocalKernel,
    MWTConfig,
    column_modes,
    extend_axis,
    from_modes,
    row_modes,
    to_modes,
)
from ergoflow.numerics.multiwavelets import plane_filters, synthesise, two_scale_matrix

SMALL = MWTConfig(order=2, copies=2, modes=3, depth=2, hidden=6)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def small_model(grid, *, periodic=(True, True), **changes):
    config = replace(SMALL, **changes)
    return MWT(config, 2, 2, grid, periodic=periodic, generator=seeded(0))


def state(grid, *, batch=2, channels=2, dtype=torch.float32):
    return torch.randn(batch, channels, *grid, generator=seeded(1), dtype=dtype)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def modes_of(grid, modes, dtype=torch.float64):
    return FourierModes(modes, max(grid))(*grid, like=torch.zeros((), dtype=dtype))


# Size


@pytest.mark.parametrize(("channels", "printed"), [(1, 5_089_153), (3, 5_089_539)])
def test_model_has_the_printed_number_of_parameters(channels, printed):
    assert count(MWT(MWTConfig(), channels, channels, (256, 256), periodic=(True, True))) == printed


def test_every_part_has_the_counted_number_of_parameters():
    model = MWT(MWTConfig(), 1, 1, (256, 256), periodic=(True, True))
    assert count(model.lift) == 128
    assert len(model.blocks) == 4
    for block in model.blocks:
        assert block.detail_to_detail.weight.numel() == 1_179_648
        assert count(block.detail_to_detail.mix) == 4_160
        for kernel in (block.smooth_to_detail, block.detail_to_smooth):
            assert (count(kernel.conv), count(kernel.mix)) == (36_928, 4_160)
        assert count(block.coarsest) == 4_160
    assert (count(model.hidden), count(model.head)) == (8_320, 129)


@pytest.mark.parametrize(("grid", "channels"), [((128, 128), 1), ((256, 256), 1), ((192, 192), 3), ((192, 96), 3)])
def test_full_width_takes_the_grids_of_the_flows(grid, channels):
    model = MWT(MWTConfig(depth=1), channels, channels, grid, periodic=(False, True), generator=seeded(0))
    with torch.no_grad():
        output = model(state(grid, batch=1, channels=channels))
    assert output.shape == (1, channels, *grid)
    assert output.isfinite().all()


# Shapes and borders


@pytest.mark.parametrize("periodic", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
@pytest.mark.parametrize("grid", [(8, 8), (9, 7), (2, 2), (3, 33), (12, 5)])
def test_model_keeps_grids_of_any_size(grid, periodic, wall_padding):
    output = small_model(grid, periodic=periodic, wall_padding=wall_padding)(state(grid))
    assert output.shape == (2, 2, *grid)
    assert output.isfinite().all()


@pytest.mark.parametrize("grid", [(8, 8), (16, 64), (11, 40)])
def test_model_does_not_depend_on_the_grid_it_was_built_for(grid):
    built, other = small_model(grid).double(), small_model((4, 4)).double()
    z = state(grid, dtype=torch.float64)
    torch.testing.assert_close(other(z), built(z), rtol=0, atol=0)


def test_grids_that_cannot_be_halved_are_refused():
    with pytest.raises(ValueError, match=r"at least 8 points, got \(16, 7\); use a finer grid"):
        small_model((16, 7), coarsest_level=2)
    with pytest.raises(ValueError, match=r"at least 2 points, got \(1, 8\); use a finer grid"):
        small_model((8, 8))(state((1, 8)))


@pytest.mark.parametrize("grid", [(8,), (8, 8, 8)])
def test_grids_with_other_than_two_axes_are_refused(grid):
    with pytest.raises(ValueError, match=r"needs a grid of 2 axes, got .*; choose"):
        small_model(grid, periodic=(True,) * len(grid))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": 0}, "order must be at least 1, got 0; choose"),
        ({"copies": 0}, "copies must be at least 1, got 0; choose"),
        ({"modes": 0}, "modes must be at least 1, got 0; choose"),
        ({"depth": 0}, "depth must be at least 1, got 0; choose"),
        ({"hidden": 0}, "hidden must be at least 1, got 0; choose"),
        ({"coarsest_level": -1}, "coarsest_level must not be negative, got -1; choose"),
        ({"wall_padding": "reflect"}, "wall_padding must be one of .*, got 'reflect'; choose"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


# Extension to powers of two


@pytest.mark.parametrize("points", [5, 6, 7, 8])
@pytest.mark.parametrize("mode", ["wrap", "edge", "constant"])
def test_axes_are_extended_on_both_sides(points, mode):
    x = state((points, 3))
    before = (8 - points) // 2
    width = [(0, 0), (0, 0), (before, 8 - points - before), (0, 0)]
    wall_padding = "zeros" if mode == "constant" else "replicate"
    result = extend_axis(x, 2, 8, periodic=mode == "wrap", wall_padding=wall_padding)
    np.testing.assert_array_equal(result.numpy(), np.pad(x.numpy(), width, mode=mode))


@pytest.mark.parametrize(
    ("periodic", "wall_padding", "modes"),
    [
        ((True, True), "replicate", ("wrap", "wrap")),
        ((False, True), "replicate", ("edge", "wrap")),
        ((True, False), "zeros", ("wrap", "constant")),
    ],
)
def test_other_grids_are_extended_and_cropped(periodic, wall_padding, modes):
    model = small_model((11, 6), periodic=periodic, wall_padding=wall_padding).double()
    z = state((11, 6), dtype=torch.float64)
    wide = np.pad(z.numpy(), [(0, 0), (0, 0), (2, 3), (0, 0)], mode=modes[0])
    wide = np.pad(wide, [(0, 0), (0, 0), (0, 0), (1, 1)], mode=modes[1])
    torch.testing.assert_close(model(z), model(torch.from_numpy(wide))[:, :, 2:13, 1:7])


def test_walls_matter_only_where_the_grid_is_extended():
    for grid, same in (((8, 16), True), ((7, 16), False)):
        z = state(grid)
        walls, torus = (small_model(grid, periodic=(p, True))(z) for p in (False, True))
        assert torch.equal(walls, torus) == same


# The Fourier kernel


def wavenumbers_of_weights(size, modes):
    """The row that each of the 2α weights serves, None for none, read off the rule of assignment.

    First the weights α.. are put on the last a = min(α, size/2 + 1) rows, and then the weights 0.. on
    those of the first a rows that are still free.
    """
    kept = min(modes, size // 2 + 1)
    rows = [None] * (2 * modes)
    for j in range(kept):
        rows[modes + j] = size - kept + j
    for j in range(kept):
        if j not in rows:
            rows[j] = j
    return rows


@pytest.mark.parametrize("modes", [1, 3, 12])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_rows_are_the_waves_their_weights_serve(size, modes):
    cos, minus_sin = row_modes(size, modes)
    x = np.arange(size)
    for weight, row in enumerate(wavenumbers_of_weights(size, modes)):
        wave = np.zeros(size) if row is None else np.exp(-2j * np.pi * row * x / size) / math.sqrt(size)
        np.testing.assert_allclose(cos[weight] + 1j * minus_sin[weight], wave, atol=1e-13)


def test_coarse_levels_keep_every_wavenumber_once():
    """Twelve modes: on 16 cells and fewer all rows are kept, on 32 and more the 12 lowest of each sign."""
    for size in (1, 2, 4, 8, 16):
        assert sorted(row for row in wavenumbers_of_weights(size, 12) if row is not None) == list(range(size))
        rows = torch.complex(*row_modes(size, 12))
        torch.testing.assert_close(rows.mH @ rows, torch.eye(size, dtype=torch.complex128), rtol=0, atol=1e-13)
    assert wavenumbers_of_weights(64, 12) == [*range(12), *range(52, 64)]


@pytest.mark.parametrize("modes", [1, 3, 5])
@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (16, 4), (2, 8), (1, 4)])
def test_kernel_multiplies_the_modes_of_the_real_fft(grid, modes):
    X, Y = grid
    x = torch.randn(2, X, Y, 3, generator=seeded(2), dtype=torch.float64)
    weight = torch.randn(2 * modes, modes, 3, 4, generator=seeded(3), dtype=torch.complex128)
    spectrum = np.fft.rfft2(x.numpy(), axes=(1, 2))
    expected = np.zeros((2, X, Y // 2 + 1, 4), dtype=complex)
    for p, row in enumerate(wavenumbers_of_weights(X, modes)):
        for q in range(min(modes, Y // 2 + 1)):
            if row is not None:
                expected[:, row, q] = spectrum[:, row, q] @ weight[p, q].numpy()
    expected = np.fft.irfft2(expected, s=grid, axes=(1, 2))
    pair = modes_of(grid, modes)
    result = from_modes(torch.einsum("bpqi,pqio->bpqo", to_modes(x, pair), weight), pair)
    np.testing.assert_allclose(result, expected, atol=1e-13)


def test_coefficients_are_the_written_fourier_sum():
    """With √2 for the modes that stand for a conjugate pair, and divided by √(XY)."""
    x = torch.randn(1, 8, 16, 1, generator=seeded(4), dtype=torch.float64)
    spectrum = to_modes(x, modes_of((8, 16), 3))
    i, j = np.arange(8)[:, None], np.arange(16)
    for p, wave in enumerate([0, 1, 2, -3, -2, -1]):
        for q in range(3):
            phase = np.exp(-2j * np.pi * (wave * i / 8 + q * j / 16))
            expected = (x[0, :, :, 0].numpy() * phase).sum() * (1 if q == 0 else math.sqrt(2)) / math.sqrt(128)
            np.testing.assert_allclose(spectrum[0, p, q, 0].numpy(), expected, atol=1e-13)


def test_real_field_is_restored_where_all_modes_are_kept():
    x = torch.randn(2, 8, 4, 5, generator=seeded(5), dtype=torch.float64)
    pair = modes_of((8, 4), 5)
    torch.testing.assert_close(from_modes(to_modes(x, pair), pair), x)


def test_columns_beyond_the_half_spectrum_are_silent():
    columns = column_modes(4, 5)
    assert columns[:, 3:].abs().max() == 0
    assert columns[0, :3].abs().min(dim=1).values[0] > 0


# Block and model against the written formulas


def reference_model(model, z, config):
    """The forward pass on a grid of powers of two, from the definitions: one level and one band at a time."""
    k, line = config.order, two_scale_matrix(config.order).reshape(2, config.order, 2, config.order)

    def transform(x, band):
        B, X, Y, _ = x.shape
        cells = x.reshape(B, X // 2, 2, Y // 2, 2, config.copies, k, k)
        return torch.einsum("ihj,mgn,BxhygCjn->BxyCim", line[band], line[band], cells).flatten(3)

    def inverse(x, band):
        B, X, Y, _ = x.shape
        x = x.reshape(B, X, Y, config.copies, k, k)
        return torch.einsum("ihj,mgn,BxyCim->BxhygCjn", line[band], line[band], x).reshape(B, 2 * X, 2 * Y, -1)

    def local(kernel, x):
        wide = F.conv2d(F.pad(x.permute(0, 3, 1, 2), [1, 1, 1, 1]), kernel.conv.weight, kernel.conv.bias)
        return F.linear(wide.relu().permute(0, 2, 3, 1), kernel.mix.weight, kernel.mix.bias)

    def fourier(kernel, x):
        X, Y = x.shape[1:3]
        spectrum, out = torch.fft.rfft2(x, dim=(1, 2)), torch.zeros(x.shape, dtype=torch.complex128)
        out = out[:, :, : Y // 2 + 1]
        for p, row in enumerate(wavenumbers_of_weights(X, config.modes)):
            for q in range(min(config.modes, Y // 2 + 1)):
                if row is not None:
                    out[:, row, q] = spectrum[:, row, q] @ kernel.weight[p, q].to(torch.complex128)
        field = torch.fft.irfft2(out, s=(X, Y), dim=(1, 2)).relu()
        return F.linear(field, kernel.mix.weight, kernel.mix.bias)

    def block(module, x):
        if min(x.shape[1:3]) == 2**config.coarsest_level:
            return F.linear(x, module.coarsest.weight, module.coarsest.bias)
        smooth, detail = transform(x, 0), transform(x, 1)
        new_detail = fourier(module.detail_to_detail, detail) + local(module.smooth_to_detail, smooth)
        new_smooth = block(module, smooth) + local(module.detail_to_smooth, detail)
        return inverse(new_smooth, 0) + inverse(new_detail, 1)

    x = F.linear(z.movedim(1, -1), model.lift.weight, model.lift.bias)
    for i, module in enumerate(model.blocks):
        x = block(module, x if i == 0 else x.relu())
    x = F.linear(x, model.hidden.weight, model.hidden.bias).relu()
    return F.linear(x, model.head.weight, model.head.bias).movedim(-1, 1)


@pytest.mark.parametrize("grid", [(8, 8), (4, 16), (16, 8)])
@pytest.mark.parametrize("changes", [{}, {"order": 3, "copies": 1, "depth": 3}, {"coarsest_level": 1, "modes": 7}])
def test_model_is_the_written_recursion(grid, changes):
    model = small_model(grid, **changes).double()
    z = state(grid, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(z), reference_model(model, z, replace(SMALL, **changes)))


def silence(block):
    """Switch the kernels A, B and C off and make T the identity."""
    with torch.no_grad():
        for kernel in (block.detail_to_detail, block.smooth_to_detail, block.detail_to_smooth):
            kernel.mix.weight.zero_()
            kernel.mix.bias.zero_()
        block.coarsest.weight.copy_(torch.eye(len(block.coarsest.bias)))
        block.coarsest.bias.zero_()


def test_block_without_kernels_keeps_polynomials_of_the_whole_domain_alone():
    """The coefficients of one smooth cell, refined to the grid, pass through every level unchanged."""
    model = small_model((8, 8)).double()
    block = model.blocks[0]
    silence(block)
    captured = []
    block.register_forward_pre_hook(lambda module, inputs: captured.append(inputs))
    model(state((8, 8), dtype=torch.float64))
    basis = captured[0][1]
    x = torch.randn(2, 1, 1, 8, generator=seeded(6), dtype=torch.float64)
    smooth_filters = plane_filters(2)[0, :1]
    for _ in range(3):
        x = synthesise((x,), smooth_filters)
    torch.testing.assert_close(block(x, basis), x)
    rough = torch.randn(2, 8, 8, 8, generator=seeded(7), dtype=torch.float64)
    once = block(rough, basis)
    assert relative(once, rough) > 0.5
    torch.testing.assert_close(block(once, basis), once)


def test_local_kernel_reaches_the_next_cells_and_no_other_level():
    kernel = LocalKernel(4, generator=seeded(8)).double()
    levels = [torch.randn(2, n, n, 4, generator=seeded(n), dtype=torch.float64) for n in (8, 4, 1)]
    changed = [level.clone() for level in levels]
    changed[0][:, 0, 5] += 1
    moved = [(a - b).abs().amax((0, 3)) > 0 for a, b in zip(kernel(changed), kernel(levels), strict=True)]
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[:2, 4:7] = True
    assert torch.equal(moved[0], expected)
    assert not moved[1].any()
    assert not moved[2].any()


# Gradients


def test_gradients_match_finite_differences():
    model = small_model((3, 4), order=1, modes=2, depth=1, hidden=3).double()
    z = state((3, 4), batch=1, dtype=torch.float64).requires_grad_()

    def outputs(z, *parameters):
        names = [name for name, _ in model.named_parameters()]
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), z)

    parameters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    assert torch.autograd.gradcheck(outputs, (z, *parameters))


# Weights


def test_weights_follow_the_laws_of_the_authors():
    model = MWT(MWTConfig(depth=1), 1, 1, (64, 64), periodic=(True, True), generator=seeded(9))
    weight = model.blocks[0].detail_to_detail.weight.detach()
    # Xavier: √(2/(fan in + fan out)), fans of 64·12².
    assert weight.abs().square().mean().sqrt().item() == pytest.approx(1 / 96, rel=0.01)
    assert weight.real.std().item() == pytest.approx(weight.imag.std().item(), rel=0.01)
    for layer, fans in ((model.blocks[0].coarsest, 128), (model.hidden, 192)):
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fans), rel=0.05)


def test_constants_are_not_saved():
    model = small_model((9, 8))
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


# Precision and devices


def test_double_precision_is_double_throughout():
    """Constants are kept in float64: rounded to float32 they would leave an error of 1e-8."""
    model = small_model((16, 16)).double()
    assert model.filters.dtype == torch.float64
    z = state((16, 16), dtype=torch.float64)
    expected = reference_model(model, z, SMALL)
    assert model(z).dtype == torch.float64
    assert relative(model(z), expected) < 1e-13
    assert 1e-9 < relative(small_model((16, 16))(z.float()).double(), expected) < 1e-5


@pytest.mark.gpu
def test_cuda_agrees_with_cpu_and_autocast_with_both():
    model = small_model((33, 31), periodic=(True, False), order=4)
    z = state((33, 31))
    expected = model(z)
    model.cuda()
    # Convolutions use TF32 unless told otherwise.
    assert relative(model(z.cuda()).cpu(), expected) < 5e-3
    with torch.autocast("cuda", torch.bfloat16):
        output = model(z.cuda())
    assert relative(output.float().cpu(), expected) < 0.05
    output.float().square().mean().backward()
    assert all(parameter.grad.abs().isfinite().all() for parameter in model.parameters())
