"""An instance that generates, over a decoder in numpy whose next token is known from all tokens before it and their
places: what becomes of each request, whoever is beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from threading import Event, Thread
from time import monotonic_ns
from typing import Any, Self, cast

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from paceline.backends.cuda.accelerator import CudaAccelerator, open_streams
from paceline.backends.errors import DeviceLost, ExecutionError, InstanceError, ModelRefused, OutOfMemory, StepHangs
from paceline.backends.onnx.device_steps import Kept
from paceline.backends.onnx.generations import GeneratingInstance
from paceline.backends.open_request import NEVER, Answer
from tests.host_accelerator import HostAccelerator
from tests.unit.backends.onnx.generating import (
    END,
    FAULTY,
    NO_NUMBER,
    Asked,
    Decoder,
    answer_of,
    assert_open,
    generating,
    hand_over,
    many,
    truth,
)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("most_tokens", [2_000, 90])
@pytest.mark.parametrize("one", [True, False])
def test_each_answer_is_its_own_whatever_the_company(one: bool, most_tokens: int, in_place: bool) -> None:
    requests = many(40, one=one)
    decoder = Decoder()
    with generating(decoder, most_tokens, in_place=in_place, prefill_tokens=8) as instance:
        hand_over(instance, *requests)
        assert [request.tokens() for request in requests] == [*map(truth, requests)]
    assert {truth(request)[1] for request in requests} == {"length", "stop"}
    assert decoder.most_rows > 1
    assert not one or all(len(request.answers) == 1 for request in requests)


def test_streamed_answers_have_a_token_each_but_a_stop() -> None:
    request = Asked([10, 20], max_tokens=3)
    stopped = Asked([END], max_tokens=3)  # its place is 1, so it is what follows
    with generating(Decoder()) as instance:
        hand_over(instance, request, stopped)
        assert request.tokens() == (answer_of([10, 20], 3), "length")
        assert stopped.tokens() == ([], "stop")
    assert [len(one[0]) for one in request.answers if isinstance(one, Sequence)] == [1, 1, 1]


class Slow(Asked):
    """Its caller reads nothing before the answer with `until` tokens in all."""

    def __init__(self, until: int, **parameters: int) -> None:
        super().__init__([10, 20], **parameters)
        self._until = until

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        super().on_answer(answer, last=last)
        assert isinstance(answer, Sequence)
        if sum(len(one[0]) for one in self.answers if isinstance(one, Sequence)) == self._until:
            self.sent(len(self.answers))


def test_slow_readers_tokens_are_gathered_after_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.backends.growing_answer._MOST_UNSENT", 4)
    never, later = Slow(99, max_tokens=12), Slow(4, max_tokens=12)
    with generating(Decoder(), 2_000) as instance:
        hand_over(instance, never, later)
        for request in (never, later):
            assert request.tokens() == truth(request)
    assert [len(one[0]) for one in never.answers if isinstance(one, Sequence)] == [1, 1, 1, 1, 8]
    assert [len(one[0]) for one in later.answers if isinstance(one, Sequence)] == [1] * 8 + [4]


def test_end_tokens_are_not_chosen_before_min_tokens() -> None:
    request = Asked([END], max_tokens=3, min_tokens=2)
    with generating(Decoder()) as instance:
        hand_over(instance, request)
        assert END not in request.tokens()[0][:2]
        assert len(request.tokens()[0]) >= 2


@pytest.mark.parametrize("fault", [ExecutionError("a faulty row"), OutOfMemory("too little")])
@pytest.mark.parametrize("in_place", [True, False])
def test_faulty_rows_end_alone_whoever_is_beside_them(in_place: bool, fault: ExecutionError) -> None:
    requests = many(30)
    with generating(Decoder(fault, faulty=13), 2_000, in_place=in_place) as instance:
        hand_over(instance, *requests)
        failed = 0
        for request in requests:
            tokens, reason = truth(request)
            if 13 in [*request.inputs[0].tolist(), *(tokens[:-1] if reason == "length" else tokens)]:
                assert str(request.error()) == str(fault)
                failed += 1
            else:
                assert request.tokens() == (tokens, reason)
    assert 3 < failed < 27


class OnLostDevice(Decoder):
    """One that is lost when rows are to be joined on it."""

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        logits, present = super().run([one.value.numpy() if isinstance(one, Kept) else one for one in inputs])
        streams = open_streams(cast("CudaAccelerator", HostAccelerator()))
        return [logits, Unjoined(ort.OrtValue.ortvalue_from_numpy(present), streams, [])]


class Unjoined(Kept):
    def joined(self, parts: Sequence[tuple[Self, int, int]], longest: int, *, at_right: bool) -> Self:
        raise DeviceLost("while rows were joined")


def test_device_lost_while_joining_rows_ends_the_instance() -> None:
    gate, requests = Event(), [Asked([10], max_tokens=50) for _ in range(2)]
    with generating(OnLostDevice(before=lambda rows: assert_open(gate)), 2_000) as instance:
        hand_over(instance, *requests)
        gate.set()
        assert [str(one.error()) for one in requests] == ["while rows were joined"] * 2
        with pytest.raises(DeviceLost, match="while rows were joined"):
            hand_over(instance, Asked([10]))


def test_logits_that_are_no_numbers_end_their_row() -> None:
    bad, good = Asked([8, NO_NUMBER], max_tokens=20), Asked([8, 9], max_tokens=20)
    with generating(Decoder()) as instance:
        hand_over(instance, bad, good)
        assert "logits" in str(bad.error())
        assert good.tokens() == truth(good)


def test_cancelled_generation_leaves_within_a_step() -> None:
    begun, gate = Event(), Event()

    def before(rows: int) -> None:
        begun.set()
        assert_open(gate)

    request, follower = Asked([10], max_tokens=50), Asked([10], max_tokens=2)
    with generating(Decoder(before=before), most_generations=1) as instance:
        hand_over(instance, request)
        assert begun.wait(20)
        request.cancel()
        gate.set()
        hand_over(instance, follower)
        assert follower.tokens() == truth(follower)
    assert len(request.answers) == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_cancelled_generations_leave_nothing_behind(in_place: bool) -> None:
    decoder = Decoder()
    with generating(decoder, 2_000, in_place=in_place, most_generations=4) as instance:
        left = []
        for request in many(200):
            request.parameters = {"max_tokens": 1_000}
            hand_over(instance, request)
            request.cancel()
            left.append(weakref.ref(request))
        last = Asked([8], max_tokens=1)
        hand_over(instance, last)
        assert last.tokens() == truth(last)
        del request
        gc.collect()
        assert [one() for one in left if one() is not None] == []


def test_request_without_a_place_waits_until_it_is_cancelled() -> None:
    gate = Event()
    with generating(Decoder(before=lambda rows: assert_open(gate)), most_generations=1) as instance:
        hand_over(instance, Asked([10], max_tokens=50))
        second = Asked([10], max_tokens=2)
        waiting = Thread(target=hand_over, args=(instance, second))
        waiting.start()
        second.cancel()
        waiting.join(20)
        assert not waiting.is_alive()
        gate.set()
    assert second.answers == []


@pytest.mark.parametrize("one", [True, False])
def test_generation_ends_in_time_with_what_there_is(one: bool) -> None:
    steps = 0

    def before(rows: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            request.ends_ns = 0

    request, other = Asked([10], one=one, max_tokens=50), Asked([10], max_tokens=50)
    request.ends_ns = NEVER - 1
    with generating(Decoder(before=before), most_generations=1) as instance:
        hand_over(instance, request, other)
        assert request.tokens() == (answer_of([10], 3), "timeout")
        assert other.tokens() == truth(other)


def refused(instance: GeneratingInstance, request: Asked) -> str:
    (result,) = instance.execute_open([request]).results
    assert isinstance(result, ModelRefused)
    assert result.status == "DEADLINE_EXCEEDED"
    assert request.answers == []
    return str(result)


def test_request_that_gets_no_place_in_time_is_refused() -> None:
    gate = Event()
    first, second = Asked([10], max_tokens=50), Asked([10], max_tokens=50)
    with generating(Decoder(before=lambda rows: assert_open(gate)), most_generations=1) as instance:
        hand_over(instance, first)
        second.ends_ns = monotonic_ns() + 1_000_000
        assert "its time is over, and it has no place yet" in refused(instance, second)
        gate.set()
        assert first.tokens() == truth(first)


def test_deadline_too_short_for_the_prompt_is_refused_if_known() -> None:
    now_ns = 0

    def before(rows: int) -> None:
        nonlocal now_ns
        now_ns += 20_000_000

    with generating(Decoder(before=before), now_ns=lambda: now_ns, prefill_tokens=16) as instance:

        def asked(tokens: int, within_ms: int) -> Asked:
            request = Asked([10] * tokens, max_tokens=1)
            request.deadline_ns = now_ns + within_ms * 1_000_000
            return request

        hand_over(instance, asked(16, 1))  # nothing is known yet
        for request in (asked(16, 100) for _ in range(5)):
            hand_over(instance, request)
            request.tokens()
        assert "10000 us are left, and its prompt and one token take about 20000 us" in refused(instance, asked(16, 10))
        assert "30000 us are left, and its prompt and one token take about 40000 us" in refused(instance, asked(32, 30))
        hand_over(instance, on_time := asked(32, 50))
        assert on_time.tokens() == truth(on_time)
        now_ns += 10_000_000_000
        hand_over(instance, asked(16, 1))  # what was measured long ago refuses nobody


def test_closing_ends_what_is_left() -> None:
    gate = Event()
    request = Asked([10], max_tokens=50)
    with generating(Decoder(before=lambda rows: assert_open(gate))) as instance:
        hand_over(instance, request)
        instance.abandon()
        gate.set()
        assert isinstance(request.error(), InstanceError)


def test_hanging_step_ends_all_and_refuses_further_requests() -> None:
    begun, gate = Event(), Event()

    def before(rows: int) -> None:
        begun.set()
        assert_open(gate)

    request = Asked([10], max_tokens=50)
    with generating(Decoder(before=before)) as instance:
        assert instance.began_ns == 0
        hand_over(instance, request)
        assert begun.wait(20)
        assert instance.began_ns > 0
        error = instance.give_up(2 * 10**9)
        assert str(request.error()) == "a step took longer than the limit of executions, 2 s"
        assert not error.ended.done()
        with pytest.raises(StepHangs):
            instance.execute_open([Asked([8], max_tokens=1)])
        gate.set()
        assert error.ended.result(20) is None
    assert len(request.answers) == 1


def test_lost_device_ends_all_and_refuses_further_requests() -> None:
    request = Asked([8, FAULTY], max_tokens=20)
    with generating(Decoder(DeviceLost("gone"))) as instance:
        hand_over(instance, request)
        assert isinstance(request.error(), DeviceLost)
        with pytest.raises(DeviceLost, match="gone"):
            instance.execute_open([Asked([8], max_tokens=1)])


def test_made_up_request_has_its_first_token() -> None:
    with generating(Decoder()) as instance:
        (((tokens, *_),)) = instance.execute([(np.array([8, 9], np.int64),)]).results
        assert tokens.tolist() == answer_of([8, 9], 1)


@pytest.mark.parametrize(
    ("prompt", "parameters", "expected"),
    [
        ([], {}, "input 'input_ids': expected at least one token, got none"),
        ([5, 97], {}, "expected tokens from 0 to 96, got 97"),
        ([-1], {}, "expected tokens from 0 to 96, got -1"),
        ([1] * 60, {}, "expected at most 59 tokens, so that there is room for one more, got 60"),
        ([1], {"max_tokens": 0}, "parameter 'max_tokens': expected an integer from 1 to"),
        ([1], {"max_tokens": True}, "parameter 'max_tokens': expected an integer from 1 to .* got True"),
        ([1], {"min_tokens": 17}, "parameter 'min_tokens': expected at most max_tokens, 16, got 17"),
        ([1], {"temperature": -1.0}, "parameter 'temperature': expected a number from 0 on, got -1.0"),
        ([1], {"temperature": "hot"}, "parameter 'temperature': expected a number from 0 on, got 'hot'"),
        ([1], {"top_k": 1.5}, "parameter 'top_k': expected an integer from -1 to"),
        ([1], {"top_p": 0.0}, "parameter 'top_p': expected a number above 0 up to 1, got 0.0"),
        ([1], {"seed": -1}, "parameter 'seed': expected an integer from 0 to"),
        ([1], {"repetition_penalty": 0}, "parameter 'repetition_penalty': expected a number above 0, got 0"),
        ([1], {"temperature": "nan"}, "parameter 'temperature': expected a number from 0 on, got nan"),
        ([1], {"stop": "x"}, "parameter 'stop': expected none, as the model has no tokenizer"),
        ([1], {"logprobs": 21}, "parameter 'logprobs': expected an integer from 0 to 20, got 21"),
        ([1], {"stream": "yes"}, "parameter 'stream': expected true or false, got 'yes'"),
        ([1], {"exclude_input_in_output": False}, "expected true, got false: the prompt is no text"),
        ([1], {"n": 2}, "parameter 'n' is not supported by this build"),
    ],
)
def test_bad_request_is_refused_by_name(prompt: list[int], parameters: dict[str, int], expected: str) -> None:
    with generating(Decoder()) as instance:
        (refused,) = instance.execute_open([Asked(prompt, **parameters)]).results
        assert isinstance(refused, ModelRefused)
        with pytest.raises(ModelRefused, match=expected):
            raise refused


def test_answer_ends_where_the_model_has_no_room() -> None:
    request = Asked([8] * 55, max_tokens=50, min_tokens=50)
    with generating(Decoder()) as instance:
        hand_over(instance, request)
        tokens, reason = request.tokens()
    assert (len(tokens), reason) == (5, "length")
