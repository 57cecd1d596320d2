"""Sessions: their options, and what goes when."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from backends.onnx_options import GraphLevel, OnnxOptions
from backends.onnx_sessions import OpenSession, session_options


def test_session_options_carry_what_was_asked_for() -> None:
    made = session_options(
        OnnxOptions(
            graph_level=GraphLevel.EXTENDED,
            intra_op_threads=3,
            inter_op_threads=2,
            parallel=True,
            cpu_mem_arena=False,
            mem_pattern=False,
            session_entries={"session.use_device_allocator_for_initializers": "1"},
        )
    )

    assert made.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert (made.intra_op_num_threads, made.inter_op_num_threads) == (3, 2)
    assert made.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert (made.enable_cpu_mem_arena, made.enable_mem_pattern) == (False, False)
    assert made.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"


@pytest.mark.parametrize("level", list(GraphLevel))
def test_session_options_know_each_graph_level(level: GraphLevel) -> None:
    made = session_options(OnnxOptions(graph_level=level))

    assert made.graph_optimization_level == getattr(ort.GraphOptimizationLevel, level.value)


def test_session_goes_before_the_streams_that_it_computes_on() -> None:
    gone: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            gone.append(self.name)

    session: Any = Part("session")
    streams: Any = Part("streams")
    held = [OpenSession(session, streams)]
    del session, streams
    assert not gone
    held.clear()
    assert gone == ["session", "streams"]
