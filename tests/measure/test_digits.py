from __future__ import annotations

import pytest

from looplab.measure.digits import with_spread


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (0.7, 1.4e-16, "0.7"),  # the standard deviation of three equal values
        (0.7, 0.0, "0.7"),
        (0.97312, 0.0021, "0.973 ± 0.002"),
        (0.0, 1e-20, "0 ± 1e-20"),
        (25.05, 0.29, "25.1 ± 0.3"),
        (0.0, 5e-324, "0 ± 4.9e-324"),
    ],
)
def test_the_spread_of_equal_values_is_not_shown(value: float, spread: float, text: str) -> None:
    assert with_spread(value, spread) == text
