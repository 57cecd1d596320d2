"""Which plans of ONNX Runtime's convolutions are wrong after an execution failed.

Lives here: which executions a session can't be trusted with. Must not: onnxruntime, locks. Each of CUDA's convolutions
keeps the plan for the last shape that it has seen. ONNX Runtime (1.31, core/providers/cuda/nn/conv.cc) stores the shape
first; only then does it validate the shape, allocate the output, and plan. If that fails, the plan is still the one for
the previous shape, and an execution with the shape that failed uses it without an error: the answers are those of other
rows, of another size, or of what lies behind the tensor in device memory. An execution with another number of rows
renews all plans, and once it has succeeded they can be trusted again.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from paceline.backends.errors import ExecutionError, StalePlan

__all__ = ["Plans"]

_IN_CONVOLUTION = re.compile(r"running \w*Conv\w* node\b(?:\. Name:'(.*?)' )?")
"""ConvTranspose, FusedConv and NhwcConv store shapes in the same way."""

_MAX_FAILED = 8


class Plans:
    """The plans of one session. `key` identifies executions with the same plans: the number of rows, where there are
    rows."""

    __slots__ = ("_failed", "_reason")

    def __init__(self) -> None:
        # Per node that failed: the keys of the execution in which it failed last. In that one, nodes before it have the
        # right plan, and nodes after it weren't reached.
        self._failed: dict[str, tuple[Hashable, ...]] = {}
        self._reason = ""

    def check(self, key: Hashable) -> None:
        """Raise StalePlan if the execution of `key` may use plans made for something else."""
        if self._failed and self._has_failed(key):
            raise StalePlan(f"a convolution that failed before would compute with an outdated plan: {self._reason}")

    def next_rows(self, rows: int) -> int:
        """The smallest number of rows, from `rows` on, that can be computed with. Raises StalePlan after too many
        failures in a row."""
        if len(self._failed) > _MAX_FAILED:
            raise StalePlan(f"convolutions failed in too many executions in a row: {self._reason}")
        return next(more for more in range(rows, rows + _MAX_FAILED + 1) if not self._has_failed(more))

    def executed(self) -> None:
        """To be called after an execution of the whole model that `check` let pass, if it wasn't the replay of a
        graph."""
        self._failed.clear()

    def failed(self, error: ExecutionError, *keys: Hashable) -> ExecutionError:
        """Note `error`, which ended an execution, and return it. `keys`: all keys by which later callers may identify
        the same execution."""
        found = _IN_CONVOLUTION.search(str(error))
        if found is not None:
            # Nodes without a name can't be told apart, so each failure counts as another node.
            self._failed[found[1] or f" {len(self._failed)}"] = keys
            self._reason = str(error)
        return error

    def _has_failed(self, key: Hashable) -> bool:
        return any(key in keys for keys in self._failed.values())
