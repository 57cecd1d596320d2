"""Generations: an instance that owns a running batch, and steps it on a thread of its own.

Lives here: the thread, and who waits for a place. Must not: decide who steps when (`scheduler.iterations`), execute
steps (`stepping`), choose tokens (`sampling`), form answers (`growing_answer`). The rules: a request has one last
answer, unless nobody waits for it; a row's fault ends that row alone; `execute_open` returns when its requests have
places, so that others wait in the queue, by its rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX, Condition, Event, Thread
from time import monotonic_ns
from typing import Any, cast

import numpy as np

from paceline.backends.base import Device, Execution
from paceline.backends.batching import Outputs, Share
from paceline.backends.errors import ExecutionError, InstanceError, InstanceLost, ModelRefused, StepHangs
from paceline.backends.generation import GenerationLimits, Wanted
from paceline.backends.generation_totals import GenerationTotals
from paceline.backends.growing_answer import GrowingAnswer
from paceline.backends.onnx.decoder_block import GONE, StepsModel
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.onnx.decoder_trial import Trial
from paceline.backends.onnx.decoding_rules import DecodingRules
from paceline.backends.onnx.encoder import EncoderThread
from paceline.backends.onnx.options import DecoderSettings
from paceline.backends.onnx.stepping import Stepping
from paceline.backends.open_request import ELSEWHERE, NEVER, Answer, OpenRequest
from paceline.backends.sampling import NONE, choose, logprobs_of
from paceline.backends.spec import MISSING, Array, Tensors
from paceline.scheduler.iterations import Iteration, Iterations, StepCosts

_log = logging.getLogger("paceline.backends.onnx")

_DOUBT_IN_PLACE = 2.0
"""Of `StepCosts`. In 45 MB of weights on two busy cores, a row costs 1.5 ms among 7 and 0.7 ms among 32, and without it
32 were halved twice."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """What is known of a decoder, and what its generations come to."""

    name: str
    layout: DecoderLayout
    limits: GenerationLimits
    settings: DecoderSettings
    tried: Trial
    rules: DecodingRules = field(default_factory=DecodingRules)
    totals: GenerationTotals = field(default_factory=GenerationTotals)


class GeneratingInstance:
    """`AnswersOpenly`. Its thread runs from the first request until it is closed. `asked` says what a request asks
    for, or raises ModelRefused; its source is for `encoder`, if there is one."""

    def __init__(
        self,
        decoder: Decoder,
        model: StepsModel,
        device: Device,
        asked: Callable[[OpenRequest], Wanted],
        encoder: EncoderThread | None = None,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.device = device
        self._now_ns = now_ns
        self._decoder = decoder
        self._model = model
        self._nothing_else = (MISSING,) * (len(decoder.limits.spec.outputs) - 1)
        self._asked = asked
        self._encoder = encoder
        layout, settings, tried = decoder.layout, decoder.settings, decoder.tried
        costs = StepCosts(_DOUBT_IN_PLACE if layout.in_place else 1.0)
        most_tokens = settings.most_cache_bytes // layout.token_bytes
        self._iterations = Iterations(
            settings.most_generations,
            most_tokens,
            settings.prefill_tokens,
            costs,
            pads=tried.pads,
            pads_prompts=tried.pads_prompts,
            in_pieces=tried.in_pieces,
        )
        # Those with a place, by the numbers of their requests. Whoever is put out keeps what the encoder has left.
        self._stepping = Stepping(model, layout, costs, now_ns)
        self._generations: dict[int, GrowingAnswer] = {}
        # Those that may have to end before their answer does.
        self._ending = set[int]()
        # Guards places, and what other threads leave here. Who only steps doesn't hold it.
        self._changed = Condition()
        self._cancelled = set[int]()
        self._numbers = 0
        self._closed = False
        # Done when the thread has ended, or if it never began.
        self._stepped = Future[None]()
        self._lost: InstanceLost | None = None
        self._thread: Thread | None = None
        self._watch = decoder.totals.watch(self._cache_usage)

    # ---- on any thread ----

    def cancel(self, number: int) -> None:
        with self._changed:
            self._cancelled.add(number)
            self._changed.notify_all()

    def sent(self, number: int, answers: int) -> None:
        if (generation := self._generations.get(number)) is not None:
            generation.sent += answers

    def _cache_usage(self) -> float:
        with self._changed:
            return self._iterations.usage

    @property
    def began_ns(self) -> int:
        """That of a step or of the encoder, which go on beside each other: the earlier one, which may hang."""
        encoder_ns = 0 if self._encoder is None else self._encoder.began_ns
        began_ns = self._stepping.began_ns
        return min(began_ns or encoder_ns, encoder_ns or began_ns)

    def give_up(self, limit_ns: int) -> StepHangs:
        ended = Future[None]()
        error = StepHangs(limit_ns, ended)
        with self._changed:
            self._closed, self._lost = True, error
            if self._thread is None:
                self._stepped.set_result(None)
            requests = [one.request for one in self._generations.values()]
            self._generations.clear()
            self._changed.notify_all()
        for request in requests:
            request.on_answer(error, last=True)
        others = self._stepped if self._encoder is None else self._encoder.give_up(error)
        self._stepped.add_done_callback(lambda _: others.add_done_callback(lambda _: ended.set_result(None)))
        return error

    # ---- on the thread that executes ----

    def execute_open(self, requests: Sequence[OpenRequest]) -> Execution:
        began_ns = self._now_ns()
        results: list[Tensors | Exception] = [ELSEWHERE] * len(requests)
        asked: dict[int, Wanted] = {}
        for place, request in enumerate(requests):
            if request.cancelled:
                continue
            try:
                asked[place] = self._asked(request)
            except ModelRefused as error:
                results[place] = error.with_traceback(None)
        left: Sequence[Array | ExecutionError | None] = [None] * len(asked)
        if self._encoder is not None and asked:
            # Not on the thread that steps, so that those that have a place go on.
            left = self._encoder.encode([cast("Array", wanted.source) for wanted in asked.values()])
        encoded_ns = self._now_ns()
        for (place, wanted), source in zip(asked.items(), left, strict=True):
            if isinstance(source, ExecutionError):
                results[place] = source
                continue
            try:
                self._take(requests[place], GrowingAnswer(requests[place], wanted, self._decoder.limits), source)
            except InstanceError:
                raise
            except ExecutionError as error:
                results[place] = error.with_traceback(None)
        return Execution(results, 0, encoded_ns - began_ns, 0, waited_ns=self._now_ns() - encoded_ns)

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        """Their first tokens."""
        began_ns = self._now_ns()
        made = [_MadeUp(inputs) for inputs in requests]
        refused = [one for one in self.execute_open(made).results if isinstance(one, Exception)]
        if refused:
            raise refused[0]
        results: list[Tensors] = []
        for one in made:
            one.answered.wait()
            if isinstance(one.answer, Exception):
                raise one.answer
            results.append(one.answer or ())
        return Execution(results, 0, self._now_ns() - began_ns, 0)

    def abandon(self) -> None:
        self._watch.end()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._model.abandon()
        if self._encoder is not None:
            self._encoder.abandon()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._watch.end()
        self._model.close()
        if self._encoder is not None:
            self._encoder.close()

    def _take(self, request: OpenRequest, generation: GrowingAnswer, source: Array | None) -> None:
        """Wait until there is a place, unless its caller goes before. `source`: what the encoder has left of it. Raises
        ModelRefused if it can't be on time."""
        prompt, ends_ns = len(generation.tokens), min(request.deadline_ns, request.ends_ns)
        length = 0 if source is None else source.shape[1]
        # As many tokens as what is kept of the source takes, and doesn't grow.
        fixed = -(-length * self._decoder.layout.source_bytes // self._decoder.layout.token_bytes)
        with self._changed:
            number = self._numbers = self._numbers + 1
            request.open(self, number)
            while not (request.cancelled or self._closed or self._lost):
                now_ns = self._now_ns()
                needed_ns = self._iterations.least_ns(prompt, now_ns)
                spare_ns = ends_ns - now_ns - needed_ns
                if spare_ns <= 0:
                    request.close()
                    raise _too_late(ends_ns - now_ns, needed_ns)
                if self._iterations.has_room(prompt + fixed):
                    break
                self._changed.wait(min(spare_ns / 1e9, TIMEOUT_MAX))
            if self._lost is not None or self._closed:
                raise self._lost or InstanceError("the instance is closed")
            if request.cancelled:
                self._cancelled.discard(number)
                return
            self._generations[number] = generation
            self._stepping.enter(number, generation.tokens, source)
            if request.ends_ns < NEVER:
                self._ending.add(number)
            self._iterations.enter(number, prompt, fixed, 0 if self._decoder.tried.pads_sources else length)
            if request.arrived_ns:
                self._watch.entered(number, prompt, request.arrived_ns)
            if self._thread is None:
                self._thread = Thread(target=self._live, name=f"{self._decoder.name}_generations", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # ---- on its own thread ----

    def _live(self) -> None:
        while True:
            with self._changed:
                while not (self._generations or self._closed):
                    self._changed.wait()
                if self._cancelled:
                    for number in self._cancelled & self._generations.keys():
                        self._leave(number)
                    self._cancelled.clear()
                if self._closed:
                    failed = [*self._generations]
                    break
                late = self._let_go_late() if self._ending else ()
                iteration = self._iterations.next()
            for one in late:
                try:
                    one.time_out()
                except ExecutionError as error:  # its tokens have no text
                    one.request.on_answer(error.with_traceback(None), last=True)
            try:
                self._iterate(iteration)
            except Exception as error:  # noqa: BLE001 - the instance goes on, and each request gets an answer
                _log.exception("model '%s': stepping failed; all generations of this instance end", self._decoder.name)
                self._fail([*self._generations], ExecutionError(f"stepping failed: {error!r}"))
        self._fail(failed, InstanceError("the instance was closed"))
        self._stepped.set_result(None)

    def _let_go_late(self) -> list[GrowingAnswer]:
        """Those that are to end with what there is; with the lock."""
        now_ns = self._now_ns()
        late = {number: one for number in self._ending if (one := self._generations[number]).request.ends_ns <= now_ns}
        for number in late:
            self._leave(number)
        return [*late.values()]

    def _iterate(self, iteration: Iteration) -> None:
        if iteration.put_out:
            self._watch.put_out(len(iteration.put_out))
        for number in iteration.put_out:
            self._stepping.forget(number)
        # First those that begin, so that they wait for nobody's step.
        for pieces in iteration.pieces:
            self._execute(dict(pieces))
        for group in iteration.groups:
            self._execute(dict.fromkeys(group, 1))

    def _execute(self, more: Mapping[int, int]) -> None:
        """Compute so many more tokens of each of these rows, and choose the next ones of those that have all."""
        done = self._stepping.execute(more)
        if self._closed:
            return  # maybe given up meanwhile: then its rows have had their answers
        for stepped, rows, logits in done:
            if isinstance(logits, ExecutionError):
                if isinstance(logits, InstanceLost):
                    self._lost = logits
                self._fail([*stepped], logits)
                continue
            with self._changed:
                complete = self._iterations.computed(stepped)
            if complete:
                self._choose(rows, logits)

    def _choose(self, rows: Sequence[int], logits: Array) -> None:
        """Choose another token of each of these, and answer."""
        generations = [None if row == GONE else self._generations[row] for row in rows]
        allowed = logits
        if self._decoder.rules:
            allowed = logits.copy()
            lengths = [(0, 0) if one is None else (len(one.tokens), one.prompt_length) for one in generations]
            self._decoder.rules.apply(allowed, [length for length, _ in lengths], [prompt for _, prompt in lengths])
        tokens = choose(allowed, [None if one is None else one.sampler for one in generations])
        self._watch.chose([row for row, token in zip(rows, tokens, strict=True) if token != NONE], self._now_ns())
        found = logprobs_of(logits, tokens, [None if one is None else one.logprobs for one in generations])
        # Most answers have a token and nothing else: so they share what is made of all.
        alone = Outputs((np.array(tokens), *self._nothing_else))
        ended, others = list[int](), list[int]()
        for place, (row, one, token, logprobs) in enumerate(zip(rows, generations, tokens, found, strict=True)):
            if one is None:
                continue
            if token == NONE:
                error = ExecutionError("the model's logits aren't numbers, or leave no token to choose")
                one.request.on_answer(error, last=True)
                ended.append(row)
            elif one.request.cancelled:
                ended.append(row)
            else:
                try:
                    share = Share(alone, place, place + 1)
                    (ended if one.add(token, logprobs, share) else others).append(row)
                except ExecutionError as error:  # its tokens have no text
                    one.request.on_answer(error.with_traceback(None), last=True)
                    ended.append(row)
        with self._changed:
            for row in ended:
                self._leave(row)
            self._iterations.extended(others)

    def _fail(self, rows: Sequence[int], error: ExecutionError) -> None:
        with self._changed:
            rows = [row for row in rows if row in self._generations]
            requests = [self._generations[row].request for row in rows]
            for row in rows:
                self._leave(row)
        for request in requests:
            request.on_answer(error.with_traceback(None), last=True)

    def _leave(self, number: int) -> None:
        """A generation has ended; with the lock."""
        del self._generations[number]
        self._stepping.leave(number)
        self._ending.discard(number)
        self._iterations.leave(number)
        self._watch.left(number)
        self._changed.notify_all()


def _too_late(left_ns: int, needed_ns: int) -> ModelRefused:
    text = "its time is over, and it has no place yet"
    if left_ns > 0:
        text = f"{left_ns // 1_000} us are left, and its prompt and one token take about {needed_ns // 1_000} us"
    return ModelRefused("DEADLINE_EXCEEDED", f"the generation can't be on time: {text}")


class _MadeUp(OpenRequest):
    """A request of nobody, for one token, by which an instance is warmed up."""

    __slots__ = ("answer", "answered")

    def __init__(self, inputs: Tensors) -> None:
        prompt = np.zeros(1, np.int64) if all(one is MISSING for one in inputs) else inputs[0]
        super().__init__((prompt, *inputs[1:]), (0,), parameters={"max_tokens": 1})
        self.takes_one = True
        self.answer: Any = None
        self.answered = Event()

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        self.answer = answer
        self.answered.set()
