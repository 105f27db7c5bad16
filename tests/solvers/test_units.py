from __future__ import annotations

import pytest

from ergoflow.solvers.units import ChannelUnits


def test_192_cells_give_the_published_lattice_units() -> None:
    units = ChannelUnits(cells=192)
    assert units.half_height == 96
    assert units.friction_velocity == pytest.approx(6.378e-3, rel=1e-4)
    assert units.viscosity == pytest.approx(3.401e-3, rel=2e-4)
    assert units.tau == pytest.approx(0.510204, abs=5e-7)
    assert units.force == pytest.approx(4.2368e-7, rel=1e-4)
    assert units.mach == pytest.approx(0.20, abs=5e-3)
    assert units.cell_plus == 1.875
    assert units.first_node_plus == pytest.approx(0.94, abs=5e-3)
    assert units.step_plus == pytest.approx(0.01196, abs=5e-6)
    assert units.turnover_steps == pytest.approx(15_052, abs=1.5)
    assert units.through_steps(1024) == pytest.approx(10_240)


def test_96_cells_give_the_published_lattice_units() -> None:
    units = ChannelUnits(cells=96)
    assert units.tau == pytest.approx(0.505102, abs=5e-7)
    assert units.force == pytest.approx(8.4736e-7, rel=1e-4)
    assert units.turnover_steps == pytest.approx(7_526, abs=1)


def test_force_balances_wall_friction() -> None:
    units = ChannelUnits(cells=57, reynolds_tau=395, bulk_velocity=0.07)
    # Momentum: force per volume times the height equals u_τ² at each of two walls (density one).
    assert units.force * units.cells == pytest.approx(2 * units.friction_velocity**2)
    assert units.friction_velocity * units.half_height / units.viscosity == pytest.approx(395)


def test_friction_follows_deans_law() -> None:
    slow, fast = ChannelUnits(cells=96), ChannelUnits(cells=96, reynolds_tau=360)
    assert slow.friction_velocity / fast.friction_velocity == pytest.approx(2 ** (1 / 7))


def test_rows_lie_half_a_cell_off_the_walls() -> None:
    units = ChannelUnits(cells=96)
    assert 2 * units.first_node_plus + 95 * units.cell_plus == pytest.approx(2 * 180)


@pytest.mark.parametrize("bad", [{"cells": 3}, {"cells": 96, "reynolds_tau": 0}, {"cells": 96, "bulk_velocity": -1}])
def test_impossible_channels_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ChannelUnits(**bad)  # type: ignore[arg-type]
