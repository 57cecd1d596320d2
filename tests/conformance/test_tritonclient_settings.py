"""NVIDIA's client reads and changes log and trace settings: everybody may read them, changes need the switch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests.conformance.triton import Triton, tensors
from tests.harness import ServerProcess, write_identity
from tests.polling import eventually

LOG_DEFAULTS: dict[str, Any] = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "json",  # as the harness starts its servers
}
TRACE_DEFAULTS = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "t.json"


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory, trace_file: Path) -> Iterator[ServerProcess]:
    """A server of one model, `echo`, whose settings clients may change."""
    repository = tmp_path_factory.mktemp("repository")
    write_identity(repository)
    args = ["--allow-remote-settings", "true", "--trace-config", f"triton,file={trace_file}"]
    with ServerProcess(repository, args=args) as started:
        yield started


@pytest.fixture(params=[tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
async def client(request: pytest.FixtureRequest, open_server: ServerProcess) -> AsyncIterator[Triton]:
    """Leaves the settings as it found them."""
    made = Triton(request.param.InferenceServerClient(open_server.target))
    yield made
    await made.update_trace_settings(settings=dict.fromkeys(TRACE_DEFAULTS))
    await made.update_trace_settings("echo", dict.fromkeys(TRACE_DEFAULTS))
    await made.update_log_settings({name: value for name, value in LOG_DEFAULTS.items() if name != "log_file"})
    await made.close()


def log_values(said: dict[str, Any]) -> dict[str, Any]:
    return {name: next(iter(value.values())) for name, value in said["settings"].items()}


def trace_values(said: dict[str, Any]) -> dict[str, Any]:
    return {name: value["value"] for name, value in said["settings"].items()}


async def infer(client: Triton, request_id: str) -> None:
    await client.infer("echo", tensors({"INPUT0": np.ones((2, 16), np.float32)}), request_id=request_id)


# ---- With the switch off ---------------------------------------------------------------------------------------------


async def test_settings_may_be_asked_for_by_everybody(triton: Triton) -> None:
    assert log_values(await triton.get_log_settings(as_json=True)) == LOG_DEFAULTS
    assert trace_values(await triton.get_trace_settings(as_json=True)) == TRACE_DEFAULTS
    assert trace_values(await triton.get_trace_settings("simple", as_json=True)) == TRACE_DEFAULTS


async def test_settings_cannot_be_changed_unless_the_server_allows_it(triton: Triton) -> None:
    for changing, what in (
        (triton.update_log_settings({"log_info": False}), "log"),
        (triton.update_trace_settings(settings={"trace_rate": "1"}), "trace"),
        (triton.update_trace_settings("simple", {"trace_rate": []}), "trace"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            await changing
        assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
        assert raised.value.message() == (
            f"{what} settings can't be changed by clients: start the server with --allow-remote-settings true"
        )
    assert log_values(await triton.get_log_settings(as_json=True)) == LOG_DEFAULTS
    assert not {"logging", "trace"} & set((await triton.get_server_metadata()).extensions)


# ---- Logging ---------------------------------------------------------------------------------------------------------


async def test_log_settings_changed_are_told_and_hold(client: Triton, open_server: ServerProcess) -> None:
    assert {"logging", "trace"} <= set((await client.get_server_metadata()).extensions)
    changes = {"log_info": False, "log_warning": True, "log_verbose_level": 2, "log_format": "ISO8601"}
    said = await client.update_log_settings(changes, as_json=True)
    assert log_values(said) == log_values(await client.get_log_settings(as_json=True)) == LOG_DEFAULTS | changes


async def test_log_info_switched_off_stops_its_lines(client: Triton, open_server: ServerProcess) -> None:
    def changes_logged() -> list[set[str]]:
        lines = [line["message"].partition("log settings changed by a client: ") for line in open_server.log]
        return [set(names.split(", ")) for _, said, names in lines if said]

    # Lines arrive later than answers, but in order: once this one has arrived, so have those of other tests.
    first = {"log_error", "log_warning"}
    before = changes_logged().count(first)
    await client.update_log_settings(dict.fromkeys(first, True))
    eventually(lambda: changes_logged().count(first) > before, "a line about the first change")
    await client.update_log_settings({"log_info": False})
    await client.update_log_settings({"log_warning": True})
    last = {"log_info", "log_warning"}
    await client.update_log_settings(dict.fromkeys(last, True))
    eventually(lambda: changes_logged()[-1] == last, "a line about the last change")
    assert changes_logged()[-2:] == [first, last]


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"log_info": False, "log_colour": True}, "INVALID_ARGUMENT", "log setting 'log_colour': expected one of"),
        ({"log_info": False, "log_error": None}, "INVALID_ARGUMENT", "'log_error': expected bool_param, got none"),
        ({"log_info": False, "log_format": "xml"}, "INVALID_ARGUMENT", "expected one of default, ISO8601, json, got"),
        ({"log_info": False, "log_file": "/tmp/x"}, "UNIMPLEMENTED", "log setting 'log_file' can't be changed"),
    ],
)
async def test_refused_log_settings_change_nothing(
    client: Triton, changes: dict[str, Any], status: str, text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text) as raised:
        await client.update_log_settings(changes)
    assert raised.value.status() == f"StatusCode.{status}"
    assert log_values(await client.get_log_settings(as_json=True)) == LOG_DEFAULTS


# ---- Tracing ---------------------------------------------------------------------------------------------------------


async def test_trace_settings_of_a_model_stand_above_everybodys(client: Triton, trace_file: Path) -> None:
    base = TRACE_DEFAULTS | {"trace_file": [str(trace_file)]}
    assert trace_values(await client.get_trace_settings(as_json=True)) == base
    said = await client.update_trace_settings(settings={"trace_rate": "5", "log_frequency": ["2"]}, as_json=True)
    assert trace_values(said) == base | {"trace_rate": ["5"], "log_frequency": ["2"]}
    said = await client.update_trace_settings("echo", {"trace_rate": "3"}, as_json=True)
    assert trace_values(said) == base | {"trace_rate": ["3"], "log_frequency": ["2"]}
    said = await client.update_trace_settings("echo", {"trace_rate": None}, as_json=True)
    assert trace_values(said) == base | {"trace_rate": ["5"], "log_frequency": ["2"]}


async def test_trace_of_requests_is_a_file_of_timestamps(client: Triton, trace_file: Path) -> None:
    await infer(client, "before")
    await client.update_trace_settings("echo", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "2"})
    for number in range(4):
        await infer(client, str(number))
    settings = trace_values(await client.get_trace_settings("echo", as_json=True))
    assert (settings["trace_level"], settings["trace_count"]) == (["TIMESTAMPS"], ["0"])

    def traced() -> list[dict[str, Any]]:
        done = sorted(trace_file.parent.glob(f"{trace_file.name}.*"))
        return json.loads(done[-1].read_text()) if done else []

    eventually(lambda: [one.get("request_id") for one in traced()] == ["0", None, "1", None], "two traces")
    for times in traced()[1::2]:
        names, stamps = zip(*((one["name"], one["ns"]) for one in times["timestamps"]), strict=True)
        assert names == (
            "GRPC_WAITREAD_START",
            "GRPC_WAITREAD_END",
            "REQUEST_START",
            "QUEUE_START",
            "COMPUTE_START",
            "COMPUTE_INPUT_END",
            "COMPUTE_OUTPUT_START",
            "COMPUTE_END",
            "INFER_RESPONSE_COMPLETE",
            "GRPC_SEND_START",
            "REQUEST_END",
        )
        assert list(stamps) == sorted(stamps)


@pytest.mark.parametrize(
    ("model", "changes", "status", "text"),
    [
        ("", {"trace_rate": "x"}, "INVALID_ARGUMENT", "'trace_rate': expected a whole number from 1"),
        ("", {"trace_count": ["1", "2"]}, "INVALID_ARGUMENT", "'trace_count': expected 1 value, got 2"),
        ("", {"trace_level": "MAX"}, "INVALID_ARGUMENT", "'trace_level': expected some of OFF"),
        ("", {"trace_level": ["TENSORS"]}, "UNIMPLEMENTED", "'trace_level': TENSORS is not supported"),
        ("", {"trace_file": "x"}, "UNIMPLEMENTED", "'trace_file' can only be given when the server starts"),
        ("", {"trace_mode": "x"}, "UNIMPLEMENTED", "'trace_mode' can only be given when the server starts"),
        ("", {"colour": "red"}, "INVALID_ARGUMENT", "trace setting 'colour': expected one of"),
        ("nosuch", {"trace_rate": "1"}, "INVALID_ARGUMENT", "Request for unknown model: 'nosuch'"),
        ("nosuch", {}, "INVALID_ARGUMENT", "Request for unknown model: 'nosuch'"),
    ],
)
async def test_refused_trace_settings_change_nothing(
    client: Triton, trace_file: Path, model: str, changes: dict[str, Any], status: str, text: str
) -> None:
    given = changes and {"log_frequency": "9", **changes}
    with pytest.raises(InferenceServerException, match=text) as raised:
        await client.update_trace_settings(model, given)
    assert raised.value.status() == f"StatusCode.{status}"
    expected = TRACE_DEFAULTS | {"trace_file": [str(trace_file)]}
    assert trace_values(await client.get_trace_settings(as_json=True)) == expected
