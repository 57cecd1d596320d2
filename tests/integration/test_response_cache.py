"""The response cache over gRPC: what is answered without an execution, and what every request keeps of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode
from tests.ensembles import ensemble_config, write_ensemble
from tests.harness import touch
from tests.integration.caching import CACHED, followed, held, until_hits, with_cache
from tests.integration.regions import register
from tests.integration.scripted import Script, mark_of, own, request, send, totals
from tests.integration.serving import Served, failure_of, serving, write_model
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.shared_objects import add_shared_input, request_shared_output, shared_object
from tests.wire import infer

pytestmark = pytest.mark.usefixtures("frontends")


async def hits_and_misses(served: Served) -> tuple[int, int]:
    (one,) = (await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"))).model_stats
    return one.inference_stats.cache_hit.count, one.inference_stats.cache_miss.count


async def test_equal_request_is_answered_without_an_execution(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        for number in range(3):
            answer = await served.infer(infer("m", {"a": np.full((1, 2), 7, np.float32)}, id=f"id {number}"))
            assert (answer.id, mark_of(answer)) == (f"id {number}", 7)
        assert mark_of(await served.infer(request(8, priority=0, timeout=10**6))) == 8
        assert mark_of(await served.infer(request(8, paceline_deadline_us=10**7))) == 8
        assert await hits_and_misses(served) == (3, 2)
        (one,) = (await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"))).model_stats
        times = one.inference_stats
        assert (times.success.count, times.queue.count, times.compute_infer.count) == (5, 5, 2)
        counted = await served.metrics()
    assert script.seen == [[7], [8]]
    assert totals(counted)["success"] == 5
    labels = '{model="m",version="1"}'
    assert counted[f"nv_inference_count{labels}"] == 2
    assert counted[f"nv_cache_num_hits_per_model{labels}"] == 3
    assert counted[f"nv_cache_num_misses_per_model{labels}"] == 2
    assert counted[f"nv_cache_miss_duration_per_model{labels}"] > 0
    assert counted[f"nv_cache_hit_duration_per_model{labels}"] > 0


def pair_model() -> MemoryModel:
    """`x` is the input `a`, `y` its negative."""
    spec = ModelSpec(
        (TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)), TensorSpec("y", "FP32", (-1, -1)))
    )
    return MemoryModel(spec, lambda inputs: [inputs[0], -inputs[0]])


async def test_each_request_gets_the_outputs_that_it_asks_for(tmp_path: Path) -> None:
    one = np.ones((1, 1), np.float32)
    model = pair_model()
    async with serving(tmp_path, {"m": model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        for outputs in (["x"], [], ["y"], ["y", "x"], ["x", "y"], ["x"]):
            answer = await served.infer(infer("m", {"a": one}, outputs=outputs))
            found = {
                output.name: np.frombuffer(raw, "<f4").tolist()
                for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
            }
            assert [*found] == (outputs or ["x", "y"])
            assert found == {name: [1 if name == "x" else -1] for name in found}
        assert await hits_and_misses(served) == (2, 4)


async def test_equal_bytes_of_another_shape_are_another_request(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        for rows, columns in ((1, 2), (2, 1), (1, 2), (2, 1)):
            answer = await served.infer(request(3, rows, columns))
            assert list(answer.outputs[0].shape) == [rows, columns]
        assert await hits_and_misses(served) == (2, 2)


async def test_optional_input_left_out_is_another_request(tmp_path: Path) -> None:
    tensors = "".join(
        f'input {{ name: "INPUT{i}" data_type: TYPE_FP32 dims: 1 optional: {str(i > 0).lower()} }} '
        f'output {{ name: "OUTPUT{i}" data_type: TYPE_FP32 dims: 1 }} '
        for i in range(3)
    )
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "identity" {CACHED} {tensors}')
    one = np.ones((1, 1), np.float32)
    async with serving(tmp_path, settings=with_cache(tmp_path)) as served:
        for given in ("0", "01", "02", "01", "012", "0"):
            answer = await served.infer(infer("m", {f"INPUT{i}": one for i in given}))
            assert "".join(output.name.removeprefix("OUTPUT") for output in answer.outputs) == given
        assert await hits_and_misses(served) == (2, 4)


async def test_custom_parameters_make_another_request(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        for parameters in ({}, {"style": "a"}, {"style": "b"}, {"style": 1, "other": 1}, {"other": 1, "style": 1}):
            assert mark_of(await served.infer(request(0, **parameters))) == 0
        assert await hits_and_misses(served) == (1, 4)


async def test_texts_cut_elsewhere_are_another_request(tmp_path: Path) -> None:
    spec = ModelSpec((TensorSpec("a", "BYTES", (-1, 2)),), (TensorSpec("x", "BYTES", (-1, 2)),))
    async with serving(tmp_path, {"m": MemoryModel(spec)}, config=CACHED, settings=with_cache(tmp_path)) as served:
        for texts in ([b"ab", b"c"], [b"a", b"bc"], [b"ab", b"c"]):
            sent = infer("m", {"a": np.array([texts], object)})
            answer = await served.infer(sent)
            assert answer.raw_output_contents[0] == sent.raw_input_contents[0]
        assert await hits_and_misses(served) == (1, 2)


async def test_answers_end_with_the_load(tmp_path: Path) -> None:
    models = {"m": Script().model}
    settings = with_cache(tmp_path, model_control_mode=ControlMode.EXPLICIT, load_models=("m",))
    async with serving(tmp_path, models, config=CACHED, settings=settings) as served:
        await served.infer(request(3))
        spec = models["m"].spec
        models["m"] = MemoryModel(spec, lambda inputs: [inputs[0] + 1])
        touch(tmp_path / "m")
        await served.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), timeout=20)
        assert mark_of(await served.infer(request(3))) == 4
        await served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"), timeout=20)
        await eventually_async(lambda: not served.server.repository.leaving, "the model gone")
        assert await served.metric("paceline_limit_used", 'limit="response_cache_bytes"') == 0


async def test_error_is_not_kept_as_an_answer(tmp_path: Path) -> None:
    script = Script()
    script.errors[3] = ValueError("not now")
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        for _ in range(2):
            code, text = await failure_of(served.infer(request(3)))
            assert (code, "not now" in text) == (grpc.StatusCode.INTERNAL, True)
        script.errors.clear()
        assert mark_of(await served.infer(request(3))) == 3
        assert await hits_and_misses(served) == (0, 3)
        assert mark_of(await served.infer(request(3))) == 3
    assert script.seen == [[3], [3], [3]]


async def test_answer_used_least_recently_makes_room(tmp_path: Path) -> None:
    script = Script()
    # Each takes its 4 KB, and less than 2 KB besides.
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path, 10_000)) as served:
        for mark in (1, 2, 1, 3, 2):
            await served.infer(request(mark, columns=1000))
        assert await served.metric("paceline_limit_used", 'limit="response_cache_bytes"') <= 10_000
        await served.infer(request(4, columns=5000))
        await served.infer(request(2, columns=1000))
        assert await hits_and_misses(served) == (2, 5)
    assert script.seen == [[1], [2], [3], [2], [4]]


async def test_each_request_gets_its_kept_answer_in_its_form(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        told = (await served.infer(request(5, paceline_batch_info=True))).parameters
        assert "paceline_batch_id" in told
        assert "paceline_cached" not in told
        told = (await served.infer(request(5, paceline_batch_info=True))).parameters
        assert [*told] == ["paceline_cached"]
        typed = await served.infer(request(5, binary_data_output=False))
        assert list(typed.outputs[0].contents.fp32_contents) == [5, 5]
        wanted = request(5)
        wanted.outputs.add(name="x").parameters["classification"].int64_param = 1
        assert b"5.000000:0" in (await served.infer(wanted)).raw_output_contents[0]
        contents = pb.ModelInferRequest(model_name="m")
        contents.inputs.add(name="a", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([5, 5])
        assert mark_of(await served.infer(contents)) == 5
        assert await hits_and_misses(served) == (4, 1)
    assert script.seen == [[5]]


@pytest.mark.parametrize("columns", [2, 50_000], ids=["small", "large"])
async def test_shared_memory_is_read_before_it_is_looked_up(tmp_path: Path, columns: int) -> None:
    script, row_bytes = Script(), 4 * columns
    settings = with_cache(tmp_path, allow_client_shm=True)
    with shared_object(2 * row_bytes) as memory:
        async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=settings) as served:
            await register(served, "r", memory.key, 2 * row_bytes)
            there = pb.ModelInferRequest(model_name="m")
            add_shared_input(there, "a", "FP32", [1, columns], "r", row_bytes, 0)
            request_shared_output(there, "x", "r", row_bytes, row_bytes)
            for mark in (1, 2, 1, 2):
                memory.put(np.full(columns, mark, np.float32))
                memory.put(np.zeros(columns, np.float32), row_bytes)
                await served.infer(there)
                assert memory.get(row_bytes, row_bytes) == np.full(columns, mark, np.float32).tobytes()
            assert mark_of(await served.infer(request(1, columns=columns))) == 1
            assert await hits_and_misses(served) == (3, 2)
    assert script.seen == [[1], [2]]


async def test_memory_that_is_too_small_fails_alone(tmp_path: Path) -> None:
    script = Script()
    settings = with_cache(tmp_path, allow_client_shm=True)
    with shared_object(4096) as memory:
        async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=settings) as served:
            await register(served, "r", memory.key, 4096)
            small = request(1)
            request_shared_output(small, "x", "r", 4, 0)
            for _ in range(2):
                code, _ = await failure_of(served.infer(small))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert mark_of(await served.infer(request(1))) == 1
    assert script.seen == [[1]]


async def test_large_request_is_kept_as_a_whole(tmp_path: Path) -> None:
    script = Script()
    config = f"{CACHED} {own(split_oversized='true')}"
    async with serving(tmp_path, {"m": script.model}, config=config, settings=with_cache(tmp_path)) as served:
        for rows in (6, 6, 3):
            answer = await served.infer(request(2, rows, 4096))
            assert (list(answer.outputs[0].shape), mark_of(answer)) == ([rows, 4096], 2)
        assert await hits_and_misses(served) == (1, 2)
    assert script.seen == [[2] * 4, [2] * 2, [2] * 3]


async def test_without_either_switch_every_request_is_executed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script()
    async with serving(tmp_path / "1", {"m": script.model}, config=CACHED) as served:
        await served.infer(request(1))
        await served.infer(request(1))
        assert await hits_and_misses(served) == (0, 0)
        assert not [name for name in await served.metrics() if name.startswith("nv_cache")]
    assert "model 'm': response_cache has no effect, as the server has no cache" in caplog.text
    (tmp_path / "2").mkdir()
    uncached = {"m": script.model}
    async with serving(tmp_path / "2", uncached, settings=with_cache(tmp_path / "2")) as served:
        await served.infer(request(1))
        await served.infer(request(1))
    assert "--cache-config has no effect: no model has response_cache { enable: true }" in caplog.text
    assert script.seen == [[1]] * 4


async def test_kept_answer_does_not_overtake_where_order_is_kept(tmp_path: Path) -> None:
    script = Script()
    config = CACHED.replace("dynamic_batching { }", "dynamic_batching { preserve_ordering: true }")
    order: list[float] = []
    async with serving(tmp_path, {"m": script.model}, config=config, settings=with_cache(tmp_path)) as served:
        await served.infer(request(1))
        call, gate = await held(served, script)
        calls = [call, *send(served, request(1))]
        await until_hits(served, 1)
        calls += await followed(served, request(0))
        for call, mark in zip(calls, (0, 1, 0), strict=True):
            call.add_done_callback(lambda _, mark=mark: order.append(mark))
        gate.open()
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == [0, 1, 0]
    assert order == [0, 1, 0]
    assert script.seen == [[1], [0]]


async def test_ensemble_is_kept_as_a_whole_until_a_step_is_replaced(tmp_path: Path) -> None:
    first, second = Script(), Script()
    models = {"first": first.model, "second": second.model}
    write_model(tmp_path, "first", CACHED)
    write_model(tmp_path, "second", "max_batch_size: 4")
    steps = [("first", {"a": "in"}, {"x": "mid"}), ("second", {"a": "mid"}, {"x": "out"})]
    write_ensemble(tmp_path, "m", ensemble_config(steps, rows=4, more="response_cache { enable: true }"))
    settings = with_cache(tmp_path, model_control_mode=ControlMode.EXPLICIT, load_models=("m",))
    async with serving(tmp_path, models, settings=settings) as served:
        asked = infer("m", {"in": np.full((1, 2), 3, np.float32)})
        second.errors[3] = ValueError("not now")
        code, _ = await failure_of(served.infer(asked))
        assert code is grpc.StatusCode.INTERNAL
        second.errors.clear()
        gate = second.hold(3)
        calls = send(served, asked)
        await asyncio.to_thread(gate.wait_entered, 1)
        calls += await followed(served, asked)
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        gate.open()
        assert mark_of(await calls[1]) == mark_of(await served.infer(asked)) == 3
        assert await hits_and_misses(served) == (2, 2)
        assert (first.seen, second.seen) == ([[3]], [[3], [3]])  # the first one has a cache of its own
        models["second"] = MemoryModel(second.model.spec, lambda inputs: [inputs[0] + 1])
        touch(tmp_path / "second")
        await served.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="second"), timeout=20)
        await eventually_async(lambda: not served.server.repository.leaving, "the models replaced")
        assert mark_of(await served.infer(asked)) == 4
