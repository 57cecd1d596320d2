"""Ensembles of random graphs, whose steps end in any order, fail or leave outputs out, against the same graphs
evaluated step by step; and answers of decoupled steps that are overtaken on their way, and what each costs.
"""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import MISSING
from paceline.server.errors import StepFailed
from paceline.server.requests import pipelines, scopes
from tests.ensembles import Step
from tests.property.pipeline_graphs import Graph, Opened, Run, StepModel, graphs


@given(graphs(), st.data())
def test_ensemble_gives_what_its_steps_give_one_by_one(graph: Graph, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from(sorted(graph.makers)), min_size=1, unique=True))
    run = Run(graph, wanted)
    while run.under_way:
        run.end(data.draw(st.integers(0, 5)))
    needed, results = graph.needed(wanted), graph.evaluated()
    numbers = {graph.models[step].number for step in needed}
    assert len(run.begun) == len({*run.begun})
    assert numbers.issuperset(run.begun)
    (end,) = run.ends
    if all(results[step] is not None for step in needed):
        assert {*run.begun} == numbers
        assert end.executed is not None
        (outputs,) = end.executed.results
        made = {name: (results[step] or {}).get(key) for name, (step, key) in graph.makers.items()}
        for name, output in zip(run.names, outputs, strict=True):
            expected = made[name] if name in wanted else None
            assert output is MISSING if expected is None else np.array_equal(output, expected)
        assert run.flight.options is not None
        assert [run.names[one] for one in run.flight.options.outputs] == [
            one for one in wanted if made[one] is not None
        ]
    else:
        assert isinstance(end.error, StepFailed)
        assert end.error.status is grpc.StatusCode.INTERNAL
        failed = next(step for step in needed if f"step {step} (" in str(end.error))
        assert results[failed] is None
        assert graph.models[failed].number in run.begun


@given(st.lists(st.sampled_from(["is answered", "fails behind", "is an error"]), max_size=6), st.data())
def test_answers_and_errors_keep_their_decoupled_steps_order(answers: list[str], data: st.DataObject) -> None:
    steps: list[Step] = [("m0", {"a": "in0"}, {"x": "x0"}), ("m1", {"a": "x0"}, {"x": "x1"})]
    graph = Graph(steps, [StepModel(0, "", decoupled=True), StepModel(1, "")], {"in0": np.ones((2, 1), np.float32)})
    opened, sent, expected = Opened(), list[int](), list[float | str | None]()
    run = Run(graph, ["x1"], opened)
    ((_, request),) = run.under_way
    run.under_way.clear()

    def go_on(until: st.SearchStrategy[bool]) -> None:
        while run.under_way and data.draw(until):
            run.end(data.draw(st.integers(0, 5)))

    for number, what in enumerate(answers, 1):
        value = -number if what == "fails behind" else number
        error = ExecutionError(f"error {number}") if what == "is an error" else None
        in_place = {
            "is answered": number + 1,
            "fails behind": f"in ensemble 'e', step 1 ('m1'): can't take -{number}",
            "is an error": f"in ensemble 'e', step 0 ('m0'): error {number}",
        }
        expected.append(in_place[what])
        answer: Any = SimpleNamespace(outputs={"x": np.full((2, 1), value, np.float32)}, sent=sent.append)
        request.on_more(answer, error)
        go_on(st.booleans())
    if data.draw(st.booleans()):
        go_on(st.just(True))
        assert [said for said, _ in opened.told] == expected
        opened.run.sent(1, len(answers))
        assert len(sent) == len(answers)
    if data.draw(st.booleans()):
        request.on_failure(ExecutionError("no more"))
        expected.append("in ensemble 'e', step 0 ('m0'): no more")
    request.on_done()
    go_on(st.just(True))
    assert [said for said, _ in opened.told if said is not None] == expected
    assert [last for _, last in opened.told] == [False] * (len(opened.told) - 1) + [True]
    opened.run.let_go()
    assert len(run.ends) == 1


def lines_executed_for(answers: int, how: str) -> int:
    """How many lines of ensembles' code are executed for so many answers through one step, of which none leaves."""
    steps: list[Step] = [("m0", {"a": "in0"}, {"x": "x0"}), ("m1", {"a": "x0"}, {"x": "x1"})]
    graph = Graph(steps, [StepModel(0, "", decoupled=True), StepModel(1, "")], {"in0": np.ones((2, 1), np.float32)})
    opened, lines, before = Opened(), 0, sys.gettrace()
    run = Run(graph, ["x1"], opened)
    ((_, request),) = run.under_way
    run.under_way.clear()

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename in (pipelines.__file__, scopes.__file__) else None

    sys.settrace(count)
    try:
        for number in range(1, 1 + answers):
            value = -number if how == "fail behind" else number
            answer: Any = SimpleNamespace(outputs={"x": np.full((2, 1), value, np.float32)}, sent=lambda size: None)
            request.on_more(answer, None)
        request.on_done()
        while run.under_way:
            run.end(-1 if how == "are overtaken" else 0)
    finally:
        sys.settrace(before)
    told = [f"in ensemble 'e', step 1 ('m1'): can't take -{number}" if how == "fail behind" else number + 1
            for number in range(1, 1 + answers)]  # fmt: skip
    assert [said for said, _ in opened.told if said is not None] == told
    return lines


@pytest.mark.parametrize("how", ["come in order", "are overtaken", "fail behind"])
def test_each_answer_costs_the_same(how: str) -> None:
    few, many = (lines_executed_for(answers, how) for answers in (50, 200))
    assert many < 4.5 * few
