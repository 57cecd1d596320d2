"""Generations: tokens per second of 32 clients whose answers are of different lengths, and how long they wait for them.

Lives here: the loads, the ratios. Must not: assert. In each round all loads follow each other; every other round goes
backwards. Prompts of 8 to 128 tokens, answers of 16 to 256, over streams; `whole`: in one response each.

1. `fixed`: a decoder whose steps cost the same whatever their rows, or nearly so, on one thread.
2. `waiting`: the same, but that cost is waiting, as for another device, which leaves the cores to others: 5, 10 and
   20 ms a step.
3. `large`: 45 MB of weights, FP32, and keys and values that are copied in each step, on all cores.
4. `few`: 1, 2, 4 and 8 clients of that decoder. `of_alone_N`: N of them over the session alone, one answer at a time.
5. `arriving`: 8 clients of that decoder whose answers are long, while two more send prompts of 1,000 tokens, for one
   token each, one after the other. `gap_of_prefill`: the time from one token to the next of the 8, at the 99th
   percentile, over that of such a prompt by the session alone. `gap_of_full_step`: the same over a step of the 8 and as
   many tokens of a prompt as a step may have, both by the session alone.

Of the first three, `of_one`: over a single client of the same server. `of_static`: over batches of as many, stepped by
nothing but the session until their longest answer is there. `of_full`: over a batch as large of equal lengths, stepped
in the same way. `of_continuous`: over the same requests in the same closed loop, stepped by the session in the groups
that the server's rules make, without a server: what continuous batching can reach with these lengths;
`continuous_of_full`: that over a full batch. Before that, each client's first answer is compared with what the naive
loop generates; `ties`: answers that went another way where two tokens were equal but for rounding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import generation_requests
from bench.generation_requests import Lengths, Wanted
from bench.report import Rounds
from bench.sessions import instance_group
from bench.steps import BenchError, run_module
from bench.subjects import cpu_s, main_thread_cpu_s
from paceline.backends.onnx.options import DecoderSettings
from paceline.clients import AsyncInferenceClient
from tests import decoder_models
from tests.decoder_models import Decoder
from tests.generation_truth import TIE, Asked, NaiveLoop, is_same
from tests.harness import ServerProcess
from tests.operators import build_library

__all__ = [
    "ARRIVING",
    "FEW",
    "FIXED",
    "LARGE",
    "WAITING",
    "Part",
    "Report",
    "closed_load",
    "direct",
    "main",
    "measure",
    "measure_arriving",
    "measure_few",
    "serving",
    "ties",
]

_FEW = (1, 2, 4, 8)
_RATIOS = (
    *("of_one", "of_static", "of_full", "of_continuous"),
    *("whole_of_static", "whole_of_full", "whole_of_continuous", "continuous_of_full"),
    *(f"of_alone_{clients}" for clients in _FEW),
    *("gap_of_prefill", "gap_of_full_step"),
)
_TIMES = ("first_p50_ms", "first_p99_ms", "token_p50_ms", "token_p99_ms")
_REQUESTS = 16
_COMPARED_TOKENS = 32
_PARTS = ("fixed", "waiting", "large", "few", "arriving")
_ARRIVING = 2
_PROMPT_TOKENS = 1_000
_PIECE_TOKENS = DecoderSettings().prefill_tokens
_WARMUP_S = 3.0
_SPARE_S = 120.0

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured with a decoder. `threads`: of its session, in the server and without it, 0 for all cores.
    `wait_us`: of each execution of one that waits. `device`: of both."""

    name: str
    decoder: Decoder
    threads: int
    clients: int = 32
    lengths: Lengths = field(default_factory=Lengths)
    wait_us: int = 0
    device: str = "cpu"

    def asked(self) -> list[list[Wanted]]:
        """What each client asks for, one after the other, in which it goes round."""
        vocabulary = self.decoder.vocabulary
        return [
            generation_requests.drawn(client, _REQUESTS, self.lengths, vocabulary) for client in range(self.clients)
        ]

    def full_batch(self) -> list[Wanted]:
        return generation_requests.full_batch(self.clients, self.lengths, self.decoder.vocabulary)


FIXED = Part("fixed", decoder_models.FIXED_COST, threads=1)
WAITING = tuple(
    Part(f"waiting_{ms}_ms", replace(decoder_models.FIXED_COST, fixed_products=0, waits=True), 1, wait_us=1000 * ms)
    for ms in (5, 10, 20)
)
LARGE = Part("large", decoder_models.LARGE, threads=0)
FEW = Part("few", decoder_models.LARGE, threads=0, clients=max(_FEW))
ARRIVING = Part("arriving", decoder_models.LARGE, threads=0, clients=8, lengths=Lengths((8, 32), (200, 256)))


