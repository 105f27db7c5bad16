from __future__ import annotations

import pytest

from ergoflow.report.digits import in_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.018_23, "0.0182"), (49.21, "49.2"), (999.4, "999"), (999.6, "1,000"), (1523.0, "1,520"), (-2e6, "-2,000,000")],
)
def test_three_digits_are_kept_and_large_numbers_are_written_out(value: float, text: str) -> None:
    assert in_digits(value) == text


def test_two_digits_round_hundreds_and_what_is_no_number_stays() -> None:
    assert [in_digits(value, 2) for value in (0.0137, 45.2, 153.0)] == ["0.014", "45", "150"]
    assert [in_digits(value) for value in (0.0, 1e-9, float("inf"))] == ["0", "1e-09", "inf"]
