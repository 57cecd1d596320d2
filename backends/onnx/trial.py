"""Trials of ONNX models.

Lives here: which models are tried, and by what. Must not: the trial itself (`trial`), or sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from backends.base import Array, ModelSpec, Supervise, Tensors, Trial
from backends.errors import ExecutionError, StalePlan
from backends.onnx.options import OnnxOptions
from backends.trial import try_rows

__all__ = ["Runs", "try_model"]


class Runs(Protocol):
    """What executes what is made up for a trial; raises ExecutionError."""

    def run(self, inputs: Sequence[Array]) -> Tensors: ...


def try_model(
    spec: ModelSpec,
    options: OnnxOptions,
    opened: Callable[[ModelSpec], AbstractContextManager[Runs]],
    supervise: Supervise,
) -> Trial:
    """Try a model of `spec`. `opened` gives what executes inputs of such a spec, without the optional ones."""
    if options.tensorrt is not None or options.openvino is not None:
        # Makes an engine for each shape that it sees, which may take minutes.
        return Trial(spec)
    needed = replace(spec, inputs=tuple(one for one in spec.inputs if not one.optional))
    with opened(needed) as runs:
        tried = try_rows(needed, lambda inputs: supervise(lambda: _run(runs, inputs)))
    return replace(tried, spec=replace(tried.spec, inputs=spec.inputs))


def _run(runs: Runs, inputs: Sequence[Array]) -> Tensors:
    try:
        return runs.run(inputs)
    except StalePlan as error:
        # What was tried in that shape failed, as this would; it goes on in others.
        raise ExecutionError(str(error)) from error
