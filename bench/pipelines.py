"""Pipelines: text in and embedding out over its encoder alone, and what a step costs that does nothing.

Lives here: the loads, the ratios. Must not: assert. In each round all loads follow each other; every other round goes
backwards.

1. `text` (needs what `examples.embedding.build` downloads): 64 callers send the sentences of that example, one each.
   `of_encoder`: embeddings per second, over what 64 callers get who send the same sentences as ready tokens to the
   encoder alone, which has one thread either way. `cpu_of_encoder`: the same as CPU of the server and its processes per
   text, which depends less on what else the machine does.
2. `identity`: three models in a row that return their input, 16 numbers, over one of them alone. `cpu_of_one`: CPU of
   the server per request, with 64 callers; `wait_of_one`: the median latency of a single caller.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import closed
from bench.report import Rounds
from bench.steps import BenchError
from bench.subjects import counted, cpu_s
from examples.embedding import build
from examples.embedding.demo import SENTENCES
from paceline.clients.messages import Inputs, infer_request
from tests.ensembles import ensemble_config, write_ensemble
from tests.harness import ServerProcess, write_identity

__all__ = ["main", "measure_identity", "measure_text"]

CALLERS = 64
_PARTS = ("text", "identity")
_STEPS = ("first", "second", "third")
_RATIOS = ("of_encoder", "cpu_of_encoder", "cpu_of_one", "wait_of_one", "rows_per_batch", "rows_per_batch_alone")

Report = Callable[[dict[str, Any]], None]


def measure_text(repository: Path, rounds: int, seconds: float, report: Report) -> None:
    """All rounds with the example's repository; each is reported. Raises BenchError."""
    texts = SENTENCES.read_text(encoding="utf-8").splitlines()
    # One thread, so that what else a request needs has a core of its own, as on a larger machine.
    args = ["--allow-python-models=true", "--backend-config=onnxruntime,intra_op_thread_count=1"]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name, ServerProcess(repository, args=args) as server:
        pipeline = _files(Path(name), "embedding", [{"text": [[text]]} for text in texts])
        encoder = _files(Path(name), "encoder", _tokens(repository, texts))

        def load(requests: Sequence[Path]) -> tuple[float, float, float]:
            """Requests per second, CPU of the server and its processes per request, rows of the encoder's batches."""
            before = counted(server, "encoder")
            told = _load(server, requests, CALLERS, seconds)
            rows, executions = (new - old for new, old in zip(counted(server, "encoder"), before, strict=True))
            return told["requests_per_s"], told["cpu_us"] / 1e3, rows / executions

        for number in range(rounds):
            found: dict[str, tuple[float, float, float]] = {}
            for one in _turns((("pipeline", pipeline), ("encoder", encoder)), number):
                found[one[0]] = load(one[1])
            (whole_per_s, whole_ms, whole_rows), (alone_per_s, alone_ms, alone_rows) = (
                found["pipeline"],
                found["encoder"],
            )
            report(
                {
                    "part": "text",
                    "pipeline_per_s": whole_per_s,
                    "encoder_per_s": alone_per_s,
                    "pipeline_cpu_ms": whole_ms,
                    "encoder_cpu_ms": alone_ms,
                    "of_encoder": whole_per_s / alone_per_s,
                    "cpu_of_encoder": whole_ms / alone_ms,
                    "rows_per_batch": whole_rows,
                    "rows_per_batch_alone": alone_rows,
                }
            )


def _tokens(repository: Path, texts: Sequence[str]) -> list[Inputs]:
    from tokenizers import Tokenizer  # an extra

    tokenizer = Tokenizer.from_file(str(repository / "tokenizer" / "1" / "tokenizer.json"))
    tokenizer.no_padding()
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return [
        {name: np.array([getattr(text, column)], np.int64) for name, column in columns.items()}
        for text in tokenizer.encode_batch(list(texts))
    ]


def measure_identity(rounds: int, seconds: float, report: Report) -> None:
    """All rounds with models that do nothing; each is reported. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        for step in _STEPS:
            write_identity(folder / "models", step, rows=CALLERS)
        tensors = ["INPUT0", *(f"from_{step}" for step in _STEPS[:-1]), "OUTPUT0"]
        steps = [
            (step, {"INPUT0": taken}, {"OUTPUT0": made})
            for step, (taken, made) in zip(_STEPS, pairwise(tensors), strict=True)
        ]
        config = ensemble_config(steps, {"INPUT0": "FP32 16"}, {"OUTPUT0": "FP32 16"}, rows=CALLERS)
        write_ensemble(folder / "models", "chain", config)
        row = {"INPUT0": np.ones((1, 16), np.float32)}
        requests = {model: _files(folder, model, [row]) for model in ("chain", "first")}
        with ServerProcess(folder / "models", args=["--model-control-mode=none"], fresh=True) as server:
            for number in range(rounds):
                found: dict[str, tuple[float, float]] = {}
                for model in _turns(("chain", "first"), number):
                    told = _load(server, requests[model], CALLERS, seconds)
                    found[model] = told["cpu_us"], _load(server, requests[model], 1, seconds / 2)["p50_ms"]
                (chain_us, chain_ms), (one_us, one_ms) = found["chain"], found["first"]
                report(
                    {
                        "part": "identity",
                        "chain_cpu_us": chain_us,
                        "one_cpu_us": one_us,
                        "chain_p50_ms": chain_ms,
                        "one_p50_ms": one_ms,
                        "cpu_of_one": chain_us / one_us,
                        "wait_of_one": chain_ms / one_ms,
                    }
                )


def _turns(loads: Sequence[Any], number: int) -> Sequence[Any]:
    return loads[::-1] if number % 2 else loads


def _files(folder: Path, model: str, inputs: Sequence[Inputs]) -> list[Path]:
    """A request for each, ready for the wire."""
    paths = []
    for number, one in enumerate(inputs):
        paths.append(folder / f"{model}-{number}")
        paths[-1].write_bytes(infer_request(model, one).SerializeToString())
    return paths


def _load(server: ServerProcess, requests: Sequence[Path], callers: int, seconds: float) -> dict[str, Any]:
    """`cpu_us` is the server's processor time for each answer."""
    told = closed(server.target, requests, callers, seconds, min(3.0, seconds), look=lambda: cpu_s(server.pid) or 0.0)
    if not told["answers"]:
        raise BenchError("no answers")
    return {**told, "cpu_us": 1e6 * (told["after"] - told["before"]) / told["answers"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipelines", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="by default both")
    parser.add_argument("--rounds", type=int, default=5, help="medians are reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="per load (default: %(default)s)")
    got = parser.parse_args(arguments)
    parts, rounds = got.parts or _PARTS, Rounds()
    if "text" in parts:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            measure_text(build.build(Path(folder)), got.rounds, got.seconds, rounds.add)
    if "identity" in parts:
        measure_identity(got.rounds, got.seconds, rounds.add)
    print(f"\n{rounds.medians(_RATIOS)}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
