"""The batcher in front of another server: what is merged, what is passed on, and what comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.server.config import Settings
from paceline.server.models.defaults import BatchDefaults
from tests.integration.front_memory import held_bytes, nothing_held
from tests.integration.scripted import marked, request, send
from tests.integration.serving import failure_of
from tests.integration.streams import Stream
from tests.integration.upstreams import (
    Upstream,
    batch_of_patient_and_hasty,
    behind,
    calls_behind_a_busy_upstream,
    tensors_of,
)
from tests.polling import eventually_async

pytestmark = pytest.mark.usefixtures("frontends")


async def test_waiting_requests_are_sent_as_one_and_each_gets_its_share(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, request(1), request(2, rows=3), request(3))
        stub.gate.set()
        answers = [tensors_of(await call) for call in calls]
        assert stub.marks == [[-1], [1, 2, 2, 2, 3]]
        assert list(stub.calls[1].inputs[0].shape) == [5, 2]
        for answer, mark, rows in zip(answers, (-1, 1, 2, 3), (1, 1, 3, 1), strict=True):
            np.testing.assert_array_equal(answer["x"], 2 * marked(mark, rows))
            np.testing.assert_array_equal(answer["y"], -marked(mark, rows))


async def test_outputs_nobody_wants_are_not_requested_from_the_upstream(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        one, two = request(1), request(2)
        one.outputs.add(name="y")
        assert list(tensors_of(await served.infer(one))) == ["y"]
        assert [output.name for output in stub.calls[0].outputs] == ["y"]
        two.outputs.add(name="x")
        calls = await calls_behind_a_busy_upstream(served, stub, one, two)
        stub.gate.set()
        answers = [tensors_of(await call) for call in calls[1:]]
        assert [list(answer) for answer in answers] == [["y"], ["x"]]
        np.testing.assert_array_equal(answers[1]["x"], 2 * marked(2))
        assert not stub.calls[-1].outputs  # none named: all of them


async def test_requests_of_different_shapes_are_sent_separately(tmp_path: Path) -> None:
    stub = Upstream()
    stub.inputs, stub.outputs = {"a": ("FP32", [-1, -1])}, {"x": ("FP32", [-1, -1]), "y": ("FP32", [-1, -1])}
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(
            served, stub, request(1, columns=3), request(2, columns=4), request(3, columns=3)
        )
        stub.gate.set()
        await asyncio.gather(*calls)
        assert sorted(map(tuple, stub.marks)) == [(-1,), (1, 3), (2,)]


async def test_max_batch_size_comes_from_the_upstreams_config_if_it_has_one(tmp_path: Path) -> None:
    stub = Upstream()
    stub.config = config_pb.ModelConfig(name="m", max_batch_size=2)
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, *(request(mark) for mark in range(5)))
        stub.gate.set()
        await asyncio.gather(*calls)
        assert stub.marks == [[-1], [0, 1], [2, 3], [4]]
        code, text = await failure_of(served.infer(request(1, rows=3)))
        assert (code, "expected a batch of 1 to 2 rows" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_flags_set_rows_and_delay_if_the_upstream_does_not(tmp_path: Path) -> None:
    stub = Upstream()
    flags = Settings(paths=(), batching=BatchDefaults(4, max_queue_delay_ns=60 * 10**9))
    async with behind(tmp_path, stub, settings=flags) as served:
        await asyncio.gather(*(served.infer(request(mark)) for mark in range(4)))  # full: it doesn't wait
        assert [len(marks) for marks in stub.marks] == [4]


async def test_request_with_more_rows_than_the_flag_allows_is_sent_in_parts(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub, settings=Settings(paths=(), batching=BatchDefaults(4))) as served:
        many = request(0, rows=10)
        rows = np.arange(20, dtype=np.float32).reshape(10, 2)
        many.raw_input_contents[0] = rows.tobytes()
        np.testing.assert_array_equal(tensors_of(await served.infer(many))["x"], 2 * rows)
        assert [len(marks) for marks in stub.marks] == [4, 4, 2]


@pytest.mark.parametrize("why", ["flag", "config", "fixed axis"])
async def test_model_that_does_not_batch_gets_separate_requests_several_at_a_time(tmp_path: Path, why: str) -> None:
    stub = Upstream()
    unbatched: tuple[str, ...] = ()
    if why == "flag":
        unbatched = ("m",)
    elif why == "config":
        stub.config = config_pb.ModelConfig(name="m", max_batch_size=0)
    else:
        stub.outputs = {"x": ("FP32", [1, 2]), "y": ("FP32", [1, 2])}
    async with behind(tmp_path, stub, unbatched=unbatched, calls=3) as served:
        stub.gate.clear()
        calls = send(served, *(request(mark) for mark in range(5)))
        await eventually_async(lambda: stub.under_way == 3 and served.waiting("m") == 2, "three under way, two waiting")
        stub.gate.set()
        await asyncio.gather(*calls)
        assert sorted(map(tuple, stub.marks)) == [(0,), (1,), (2,), (3,), (4,)]


async def test_flag_sets_how_many_batches_of_a_model_are_under_way_at_once(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub, batches=2) as served:
        stub.gate.clear()
        first = send(served, request(1))
        await eventually_async(lambda: stub.under_way == 1, "the first batch")
        second = send(served, request(2))
        await eventually_async(lambda: stub.under_way == 2, "the second batch")
        third = send(served, request(3), request(4))
        await eventually_async(lambda: served.waiting("m") == 2, "two waiting")
        stub.gate.set()
        await asyncio.gather(*first, *second, *third)
        assert [sorted(marks) for marks in stub.marks[2:]] == [[3, 4]]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=str)
async def test_deadline_of_a_batch_is_the_longest_and_each_request_keeps_its_own(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        patient, hasty = await batch_of_patient_and_hasty(served, stub, order)
        left_s = stub.left_s[-1]
        assert left_s is not None
        assert 50 < left_s < 61
        assert (await failure_of(hasty))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert stub.under_way == 1
        stub.gates[1].set()
        assert tensors_of(await patient)["x"][0, 0] == 2


async def test_deadline_of_a_lone_request_is_passed_on(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub, timeout_secs=70) as served:
        await served.infer(request(1), timeout_s=30)
        await served.infer(request(1), timeout_s=None)
        lone, none = stub.left_s
        assert lone is not None
        assert none is not None
        assert 10 < lone < 31
        assert 50 < none < 71


async def test_requests_with_different_headers_are_sent_separately_with_them(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub)
        users = ["Bearer a", "Bearer b", "Bearer a"]
        for number, user in enumerate(users):
            metadata = (("authorization", user), ("cookie", "mine"))
            calls.append(asyncio.ensure_future(served.stub.ModelInfer(request(number), metadata=metadata, timeout=20)))
            await eventually_async(lambda n=number: served.waiting("m") == n + 1, "waiting")
        stub.gate.set()
        await asyncio.gather(*calls)
        assert stub.marks == [[-1], [0, 2], [1]]
        assert [found.get("authorization") for found in stub.headers] == [None, "Bearer a", "Bearer b"]
        assert not any("cookie" in found for found in stub.headers)


async def test_trace_headers_are_passed_on_unless_they_differ_within_the_batch(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:

        def traced(mark: float, trace: str) -> Any:
            metadata = (("traceparent", trace), ("x-request-id", trace))
            return asyncio.ensure_future(served.stub.ModelInfer(request(mark), metadata=metadata, timeout=20))

        await traced(1, "t1")
        for traces in (["t2", "t3"], ["t4", "t4"]):
            calls = await calls_behind_a_busy_upstream(served, stub)
            for number, trace in enumerate(traces):
                calls.append(traced(number, trace))
                await eventually_async(lambda n=number: served.waiting("m") == n + 1, "waiting")
            stub.gate.set()
            await asyncio.gather(*calls)
        assert stub.marks == [[1], [-1], [0, 1], [-1], [0, 1]]
        for name in ("traceparent", "x-request-id"):
            assert [found.get(name) for found in stub.headers] == ["t1", None, None, None, "t4"]


async def test_headers_to_pass_on_are_configurable(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub, headers=("X-Tenant",), tracing_headers=()) as served:
        metadata = (("x-tenant", "t"), ("authorization", "secret"), ("traceparent", "1"))
        await served.stub.ModelInfer(request(1), metadata=metadata, timeout=20)
        found = stub.headers[0]
        assert found["x-tenant"] == "t"
        assert not {"authorization", "traceparent"} & found.keys()


async def test_stream_headers_are_passed_on_with_each_request_and_as_parameters_if_configured(tmp_path: Path) -> None:
    stub, settings = Upstream(), Settings(paths=(), grpc_header_forward_pattern="^(x-|authorization)")
    async with behind(tmp_path, stub, settings=settings) as served:
        stream = Stream(served, metadata=[("authorization", "Bearer a"), ("x-tenant", "t")])
        for mark in (1, 2):
            await stream.send(request(mark, **{"x-tenant": "another"}))
            await stream.message()
        assert [found.get("authorization") for found in stub.headers] == ["Bearer a"] * 2
        assert [{key: one.string_param for key, one in call.parameters.items()} for call in stub.calls] == [
            {"x-tenant": "t"}
        ] * 2


async def test_parameters_except_ours_are_passed_on_and_must_be_equal_in_a_batch(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        hot, cold = request(1, temperature=2.5), request(2, temperature=0.5)
        ours = request(3, temperature=2.5, priority=1, paceline_batch_info=True)
        hot.inputs[0].parameters["content_type"].string_param = "np"
        ours.inputs[0].parameters["content_type"].string_param = "np"
        calls = await calls_behind_a_busy_upstream(served, stub, hot, cold, ours)
        stub.gate.set()
        await asyncio.gather(*calls)
        assert stub.marks == [[-1], [1, 3], [2]]
        sent = stub.calls[1]
        assert {key: one.double_param for key, one in sent.parameters.items()} == {"temperature": 2.5}
        assert sent.inputs[0].parameters["content_type"].string_param == "np"
        assert stub.calls[2].parameters["temperature"].double_param == 0.5


async def test_priorities_and_timeouts_of_the_upstreams_config_apply_to_our_queue(tmp_path: Path) -> None:
    stub = Upstream()
    stub.config = text_format.Parse(
        "max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 2"
        " default_queue_policy { allow_timeout_override: true max_queue_size: 1 } }",
        config_pb.ModelConfig(name="m"),
    )
    async with behind(tmp_path, stub) as served:
        # Requests with different parameters are sent separately.
        late = [request(number, temperature=float(number)) for number in (1, 2)]
        first = request(3, temperature=3.0, priority=1)
        calls = await calls_behind_a_busy_upstream(served, stub, *late, first)
        status, text = await failure_of(served.infer(request(4, timeout=1_000)))
        assert (status, text[:34]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "model 'm': Request timeout expired")
        stub.gate.set()
        await asyncio.gather(*calls)
        assert stub.marks == [[-1], [3], [1], [2]]
        config = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
        assert config.dynamic_batching.priority_levels == 2


@pytest.mark.parametrize("merged", [False, True])
async def test_outputs_omitted_upstream_with_optional_inputs_are_omitted_here(tmp_path: Path, merged: bool) -> None:
    def given(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
        answer = pb.ModelInferResponse(model_name="m")
        for one, raw in zip(call.inputs, call.raw_input_contents, strict=True):
            answer.outputs.add(name=one.name.replace("a", "x").replace("b", "y"), datatype="FP32", shape=one.shape)
            answer.raw_output_contents.append(raw)
        return answer

    stub = Upstream()
    stub.inputs = {"a": ("FP32", [-1, 2]), "b": ("FP32", [-1, 2])}
    stub.answer = given
    stub.config = text_format.Parse(
        'max_batch_size: 8 input { name: "b" optional: true }', config_pb.ModelConfig(name="m")
    )
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(
            served, stub, *[request(mark) for mark in range(1, 4 if merged else 2)]
        )
        stub.gate.set()
        for call, mark in zip(calls, (-1, 1, 2, 3), strict=False):
            answer = tensors_of(await call)
            assert list(answer) == ["x"]
            np.testing.assert_array_equal(answer["x"], marked(mark, 1))
        assert stub.marks == [[-1], [1, 2, 3] if merged else [1]]
        # If all inputs are present, a missing output is an error.
        whole = request(5)
        whole.inputs.add(name="b", datatype="FP32", shape=[1, 2])
        whole.raw_input_contents.append(whole.raw_input_contents[0])
        stub.answer = lambda call: given(request(5))
        status, text = await failure_of(served.infer(whole))
        assert (status, text) == (
            grpc.StatusCode.INTERNAL,
            "model 'm': output 'y' is not in the upstream's answer, only ['x']",
        )


async def test_id_of_a_request_is_passed_on_only_if_it_is_sent_alone(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        one, two = request(1), request(2)
        one.id, two.id = "first", "second"
        assert (await served.infer(one)).id == "first"
        calls = await calls_behind_a_busy_upstream(served, stub, one, two)
        stub.gate.set()
        assert [(await call).id for call in calls] == ["", "first", "second"]
        assert [call.id for call in stub.calls] == ["first", "", ""]


async def test_requests_of_a_stream_are_sent_with_its_headers(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        stream = served.stub.ModelStreamInfer(metadata=(("authorization", "Bearer s"),), timeout=20)
        await stream.write(request(5))
        await stream.done_writing()
        (answer,) = [one async for one in stream]
        assert tensors_of(answer.infer_response)["x"][0, 0] == 10
        assert stub.headers[0]["authorization"] == "Bearer s"


async def test_tensors_read_by_fronts_are_sent_upstream_from_the_fronts_memory(tmp_path: Path, frontends: int) -> None:
    if frontends == 1:
        pytest.skip("there is no other memory")
    stub = Upstream()
    stub.inputs = {"a": ("FP32", [-1, -1])}
    stub.outputs = {"x": ("FP32", [-1, -1]), "y": ("FP32", [-1, -1])}
    async with behind(tmp_path, stub) as served:
        stub.gate.set()
        await served.infer(request(1, columns=8192))  # the first of its kind is parsed, and kept elsewhere
        stub.gate.clear()
        calls = await calls_behind_a_busy_upstream(served, stub, request(1, columns=8192))
        assert 8192 * 4 < await held_bytes(served, "in") < 8192 * 5
        stub.gate.set()
        *_, answer = [tensors_of(await call) for call in calls]
        np.testing.assert_array_equal(answer["x"], 2 * marked(1, columns=8192))
        await nothing_held(served)