async def ties(target: str, model: str, folder: Path, clients: Sequence[Sequence[Wanted]], tie: float = TIE) -> int:
    """How many of the beginnings of all clients' first answers, asked for at once, aren't what the naive loop
    generates, because the scores of two tokens were no more than `tie` apart. Raises BenchError if one differs
    elsewhere."""
    asked = [Wanted(own[0].prompt, min(own[0].tokens, _COMPARED_TOKENS)) for own in clients]

    async def answer(client: AsyncInferenceClient, wanted: Wanted) -> tuple[list[int], str]:
        tokens, reason = [], ""
        ids, parameters = np.array(wanted.prompt, np.int64), {"max_tokens": wanted.tokens}
        async for result in client.stream_infer(model, {"input_ids": ids}, parameters=parameters):
            tokens += result["output_ids"].tolist()
            reason = str(result.parameters.get("finish_reason", ""))
        return tokens, reason

    async with AsyncInferenceClient(target) as client:
        found = await asyncio.gather(*(answer(client, wanted) for wanted in asked))
    truth = NaiveLoop(folder)
    try:
        with ThreadPoolExecutor() as pool:
            right = pool.map(lambda one: truth.generate(one.prompt, Asked(max_tokens=one.tokens)), asked)
            same = [is_same(one, *given, tie) for one, given in zip(right, found, strict=True)]
    except AssertionError as error:
        raise BenchError(f"{model} generates something else than the naive loop: {error}") from None
    return same.count(False)


def measure(part: Part, rounds: int, seconds: float, report: Report) -> None:
    """All rounds with a decoder; each is reported. Raises BenchError."""
    asked, rows = part.asked(), part.full_batch()
    with serving(part, asked) as (server, folder, paths):
        without = folder
        if part.decoder.waits:
            without = decoder_models.write(replace(part.decoder, waits=False), folder.parent / "without waiting")
        different = asyncio.run(ties(server.target, part.name, without, asked))
        loads: list[tuple[str, Callable[[], dict[str, float]]]] = [
            ("together", lambda: closed_load(server, paths, seconds)),
            ("whole", lambda: closed_load(server, paths, seconds, whole=True)),
            ("one", lambda: closed_load(server, paths[:1], seconds)),
            ("static", lambda: direct(part, folder, generation_requests.batches(asked), seconds)),
            ("full", lambda: direct(part, folder, [rows], seconds)),
            ("continuous", lambda: direct(part, folder, asked, seconds, callers=True)),
        ]
        for number in range(rounds):
            found = {name: measured() for name, measured in (loads[::-1] if number % 2 else loads)}
            together, others = found["together"], ("whole", "one", "static", "full", "continuous")
            report(
                {
                    "part": part.name,
                    "ties": different,
                    **{f"{name}_per_s": found[name]["tokens_per_s"] for name in ("together", *others)},
                    **{f"of_{name}": together["tokens_per_s"] / found[name]["tokens_per_s"] for name in others},
                    **{
                        f"whole_of_{name}": found["whole"]["tokens_per_s"] / found[name]["tokens_per_s"]
                        for name in ("static", "full", "continuous")
                    },
                    "continuous_of_full": found["continuous"]["tokens_per_s"] / found["full"]["tokens_per_s"],
                    **{key: together[key] for key in (*_TIMES, "server_cpu_us", "loop_cpu_us", "load_cores")},
                    **{f"one_{key}": found["one"][key] for key in _TIMES},
                }
            )


def measure_few(part: Part, rounds: int, seconds: float, report: Report) -> None:
    """All rounds with 1, 2, 4 and 8 clients of `part`; each is reported. Raises BenchError."""
    asked = part.asked()
    one_by_one = [[wanted] for own in asked for wanted in own]
    with serving(part, asked) as (server, folder, paths):
        loads: list[tuple[str, Callable[[], dict[str, float]]]] = [
            ("alone", lambda: direct(part, folder, one_by_one, seconds)),
            *(
                (f"clients_{clients}", partial(closed_load, server, paths[:clients], seconds))
                for clients in _FEW
                if clients <= part.clients
            ),
        ]
        for number in range(rounds):
            found = {name: measured() for name, measured in (loads[::-1] if number % 2 else loads)}
            alone = found.pop("alone")["tokens_per_s"]
            ratios = {
                f"of_alone_{name.removeprefix('clients_')}": one["tokens_per_s"] / alone for name, one in found.items()
            }
            report({"part": part.name, "alone_per_s": alone, **ratios})


