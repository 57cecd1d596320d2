"""The smaller parts of NVIDIA's client: inputs, outputs and results, connection options, plugins, helpers for texts and
datatypes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.utils
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from paceline.protos.datatypes import by_name
from paceline.protos.tensors import decode_raw, encode_raw
from tests.conformance import zoo
from tests.conformance.triton import Triton, assert_same_bits, outputs_of, tensors, wanted
from tests.harness import ServerProcess

ONE_ROW = {name: np.arange(16, dtype=np.int32).reshape(1, 16) for name in ("INPUT0", "INPUT1")}


# ---- Inputs, outputs, results ----------------------------------------------------------------------------------------


async def test_input_given_another_shape_and_data_is_sent_with_these(triton: Triton) -> None:
    """As callers do that keep their objects and send them again and again."""
    kept = {name: tritonclient.grpc.InferInput(name, [1, 16], "INT32") for name in ONE_ROW}
    for rows in (1, 3, 2):
        arrays = {name: np.full((rows, 16), rows, np.int32) for name in ONE_ROW}
        for name, tensor in kept.items():
            tensor.set_shape([rows, 16])
            tensor.set_data_from_numpy(arrays[name])
            assert (tensor.name(), tensor.datatype(), list(tensor.shape())) == (name, "INT32", [rows, 16])
        result = await triton.infer("simple", list(kept.values()))
        assert_same_bits(outputs_of(result), zoo.answer("simple", arrays))


async def test_input_in_shared_memory_given_data_is_sent_with_the_data(triton: Triton) -> None:
    inputs = tensors(ONE_ROW)
    inputs[0].set_shared_memory("nosuch", 64, 8)
    inputs[0].set_data_from_numpy(ONE_ROW["INPUT0"])
    result = await triton.infer("simple", inputs)
    assert_same_bits(outputs_of(result), zoo.answer("simple", ONE_ROW))


async def test_result_as_numpy_output_and_response_say_the_same(triton: Triton) -> None:
    (output,) = wanted("OUTPUT1")
    assert output.name() == "OUTPUT1"
    result = await triton.infer("simple", tensors(ONE_ROW), outputs=[output], request_id="7")
    found = result.get_output("OUTPUT1")
    assert (found.name, found.datatype, list(found.shape)) == ("OUTPUT1", "INT32", [1, 16])
    assert_same_bits({"OUTPUT1": result.as_numpy("OUTPUT1")}, {"OUTPUT1": ONE_ROW["INPUT0"] * 0})
    assert (result.as_numpy("OUTPUT0"), result.get_output("OUTPUT0")) == (None, None)
    assert result.get_response(as_json=True) == {
        "model_name": "simple",
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "OUTPUT1", "datatype": "INT32", "shape": ["1", "16"]}],
        "raw_output_contents": [base64.b64encode(bytes(64)).decode()],
    }


# ---- The connection --------------------------------------------------------------------------------------------------

KEEPALIVE = tritonclient.grpc.KeepAliveOptions(
    keepalive_time_ms=10_000,
    keepalive_timeout_ms=5_000,
    keepalive_permit_without_calls=True,
    http2_max_pings_without_data=0,
)


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
@pytest.mark.parametrize(
    "options",
    [
        {"keepalive_options": KEEPALIVE},
        {"channel_args": []},
        {"channel_args": [("grpc.primary_user_agent", "somebody"), ("grpc.enable_http_proxy", 0)]},
        {"verbose": True},
    ],
    ids=["keepalive", "no options", "channel options", "verbose"],
)
async def test_client_with_any_options_of_the_connection_is_served(
    server: ServerProcess, module: Any, options: dict[str, Any]
) -> None:
    client = Triton(module.InferenceServerClient(server.target, **options))
    result = await client.infer("simple", tensors(ONE_ROW))
    await client.close()
    assert_same_bits(outputs_of(result), zoo.answer("simple", ONE_ROW))


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
async def test_tls_client_on_a_plain_port_gets_an_error(server: ServerProcess, triton: Triton, module: Any) -> None:
    client = Triton(module.InferenceServerClient(server.target, ssl=True))
    with pytest.raises(InferenceServerException) as raised:
        await client.is_server_live(client_timeout=20)
    await client.close()
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert await triton.is_server_live()


# ---- Plugins ---------------------------------------------------------------------------------------------------------


class Noting(tritonclient.grpc.InferenceServerClientPlugin):
    """Adds a header, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: Any) -> None:
        self.calls += 1
        request.headers = {**(request.headers or {}), "x-noted": str(self.calls)}


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
async def test_plugin_that_adds_headers_leaves_answers_as_they_are(server: ServerProcess, module: Any) -> None:
    own = module.InferenceServerClient(server.target)
    client, noting = Triton(own), Noting()
    own.register_plugin(noting)
    assert own.plugin() is noting
    assert await client.is_model_ready("simple")
    result = await client.infer("simple", tensors(ONE_ROW))
    assert noting.calls == 2
    own.unregister_plugin()
    own.register_plugin(BasicAuth("somebody", "secret"))
    again = await client.infer("simple", tensors(ONE_ROW), headers={"x-request-id": "7"})
    own.unregister_plugin()
    assert own.plugin() is None
    await client.close()
    for one in (result, again):
        assert_same_bits(outputs_of(one), zoo.answer("simple", ONE_ROW))


# ---- CUDA shared memory, without a GPU or with -----------------------------------------------------------------------


async def test_cuda_shared_memory_switched_off_is_unimplemented_and_has_no_regions(triton: Triton) -> None:
    handle = base64.b64encode(bytes(64))
    with pytest.raises(InferenceServerException, match="--allow-client-shm") as raised:
        await triton.register_cuda_shared_memory("data", handle, 0, 64)
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    assert await triton.get_cuda_shared_memory_status(as_json=True) == {}


# ---- Helpers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", zoo.DATATYPES)
def test_helpers_for_datatypes_agree_with_ours(datatype: str) -> None:
    theirs = np.dtype(tritonclient.utils.triton_to_np_dtype(datatype))
    assert tritonclient.utils.np_to_triton_dtype(theirs) == datatype
    if datatype not in ("BYTES", "BF16"):
        assert by_name(datatype).dtype == theirs


def test_helpers_for_texts_make_and_read_what_ours_does() -> None:
    sent = zoo.samples("BYTES")
    theirs = tritonclient.utils.serialize_byte_tensor(sent).item()
    ours = encode_raw(sent, by_name("BYTES"))
    assert theirs == ours
    # Theirs counts only the elements, without the four bytes before each.
    assert tritonclient.utils.serialized_byte_size(sent) + 4 * sent.size == len(ours)
    assert tritonclient.utils.deserialize_bytes_tensor(ours).tolist() == sent.ravel().tolist()
    assert decode_raw(theirs, by_name("BYTES"), sent.shape).tolist() == sent.tolist()
