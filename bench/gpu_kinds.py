"""What `bench.gpu` measures beside plain models: texts of mixed lengths, sequences, generations.

Lives here: of each kind, a server, whether its answers are right, its loads round by round, and what is compared. Must
not: models, requests and loads, which are those of the benchmarks on a CPU (`lengths`, `sequences`, `generations`).
What answers wrongly isn't timed. Each kind has a limit of its own, and its section is there after each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench import generations, gpu_models, gpu_steps, lengths, sequence_models, sequences, text_model
from bench.generation_requests import Lengths
from bench.generations import Part
from bench.gpu_plan import Found, Plan, say
from bench.gpu_processes import serving
from bench.load import GENERATOR
from bench.scenario import Reach
from bench.sequence_models import WIDE
from bench.sessions import open_session
from bench.stats import Sample, ratio, spread
from bench.steps import BenchError
from bench.subjects import stub
from bench.summary import Comparison, Section
from paceline.protos.inference_pb2 import ModelInferRequest
from tests import decoder_models
from tests.generation_truth import TIE
from tests.harness import ServerProcess
from tests.wire import Array

__all__ = ["generate", "mix_lengths", "step_sequences"]

_LONGEST_S, _START_S = 150.0, 60.0
"""After which nothing is begun of a kind; that its server may take to start."""
_OURS, _EXACT, _ALONE, _DIRECT = "paceline", "paceline, paceline.pad off", "paceline, 1 client", "run_with_iobinding"
_ANSWER_S = 60.0
_STEPS = 100
_DECODER = Part("decoder", replace(decoder_models.LARGE, layers=12, heads=12, inner=2048), threads=1)
_QUICK = Part("decoder", replace(decoder_models.TINY, end_tokens=()), 1, clients=4, lengths=Lengths((2, 20), (1, 12)))
_ON_GPU_TIE = 0.1
"""Scores have a deviation of 4, and the largest are about 16. Of those, TF32 is off by a thousandth or less."""
_TOLD = ("tokens_per_s", "first_p50_ms", "first_p99_ms", "token_p50_ms", "token_p99_ms", "cores")


@dataclass(frozen=True, slots=True)
class _Kind:
    """`unit`: what is counted in `<unit>_per_s` under the load `point`, of whom else with which bound in `others`, in
    words after their names."""

    plan: Plan
    name: str
    unit: str
    point: str
    how: str
    others: Mapping[str, tuple[str, Reach | None]]
    generator: str
    found: Found = field(default_factory=Found)
    right: list[Comparison] = field(default_factory=list)

    def section(self) -> Section:
        ours, compared = self.found.of(_OURS, self._rate), [*self.right]
        for who, (words, bound) in self.others.items():
            theirs = self.found.of(who, self._rate)
            if both := min(len(ours), len(theirs)):
                reach = self.plan.reach(bound) if bound else None
                what = f"{self.unit}/s / {who}{words}"
                compared.append(Comparison(self.point, what, ratio(ours[:both], theirs[:both]), reach))
        if shares := self.found.of(_OURS, "padding"):
            compared.append(Comparison(self.point, "padding, of all that is computed", spread(shares), None))
        points = dict.fromkeys((_OURS, _EXACT), self.point) | {_ALONE: "1 client"}
        how = f"{self.how}; {self.plan.how}"
        return self.found.section(f"gpu-{self.name}", self.name, how, tuple(compared), points, self.generator)

    def check(self, who: str, what: str, apart: float, tolerance: float) -> None:
        """Note how far answers were off. Raises BenchError if it was too far."""
        self.found.add(who, {"deviation": apart})
        part, reach = apart / (tolerance or 1.0), Reach(False, 1.0 if tolerance else 0.0)
        comparison = Comparison("", f"{what} / {tolerance:g}" if tolerance else what, spread([part]), reach)
        self.right.append(comparison)
        say(f"{comparison.what}: {part:.3f}, {comparison.verdict}")
        if comparison.verdict != "reached":
            raise BenchError(f"wrong answers, {apart:g} apart")

    def rounds(self, loads: Mapping[str, Callable[[], Sample]]) -> Iterator[Section]:
        """Measure each in turn, in reverse order every second round; the section after each round."""
        yield self.section()
        for number in range(self.plan.rounds):
            for who in [*loads][:: -1 if number % 2 else 1]:
                self.plan.check()
                self.found.add(who, loads[who]())
            rates = (f"{who} {self.found.of(who, self._rate)[-1]:,.0f}" for who in loads)
            say(f"{self.name}: round {number + 1} of {self.plan.rounds}: {self.unit}/s: {', '.join(rates)}")
            yield self.section()

    @property
    def _rate(self) -> str:
        return f"{self.unit}_per_s"


def _generator(plan: Plan) -> str:
    return f"{plan.processes} of {GENERATOR}"


def mix_lengths(plan: Plan, folder: Path) -> Iterator[Section]:
    """64 callers with texts of log-normal lengths, for an encoder twice: its lengths are found, and are left alone."""
    how = "an encoder with a mask, texts of 5 to 256 words, of 40 on median"
    others = {_EXACT: ("", Reach(True, 4.0))}
    kind = _Kind(
        plan.within(_LONGEST_S), "lengths", "texts", f"{lengths.CLIENTS} clients", how, others, _generator(plan)
    )
    with kind.found.trying("texts"), ExitStack() as stack:
        kind.plan.check()
        say("making an encoder")
        file, models = text_model.write(folder, plan.sized(text_model.QUICK, text_model.BERT_BASE)), ("pads", "exact")
        for model in models:
            text_model.add(model, file, folder / "lengths", plan.device, pads=model == "pads")
        server = stack.enter_context(serving(folder / "lengths", plan.frontends, start_s=_START_S))
        texts, tolerance = text_model.lengths(lengths.TEXTS), gpu_models.tolerance("FP32", plan.device)
        some, session = texts[: lengths.CLIENTS], open_session(file, threads=0)
        expected = [session.run(None, text_model.feeds([words]))[0] for words in some]
        for model, who in zip(models, (_OURS, _EXACT), strict=True):
            apart = _apart(server, [text_model.request(model, words) for words in some], expected)
            at_once = f"{who}, {len(some)} texts at once"
            kind.check(at_once, f"{who}: largest deviation from the CPU's answers", apart, tolerance)
        if not _elements(server, models[0])[0]:
            said = [one["message"] for one in server.log if f"'{models[0]}'" in one["message"]]
            raise BenchError(f"no lengths were found: {'; '.join(said)}")
        requests = {model: lengths.requests_of(folder, model, texts) for model in models}

        def load(model: str) -> Sample:
            before = gpu_steps.counters(server, model), _elements(server, model)
            per_s = lengths.texts_per_s(server.target, requests[model], plan.seconds, plan.processes)
            elements, padding = (new - old for old, new in zip(before[1], _elements(server, model), strict=True))
            batches = gpu_steps.batches_between(before[0], gpu_steps.counters(server, model))
            shares = {"padding": padding / (elements + padding)} if elements else {}
            return {"texts_per_s": per_s, **batches, **shares}

        yield from kind.rounds({_OURS: partial(load, "pads"), _EXACT: partial(load, "exact")})
    yield kind.section()


def _apart(server: ServerProcess, messages: Sequence[bytes], expected: Sequence[Array]) -> float:
    """The largest deviation of answers to all of these at once, as a share of the largest value."""
    channel, service = stub(server.target)
    with channel:
        requests = map(ModelInferRequest.FromString, messages)
        calls = [service.ModelInfer.future(request, timeout=_ANSWER_S) for request in requests]
        answers = [call.result().raw_output_contents[0] for call in calls]
    return max(gpu_steps.apart(*pair) for pair in zip(answers, expected, strict=True))


def _elements(server: ServerProcess, model: str) -> list[float]:
    """Words so far, and what texts were filled up with."""
    metrics = server.metrics()
    names = (f'paceline_{name}elements{{model="{model}",version="1"}}' for name in ("", "padding_"))
    return [metrics.get(name, 0.0) for name in names]


def step_sequences(plan: Plan, folder: Path) -> Iterator[Section]:
    """64 streams, each with one sequence after the other, whose states stay on the device."""
    how = f"sequences of {_STEPS} steps, with {WIDE.first.nbytes // 1024} KiB of state"
    others = {_DIRECT: ", states joined for good", _ALONE: ""}
    point, bounds = f"{sequences.STREAMS} streams", {who: (words, None) for who, words in others.items()}
    kind = _Kind(plan.within(_LONGEST_S), "sequences", "steps", point, how, bounds, _generator(plan))
    with kind.found.trying("sequences"), ExitStack() as stack:
        kind.plan.check()
        file = sequence_models.write_fixed(folder, products=1, size=WIDE.first.size)
        sequence_models.add(WIDE, file, folder / "states", plan.device)
        server = stack.enter_context(serving(folder / "states", plan.frontends, start_s=_START_S))
        apart = asyncio.run(sequences.difference(WIDE, file, server.target, _STEPS))
        # Sums of whole numbers are exact, whatever a device multiplies with.
        kind.check(f"{point} at once", "largest difference from the CPU's answers", apart, 0.0)
        requests = sequence_models.messages(WIDE, 0, _STEPS)

        def load(streams: int) -> Sample:
            before, processes = gpu_steps.counters(server, WIDE.name), min(plan.processes, streams)
            told = sequences.load(server.target, requests, streams, plan.seconds, steps=_STEPS, processes=processes)
            batches = gpu_steps.batches_between(before, gpu_steps.counters(server, WIDE.name))
            return {"steps_per_s": told["requests_per_s"], "cores": told["cores"], **batches}

        def direct() -> Sample:
            return {"steps_per_s": sequences.joined(WIDE.name, file, plan.seconds / 2, plan.device)}

        yield from kind.rounds({_OURS: partial(load, sequences.STREAMS), _ALONE: partial(load, 1), _DIRECT: direct})
    yield kind.section()


def generate(plan: Plan, folder: Path) -> Iterator[Section]:
    """32 clients of a decoder, over one, and over the same callers without a server."""
    part = replace(plan.sized(_QUICK, _DECODER), device=plan.device)
    (least, most), (few, many) = part.lengths.prompts, part.lengths.answers
    how = f"{part.decoder.layers} layers, {part.decoder.width} wide; prompts of {least} to {most} tokens, answers of "
    others = {_ALONE: "", _DIRECT: ", stepped in the same groups"}
    point, bounds = f"{part.clients} clients", {who: (words, None) for who, words in others.items()}
    kind = _Kind(plan.within(_LONGEST_S), "generations", "tokens", point, f"{how}{few} to {many}", bounds, "")
    with kind.found.trying("generations"), ExitStack() as stack:
        kind.plan.check()
        say("making a decoder")
        asked = part.asked()
        server, decoder, paths = stack.enter_context(generations.serving(part, asked))
        tie = _ON_GPU_TIE if plan.on_gpu else TIE
        ties = asyncio.run(generations.ties(server.target, part.name, decoder, asked, tie))
        what = (
            f"answers, of {part.clients}, that left the naive loop's on a CPU where tokens were {tie:g} apart or less"
        )
        kind.right.append(Comparison(point, what, spread([ties]), None))

        def load(clients: int) -> Sample:
            told = generations.closed_load(server, paths[:clients], plan.seconds)
            return {name: told[name] for name in _TOLD if told[name] is not None}

        def direct() -> Sample:
            told = generations.direct(part, decoder, asked, plan.seconds, callers=True)
            return {"tokens_per_s": told["tokens_per_s"], "rows_per_batch": told["rows"]}

        yield from kind.rounds({_OURS: partial(load, part.clients), _ALONE: partial(load, 1), _DIRECT: direct})
    yield kind.section()
