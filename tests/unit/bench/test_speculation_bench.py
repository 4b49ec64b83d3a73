"""The bench of speculation: what it says of the answers that it timed."""

from __future__ import annotations

from bench.speculation import Spent, rows_of


def test_a_row_says_both_medians_and_their_ratio() -> None:
    without = {"copies": [Spent(4.0, 8.0), Spent(90.0, 90.0), Spent(3.0, 7.0)], "invents": [Spent(1.0, 2.0)]}
    with_ = {"copies": [Spent(2.0, 2.0), Spent(1.0, 1.0), Spent(9.0, 9.0)], "invents": [Spent(1.25, 4.0)]}
    assert rows_of(without, with_) == [
        ["copies", "4.00", "2.00", "2.00", "8.00", "2.00", "4.00"],
        ["invents", "1.00", "1.25", "0.80", "2.00", "4.00", "0.50"],
    ]
