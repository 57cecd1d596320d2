"""Both clients against a scripted peer: what they take, what they refuse, and what reaches the server."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import (
    AsyncInferenceClient,
    AsyncInferenceSequence,
    DeadlineExceeded,
    InferenceClient,
    InferenceError,
    InferenceSequence,
    Tls,
)
from tests.unit.clients.conftest import Twin
from tests.unit.clients.peer import Peer

MakeTwin = Callable[..., Twin]
X = {"x": np.zeros((1, 2), np.float32)}


async def test_infer_all_options_reach_the_server(twin: Twin, peer: Peer) -> None:
    await twin.infer(
        "m",
        {"a": [1, 2], "b": ["text"]},
        version="2",
        outputs=("b",),
        request_id="r1",
        parameters={"priority": 1, "flag": True, "scale": 0.5, "tag": "t"},
        datatypes={"a": "INT32"},
        metadata=(("x-one", "1"), ("x-two-bin", b"\0")),
    )
    request = peer.requests[0]
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "r1")
    assert [output.name for output in request.outputs] == ["b"]
    assert [(each.name, each.datatype, list(each.shape)) for each in request.inputs] == [
        ("a", "INT32", [2]),
        ("b", "BYTES", [1]),
    ]
    assert request.parameters["priority"].int64_param == 1
    assert request.parameters["flag"].bool_param is True
    assert request.parameters["scale"].double_param == 0.5
    assert request.parameters["tag"].string_param == "t"
    assert peer.metadata[0]["x-one"] == "1"
    assert peer.metadata[0]["x-two-bin"] == b"\0"


async def test_infer_unusable_input_raises_before_sending(twin: Twin, peer: Peer) -> None:
    with pytest.raises(TypeError, match="input 'x'"):
        await twin.infer("m", {"x": np.array([1j])})
    assert peer.requests == []


async def test_timeout_left_out_or_given_or_none_reaches_the_server(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target, timeout_s=500.0)
    await twin.server_live()
    await twin.server_live(timeout_s=50.0)
    await twin.server_live(timeout_s=None)
    # No deadline is None or centuries; gRPC rounds up what it sends.
    default_s, own_s, none_s = (left_s or 1e9 for left_s in peer.time_left_s)
    assert 100 < default_s < 1000
    assert 10 < own_s < 100
    assert none_s > 1e6


@pytest.mark.parametrize("timeout_s", [math.inf, 7.5e9, 1e10, 1e300, 10**400])
async def test_timeout_beyond_grpcs_range_is_no_bound(make_twin: MakeTwin, peer: Peer, timeout_s: float) -> None:
    twin = make_twin(peer.target, timeout_s=timeout_s)
    await twin.server_live()
    await twin.server_live(timeout_s=timeout_s)
    await twin.wait_ready(timeout_s)
    assert all((left_s or 1e9) > 1e6 for left_s in peer.time_left_s)


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1, -math.inf])
async def test_timeout_that_has_passed_is_deadline_exceeded(twin: Twin, timeout_s: float) -> None:
    await twin.wait_ready(30.0)
    with pytest.raises(DeadlineExceeded):
        await twin.server_live(timeout_s=timeout_s)
    with pytest.raises(DeadlineExceeded):
        await twin.infer("m", X, timeout_s=timeout_s)
    with pytest.raises(DeadlineExceeded):
        await twin.wait_ready(timeout_s)


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("infer", {"inputs": X, "model": None}, "model: expected a str, got None"),
        ("infer", {"inputs": X, "model": "m", "version": 1}, "version: expected a str, got 1"),
        ("infer", {"inputs": X, "model": "m", "request_id": 7}, "request_id: expected a str, got 7"),
        ("infer", {"inputs": X, "model": "m", "outputs": [1]}, "outputs: expected a str, got 1"),
        ("infer", {"inputs": X, "model": "m", "outputs": None}, "outputs: expected a sequence of names, got None"),
        ("infer", {"inputs": X, "model": "m", "outputs": 5}, "outputs: expected a sequence of names, got 5"),
        ("infer", {"inputs": X, "model": "m", "outputs": b"y"}, "outputs: expected a sequence of names, got b'y'"),
        ("infer", {"inputs": None, "model": "m"}, "inputs: expected a mapping by name, got NoneType"),
        ("infer", {"inputs": {1: X["x"]}, "model": "m"}, "inputs: expected a str, got 1"),
        ("infer", {"inputs": {b"x": X["x"]}, "model": "m"}, "inputs: expected a str, got b'x'"),
        ("infer", {"inputs": X["x"], "model": "m"}, "inputs: expected a mapping by name, got ndarray"),
        ("infer", {"inputs": X, "model": "m", "parameters": ["a"]}, "parameters: expected a mapping by name, got list"),
        ("infer", {"inputs": X, "model": "m", "parameters": {1: "a"}}, "parameters: expected a str, got 1"),
        ("infer", {"inputs": X, "model": "m", "datatypes": ["x"]}, "datatypes: expected a mapping by name, got list"),
        ("infer", {"inputs": X, "model": "m", "datatypes": "FP32"}, "datatypes: expected a mapping by name, got str"),
        ("infer", {"inputs": X, "model": "m", "timeout_s": "1"}, "timeout_s: expected a number of seconds.* got '1'"),
        ("model_ready", {"model": None}, "model: expected a str, got None"),
        ("model_ready", {"model": "m", "version": 1}, "version: expected a str, got 1"),
        ("model_metadata", {"model": b"m"}, "model: expected a str, got b'm'"),
        ("model_metadata", {"model": "m", "version": None}, "version: expected a str, got None"),
        ("health", {"service": None}, "service: expected a str, got None"),
        ("server_live", {"timeout_s": "1"}, "timeout_s: expected a number of seconds, or None, got '1'"),
        ("server_live", {"metadata": None}, "metadata: expected pairs of key and value, got NoneType"),
        ("server_live", {"metadata": "ab"}, "metadata: expected pairs of key and value, got str"),
        (
            "server_live",
            {"metadata": ["ab"]},
            "metadata: expected pairs of key and value, got something else among them",
        ),
        ("wait_ready", {"timeout_s": [1]}, r"timeout_s: expected a number of seconds, or None, got \[1\]"),
    ],
)
async def test_argument_of_a_wrong_type_is_refused_by_name_before_sending(
    twin: Twin, peer: Peer, method: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=f"^{text}$"):
        await getattr(twin, method)(**arguments)
    assert peer.requests == []


@pytest.mark.parametrize(
    ("method", "arguments", "argument"),
    [
        ("infer", {"model": "\ud800", "inputs": X}, "model"),
        ("infer", {"model": "m", "inputs": {"\ud800": X["x"]}}, "inputs"),
        ("infer", {"model": "m", "inputs": X, "request_id": "\ud800"}, "request_id"),
        ("infer", {"model": "m", "inputs": X, "parameters": {"p": "\ud800"}}, "parameter 'p'"),
        ("model_ready", {"model": "m", "version": "\ud800"}, "version"),
        ("health", {"service": "\ud800"}, "service"),
    ],
)
async def test_text_that_utf8_cannot_encode_is_refused_by_name_before_sending(
    twin: Twin, peer: Peer, method: str, arguments: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}: expected text that UTF-8 can encode, got '\\ud800'$"):
        await getattr(twin, method)(**arguments)
    assert peer.requests == []


@pytest.mark.parametrize("timeout_s", [30, 30.0, np.float32(30), np.int64(30), Fraction(30)])
async def test_timeout_of_any_numeric_type_is_accepted(make_twin: MakeTwin, peer: Peer, timeout_s: float) -> None:
    twin = make_twin(peer.target, timeout_s=timeout_s)
    await twin.wait_ready(timeout_s)
    assert await twin.server_live()
    assert await twin.server_live(timeout_s=timeout_s)


TARGET = "target: expected a gRPC name such as '127.0.0.1:8001', got "
SCHEME = "leave out the scheme; tls=True selects TLS"


@pytest.mark.parametrize("client", [InferenceClient, AsyncInferenceClient])
@pytest.mark.parametrize(
    ("target", "settings", "error", "text"),
    [
        ("", {}, ValueError, "target: expected a gRPC name such as '127.0.0.1:8001', got ''"),
        (
            "http://h:1",
            {},
            ValueError,
            f"{TARGET}'http://h:1': leave out the scheme; tls=True selects TLS",
        ),
        ("127.0.0.1:99999", {}, ValueError, f"{TARGET}'127.0.0.1:99999', whose port is above 65535"),
        (None, {}, TypeError, "target: expected a str, got None"),
        (8001, {}, TypeError, "target: expected a str, got 8001"),
        ("h:1", {"timeout_s": "1"}, TypeError, "timeout_s: expected a number of seconds, or None, got '1'"),
        ("h:1", {"timeout_s": ...}, TypeError, "timeout_s: expected a number of seconds, or None, got Ellipsis"),
        ("h:1", {"tls": "ca.crt"}, TypeError, "tls: expected True, False or clients.Tls, got 'ca.crt'"),
        ("h:1", {"token": 5}, TypeError, "token: expected a str, got int"),
        ("h:1", {"token": b"secret"}, TypeError, "token: expected a str, got bytes"),
        ("h:1", {"credentials": 5}, TypeError, "credentials: expected grpc.ChannelCredentials, got int"),
        ("h:1", {"options": 5}, TypeError, "options: expected pairs of name and value, got 5"),
        ("h:1", {"options": [("a",)]}, TypeError, "options: expected pairs of name and value, got [('a',)]"),
        ("h:1", {"metadata": 5}, TypeError, "metadata: expected pairs of key and value, got int"),
    ],
)
def test_invalid_settings_are_refused_by_name(
    client: Any, target: Any, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as refusal:
        client(target, **settings)
    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ca": 5}, "TLS: ca: expected the path of a file, got 5"),
        ({"ca": b"ca.crt"}, "TLS: ca: expected the path of a file, got b'ca.crt'"),
        ({"certificate": 5, "key": 5}, "TLS: certificate: expected the path of a file, got 5"),
        ({"server_name": 5}, "TLS: server_name: expected a str, got 5"),
    ],
)
def test_tls_argument_of_a_wrong_type_is_refused_by_name(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as refusal:
        Tls(**arguments)
    assert str(refusal.value) == text


async def test_timeout_of_nan_is_refused_before_sending(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target)
    for method, arguments in ((twin.server_live, ()), (twin.infer, ("m", X)), (twin.wait_ready, ())):
        with pytest.raises(ValueError, match="timeout_s: expected a number of seconds, got nan"):
            await method(*arguments, timeout_s=math.nan)
    with pytest.raises(ValueError, match="timeout_s"):
        make_twin(peer.target, timeout_s=math.nan)
    assert peer.requests == []


async def test_metadata_of_client_and_call_both_reach_the_server(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target, metadata=(("authorization", "token"),))
    await twin.server_live(metadata=[("x-call", "1")])
    assert peer.metadata[0]["authorization"] == "token"
    assert peer.metadata[0]["x-call"] == "1"


async def test_given_options_override_the_clients_own(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target, options=[("grpc.max_receive_message_length", 10)])
    with pytest.raises(InferenceError) as caught:
        await twin.infer("m", X)
    assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def surface(client: type) -> dict[str, inspect.Signature]:
        members = inspect.getmembers(client, inspect.isfunction)
        found = {name: inspect.signature(member) for name, member in members if not name.startswith("_")}
        for name in ("generate", "stream_infer", "sequence"):  # each client's return kinds of their own
            found[name] = found[name].replace(return_annotation=None)
        return found

    assert surface(InferenceClient) == surface(AsyncInferenceClient)
    settings = dict(inspect.signature(AsyncInferenceClient).parameters)
    assert settings.pop("transport").default == "call"
    assert settings.pop("coalesce").default is None
    assert settings == dict(inspect.signature(InferenceClient).parameters)


@pytest.mark.parametrize("method", ["infer", "infer_all"])
def test_both_sequences_have_the_same_methods_and_arguments(method: str) -> None:
    blocking, asynchronous = (
        [(each.name, each.kind, each.default) for each in inspect.signature(getattr(kind, method)).parameters.values()]
        for kind in (InferenceSequence, AsyncInferenceSequence)
    )
    assert blocking == asynchronous
