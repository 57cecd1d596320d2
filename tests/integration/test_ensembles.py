"""Ensembles: what their steps get and give, errors, cancellation, deadlines, statistics."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.requests.pipelines import PipelineRun
from tests.ensembles import Step, ensemble_config, write_ensemble
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

BATCHED = "max_batch_size: 8 dynamic_batching { }"
CHAIN: Sequence[Step] = [("first", {"a": "in"}, {"x": "mid"}), ("second", {"a": "mid"}, {"x": "out"})]


BRANCHES: Sequence[Step] = [
    ("first", {"a": "in"}, {"x": "left"}),
    ("second", {"a": "in"}, {"x": "right"}),
    ("third", {"a": "left"}, {"x": "out"}),
]


@asynccontextmanager
async def served(
    root: Path, steps: Sequence[Step] = CHAIN, models: Mapping[str, MemoryModel] | None = None, **config: object
) -> AsyncIterator[Served]:
    """Ensemble `e` of `steps` over models that echo."""
    models = models or {name.partition(":")[0]: echo_model() for name, _, _ in steps}
    write_ensemble(root, "e", ensemble_config(steps, **config))  # type: ignore[arg-type]
    async with serving(root, models, config=BATCHED) as started:
        yield started


def executions(started: Served, name: str) -> int:
    return started.server.repository.get(name, "").statistics.execution_count


async def test_ensemble_passes_tensors_from_step_to_step(tmp_path: Path) -> None:
    rows = rows_of_floats(3)
    async with served(tmp_path) as started:
        response = await started.infer(infer("e", {"in": rows}, id="5"))
        assert (response.model_name, response.model_version, response.id) == ("e", "1", "5")
        assert [one.name for one in response.outputs] == ["out"]
        assert response.raw_output_contents[0] == rows.tobytes()


async def test_steps_that_need_nothing_of_each_other_execute_at_the_same_time(tmp_path: Path) -> None:
    models = {name: echo_model() for name in ("first", "second", "third")}
    async with served(tmp_path, BRANCHES, models, outputs={"out": "FP32 -1", "right": "FP32 -1"}) as started:
        models["first"].gate.close()
        models["second"].gate.close()
        call = asyncio.ensure_future(started.infer(infer("e", {"in": rows_of_floats(1)})))
        await eventually_async(lambda: [models[one].gate.entered for one in ("first", "second")] == [1, 1], "both")
        models["first"].gate.open()
        models["second"].gate.open()
        assert [one.name for one in (await call).outputs] == ["out", "right"]


async def test_branch_that_nobody_asked_for_is_not_executed(tmp_path: Path) -> None:
    async with served(tmp_path, BRANCHES, outputs={"out": "FP32 -1", "right": "FP32 -1"}) as started:
        response = await started.infer(infer("e", {"in": rows_of_floats(1)}, outputs=["right"]))
        assert [one.name for one in response.outputs] == ["right"]
        assert [executions(started, name) for name in ("first", "second", "third")] == [0, 1, 0]


async def test_steps_share_batches_with_requests_to_their_models(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        models["second"].gate.close()
        calls = [asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))]
        await eventually_async(lambda: models["second"].gate.entered == 1, "an execution that is held")
        calls += [asyncio.ensure_future(started.infer(infer("e", {"in": rows_of_floats(1)}))) for _ in range(3)]
        calls += [asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))]
        await eventually_async(lambda: started.waiting("second") == 4, "all wait for the second model")
        models["second"].gate.open()
        await asyncio.gather(*calls)
        assert models["second"].batches == [(1,), (1, 1, 1, 1)]


@pytest.mark.usefixtures("frontends")
async def test_error_names_the_step_and_keeps_its_status(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        models["second"].faults.raise_next(ExecutionError("the model is broken"))
        status, text = await failure_of(started.infer(infer("e", {"in": rows_of_floats(1)})))
        assert (status, text) == (
            grpc.StatusCode.INTERNAL,
            "in ensemble 'e', step 1 ('second'): the model is broken",
        )
        ensemble, second = (started.server.repository.get(name, "").statistics for name in ("e", "second"))
        assert (ensemble.failed, ensemble.execution_count, second.failed) == (1, 0, 1)


@pytest.mark.usefixtures("frontends")
async def test_request_that_fits_the_ensemble_and_not_its_model_gets_the_models_error(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model("FP32", 2)}
    async with served(tmp_path, CHAIN, models) as started:
        status, text = await failure_of(started.infer(infer("e", {"in": np.zeros((1, 3), np.float32)})))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert text == (
            "in ensemble 'e', step 1 ('second'): unexpected shape for input 'a' for model 'second': expected [-1, 2], "
            "got [1, 3]"
        )


async def test_bad_request_to_an_ensemble_is_refused_before_any_step(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        status, text = await failure_of(started.infer(infer("e", {"in": np.zeros((9, 3), np.float32)})))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert text == "model 'e': input 'in': expected a batch of 1 to 8 rows, got 9 in shape [9, 3]"
        assert executions(started, "first") == 0


async def test_failed_step_takes_the_others_out_of_their_queues(tmp_path: Path) -> None:
    models = {name: echo_model() for name in ("first", "second", "third")}
    async with served(tmp_path, BRANCHES, models, outputs={"out": "FP32 -1", "right": "FP32 -1"}) as started:
        models["second"].gate.close()
        held = asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))
        await eventually_async(lambda: models["second"].gate.entered == 1, "an execution that is held")
        models["first"].gate.close()
        models["first"].faults.raise_next(ExecutionError("broken"))
        call = asyncio.ensure_future(failure_of(started.infer(infer("e", {"in": rows_of_floats(1)}))))
        await eventually_async(lambda: started.waiting("second") == 1, "a step that waits")
        models["first"].gate.open()
        assert (await call)[1] == "in ensemble 'e', step 0 ('first'): broken"
        assert started.waiting("second") == 0
        models["second"].gate.open()
        await held


async def test_cancelled_request_takes_its_steps_out_of_their_queues(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        models["second"].gate.close()
        held = asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))
        await eventually_async(lambda: models["second"].gate.entered == 1, "an execution that is held")
        call = started.stub.ModelInfer(infer("e", {"in": rows_of_floats(1)}))
        await eventually_async(lambda: started.waiting("second") == 1, "a step that waits")
        call.cancel()
        await eventually_async(lambda: started.waiting("second") == 0, "the step to be withdrawn")
        await eventually_async(lambda: started.failed("e") == 1, "one failure")
        models["second"].gate.open()
        await held
        assert models["second"].batches == [(1,)]


async def test_what_is_left_of_the_deadline_reaches_every_step(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        models["second"].gate.close()
        held = asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))
        await eventually_async(lambda: models["second"].gate.entered == 1, "an execution that is held")
        for deadline_us in (200_000, 2_000_000, 10_000_000):
            request = infer("e", {"in": rows_of_floats(1)}, parameters={"paceline_deadline_us": deadline_us})
            status, text = await failure_of(started.infer(request))
            assert status is grpc.StatusCode.DEADLINE_EXCEEDED
            if "step 1" in text:
                break  # a busy machine may take longer to get there
        assert text.startswith("in ensemble 'e', step 1 ('second'): Request timeout expired after ")
        models["second"].gate.open()
        await held


async def test_full_queue_of_a_step_refuses_the_request(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    write_model(tmp_path, "second", "max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    async with served(tmp_path, CHAIN, models, rows=1) as started:
        models["second"].gate.close()
        calls = [asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))]
        await eventually_async(lambda: models["second"].gate.entered == 1, "an execution that is held")
        calls += [asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))]
        await eventually_async(lambda: started.waiting("second") == 1, "a full queue")
        status, text = await failure_of(started.infer(infer("e", {"in": rows_of_floats(1)})))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text == "in ensemble 'e', step 1 ('second'): Exceeds maximum queue size of 1 requests"
        models["second"].gate.open()
        await asyncio.gather(*calls)


async def test_only_so_many_requests_execute_at_a_time(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models, scheduling="max_inflight_requests: 2") as started:
        models["second"].gate.close()
        calls = [asyncio.ensure_future(started.infer(infer("e", {"in": rows_of_floats(1)}))) for _ in range(5)]
        await eventually_async(lambda: started.waiting("e") == 3, "three that wait in front of the ensemble")
        await eventually_async(lambda: sum(map(len, models["first"].batches)) >= 2, "two that execute")
        assert sum(map(len, models["first"].batches)) == 2
        models["second"].gate.open()
        await asyncio.gather(*calls)


async def test_optional_input_left_out_is_left_out_of_the_step(tmp_path: Path) -> None:
    both = ModelSpec(
        (TensorSpec("a", "FP32", (-1, -1)), TensorSpec("b", "FP32", (-1, -1))), (TensorSpec("x", "FP32", (-1, -1)),)
    )
    models = {"m": MemoryModel(both, lambda inputs: inputs[:1])}
    optional = 'input { name: "%s" data_type: TYPE_FP32 dims: [ -1 ] optional: true }'
    needed = 'input { name: "a" data_type: TYPE_FP32 dims: -1 } output { name: "x" data_type: TYPE_FP32 dims: -1 }'
    write_model(tmp_path, "m", f"max_batch_size: 8 {needed} {optional % 'b'}")
    config = ensemble_config([("m", {"a": "in", "b": "maybe"}, {"x": "out"})], more=optional % "maybe")
    write_ensemble(tmp_path, "e", config)
    async with serving(tmp_path, models) as started:
        rows = rows_of_floats(1)
        assert (await started.infer(infer("e", {"in": rows}))).raw_output_contents[0] == rows.tobytes()


@pytest.mark.parametrize("asked", [["out"], []])
async def test_ensemble_of_ensembles_gives_what_its_models_give(tmp_path: Path, asked: list[str]) -> None:
    outer = [("e", {"in": "in"}, {"out": "between"}), ("first", {"a": "between"}, {"x": "out"})]
    write_ensemble(tmp_path, "outer", ensemble_config(outer))
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        rows = rows_of_floats(2)
        response = await started.infer(infer("outer", {"in": rows}, outputs=asked))
        assert response.raw_output_contents[0] == rows.tobytes()
        models["second"].faults.raise_next(ExecutionError("broken"))
        _, text = await failure_of(started.infer(infer("outer", {"in": rows})))
        assert text == "in ensemble 'outer', step 0 ('e'): in ensemble 'e', step 1 ('second'): broken"


@pytest.mark.parametrize(("own", "expected"), [("", b"9.000000:1:theirs"), ("own", b"9.000000:1:own")])
async def test_classes_have_the_ensembles_labels_or_else_its_models(tmp_path: Path, own: str, expected: bytes) -> None:
    tensors = 'input { name: "a" data_type: TYPE_FP32 dims: -1 } output { name: "x" data_type: TYPE_FP32 dims: -1 '
    folder = write_model(tmp_path, "second", f'{BATCHED} {tensors} label_filename: "labels" }}')
    (folder / "labels").write_text("none\ntheirs\n")
    config = ensemble_config(CHAIN)
    if own:
        config = config.replace('name: "out"', 'name: "out" label_filename: "labels"')
        (write_ensemble(tmp_path, "e", config) / "labels").write_text(f"none\n{own}\n")
    write_ensemble(tmp_path, "e", config)
    async with serving(tmp_path, {"first": echo_model(), "second": echo_model()}, config=BATCHED) as started:
        request = infer("e", {"in": np.array([[1, 9]], np.float32)}, outputs=["out"])
        request.outputs[0].parameters["classification"].int64_param = 1
        assert (await started.infer(request)).raw_output_contents[0][4:] == expected


async def test_nothing_of_a_cancelled_request_stays_in_memory(tmp_path: Path, frontends: int) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        models["second"].gate.close()
        held = asyncio.ensure_future(started.infer(infer("second", {"a": rows_of_floats(1)})))
        await eventually_async(lambda: models["second"].gate.entered == 1, "an execution that is held")
        gc.collect()
        gc.disable()  # no cycle may be left for it to find
        try:
            call = started.stub.ModelInfer(infer("e", {"in": rows_of_floats(1)}))
            await eventually_async(lambda: started.waiting("second") == 1, "a step that waits")
            runs = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, PipelineRun)]
            call.cancel()
            await eventually_async(lambda: started.waiting("second") == 0, "the step to be withdrawn")
            await eventually_async(lambda: runs and not any(one() for one in runs), "nothing to be left")
        finally:
            gc.enable()
        models["second"].gate.open()
        await held


async def test_ensembles_statistics_have_the_times_of_all_steps(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        await started.infer(infer("e", {"in": rows_of_floats(3)}))
        response = await started.stub.ModelStatistics(pb.ModelStatisticsRequest(name=""))
        counted = {one.name: one for one in response.model_stats}
        ensemble, steps = counted["e"], [counted["first"], counted["second"]]
        assert [one.inference_count for one in counted.values()] == [3, 3, 3]
        assert [one.execution_count for one in counted.values()] == [1, 1, 1]
        assert [one.inference_stats.success.count for one in counted.values()] == [1, 1, 1]
        assert [one.batch_size for one in ensemble.batch_stats] == [3]
        times = [one.inference_stats.compute_infer.ns for one in steps]
        assert ensemble.inference_stats.compute_infer.ns == sum(times) > 0


async def test_configuration_and_metadata_describe_the_ensemble(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        config = (await started.stub.ModelConfig(pb.ModelConfigRequest(name="e"))).config
        assert (config.platform, config.backend, len(config.instance_group)) == ("ensemble", "", 0)
        assert [step.model_name for step in config.ensemble_scheduling.step] == ["first", "second"]
        assert config.HasField("model_transaction_policy")
        metadata = await started.stub.ModelMetadata(pb.ModelMetadataRequest(name="e"))
        assert (metadata.platform, list(metadata.versions)) == ("ensemble", ["1"])
        assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [("in", "FP32", [-1, -1])]


async def test_stopping_server_finishes_requests_between_their_steps(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with served(tmp_path, CHAIN, models) as started:
        models["first"].gate.close()
        call = asyncio.ensure_future(started.infer(infer("e", {"in": rows_of_floats(1)})))
        await eventually_async(lambda: models["first"].gate.entered == 1, "an execution that is held")
        stopping = asyncio.ensure_future(started.server.stop(20))
        await eventually_async(lambda: not started.server.repository.get("e", "").batcher._accepts, "a stop")
        models["first"].gate.open()
        assert len((await call).outputs) == 1
        assert await stopping


async def test_tensor_of_one_request_reaches_the_next_step_without_a_copy(tmp_path: Path) -> None:
    made: list[Array] = []
    got: list[Array] = []

    def doubled(inputs: Tensors) -> Tensors:
        made.append(2 * inputs[0])
        return made

    def as_they_are(inputs: Tensors) -> Tensors:
        got.append(inputs[0])
        return inputs

    spec = echo_model().spec
    models = {"first": MemoryModel(spec, doubled), "second": MemoryModel(spec, as_they_are)}
    async with served(tmp_path, CHAIN, models) as started:
        rows = np.arange(150_000, dtype=np.float32).reshape(1, -1)
        response = await started.infer(infer("e", {"in": rows}))
        assert response.raw_output_contents[0] == (2 * rows).tobytes()
        assert np.shares_memory(made[0], got[0])
