from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.scenario import FOLDER, Closed, Open, Reach, ScenarioError, Side, load, load_all, parse, parse_reach

SUBJECT: dict[str, Any] = {"server": "paceline", "model": "tiny"}
# What the product has to reach; a scenario that asks for less would be a different promise.
TARGETS = {
    ("unary-tiny", "a bare grpc.aio echo"): ">= 0.9",
    ("stream-tiny", "a bare stream echo"): ">= 0.85",
    ("image", "a bare grpc.aio echo"): ">= 0.9",
    ("image-shared-memory", "in messages"): ">= 2",
    ("mlp-64", "session.run of 64 rows"): ">= 0.8",
    ("mlp-16", "session.run of 16 rows"): ">= 0.65",
    ("mixed-shapes", "one shape"): ">= 0.8",
    ("stacking", "one memcpy of the same bytes"): "<= 1.3",
    ("stacking-large", "one memcpy of the same bytes"): "<= 1.3",
}


def test_parse_reads_subject_loads_and_references() -> None:
    text = {
        "title": "a title",
        "clients": [1, 64],
        "rates": [2.5],
        "deadline_s": 2,
        "plot": True,
        "subject": {**SUBJECT, "transport": "stream", "shapes": [[3, 4], [5]]},
    }
    text["reference"] = [{"server": "echo", "label": "the floor", "measure": "p99_ms", "reach": "<= 1.5"}]
    with pytest.raises(ScenarioError, match="streams and HTTP are measured with clients only"):
        parse("name", text)
    found = parse("name", {**text, "rates": []})
    echo = Side("echo", "tiny", ((3, 4), (5,)), "stream")
    assert found.sides == (Side("paceline", "tiny", ((3, 4), (5,)), "stream"), echo)
    assert (found.points, found.plot, found.deadline_s) == ((Closed(1), Closed(64)), True, 2.0)
    (reference,) = found.references
    assert (reference.side, reference.measure, reference.over, reference.reach) == (
        echo,
        "p99_ms",
        "p99_ms",
        Reach(at_least=False, bound=1.5),
    )
    assert (found.name_of(found.subject), found.name_of(echo)) == ("paceline", "the floor")


def test_parse_of_a_subject_alone_is_one_client_and_no_references() -> None:
    found = parse("name", {"title": "t", "subject": SUBJECT})
    assert (found.points, found.references, found.plot) == ((Closed(1),), (), False)
    assert found.subject.shapes == ((16,),)


def test_parse_rates_are_an_open_loop() -> None:
    assert parse("name", {"title": "t", "rates": [5], "subject": SUBJECT}).points == (Open(5),)


def test_parse_reference_to_another_model_has_that_models_shape() -> None:
    found = parse("name", {"title": "t", "subject": SUBJECT, "reference": [{"model": "mlp"}]})
    assert found.references[0].side.shapes == ((1024,),)


def test_parse_two_numbers_of_one_measurement_compare_the_subject_with_itself() -> None:
    reference = {"measure": "stack_split_us", "over": "memcpy_us"}
    found = parse("name", {"title": "t", "subject": {**SUBJECT, "server": "batching"}, "reference": [reference]})
    assert found.references[0].side == found.subject
    assert not found.subject.served


def test_parse_arguments_make_another_process_of_the_same_product() -> None:
    text = {"title": "t", "subject": {**SUBJECT, "args": ["--grpc-port", "0"]}}
    found = parse("name", {**text, "reference": [{"args": []}, {"transport": "stream"}, {"server": "echo"}]})
    subject, plain, stream, echo = found.sides
    assert subject.args == stream.args == ("--grpc-port", "0")
    assert plain.args == echo.args == ()
    assert len({one.process for one in found.sides}) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"title": 1}, "title: got 1"),
        ({"clients": 0}, "clients: got 0"),
        ({"clients": [True]}, "clients: got True"),
        ({"rates": [-1]}, "rates: got -1"),
        ({"typo": 1}, "unknown: typo"),
        ({"subject": {"model": "tiny"}}, "subject: 'server' is missing"),
        ({"subject": {**SUBJECT, "model": "nope"}}, "subject: model: expected one of tiny, .*, got 'nope'"),
        ({"subject": {**SUBJECT, "shape": [1]}}, "subject: unknown: shape"),
        ({"subject": {**SUBJECT, "transport": "pigeon"}}, "transport: expected one of unary, stream, shm"),
        ({"reference": [{"server": "nope"}]}, "reference 1: server: expected one of paceline"),
        ({"reference": [{}, {"reach": "0.9"}]}, 'reach: expected ">= NUMBER" or "<= NUMBER", got "0.9"'),
        ({"reference": [{"measure": "p98_ms"}]}, "reference 1: measure: expected one of requests_per_s"),
        ({"reference": [{"server": "echo", "args": ["--x"]}]}, "args: only paceline takes them, not echo"),
    ],
)
def test_parse_of_a_wrong_scenario_says_what_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        parse("name", {"title": "t", "subject": SUBJECT, **change})


def test_load_of_a_wrong_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("title = ")
    with pytest.raises(ScenarioError, match=r"wrong\.toml: Invalid value"):
        load(path)


@pytest.mark.parametrize(
    ("text", "value", "met"), [(">= 2", 2.0, True), (">= 2", 1.99, False), ("<= 1.3", 1.31, False)]
)
def test_reach_is_met_at_its_bound_and_not_beyond(text: str, value: float, met: bool) -> None:
    reach = parse_reach(text)
    assert (str(reach), reach.met(value)) == (text, met)


def test_scenarios_hold_the_product_to_its_targets() -> None:
    scenarios = load_all()
    found = {
        (one.name, reference.label): str(reference.reach)
        for one in scenarios
        for reference in one.references
        if reference.measure in ("requests_per_s", "stack_split_us")
    }
    assert {key: found.get(key) for key in TARGETS} == TARGETS
    assert len(scenarios) == len(list(FOLDER.glob("*.toml")))
    assert {one.title for one in scenarios if one.plot}, "no scenario makes a picture"


def test_rivals_without_grpc_are_asked_over_http() -> None:
    found = parse(
        "name", {"title": "t", "subject": SUBJECT, "reference": [{"server": "mosec"}, {"server": "rayserve"}]}
    )
    assert [one.transport for one in found.sides] == ["unary", "http", "unary"]
    with pytest.raises(ScenarioError, match="streams and HTTP are measured with clients only"):
        parse("name", {"title": "t", "rates": [5], "subject": SUBJECT, "reference": [{"server": "mosec"}]})
    with pytest.raises(ScenarioError, match="reference 1: unknown: transport"):
        parse("name", {"title": "t", "subject": SUBJECT, "reference": [{"server": "mosec", "transport": "unary"}]})