def measure_arriving(part: Part, prompt: int, rounds: int, seconds: float, report: Report) -> None:
    """All rounds with the clients of `part` and prompts of so many tokens; each is reported. Raises BenchError."""
    running, rows = part.asked(), part.full_batch()
    prompts = replace(part, clients=part.clients + _ARRIVING, lengths=Lengths((prompt, prompt), (1, 1)))
    arriving = prompts.asked()[part.clients :]
    with serving(part, running + arriving) as (server, folder, paths):
        loads: list[tuple[str, Callable[[], dict[str, float]]]] = [
            ("arriving", lambda: closed_load(server, paths, seconds, untimed=_ARRIVING)),
            ("undisturbed", lambda: closed_load(server, paths[:-_ARRIVING], seconds)),
            ("prefill", lambda: direct(part, folder, [arriving[0][:1]], seconds)),
            ("piece", lambda: direct(part, folder, [[Wanted(arriving[0][0].prompt[:_PIECE_TOKENS], 1)]], seconds)),
            ("step", lambda: direct(part, folder, [rows], seconds)),
        ]
        for number in range(rounds):
            found = {name: measured() for name, measured in (loads[::-1] if number % 2 else loads)}
            prefill_ms, piece_ms = (1e3 / found[name]["tokens_per_s"] for name in ("prefill", "piece"))
            full_step_ms = piece_ms + 1e3 * part.clients / found["step"]["tokens_per_s"]
            report(
                {
                    "part": part.name,
                    "prefill_ms": prefill_ms,
                    "full_step_ms": full_step_ms,
                    "gap_of_full_step": found["arriving"]["token_p99_ms"] / full_step_ms,
                    "gap_of_prefill": found["arriving"]["token_p99_ms"] / prefill_ms,
                    **{key: found["arriving"][key] for key in _TIMES},
                    **{f"undisturbed_{key}": found["undisturbed"][key] for key in _TIMES},
                }
            )


@contextmanager
def serving(part: Part, asked: Sequence[Sequence[Wanted]]) -> Iterator[tuple[ServerProcess, Path, list[Path]]]:
    """A server, the folder of its decoder, and files with the requests of each client."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = decoder_models.write(part.decoder, Path(name) / "models" / part.name / "1")
        paths = [
            generation_requests.write_messages(
                Path(name) / str(client), [generation_requests.message(part.name, one) for one in own]
            )
            for client, own in enumerate(asked)
        ]
        args = ["--model-control-mode=none"]
        args += [f"--backend-config=onnxruntime,intra_op_thread_count={part.threads}"] if part.threads else []
        config = instance_group(part.device)
        if part.decoder.waits:
            library = build_library(folder / "waits.so", wait_us=part.wait_us)
            config += f' model_operations {{ op_library_filename: "{folder.name}/{library.name}" }}'
            args += ["--allow-op-libraries=true"]
        (folder.parent / "config.pbtxt").write_text(config)
        with ServerProcess(Path(name) / "models", args=args, fresh=True) as server:
            yield server, folder, paths


def closed_load(
    server: ServerProcess, paths: Sequence[Path], seconds: float, *, untimed: int = 0, whole: bool = False
) -> dict[str, float]:
    before_s, loop_before_s = cpu_s(server.pid) or 0.0, main_thread_cpu_s(server.pid) or 0.0
    told = run_module(
        *("generation_load", server.target, *map(str, paths)),
        *("--seconds", str(seconds), "--warmup", str(min(_WARMUP_S, seconds)), "--untimed", str(untimed)),
        *(["--whole"] if whole else []),
        timeout_s=seconds + _WARMUP_S + _SPARE_S,
    )
    if told["errors"] or not told["tokens_per_s"]:
        raise BenchError(f"{told['tokens_in_all']} tokens, errors {told['errors']}")
    cpu_us = 1e6 * ((cpu_s(server.pid) or 0.0) - before_s) / told["tokens_in_all"]
    loop_cpu_us = 1e6 * ((main_thread_cpu_s(server.pid) or 0.0) - loop_before_s) / told["tokens_in_all"]
    return {**told, "server_cpu_us": cpu_us, "loop_cpu_us": loop_cpu_us, "load_cores": told["cores"]}


def direct(
    part: Part, folder: Path, asked: Sequence[Sequence[Wanted]], seconds: float, *, callers: bool = False
) -> dict[str, float]:
    """By the session alone: batches, or what each of `callers` asks for, in a closed loop."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[astuple(one) for one in batch] for batch in asked], file)
        file.flush()
        return run_module(
            *("generation_direct", str(folder / "model.onnx"), file.name),
            *("--seconds", str(seconds), "--threads", str(part.threads), "--device", part.device),
            *(["--callers"] if callers else []),
            timeout_s=seconds + _SPARE_S,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generations", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="by default all")
    parser.add_argument("--rounds", type=int, default=5, help="medians are reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="per load (default: %(default)s)")
    got = parser.parse_args(arguments)
    rounds = Rounds()
    wanted = got.parts or _PARTS
    for name, parts in (("fixed", [FIXED]), ("waiting", WAITING), ("large", [LARGE])):
        for part in parts if name in wanted else ():
            measure(part, got.rounds, got.seconds, rounds.add)
    if FEW.name in wanted:
        measure_few(FEW, got.rounds, got.seconds, rounds.add)
    if ARRIVING.name in wanted:
        measure_arriving(ARRIVING, _PROMPT_TOKENS, got.rounds, got.seconds, rounds.add)
    keys = (*_RATIOS, "together_per_s", "loop_cpu_us", *_TIMES)
    print(f"\n{rounds.medians(keys, 'part')}", flush=True)


if __name__ == "__main__":
    main()
