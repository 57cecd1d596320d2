"""Python models written for Triton's Python backend, unchanged: loading, requests, responses and errors."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests import triton_puppet
from tests.integration.caching import followed
from tests.integration.scripted import send
from tests.integration.serving import failure_of, serving
from tests.integration.streams import Stream
from tests.integration.triton_serving import BATCHED, INTERNAL, TOGETHER, asking, number, served, text
from tests.triton_puppet import TENSORS


async def load_error(root: Path) -> str:
    with pytest.raises(StartError) as caught:
        async with serving(root, settings=Settings(paths=(root,), allow_python_models=True)):
            pass
    return str(caught.value)


@pytest.mark.usefixtures("frontends")
async def test_unary_and_streamed_requests_are_answered(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        assert number(await started.infer(asking("response = answer(5)", "an id"))) == 5
        stream = Stream(started)
        await stream.send(*(asking(f"response = answer({value})", str(value)) for value in range(20)))
        answers = [(await stream.message()).infer_response for _ in range(20)]
        assert [(one.id, number(one)) for one in answers] == [(str(value), value) for value in range(20)]
        await stream.end()


async def test_requests_of_a_batch_come_as_a_list(tmp_path: Path) -> None:
    async with served(tmp_path, TOGETHER) as started:
        answers = await asyncio.gather(*(started.infer(asking("response = answer(model.batch)")) for _ in range(4)))
        assert [number(one) for one in answers] == [4] * 4


async def test_request_tells_what_its_caller_sent(tmp_path: Path) -> None:
    code = """response = text(json.dumps([
        request.request_id(), request.requested_output_names(), request.timeout(), request.correlation_id(),
        request.flags(), request.is_cancelled(), request.trace().get_context(),
        pb_utils.get_input_tensor_by_name(request, "x").as_numpy().tolist(),
        pb_utils.get_input_tensor_by_name(request, "no"), [one.name() for one in request.inputs()],
        {**json.loads(request.parameters()), "run": ""},
    ]))"""
    async with served(tmp_path) as started:
        request = asking(code, "seven")
        request.parameters["timeout"].int64_param = 5_000_000
        request.parameters["sequence_id"].int64_param = 42
        request.parameters["sequence_start"].bool_param = True
        request.parameters["own"].int64_param = 3
        sent = {"run": "", "own": 3}
        expected = ["seven", ["z"], 5_000_000, 42, 1, False, None, [[1]], None, ["x"], sent]
        assert await text(started, request) == expected


async def test_initialize_gets_the_arguments_of_triton(tmp_path: Path) -> None:
    code = """response = text(json.dumps({
        **model.args, "model_config": json.loads(model.args["model_config"]), "dir": pb_utils.get_model_dir(),
    }))"""
    async with served(tmp_path, BATCHED + 'parameters { key: "a" value { string_value: "b" } }') as started:
        told = await text(started, asking(code))
    config = told.pop("model_config")
    assert told == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
        "dir": str(tmp_path / "m" / "1"),
    }
    assert config["max_batch_size"] == 8
    assert (config["input"][0]["data_type"], config["input"][0]["dims"]) == ("TYPE_INT64", [1])
    assert config["parameters"] == {"a": {"string_value": "b"}}
    assert "sequence_batching" not in config


COMPLETES = (
    triton_puppet.SOURCE
    + """
    @staticmethod
    def auto_complete_config(config):
        known = config.as_dict()["max_batch_size"]
        config.add_input({"name": "x", "data_type": "TYPE_INT64", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_INT64", "dims": [1]})
        config.add_output({"name": "z", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        return config
"""
)


async def test_model_completes_its_configuration(tmp_path: Path) -> None:
    async with served(tmp_path, "", COMPLETES) as started:
        assert number(await started.infer(asking())) == 1
        config = (await started.stub.ModelConfig(pb.ModelConfigRequest(name="m"), timeout=20)).config
        assert (config.max_batch_size, config.HasField("dynamic_batching"), config.backend) == (16, True, "python")
        assert [(one.name, list(one.dims)) for one in (*config.input, *config.output)] == [
            ("x", [1]), ("y", [1]), ("z", [1]),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("max_batch_size: 32", "configuration specified max_batch_size 32, but auto-complete-config function"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }',
            "input 'x': configuration expects data_type TYPE_FP32, model provides TYPE_INT64",
        ),
        ("sequence_batching { }", "Configuration specified scheduling_choice as 'sequence_batching'"),
        ("model_transaction_policy { decoupled: true }", "trying to change decoupled property"),
    ],
)
async def test_contradicting_completion_fails_the_load(tmp_path: Path, config: str, words: str) -> None:
    triton_puppet.write(tmp_path, config, COMPLETES)
    assert words in await load_error(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class TritonPythonModel: pass", "expected a method execute(self, requests) of class TritonPythonModel"),
        (
            triton_puppet.SOURCE + "\n    @staticmethod\n    def auto_complete_config(config): pass",
            "auto_complete_config: expected a ModelConfig, got NoneType",
        ),
        (
            triton_puppet.SOURCE + "\n    def initialize(self, args): raise ValueError('no weights')",
            "ValueError: no weights",
        ),
        (triton_puppet.SOURCE + "\n    def initialize(self, args): os._exit(3)", "ended with exit status 3"),
    ],
)
async def test_failing_load_says_why(tmp_path: Path, source: str, words: str) -> None:
    triton_puppet.write(tmp_path, BATCHED, source)
    assert words in await load_error(tmp_path)


async def test_model_without_tensors_fails_to_load(tmp_path: Path) -> None:
    triton_puppet.write(tmp_path, "max_batch_size: 8")
    assert "expected output, and input if it has some, in its configuration or from its" in await load_error(tmp_path)


OUTPUTS = TENSORS[TENSORS.index("output") :]


async def test_model_without_inputs_is_served(tmp_path: Path) -> None:
    async with served(tmp_path, OUTPUTS) as started:
        request = asking("response = answer(len(request.inputs()))")
        assert "unexpected input 'x', expected []" in (await failure_of(started.infer(request)))[1]
        del request.inputs[:], request.raw_input_contents[:]
        answers = await asyncio.gather(*(started.infer(request) for _ in range(4)))
        assert [number(one) for one in answers] == [0] * 4


async def test_batch_axis_without_inputs_fails_to_load(tmp_path: Path) -> None:
    triton_puppet.write(tmp_path, f"max_batch_size: 8 {OUTPUTS}")
    assert "max_batch_size: expected 0, as requests bring no inputs, got 8" in await load_error(tmp_path)


BAD_RESPONSES = [
    ("response = error('too bad')", "too bad"),
    (
        "response = 7",
        "model 'm': Expected an 'InferenceResponse' object in the execute function return list, found type 'int'",
    ),
    ("response = pb_utils.InferenceResponse([])", "model 'm': expected output 'y' in the response, got only []"),
    (
        "response = pb_utils.InferenceResponse([pb_utils.Tensor('y', np.zeros((), np.int64))])",
        "output 'y': expected shape [-1, 1], got []",
    ),
    ("pass", "the model dropped the request without ending it"),
    (
        "request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)",
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    ),
]


async def test_bad_response_fails_its_request_alone(tmp_path: Path) -> None:
    async with served(tmp_path, TOGETHER) as started:
        for code, words in BAD_RESPONSES:
            good = [started.infer(asking(f"response = answer({value})")) for value in range(3)]
            (status, said), *answers = await asyncio.gather(failure_of(started.infer(asking(code))), *good)
            assert status is INTERNAL
            assert words in said
            assert [number(one) for one in answers] == [0, 1, 2]


BAD_EXECUTIONS = [
    ("raise ValueError('never')", "ValueError: never"),
    ("model.returns = lambda responses: responses[1:]", "expected 1 responses from execute, got 0"),
    ("model.returns = lambda responses: responses * 2", "expected 1 responses from execute, got 2"),
    ("model.returns = lambda responses: 7", "Expected a list in the execute return, found type 'int'"),
    ("model.returns = lambda responses: None", "the model dropped the request without ending it"),
    ("os._exit(9)", "the model's process ended with exit status 9"),
    ("if not os.fork(): response = answer(8)\nelse: raise OSError('a fork')", "OSError: a fork"),
    ("print('hello'); pb_utils.Tensor('y', [1])", "expected a numpy array, got list"),
    (
        "pb_utils.InferenceRequest(model_name='m', requested_output_names=['y'])",
        "TypeError: InferenceRequest: expected inputs, requested_output_names, model_name, got no inputs",
    ),
    ("pb_utils.MetricFamily('a', 'b', pb_utils.MetricFamily.COUNTER)", "MetricFamily is not supported"),
]


async def test_bad_execution_fails_its_own_requests(tmp_path: Path) -> None:
    async with served(tmp_path, BATCHED) as started:
        for code, words in BAD_EXECUTIONS:
            status, said = await failure_of(started.infer(asking(code)))
            assert status is INTERNAL
            assert words in said
            assert number(await started.infer(asking("response = answer(3)"))) == 3


CODES = [
    ("UNKNOWN", grpc.StatusCode.UNKNOWN),
    ("INTERNAL", grpc.StatusCode.INTERNAL),
    ("NOT_FOUND", grpc.StatusCode.NOT_FOUND),
    ("INVALID_ARG", grpc.StatusCode.INVALID_ARGUMENT),
    ("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE),
    ("UNSUPPORTED", grpc.StatusCode.UNIMPLEMENTED),
    ("ALREADY_EXISTS", grpc.StatusCode.ALREADY_EXISTS),
    ("CANCELLED", grpc.StatusCode.CANCELLED),
]


async def test_codes_of_errors_become_statuses(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        for code, status in CODES:
            request = asking(f"response = error('the reason', pb_utils.TritonError.{code})")
            assert await failure_of(started.infer(request)) == (status, "the reason")


async def test_coroutine_may_execute_requests(tmp_path: Path) -> None:
    source = triton_puppet.SOURCE.replace("def execute(self", "async def execute(self")
    async with served(tmp_path, BATCHED, source) as started:
        assert number(await started.infer(asking("response = answer(4)"))) == 4
        assert await failure_of(started.infer(asking("raise KeyError('k')"))) == (INTERNAL, "model 'm': KeyError: k")


async def test_inputs_may_be_written(tmp_path: Path) -> None:
    code = "x = request.inputs()[0].as_numpy(); x += 6; response = answer(int(request.inputs()[0].as_numpy()[0, 0]))"
    async with served(tmp_path) as started:
        assert number(await started.infer(asking(code))) == 7


BY_SENDER = [
    "request.get_response_sender().send(answer(6))",
    "s = request.get_response_sender(); s.send(answer(6)); s.send(flags=final)",
    "s = request.get_response_sender(); thread(lambda: s.send(answer(6), final))",
    "model.kept.append(request); thread(lambda: model.kept.pop().get_response_sender().send(answer(6), final))",
]


async def test_sender_answers_a_unary_request(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        for code in BY_SENDER:
            assert number(await started.infer(asking(code))) == 6
        assert number(await started.infer(asking())) == 1


TOO_MUCH = [
    ("s.send(answer(1)); s.send(answer(2))", "Non-decoupled model cannot send more than one response."),
    ("s.send(flags=final)", "Non-decoupled model cannot send complete final before sending a response."),
    ("s.send(answer(1), final); s.send(answer(2))", "Response sender has been closed."),
    ("s.send(answer(1), 5)", "Unsupported flag 5"),
    ("s.send()", "Inference Response object must be provided when the response flags is set to zero."),
    ("s.send(3)", "expected an InferenceResponse, got int"),
]


async def test_sending_too_much_is_an_exception(tmp_path: Path) -> None:
    catching = """
s = request.get_response_sender()
try: %s
except pb_utils.TritonModelException as error: model.said = str(error)
s = None
"""
    async with served(tmp_path) as started:
        for code, words in TOO_MUCH:
            await asyncio.gather(started.infer(asking(catching % code)), return_exceptions=True)
            assert words in await text(started, asking("response = text(json.dumps(model.said))"))


async def test_error_by_a_sender_fails_the_request(tmp_path: Path) -> None:
    code = "request.get_response_sender().send(error('not today', pb_utils.TritonError.UNAVAILABLE), final)"
    async with served(tmp_path) as started:
        assert await failure_of(started.infer(asking(code))) == (grpc.StatusCode.UNAVAILABLE, "not today")


async def test_model_without_a_batch_axis_gets_one_request(tmp_path: Path) -> None:
    async with served(tmp_path, TENSORS.replace("dims: [ 1 ]", "dims: [ -1, 1 ]")) as started:
        answers = await asyncio.gather(*(started.infer(asking("response = answer(model.batch)")) for _ in range(4)))
        assert [number(one) for one in answers] == [1] * 4


async def test_file_with_both_classes_is_ours(tmp_path: Path) -> None:
    ours = """
class Model:
    inputs = {"x": ("INT64", [-1, 1])}
    outputs = {"y": ("INT64", [-1, 1])}
    def execute(self, inputs): return {"y": inputs["x"] + 1}

class TritonPythonModel:
    def execute(self, requests): raise SystemExit
"""
    async with served(tmp_path, "max_batch_size: 8", ours) as started:
        assert number(await started.infer(asking())) == 2


async def test_response_cache_keeps_answers(tmp_path: Path) -> None:
    count = "model.kept.append(0); response = answer(len(model.kept))"
    cached = f"{BATCHED} response_cache {{ enable: true }}"
    async with served(tmp_path, cached, cache_bytes=1_000_000) as started:
        assert [number(await started.infer(asking(count))) for _ in range(3)] == [1, 1, 1]
        os.mkfifo(fifo := tmp_path / "fifo")
        says = asking(f"open({str(fifo)!r}).read(); response = answer(2, parameters={{'a': 3}})")
        calls = send(started, says)
        go = await asyncio.to_thread(fifo.open, "w")  # it executes
        calls += await followed(started, says, says)
        go.close()
        assert [(await call).parameters["a"].int64_param for call in calls] == [3, 3, 3]
