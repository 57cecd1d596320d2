"""How long the proofs are that only get better by repeating: short in the suite, long by `make proofs`.

Lives here: which of the two it is. Must not: the numbers, which stand in the tests.
"""

from __future__ import annotations

import os

__all__ = ["LONG"]

LONG = "TESTS_LONG" in os.environ
