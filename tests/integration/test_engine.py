"""Models in an application's own process: what it asks, what it gets, what it may rely on at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import paceline
from paceline import Engine
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import ModelSpec, TensorSpec
from tests import decoder_models
from tests.decoder_models import FIXED_COST, TINY
from tests.ensembles import ensemble_config, write_ensemble
from tests.generation_truth import Asked, NaiveLoop
from tests.integration.engines import BATCHED, BROKEN, PROMPT, backend_of, engine_of, failure, row
from tests.integration.serving import echo_model, write_model
from tests.memory_models import MemoryModel
from tests.polling import eventually_async


async def test_concurrent_requests_share_batches_and_get_their_own(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=(model := echo_model())) as engine:
        results = await asyncio.gather(*(engine.infer(row(value)) for value in range(16)))
        for value, result in enumerate(results):
            np.testing.assert_array_equal(result["x"], row(value)["a"])
        assert max(map(len, model.batches)) == 8
        assert engine.models == ["m"]
        assert engine.describe().batching.max_rows == 8


async def test_results_tell_of_their_batch_if_asked(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=echo_model()) as engine:
        asked = await engine.infer(row(1), parameters={"paceline_batch_info": True})
        assert asked.parameters["paceline_batch_rows"] == 1
        assert asked.parameters["paceline_batch_id"]
        assert not (await engine.infer(row(1))).parameters


async def test_arrays_of_the_right_datatype_arrive_uncopied(tmp_path: Path) -> None:
    seen: list[int] = []
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))

    def compute(inputs: Any) -> Any:
        seen.append(inputs[0].__array_interface__["data"][0])
        return inputs

    async with engine_of(tmp_path, m=MemoryModel(spec, compute)) as engine:
        given = row(3)
        await engine.infer(given)
        assert seen[-1] == given["a"].__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("datatype", "given", "expected"),
    [
        ("FP32", [[1, 2.5]], np.array([[1, 2.5]], np.float32)),
        ("FP32", np.array([[1.0, 2.5]]), np.array([[1, 2.5]], np.float32)),
        ("INT32", [[1, 2]], np.array([[1, 2]], np.int32)),
        ("BYTES", [["é", b"\0b\0"]], np.array([["é".encode(), b"\0b\0"]], object)),
    ],
    ids=["list", "doubles", "integers", "texts"],
)
async def test_values_are_converted_to_the_models_datatypes(
    tmp_path: Path, datatype: str, given: Any, expected: Any
) -> None:
    async with engine_of(tmp_path, m=echo_model(datatype)) as engine:
        got = (await engine.infer({"a": given}))["x"]
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("datatype", "given", "error", "text"),
    [
        ("FP32", [[1e300]], ValueError, "input 'a': FP32 can't hold 1e+300"),
        ("INT32", [[0.5]], ValueError, "input 'a': INT32 takes whole numbers"),
        ("FP32", [["1"]], TypeError, "input 'a': FP32 takes numbers"),
        ("BYTES", [[1]], paceline.InvalidArgument, "input 'a'"),
        ("FP32", [[1.0], [2.0, 3.0]], ValueError, "input 'a'"),
    ],
    ids=["too large", "fraction", "text", "number", "ragged"],
)
async def test_values_that_would_be_lost_are_refused_by_name(
    tmp_path: Path, datatype: str, given: Any, error: type[Exception], text: str
) -> None:
    async with engine_of(tmp_path, m=(model := echo_model(datatype))) as engine:
        with pytest.raises(error) as raised:
            await engine.infer({"a": given})
        assert text in str(raised.value)
        assert not model.batches


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"parameters": {BROKEN: 1}}, "a parameter's name"),
        ({"parameters": {"k": BROKEN}}, "parameter 'k'"),
        ({"request_id": BROKEN}, "the request's id"),
        ({"outputs": [BROKEN]}, "an output's name"),
        ({"inputs": {"a": [[1.0]], BROKEN: [[1.0]]}}, "an input's name"),
    ],
    ids=["name", "value", "id", "output", "input"],
)
async def test_text_without_bytes_is_refused_by_name(tmp_path: Path, asked: dict[str, Any], what: str) -> None:
    async with engine_of(tmp_path, m=echo_model()) as engine:
        error = await failure(engine.infer(**{"inputs": row(1), **asked}))
        assert type(error) is paceline.InvalidArgument
        assert error.message.startswith(f"{what}: expected text that UTF-8 can encode, got 'x\\ud800'")


async def test_errors_are_the_clients_and_name_the_fault(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=(model := echo_model()), n=echo_model()) as engine:
        error = await failure(engine.infer({"b": [[1.0]]}, model="m"))
        assert type(error) is paceline.InvalidArgument
        assert "unexpected input 'b'" in error.message
        error = await failure(engine.infer(row(1), model="o"))
        assert type(error) is paceline.NotFound
        error = await failure(engine.infer(row(1), model="m", parameters={"priority": 2**70}))
        assert type(error) is paceline.InvalidArgument
        model.faults.raise_next(ArithmeticError("it broke"))
        error = await failure(engine.infer(row(1), model="m"))
        assert type(error) is paceline.Internal
        assert "it broke" in error.message
        with pytest.raises(ValueError, match="expected model=, as there are several: m, n"):
            await engine.infer(row(1))
        with pytest.raises(ValueError, match="expected a timeout_s above 0, got 0"):
            await engine.infer(row(1), model="m", timeout_s=0)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"inputs": [[1.0]]}, "inputs: expected a mapping by name, got list"),
        ({"model": 1}, "model: expected a str, got 1"),
        ({"version": 1}, "version: expected a str, got 1"),
        ({"outputs": "x"}, "outputs: expected a sequence of names, got 'x'"),
        ({"parameters": ["priority"]}, "parameters: expected a mapping by name, got list"),
        ({"timeout_s": "1"}, "timeout_s: expected a number of seconds, or None, got '1'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_arguments_of_other_types_are_refused_by_name(tmp_path: Path, asked: dict[str, Any], text: str) -> None:
    async with engine_of(tmp_path, m=echo_model()) as engine:
        with pytest.raises(TypeError) as raised:
            await engine.infer(**{"inputs": row(1), **asked})
        assert str(raised.value) == text
        with pytest.raises(TypeError):
            await anext(engine.stream(**{"inputs": row(1), **asked}))


async def test_parameters_are_plain_values_or_refused_by_name(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=echo_model()) as engine:
        of_numpy: Any = {"priority": np.uint64(0), "other": np.float32(0.5)}
        await engine.infer(row(1), parameters=of_numpy)
        for value, got in (
            (None, "NoneType"),
            (["a"], "list"),
            (-(2**70), "-1180591620717411303424"),
        ):
            error = await failure(engine.infer(row(1), parameters={"p": value}))  # type: ignore[dict-item]
            assert error.status is grpc.StatusCode.INVALID_ARGUMENT
            assert "parameter 'p': expected " in str(error)
            assert got in str(error)


async def test_row_at_fault_fails_alone(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=(model := echo_model())) as engine:
        model.faults.raise_when(lambda inputs: bool((inputs[0] == 5).any()), ArithmeticError("five"))
        results = await asyncio.gather(*(engine.infer(row(value)) for value in range(8)), return_exceptions=True)
        assert [isinstance(one, paceline.Internal) for one in results] == [value == 5 for value in range(8)]


async def test_failed_step_is_named_as_to_clients(tmp_path: Path) -> None:
    write_ensemble(tmp_path, "e", ensemble_config([("m", {"a": "in"}, {"x": "out"})]))
    async with engine_of(tmp_path, m=(model := echo_model())) as engine:
        model.faults.raise_next(ExecutionError("broken"))
        error = await failure(engine.infer({"in": row(1)["a"]}, model="e"))
        assert str(error) == "INTERNAL: in ensemble 'e', step 0 ('m'): broken"


async def test_late_and_cancelled_requests_are_withdrawn(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=(model := echo_model())) as engine:
        model.gate.close()
        executing = asyncio.create_task(engine.infer(row(0)))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        batcher = engine._running.repository.get("m", "").batcher
        late = await failure(engine.infer(row(1), timeout_s=0.01))
        assert late.status is grpc.StatusCode.DEADLINE_EXCEEDED
        cancelled = asyncio.create_task(engine.infer(row(2)))
        await eventually_async(lambda: batcher.waiting_requests == 1, "waiting")
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await eventually_async(lambda: not batcher.waiting_requests, "withdrawn")
        model.gate.open()
        await executing
        assert model.batches == [(1,)]


async def test_accepted_requests_are_answered_at_the_end(tmp_path: Path) -> None:
    model = echo_model()
    async with engine_of(tmp_path, m=model) as engine:
        requests = [asyncio.create_task(engine.infer(row(value))) for value in range(20)]
        await asyncio.to_thread(model.gate.wait_entered, 1)
    assert [(await one)["x"][0, 0] for one in requests] == [*range(20)]
    assert not model.open_instances
    with pytest.raises(RuntimeError, match="expected a running engine"):
        await engine.infer(row(1))


async def test_requests_may_be_withdrawn_while_the_engine_ends(tmp_path: Path) -> None:
    decoder_models.write(TINY, tmp_path / "m" / "1")
    asked: dict[str, Any] = {"parameters": {"max_tokens": 500, "ignore_eos": True}}

    async def drain(answers: AsyncIterator[object]) -> None:
        async for _ in answers:
            pass

    async with Engine(tmp_path) as engine:
        opened = engine._running.repository.get("m", "").open_requests
        streamed = asyncio.create_task(drain(engine.stream({"input_ids": PROMPT}, **asked)))
        asked_once = asyncio.create_task(engine.infer({"input_ids": PROMPT}, **asked))
        await eventually_async(lambda: len(opened or ()) == 2, "begun")
        asyncio.get_running_loop().call_soon(streamed.cancel)
        asyncio.get_running_loop().call_soon(asked_once.cancel)
    await asyncio.wait([streamed, asked_once])
    assert (streamed.cancelled(), asked_once.cancelled()) == (True, True)


async def test_engine_that_runs_is_not_started_again(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=echo_model()) as engine:
        with pytest.raises(RuntimeError, match="started already"):
            await engine.__aenter__()
        assert (await engine.infer(row(1)))["x"].tolist() == [[1, 1]]


async def test_another_event_loop_is_refused(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=echo_model()) as engine:
        with pytest.raises(RuntimeError, match="expected the event loop on which the engine was started"):
            await asyncio.to_thread(asyncio.run, asyncio.wait_for(engine.infer(row(1)), 5))
        assert (await engine.infer(row(1)))["x"].tolist() == [[1, 1]]


async def test_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, "good", BATCHED)
    write_model(tmp_path, "bad", "max_batch_size: -1")
    model = echo_model()
    with pytest.raises(paceline.StartError, match=r"model 'bad': .*max_batch_size"):
        async with Engine(tmp_path, backend_of=backend_of(good=model, bad=model)):
            raise AssertionError("it started")
    assert not model.open_instances
    with pytest.raises(paceline.StartError, match="nosuch"):
        async with Engine(tmp_path / "nosuch"):
            raise AssertionError("it started")


async def test_generation_is_streamed_and_told_why_it_ends(tmp_path: Path) -> None:
    folder = decoder_models.write(TINY, tmp_path / "m" / "1")
    truth = NaiveLoop(folder).generate(PROMPT, Asked(max_tokens=5)).tokens
    async with Engine(tmp_path) as engine:
        answers = engine.stream({"input_ids": PROMPT}, parameters={"max_tokens": 5})
        steps = [(one["output_ids"].tolist(), dict(one.parameters)) async for one in answers]
        assert [token for tokens, _ in steps for token in tokens] == truth
        assert [told for _, told in steps] == [{}, {}, {}, {}, {"finish_reason": "length"}]
        whole = await engine.infer({"input_ids": PROMPT}, parameters={"max_tokens": 5})
        assert (whole["output_ids"].tolist(), dict(whole.parameters)) == (truth, {"finish_reason": "length"})


async def test_unforeseen_failure_of_a_callback_leaves_others_alone(tmp_path: Path) -> None:
    decoder_models.write(TINY, tmp_path / "m" / "1")
    async with Engine(tmp_path) as engine:
        served = engine.find("m", "")
        errors, ended = asyncio.Queue[object](), asyncio.Queue[int]()
        asked: Any = {"parameters": {"max_tokens": 5}}

        def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        engine.announce(served, {"input_ids": PROMPT}, asked, lambda one: errors.put_nowait(one.error), fail)
        engine.announce(served, {"input_ids": PROMPT}, asked, fail)
        engine.announce(served, {"input_ids": PROMPT}, asked, lambda one: ended.put_nowait(len(one.outputs)))
        assert str(await asyncio.wait_for(errors.get(), 20)) == "a bug"
        assert await asyncio.wait_for(ended.get(), 20) == 1
        counted = served.statistics.answers_of(0)
        assert (counted.failed.count, counted.succeeded.count) == (1, 0)


async def test_stream_that_is_left_withdraws_its_request(tmp_path: Path) -> None:
    decoder_models.write(TINY, tmp_path / "m" / "1")
    async with Engine(tmp_path) as engine:
        async with aclosing(engine.stream({"input_ids": PROMPT}, parameters={"max_tokens": 500})) as answers:
            await anext(answers)
        opened = engine._running.repository.get("m", "").open_requests
        assert opened is not None
        await eventually_async(lambda: not opened, "withdrawn")


async def test_stream_that_is_late_names_its_whole_timeout(tmp_path: Path) -> None:
    decoder_models.write(FIXED_COST, tmp_path / "m" / "1")
    asked: dict[str, Any] = {"parameters": {"max_tokens": 500, "ignore_eos": True}}
    async with Engine(tmp_path) as engine:
        answers = engine.stream({"input_ids": PROMPT}, timeout_s=0.25, **asked)
        with pytest.raises(paceline.DeadlineExceeded, match=r"no answer within 0\.25 s"):
            async for _ in answers:
                pass


async def test_lone_answers_are_streamed_too(tmp_path: Path) -> None:
    async with engine_of(tmp_path, m=echo_model()) as engine:
        answers = [one async for one in engine.stream(row(4))]
        np.testing.assert_array_equal([one["x"] for one in answers], [row(4)["a"]])


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"max_batchsize": 8}, TypeError, "unknown setting 'max_batchsize': expected one of .*max_batch_size"),
        ({"max_batch_size": "8"}, TypeError, "max_batch_size: expected a whole number, got '8'"),
        ({"max_batch_size": True}, TypeError, "max_batch_size: expected a whole number, got True"),
        ({"max_batch_size": -3}, ValueError, "max_batch_size: expected a whole number from 0 to 2147483647, got -3"),
        ({"max_queue_delay_us": 1.5}, TypeError, "max_queue_delay_us: expected a whole number, got 1.5"),
        ({"intra_op_threads": 2000}, ValueError, "intra_op_threads: .* from 0 to 1024, got 2000"),
        ({"execution_timeout_s": float("inf")}, ValueError, "execution_timeout_s: .* from 0 to 1000000, got inf"),
        ({"execution_timeout_s": float("nan")}, ValueError, "execution_timeout_s: .* got nan"),
        ({"model_name": 3}, TypeError, "model_name: expected a str, got 3"),
        ({"allow_python_models": "no"}, TypeError, "allow_python_models: expected True or False, got 'no'"),
        ({"offline": True}, TypeError, "offline: expected Offline or None, got True"),
        ({"backend_of": 3}, TypeError, "backend_of: expected a function, got 3"),
    ],
    ids=str,
)
def test_settings_that_cant_be_meant_are_refused(settings: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{text}"):
        Engine("model.onnx", **settings)


def test_truth_values_of_numpy_are_settings() -> None:
    Engine("model.onnx", allow_python_models=np.True_)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("paths", "kind"), [((), ValueError), (("",), ValueError), ((b"m",), TypeError), ((["m"],), TypeError)]
)
def test_paths_are_needed(paths: tuple[Any, ...], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"expected (at least one|a) path|expected paths as"):
        Engine(*paths)


async def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    write_model(tmp_path, "m", BATCHED)
    given: dict[str, Any] = {"max_batch_size": np.int64(4), "execution_timeout_s": np.float32(2)}
    async with Engine(tmp_path, backend_of=backend_of(m=echo_model()), **given) as engine:
        with pytest.raises(TypeError, match=r"unknown argument 'time_out': expected one of .*timeout_s"):
            await engine.infer(row(1), time_out=3)  # type: ignore[call-arg]


COUNTER = """
import numpy as np


class Model:
    inputs = {"count": ("INT32", [1])}
    outputs = {"number": ("INT32", [1])}

    def execute(self, requests):
        for request in requests:
            for number in range(int(request.inputs["count"][0])):
                request.send({"number": np.array([number], np.int32)})
            request.fail("no more")
"""


async def test_decoupled_model_is_streamed_and_its_error_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(COUNTER)
    (folder.parent / "config.pbtxt").write_text('backend: "python" model_transaction_policy { decoupled: true }')
    async with Engine(tmp_path, allow_python_models=True) as engine:
        answers = engine.stream({"count": [100]})
        assert [int((await anext(answers))["number"][0]) for _ in range(100)] == [*range(100)]
        with pytest.raises(paceline.Internal, match="no more"):
            await anext(answers)
        error = await failure(engine.infer({"count": [1]}))
        assert type(error) is paceline.Unimplemented
        assert error.message == "model 'm' may answer more than once: expected stream, got infer"
