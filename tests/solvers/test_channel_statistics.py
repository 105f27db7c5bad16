from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
import torch
from torch import Tensor

from ergoflow.solvers.channel import ChannelConfig, initial_populations, make_step, populations_from_velocity
from ergoflow.solvers.channel_statistics import (
    ChannelLimits,
    ChannelStatistics,
    ChannelUnphysical,
    check,
    monitor,
)

CONFIG = ChannelConfig(box=(6, 8, 10))


def state_of(velocity_plus: Tensor, config: ChannelConfig = CONFIG, *, excess: Tensor | None = None) -> Tensor:
    return populations_from_velocity(velocity_plus * config.units.friction_velocity, config, excess=excess)


def random_velocity(seed: int) -> Tensor:
    x, y, z = CONFIG.box
    return torch.randn((3, y, x, z), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_statistics_are_plane_averages_over_all_samples_and_both_walls() -> None:
    fields = [random_velocity(seed) + torch.tensor([3.0, 0, 0]).reshape(3, 1, 1, 1) for seed in range(3)]
    statistics = ChannelStatistics(CONFIG)
    for field in fields:
        statistics.update(state_of(field))
    result = statistics.result()
    samples = torch.stack(fields).permute(1, 2, 0, 3, 4).flatten(2)  # (3, Y, samples)
    mean = samples.mean(dim=-1)
    variance = samples.var(dim=-1, correction=0)
    uv = -((samples[0] - mean[0, :, None]) * (samples[1] - mean[1, :, None])).mean(dim=-1)
    torch.testing.assert_close(result["u_plus"], (mean[0] + mean[0].flip(0))[:4] / 2)
    for name, component in (("u_rms", 0), ("v_rms", 1), ("w_rms", 2)):
        torch.testing.assert_close(result[name], ((variance + variance.flip(1))[component, :4] / 2).sqrt())
    torch.testing.assert_close(result["uv"], (uv - uv.flip(0))[:4] / 2)
    torch.testing.assert_close(result["y_plus"], torch.tensor([22.5, 67.5, 112.5, 157.5], dtype=torch.float64))
    assert result["bulk_plus"] == pytest.approx(float(samples[0].mean()))
    assert result["first_node_v"] == pytest.approx(float(((variance[1, 0] + variance[1, -1]) / 2).sqrt()))
    assert result["samples"] == 3


@pytest.mark.parametrize("depth", [10, 9])
def test_spectrum_sums_to_the_variance_and_correlation_is_that_of_a_cosine(depth: int) -> None:
    config = ChannelConfig(box=(6, 8, depth))
    z = torch.arange(depth, dtype=torch.float64)
    velocity = torch.zeros(3, 8, 6, depth, dtype=torch.float64)
    velocity[0] = 5 + math.sqrt(2) * torch.cos(2 * math.pi * 2 * z / depth)
    velocity[2] = torch.randn((8, 6, depth), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    statistics = ChannelStatistics(config)
    statistics.update(state_of(velocity, config))
    result = statistics.result()
    power, correlation = result["power"], result["correlation"]
    assert isinstance(power, Tensor)
    assert isinstance(correlation, Tensor)
    torch.testing.assert_close(power[2].sum(dim=-1), result["w_rms"].square())  # type: ignore[union-attr]
    assert power[0, :, 2].tolist() == pytest.approx([1.0] * 4)
    lags = torch.arange(depth // 2 + 1, dtype=torch.float64)
    expected = torch.cos(2 * math.pi * 2 * lags / depth).expand(4, -1)
    torch.testing.assert_close(correlation[0], expected, rtol=0, atol=1e-9)


def test_density_rms_is_that_of_the_density() -> None:
    excess = 1e-3 * random_velocity(1)[0] + 0.01
    statistics = ChannelStatistics(CONFIG)
    statistics.update(state_of(random_velocity(0), excess=excess))
    expected = float(excess.std(correction=0))
    assert statistics.result()["density_rms"] == pytest.approx(expected, rel=1e-6)
    values = monitor(state_of(random_velocity(0), excess=excess), CONFIG)
    assert values["density_rms"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("smagorinsky", [0.0, 0.4])
@pytest.mark.parametrize("traceless", [False, True])
def test_total_stress_of_a_steady_laminar_channel_is_a_straight_line(smagorinsky: float, traceless: bool) -> None:
    # The balance of momentum, whatever the eddy viscosity: a wrong share of it would bend the line by a per cent.
    config = ChannelConfig(
        box=(4, 8, 4), reynolds_tau=1.0, smagorinsky=smagorinsky, van_driest=False, trace_removal=traceless
    )
    y = torch.arange(8, dtype=torch.float64) + 0.5
    velocity = torch.zeros(3, 8, 4, 4, dtype=torch.float64)
    velocity[0] = (y * (8 - y) / 32)[:, None, None]
    state = make_step(config, substeps=600)(state_of(velocity, config))
    statistics = ChannelStatistics(config)
    statistics.update(state)
    result = statistics.result()
    torch.testing.assert_close(result["total_stress"], (1 - y / 4)[:4], rtol=0, atol=1e-3)
    assert float(result["uv"].abs().max()) < 1e-12  # type: ignore[union-attr]


def test_viscous_stress_of_a_shear_is_that_of_the_fluid_and_of_smagorinskys_eddies() -> None:
    # (ν + Cs²|s|) s for the shear s, whose Π_xy is −τs/3. Next to the walls the eddies' viscosity is five times ν.
    config = ChannelConfig(box=(4, 8, 4), smagorinsky=0.1, van_driest=False)
    units = config.units
    shear = 0.02 * (4 - torch.arange(8, dtype=torch.float64) - 0.5)
    viscosity = units.viscosity + 0.1**2 * shear.abs()
    tau = 3 * viscosity + 0.5
    # `populations_from_velocity` relaxes Π without eddies; a run relaxes it with them.
    relaxed = -tau / 3 * shear * (1 - 1 / tau) / (1 - 1 / units.tau)
    stress = torch.zeros(3, 3, 8, 4, 4, dtype=torch.float64)
    stress[0, 1] = stress[1, 0] = relaxed[:, None, None]
    statistics = ChannelStatistics(config)
    statistics.update(populations_from_velocity(torch.zeros_like(stress[0]), config, stress=stress))
    expected = (viscosity * shear / units.friction_velocity**2)[:4]
    torch.testing.assert_close(statistics.result()["total_stress"], expected, rtol=1e-6, atol=0)


def test_statistics_need_a_sample() -> None:
    with pytest.raises(ValueError, match="at least one state"):
        ChannelStatistics(CONFIG).result()


def test_statistics_of_half_storage_agree() -> None:
    half = dataclasses.replace(CONFIG, storage="float16")
    results = []
    for config in (CONFIG, half):
        statistics = ChannelStatistics(config)
        statistics.update(initial_populations(config, seed=0))
        results.append(statistics.result())
    torch.testing.assert_close(results[0]["u_plus"], results[1]["u_plus"], rtol=0, atol=0.01)
    torch.testing.assert_close(results[0]["u_rms"], results[1]["u_rms"], rtol=0, atol=0.01)


def test_a_healthy_channel_passes_the_check_and_reports_its_numbers() -> None:
    config = ChannelConfig(box=(16, 24, 16))
    values = check(initial_populations(config, seed=0), config, step=0)
    assert 0.15 < values["mach"] < 0.4
    assert values["density_rms"] < 1e-6
    assert values["first_cell_v"] < 0.2


def broken(what: str) -> Tensor:
    velocity = random_velocity(0) * 0.01
    excess = torch.zeros(8, 6, 10, dtype=torch.float64)
    if what == "mach":
        velocity[2, 4, 3, 3] = 0.3 / CONFIG.units.friction_velocity
    if what == "density_rms":
        excess[::2] = 0.03
    if what == "first_cell_v":
        velocity[1, -1] = 3.0 * torch.sign(random_velocity(1)[1, -1])
    state = state_of(velocity, excess=excess)
    if what == "nan":
        state[5, 3, 2, 1] = math.nan
    return state


@pytest.mark.parametrize("what", ["mach", "density_rms", "first_cell_v", "nan"])
def test_an_unphysical_channel_stops_with_step_value_and_advice(what: str) -> None:
    with pytest.raises(ChannelUnphysical, match="at step 1200; set trace_removal") as caught:
        check(broken(what), CONFIG, step=1200)
    assert caught.value.step == 1200
    if what == "nan":
        assert math.isnan(caught.value.value)
    else:
        assert caught.value.quantity == what
        assert caught.value.value > caught.value.limit
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_limits_can_be_widened() -> None:
    check(broken("density_rms"), CONFIG, step=1, limits=ChannelLimits(density_rms=1.0))


def test_first_cell_limit_rises_with_its_height() -> None:
    limits = ChannelLimits()
    fine, coarse = (limits.first_cell(ChannelConfig(box=(8, cells, 8))) for cells in (192, 32))
    assert fine == pytest.approx(0.15 + 0.04 * 0.9375)
    assert coarse == pytest.approx(0.15 + 0.04 * 5.625)
