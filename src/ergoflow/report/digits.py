"""How numbers are printed in tables and titles."""

from __future__ import annotations

import math


def in_digits(value: float, digits: int = 3) -> str:
    """A number in so many digits, large ones in full: 0.0182, 49.2, 1,520."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if 10**digits <= abs(float(text)) < math.inf else text
