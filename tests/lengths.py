"""How long the proofs are that only get better by repeating: short in the suite, long by `make proofs`;
and which tests have no short form.

Lives here: which of the two it is. Must not: the numbers, which stand in the tests.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["LONG", "whole_measurement"]

LONG = "TESTS_LONG" in os.environ

whole_measurement = pytest.mark.skipif(
    not LONG, reason="the measurement's parts have tests of their own; whole ones are run by: make bench-quick"
)
"""Of a test that runs a measurement from end to end, which starts servers and loads them."""
