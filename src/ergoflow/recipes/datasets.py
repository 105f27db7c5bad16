"""The data sets that have a name."""

from __future__ import annotations

import dataclasses

from ergoflow.config import ChannelDatasetConfig, KolmogorovDatasetConfig, SimulatedDatasetConfig
from ergoflow.solvers.channel import ChannelConfig
from ergoflow.solvers.kolmogorov import KolmogorovConfig


def datasets() -> dict[str, SimulatedDatasetConfig]:
    """Data sets by name."""
    kf256 = KolmogorovDatasetConfig(name="kf256", flow=KolmogorovConfig())
    kf64 = KolmogorovDatasetConfig(
        name="kf64",
        flow=KolmogorovConfig(grid=(64, 64), viscosity=1e-2, dt=0.02, max_speed=4.0),
        spin_up_seconds=30.0,
        frame_seconds=0.2,
        frames=150,
        train=20,
        valid=4,
        test=8,
        shard_size=36,
    )
    listed: list[SimulatedDatasetConfig] = [
        kf256,
        dataclasses.replace(kf256, name="kf128", subsample=2),
        dataclasses.replace(kf256, name="kf256-transient", spin_up_seconds=0.0),
        kf64,
        ChannelDatasetConfig(name="tcf192", flow=ChannelConfig()),
        ChannelDatasetConfig(
            name="tcf96",
            flow=ChannelConfig(box=(512, 96, 96), smagorinsky=0.07),
            plane_spacing=64,
            coarse_spin_up=0.0,
            spin_up=12.0,
        ),
        ChannelDatasetConfig(
            name="tcf32",
            flow=ChannelConfig(box=(64, 32, 32), reynolds_tau=90.0, collision="regularized"),
            coarse_spin_up=0.0,
            spin_up=2.0,
            steps_per_frame=10,
            frames=60,
            plane_spacing=32,
            train=8,
            valid=2,
            test=4,
        ),
    ]
    return {d.name: d for d in listed}
