"""Trials of ONNX models.

Lives here: which models are tried, and with what. Must not: the trial itself (`trial`), or sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from paceline.backends.base import Supervise, Trial
from paceline.backends.errors import ExecutionError, StalePlan
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.backends.trial import try_rows

__all__ = ["Runs", "try_model"]


class Runs(Protocol):
    """Executes the made-up inputs of a trial; raises ExecutionError."""

    def run(self, inputs: Sequence[Array]) -> Tensors: ...


def try_model(
    spec: ModelSpec,
    options: OnnxOptions,
    opened: Callable[[ModelSpec], AbstractContextManager[Runs]],
    supervise: Supervise,
) -> Trial:
    """Try a model of `spec`. `opened` returns what executes inputs of a given spec, here the one without optional
    inputs."""
    if options.tensorrt is not None or options.openvino is not None:
        # They build an engine for each new shape, which may take minutes.
        return Trial(spec)
    needed = replace(spec, inputs=tuple(one for one in spec.inputs if not one.optional))
    with opened(needed) as runs:
        tried = try_rows(needed, lambda inputs: supervise(lambda: _run(runs, inputs)))
    return replace(tried, spec=replace(tried.spec, inputs=spec.inputs))


def _run(runs: Runs, inputs: Sequence[Array]) -> Tensors:
    try:
        return runs.run(inputs)
    except StalePlan as error:
        # An earlier execution of that shape failed, as this one would; the trial goes on with others.
        raise ExecutionError(str(error)) from error
