"""The measurement of generations runs to its end: every answer is as the naive loop's, by the server and by batches
that are stepped without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import generation_arrivals, generation_direct, generation_requests, generations, generations_inside
from bench.generation_requests import Lengths, Wanted
from bench.sessions import open_session
from paceline.backends.base import Device
from paceline.protos import inference_pb2 as pb
from tests import decoder_models
from tests.decoder_models import TINY
from tests.generation_truth import Asked, NaiveLoop, is_same
from tests.lengths import whole_measurement

DECODER = replace(TINY, end_tokens=(), fixed_products=1)
LENGTHS = Lengths((2, 20), (1, 12))


@whole_measurement
def test_all_answers_are_compared_and_loads_measured() -> None:
    waiting = replace(DECODER, fixed_products=0, waits=True)
    part = generations.Part("waiting", waiting, threads=1, clients=4, lengths=LENGTHS, wait_us=2_000)
    found: list[dict[str, Any]] = []
    generations.measure(part, 1, 0.2, found.append)
    assert [(one["part"], one["ties"]) for one in found] == [("waiting", 0)]
    assert found[0]["full_per_s"] < part.clients / 0.002  # none of whose steps is shorter
    keys = ("of_one", "of_full", "whole_of_full", "whole_of_continuous", "continuous_of_full", "first_p50_ms")
    assert all(one[key] > 0 for one in found for key in keys)


@whole_measurement
def test_few_clients_are_compared_with_one_at_a_time() -> None:
    found: list[dict[str, Any]] = []
    generations.measure_few(generations.Part("few", DECODER, 1, clients=1, lengths=LENGTHS), 1, 0.1, found.append)
    assert all(found[0][key] > 0 for key in ("alone_per_s", "of_alone_1"))


@whole_measurement
def test_gaps_are_measured_while_prompts_arrive() -> None:
    part = generations.Part("arriving", DECODER, threads=1, clients=2, lengths=Lengths((2, 4), (40, 60)))
    found: list[dict[str, Any]] = []
    generations.measure_arriving(part, 100, 1, 0.5, found.append)
    assert [one["part"] for one in found] == ["arriving"]
    assert all(
        one[key] > 0
        for one in found
        for key in ("prefill_ms", "gap_of_prefill", "gap_of_full_step", "undisturbed_token_p50_ms")
    )


@whole_measurement
def test_first_tokens_are_timed_at_random_arrivals(tmp_path: Path) -> None:
    part = generations.Part("fixed", DECODER, threads=1, clients=4, lengths=LENGTHS)
    found: list[dict[str, Any]] = []
    generation_arrivals.measure(part, 1, 0.5, found.append, shares=(0.2, 0.5))
    assert [one["share"] for one in found] == [0.2, 0.5]
    assert all(one[key] > 0 for one in found for key in ("first_of_aim", "first_p50_ms", "answers", "tokens"))
    generation_arrivals.draw(found, tmp_path / "first.svg")
    assert "three steps" in (tmp_path / "first.svg").read_text()


def test_time_of_the_stepping_thread_is_told_apart() -> None:
    found = generations_inside.stepping(DECODER, 0.3, callers=4, lengths=LENGTHS)
    assert found["own_us"] > 0
    assert found["session_us"] > 0
    assert 1 < found["rows"] <= 4


def test_static_batches_generate_what_rows_alone_do(tmp_path: Path) -> None:
    folder = decoder_models.write(DECODER, tmp_path)
    batch = [generation_requests.drawn(client, 1, LENGTHS, DECODER.vocabulary)[0] for client in range(6)]
    found = generation_direct.answers(open_session(folder / "model.onnx"), batch)
    truth = NaiveLoop(folder)
    for wanted, tokens in zip(batch, found, strict=True):
        assert is_same(truth.generate(wanted.prompt, Asked(max_tokens=wanted.tokens)), tokens, "length")


def test_callers_without_server_get_the_naive_answers(tmp_path: Path) -> None:
    folder = decoder_models.write(DECODER, tmp_path)
    asked = [generation_requests.drawn(caller, 3, LENGTHS, DECODER.vocabulary) for caller in range(4)]
    model, truth = generation_direct.open_model(folder / "model.onnx", Device(), 1), NaiveLoop(folder)
    callers, tokens = generation_direct.Callers(model, Device(), asked), 0
    while len(callers.answered) < 24:
        tokens += callers.iterate()
    assert callers.executions < tokens  # they share steps
    for wanted, given in callers.answered:
        assert is_same(truth.generate(wanted.prompt, Asked(max_tokens=wanted.tokens)), given, "length")


def test_requests_ask_for_lengths_within_bounds(tmp_path: Path) -> None:
    asked = generation_requests.drawn(3, 200, LENGTHS, DECODER.vocabulary)
    assert {len(one.prompt) for one in asked} == set(range(2, 21))
    assert {one.tokens for one in asked} == set(range(1, 13))
    assert {token for one in asked for token in one.prompt} == set(range(DECODER.vocabulary))
    equal = generation_requests.full_batch(5, LENGTHS, DECODER.vocabulary)
    assert [(len(one.prompt), one.tokens) for one in equal] == [(11, 6)] * 5
    path = generation_requests.write_messages(
        tmp_path / "asked", [generation_requests.message("m", one) for one in asked]
    )
    requests = [pb.ModelInferRequest.FromString(message) for message in generation_requests.read_messages(path)]
    assert [request.parameters["max_tokens"].int64_param for request in requests] == [one.tokens for one in asked]
    assert [list(request.inputs[0].shape) for request in requests] == [[len(one.prompt)] for one in asked]


def test_batches_have_one_of_each_client() -> None:
    asked = [[Wanted([client], number) for number in (1, 2)] for client in range(3)]
    assert [[one.tokens for one in batch] for batch in generation_requests.batches(asked)] == [[1] * 3, [2] * 3]
    assert [one.prompt for one in generation_requests.batches(asked)[0]] == [[0], [1], [2]]
