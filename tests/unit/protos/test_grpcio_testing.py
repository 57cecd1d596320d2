"""The generated stubs and service work with grpcio-testing, so that users can test what they build on them without a
port. That the descriptors are in a private pool must make no difference."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import grpc_testing  # type: ignore[import-untyped]
import pytest

from paceline.clients import InvalidArgument, messages
from paceline.clients.errors import rpc_failure
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.unit.clients.peer import Peer

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
WAIT_S = 30.0


@pytest.fixture
def channel() -> Iterator[Any]:
    made = grpc_testing.channel([SERVICE], grpc_testing.strict_real_time())
    yield made
    made.close()


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    """Run a call that blocks until the test answers it. Its thread, and a list that gets its result or error."""
    ends: list[Any] = []

    def run() -> None:
        try:
            ends.append(call())
        except grpc.RpcError as error:
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ends


def test_stub_sends_what_the_client_library_makes_and_reads_the_answer(channel: Any) -> None:
    request = messages.infer_request("m", {"x": [[1.0, 2.0]]}, datatypes={"x": "FP32"})
    stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    thread, ends = in_thread(lambda: stub.ModelInfer(request, timeout=WAIT_S, metadata=(("k", "v"),)))
    headers, taken, call = channel.take_unary_unary(SERVICE.methods_by_name["ModelInfer"])
    assert ("k", "v") in headers
    assert (taken.model_name, list(taken.inputs[0].shape)) == ("m", [1, 2])
    answer = pb.ModelInferResponse(model_name="m")
    answer.outputs.add(name="y", datatype="FP32", shape=[1, 2])
    answer.raw_output_contents.append(taken.raw_input_contents[0])
    call.send_initial_metadata(())
    call.terminate(answer, (), grpc.StatusCode.OK, "")
    thread.join(WAIT_S)
    assert messages.infer_result(ends[0])["y"].tolist() == [[1.0, 2.0]]


def test_received_status_becomes_an_exception_of_the_client_library(channel: Any) -> None:
    stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    thread, ends = in_thread(lambda: stub.ModelInfer(pb.ModelInferRequest(model_name="m"), timeout=WAIT_S))
    _, _, call = channel.take_unary_unary(SERVICE.methods_by_name["ModelInfer"])
    call.terminate(None, (), grpc.StatusCode.INVALID_ARGUMENT, "missing inputs ['x']")
    thread.join(WAIT_S)
    failure = rpc_failure(ends[0])
    assert isinstance(failure, InvalidArgument)
    assert "missing inputs ['x']" in str(failure)


def test_servicer_answers_an_invoked_call() -> None:
    peer = Peer()
    server = grpc_testing.server_from_dictionary({SERVICE: peer}, grpc_testing.strict_real_time())
    call = server.invoke_unary_unary(
        SERVICE.methods_by_name["ServerMetadata"], (("k", "v"),), pb.ServerMetadataRequest(), WAIT_S
    )
    answer, _, code, _ = call.termination()
    assert (answer.name, answer.version, code) == ("peer", "7", grpc.StatusCode.OK)
    assert peer.metadata == [{"k": "v"}]
