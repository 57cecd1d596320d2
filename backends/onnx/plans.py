"""What ONNX Runtime's convolutions remember wrongly of executions that failed.

Lives here: which executions a session can't be trusted with. Must not: onnxruntime, locks. Of CUDA's convolutions each
keeps the plan for the last shape that it has seen. ONNX Runtime (1.31, core/providers/cuda/nn/conv.cc) notes the shape
first, and then looks whether it is right, makes room for the output, and plans. If that fails the plan is still the one
for the shape before, and an execution with the shape that failed goes by it, without an error: with other rows'
answers, of another size, or of what lies in the device's memory behind the tensor. One with another number of rows
makes all plans anew, and once it is through they can be trusted again.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from backends.errors import ExecutionError, StalePlan

__all__ = ["Plans"]

_IN_CONVOLUTION = re.compile(r"running \w*Conv\w* node\b(?:\. Name:'(.*?)' )?")
"""Those of ConvTranspose, FusedConv and NhwcConv note shapes likewise."""

_MOST_FAILED = 8


class Plans:
    """Those of one session. `key` tells executions apart: by the number of rows, where there are rows."""

    __slots__ = ("_failed", "_reason")

    def __init__(self) -> None:
        # By node, in what it failed last: before, it is right, and what comes behind it hasn't been asked.
        self._failed: dict[str, tuple[Hashable, ...]] = {}
        self._reason = ""

    def check(self, key: Hashable) -> None:
        """Raise StalePlan if what is to be executed may go by plans for something else."""
        if self._failed and self._has_failed(key):
            raise StalePlan(f"a convolution that failed would compute by an outdated plan: {self._reason}")

    def next_rows(self, rows: int) -> int:
        """From `rows` on, how many are right to compute with. Raises StalePlan after too many failures on end."""
        if len(self._failed) > _MOST_FAILED:
            raise StalePlan(f"convolutions failed in one execution after the other: {self._reason}")
        return next(more for more in range(rows, rows + _MOST_FAILED + 1) if not self._has_failed(more))

    def executed(self) -> None:
        """All of the model was, by what `check` let pass, and not by a graph."""
        self._failed.clear()

    def failed(self, error: ExecutionError, *keys: Hashable) -> ExecutionError:
        """`error`, which an execution ended with. `keys`: all that others may tell the same execution by."""
        found = _IN_CONVOLUTION.search(str(error))
        if found is not None:
            # Which one, of those without a name, isn't known.
            self._failed[found[1] or f" {len(self._failed)}"] = keys
            self._reason = str(error)
        return error

    def _has_failed(self, key: Hashable) -> bool:
        return any(key in keys for keys in self._failed.values())
