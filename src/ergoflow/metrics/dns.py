"""The turbulent channel at Re_τ = 180 by direct numerical simulation, and the bands a simulation must meet.

Profiles: Moser, Kim & Mansour, Phys. Fluids 11 (1999), at eleven heights. A lattice with 96 cells between the walls is
coarser than DNS and gets wider bands than one with 192.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

REYNOLDS_TAU = 180.0
BULK_PLUS = 15.68
PROFILE_NAMES = ("y_plus", "u_plus", "u_rms", "v_rms", "w_rms", "uv")
# y⁺, U⁺, u′, v′, w′, −⟨u′v′⟩, all in wall units.
_TABLE = np.array(
    [
        (1, 0.997, 0.370, 0.009, 0.179, 0.001),
        (5, 4.811, 1.675, 0.120, 0.594, 0.086),
        (10, 8.522, 2.504, 0.294, 0.832, 0.351),
        (15, 10.860, 2.658, 0.449, 0.961, 0.558),
        (20, 12.287, 2.556, 0.573, 1.032, 0.664),
        (30, 13.868, 2.216, 0.734, 1.082, 0.723),
        (50, 15.309, 1.739, 0.835, 1.056, 0.667),
        (80, 16.543, 1.392, 0.791, 0.945, 0.514),
        (100, 17.147, 1.247, 0.741, 0.852, 0.410),
        (150, 18.131, 0.905, 0.626, 0.632, 0.145),
        (178, 18.301, 0.814, 0.612, 0.589, 0.000),
    ]
)
# The mean profile is compared from here on: below, one node of the lattice spans the viscous layer.
COMPARED_FROM = 5.0
PEAK_RANGE = (12.0, 19.0)


@dataclass(frozen=True, kw_only=True)
class Bands:
    """Allowed ranges: relative for the mean velocity, absolute for peaks and the first node's v′."""

    bulk: float
    mean: float
    u_rms: tuple[float, float]
    v_rms: tuple[float, float]
    w_rms: tuple[float, float]
    uv: tuple[float, float]
    first_node_v: float


FINE = Bands(
    bulk=0.03, mean=0.03, u_rms=(2.50, 2.90), v_rms=(0.76, 0.90), w_rms=(0.98, 1.17), uv=(0.68, 0.76), first_node_v=0.03
)
COARSE = Bands(
    bulk=0.05, mean=0.06, u_rms=(2.4, 3.1), v_rms=(0.70, 0.92), w_rms=(0.92, 1.20), uv=(0.66, 0.79), first_node_v=0.08
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: a value, the words of its band, and whether it lies inside."""

    name: str
    value: float
    band: str
    passed: bool


def dns_profiles() -> dict[str, np.ndarray]:
    """Return the DNS profiles by name, each (11,)."""
    return dict(zip(PROFILE_NAMES, _TABLE.T.copy(), strict=True))


def compare_with_dns(profiles: Mapping[str, np.ndarray], *, cells: int) -> list[Check]:
    """Return the checks of wall-to-centre profiles (H,) in wall units against DNS, for `cells` between the walls.

    `profiles` holds the names of PROFILE_NAMES. Between nodes values are linear; below the first they fall to zero.
    """
    bands = FINE if cells >= 192 else COARSE
    y = np.concatenate(([0.0], profiles["y_plus"]))
    u = np.concatenate(([0.0], profiles["u_plus"]))
    dns = dns_profiles()
    used = dns["y_plus"] >= COMPARED_FROM
    errors = np.interp(dns["y_plus"][used], y, u) / dns["u_plus"][used] - 1
    worst = float(errors[np.abs(errors).argmax()])
    # Cells are equally high, so the bulk velocity is the plain mean over the half channel.
    bulk = float(profiles["u_plus"].mean())
    checks = [
        Check(
            name="bulk velocity",
            value=bulk,
            band=f"{BULK_PLUS} ± {bands.bulk:.0%}",
            passed=abs(bulk / BULK_PLUS - 1) <= bands.bulk,
        ),
        Check(
            name="mean profile, largest error", value=worst, band=f"± {bands.mean:.0%}", passed=abs(worst) <= bands.mean
        ),
    ]
    for name in ("u_rms", "v_rms", "w_rms", "uv"):
        low, high = getattr(bands, name)
        peak = float(profiles[name].max())
        checks.append(Check(name=f"peak {name}", value=peak, band=f"{low} to {high}", passed=low <= peak <= high))
    height = float(profiles["y_plus"][profiles["u_rms"].argmax()])
    low, high = PEAK_RANGE
    checks.append(
        Check(name="height of the u_rms peak", value=height, band=f"{low:g} to {high:g}", passed=low <= height <= high)
    )
    first = float(profiles["v_rms"][0])
    checks.append(
        Check(
            name="v_rms at the first node",
            value=first,
            band=f"< {bands.first_node_v}",
            passed=first < bands.first_node_v,
        )
    )
    return checks
