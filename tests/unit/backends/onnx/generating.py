"""A decoder in numpy whose next token is known from all tokens before it and their places, an instance that generates
over it, and requests that keep what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from time import monotonic_ns

import numpy as np

from paceline.backends.base import Device
from paceline.backends.errors import ExecutionError
from paceline.backends.generation import GenerationLimits, read_request
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.onnx.decoder_trial import Trial
from paceline.backends.onnx.generations import Decoder as Known
from paceline.backends.onnx.generations import GeneratingInstance
from paceline.backends.onnx.options import DecoderSettings
from paceline.backends.open_request import ELSEWHERE, Answer, OpenRequest, Told
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec

VOCABULARY, END, FAULTY, NO_NUMBER = 97, 7, 90, 91


def layout(in_place: bool = False) -> DecoderLayout:
    lead = [TensorSpec(name, "INT64", (-1, -1)) for name in ("input_ids", "attention_mask", "position_ids")]
    past = TensorSpec("past_key_values.0.key", "FP32", (-1, 1, -1, 1))
    outputs = (TensorSpec("logits", "FP32", (-1, -1, -1)), TensorSpec("present.0.key", "FP32", (-1, 1, -1, 1)))
    return DecoderLayout(ModelSpec((*lead, past), outputs), tuple(one.name for one in lead), in_place)


def next_token(tokens: Sequence[int]) -> int:
    if NO_NUMBER in tokens:
        return -1
    return sum((place + 1) * token for place, token in enumerate(tokens)) % 80


def answer_of(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        if (token := next_token(tokens)) == END:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class Decoder:
    """Keeps each token times its place. `fault` is raised by steps that have the token `faulty`; `before` is called
    before each step, with its number of rows."""

    def __init__(
        self,
        fault: ExecutionError | None = None,
        before: Callable[[int], None] = lambda rows: None,
        faulty: int = FAULTY,
    ) -> None:
        self.faulty = faulty
        self.fault = fault or ExecutionError("a faulty row")
        self.before = before
        self.most_rows = 0

    def run(self, inputs: Sequence[Array]) -> Tensors:
        tokens, mask, positions, past = inputs
        present = np.concatenate([past, self.computed(tokens, positions)], axis=2)
        return [self.logits(tokens, [row[0, one == 1, 0] for row, one in zip(present, mask, strict=True)]), present]

    def keeping(self, kept: Sequence[Array]) -> Callable[[Sequence[Array]], Tensors]:
        (past,) = kept

        def run(inputs: Sequence[Array]) -> Tensors:
            tokens, mask, positions = inputs
            more, after = tokens.shape[1], mask.sum(1).tolist()
            assert len(tokens) == 1 or more == 1 or max(after) == more
            # Rows that begin together are filled up on the right.
            ends = [max(end, more) for end in after]
            for row, new, end in zip(past, self.computed(tokens, positions), ends, strict=True):
                row[:, end - more : end] = new
            kept = [row[0, :end, 0] for row, end in zip(past, after, strict=True)]
            return [self.logits(tokens, kept, [end - longest for end, longest in zip(after, ends, strict=True)])]

        return run

    def computed(self, tokens: Array, positions: Array) -> Array:
        self.before(len(tokens))
        self.most_rows = max(self.most_rows, len(tokens))
        if self.faulty in tokens:
            raise self.fault
        new = np.where(tokens == NO_NUMBER, np.nan, (positions + 1) * tokens).astype(np.float32)
        return new[:, None, :, None]

    def logits(self, tokens: Array, kept: Sequence[Array], fill: Sequence[int] | None = None) -> Array:
        """`fill`: minus how many tokens each row has behind its last one."""
        logits = np.zeros((*tokens.shape, VOCABULARY), np.float32)
        for row, (values, behind) in enumerate(zip(kept, fill or [0] * len(kept), strict=True)):
            total = values.sum()
            if np.isnan(total):
                logits[row, behind - 1] = np.nan
            else:
                logits[row, behind - 1, int(total) % 80] = 1
        return logits

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class Asked(OpenRequest):
    def __init__(self, prompt: Sequence[int], *, one: bool = False, **parameters: int) -> None:
        super().__init__((np.array(prompt, np.int64),), (0,), parameters=parameters)
        self.takes_one = one
        self.answers: list[Answer] = []
        self.ended = Event()

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        assert not self.ended.is_set()
        self.answers.append(answer)
        if last:
            self.ended.set()

    def tokens(self) -> tuple[list[int], str]:
        """All tokens, once it has ended, and why it did."""
        assert self.ended.wait(20)
        told = [one for one in self.answers if isinstance(one, Sequence)]
        assert len(told) == len(self.answers), self.answers
        last = told[-1]
        assert [one for one in told if isinstance(one, Told)] == [last]
        assert isinstance(last, Told)
        return [token for one in told for token in one[0].tolist()], str(last.parameters["finish_reason"])

    def error(self) -> ExecutionError:
        assert self.ended.wait(20)
        assert isinstance(self.answers[-1], ExecutionError)
        return self.answers[-1]


@contextmanager
def generating(
    decoder: Decoder,
    most_tokens: int = 200,
    *,
    in_place: bool = False,
    now_ns: Callable[[], int] = monotonic_ns,
    **given: int,
) -> Iterator[GeneratingInstance]:
    """An instance in whose memory `most_tokens` tokens fit."""
    limits = GenerationLimits(VOCABULARY, 60, (END,))
    settings = DecoderSettings(most_cache_bytes=most_tokens * layout().token_bytes, **given)
    instance = GeneratingInstance(
        Known("m", layout(in_place), limits, settings, Trial(VOCABULARY)),
        decoder,
        Device(),
        lambda request: read_request(request.inputs, request.parameters, limits),
        now_ns=now_ns,
    )
    try:
        yield instance
    finally:
        instance.close()


def assert_open(gate: Event) -> None:
    assert gate.wait(20)


def hand_over(instance: GeneratingInstance, *requests: Asked) -> None:
    for request in requests:
        assert instance.execute_open([request]).results == [ELSEWHERE]


def many(count: int, *, one: bool = False) -> list[Asked]:
    random = np.random.default_rng(1)
    return [
        Asked(random.integers(8, 80, random.integers(1, 20)).tolist(), one=one, max_tokens=int(random.integers(1, 30)))
        for _ in range(count)
    ]


def truth(request: Asked) -> tuple[list[int], str]:
    wanted = int(request.parameters["max_tokens"])
    tokens = answer_of(request.inputs[0].tolist(), wanted)
    return tokens, "length" if len(tokens) == wanted else "stop"
