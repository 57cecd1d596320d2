from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.perf_analyzer import FailedError, UnstableError, arguments, find, input_data, read, run
from bench.scenario import Side

HEAD = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency"
)
REPORT = f"{HEAD}\n64,3086.77,3,19840,659,18,43,14,0,19451,25580,27974,31837\n"
SAID = "Request concurrency: 64\n  Client: \n    Request count: 11340\n    Throughput: 3086.77 infer/sec\n"
TINY = Side("paceline", "tiny", ((16,),))


def program(folder: Path, script: str) -> Path:
    path = folder / "perf_analyzer"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_read_finds_rate_percentiles_in_milliseconds_and_answers() -> None:
    assert read(REPORT, SAID) == {
        "requests_per_s": 3086.77,
        "p50_ms": 19.451,
        "p90_ms": 25.58,
        "p99_ms": 31.837,
        "answers": 11340,
    }


@pytest.mark.parametrize(("report", "said"), [(HEAD, SAID), ("", SAID), (REPORT, "nothing")])
def test_read_without_a_result_fails_and_quotes_the_output(report: str, said: str) -> None:
    with pytest.raises(FailedError, match=said.splitlines()[-1].strip()):
        read(report, said)


def test_arguments_follow_the_side() -> None:
    def line(side: Side) -> str:
        return " ".join(arguments("host:1", side, 64, 3.0, Path("data"), Path("report")))

    plain = line(TINY)
    assert plain.startswith("-u host:1 -i grpc -m tiny --async --concurrency-range 64 -p 1000 ")
    assert plain.endswith("-f report --shape INPUT0:16")
    assert line(Side("paceline", "free", ((12,), (13,)))).endswith("--input-data data")
    assert line(Side("echo", "tiny", ((16,),), "stream")).endswith("--streaming")
    memory = line(Side("paceline", "image", ((150528,),), "shm"))
    assert memory.endswith("--shared-memory system --output-shared-memory-size 4000")


def test_arguments_window_is_never_shorter_than_perf_analyzer_allows() -> None:
    given = arguments("host:1", TINY, 1, 0.1, Path("data"), Path("report"))
    assert given[given.index("-p") + 1] == "100"


def test_input_data_has_one_entry_per_shape() -> None:
    first, second = json.loads(input_data(((2,), (1, 3))))["data"]
    assert first == {"INPUT0": {"content": [0.5, 0.5], "shape": [2]}}
    assert second == {"INPUT0": {"content": [0.5] * 3, "shape": [1, 3]}}


def test_find_accepts_only_an_executable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERF_ANALYZER", raising=False)
    assert find(tmp_path) is None
    (tmp_path / "perf_analyzer").write_text("no program")
    assert find(tmp_path) is None
    path = program(tmp_path, "true")
    assert find(tmp_path) == path
    monkeypatch.setenv("PERF_ANALYZER", str(path))
    assert find(tmp_path / "elsewhere") == path


def test_run_reads_the_report_and_counts_requests_in_flight(tmp_path: Path) -> None:
    (tmp_path / "made.csv").write_text(REPORT)
    binary = program(tmp_path, f'cp "{tmp_path}/made.csv" "{tmp_path}/perf_analyzer.csv"; echo "Request count: 11340"')
    found = run(binary, "host:1", TINY, 64, 0.1, tmp_path)
    assert (found["requests_per_s"], found["answers"]) == (3086.77, 11340 + 64)
    assert found["cores"] >= 0


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("error: no such model", FailedError),
        ("Failed to obtain stable measurement.", UnstableError),
        ("No valid requests recorded within time interval. Please use a larger time window.", UnstableError),
    ],
)
def test_run_of_a_failing_program_distinguishes_errors_from_too_few_answers(
    tmp_path: Path, said: str, error: type[FailedError]
) -> None:
    with pytest.raises(FailedError) as caught:
        run(program(tmp_path, f'echo "{said}"; exit 2'), "host:1", TINY, 64, 0.1, tmp_path)
    assert type(caught.value) is error
