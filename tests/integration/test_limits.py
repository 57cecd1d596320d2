"""Limits of the server as a whole: one too many is refused, accepted ones are answered, then there is room again."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.wire import MAX_FIELDS
from paceline.server.config import Settings
from paceline.server.limits import Limits
from tests.harness import REPO, touch
from tests.integration.controlling import explicit, index, load, unload
from tests.integration.limiting import executing, limited, one, used
from tests.integration.regions import register
from tests.integration.serving import echo_model, failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async
from tests.shared_objects import add_shared_input, shared_object
from tests.wire import infer

Code = grpc.StatusCode
DOCS = REPO / "docs" / "configuration.md"
NO_BATCHES = "max_batch_size: 1"


# ---- Messages and headers --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("frontends")
async def test_message_beyond_the_limit_is_refused_and_one_of_exactly_that_size_is_not(tmp_path: Path) -> None:
    message = one(columns=1000)
    size = message.ByteSize()
    async with serving(tmp_path, {"m": echo_model()}, settings=limited(tmp_path, message_bytes=size)) as served:
        await served.infer(message)
        witness = Stream(served)
        message.id = "x"
        assert (await failure_of(served.infer(message)))[0] is Code.RESOURCE_EXHAUSTED
        stream = Stream(served)
        await stream.send(message)
        assert (await stream.status())[0] is Code.RESOURCE_EXHAUSTED
        message.id = ""
        await served.infer(message)
        await witness.send(message)
        assert (await witness.message()).infer_response.outputs
        assert await served.metric("paceline_limit", 'limit="message_bytes"') == size


def texts(count: int, form: str) -> pb.ModelInferRequest:
    """A request of so many empty texts, in that form."""
    message = infer("m", {"a": np.full((1, count), b"", object)})
    if form == "typed":
        del message.raw_input_contents[:]
        message.inputs[0].contents.bytes_contents.extend([b""] * count)
    return message


@pytest.mark.parametrize("form", ["raw", "typed"])
async def test_elements_beyond_the_limit_are_refused(tmp_path: Path, frontends: int, form: str) -> None:
    settings = limited(tmp_path, request_elements=5_000)
    async with serving(tmp_path, {"m": echo_model("BYTES")}, settings=settings) as served:
        stream = Stream(served)
        for _ in range(2):
            code, text = await failure_of(served.infer(texts(5_001, form)))
            assert (code, "expected at most 5000 elements" in text) == (Code.RESOURCE_EXHAUSTED, True)
            assert "(--max-request-elements)" in text
            await stream.send(texts(5_001, form))
            answer = await stream.message()
            assert answer.infer_response.parameters["paceline_status"].string_param == "RESOURCE_EXHAUSTED"
            assert answer.error_message == text
            most = texts(5_000, form)
            assert (await served.infer(most)).outputs[0].shape == [1, 5_000]
            await stream.send(most)
            assert (await stream.message()).infer_response.outputs


async def test_more_fields_than_any_message_has_are_refused(tmp_path: Path, frontends: int) -> None:
    surplus = MAX_FIELDS + 1
    rpcs = {
        "ModelInfer": b"\x2a\x00" * surplus,
        "RepositoryModelLoad": b"\x1a\x00" * surplus,
        "TraceSetting": b"\x0a\x00" * surplus,
    }
    async with serving(tmp_path, {"m": echo_model()}, settings=limited(tmp_path)) as served:
        for rpc, data in rpcs.items():
            call = served.channel.unary_unary(f"/inference.GRPCInferenceService/{rpc}")
            assert await failure_of(call(data, timeout=20)) == (
                Code.RESOURCE_EXHAUSTED,
                "expected a message of at most 65536 fields (such as tensors), got more",
            )
        await served.infer(one())


async def test_texts_are_queued_at_what_they_take(tmp_path: Path, frontends: int) -> None:
    model = echo_model("BYTES")
    async with serving(tmp_path, {"m": model}, config=NO_BATCHES, settings=limited(tmp_path)) as served:
        model.gate.close()
        calls = [asyncio.create_task(served.infer(texts(1_000, form))) for form in ("raw", "typed")]
        await asyncio.to_thread(model.gate.wait_entered, 1)
        await eventually_async(lambda: served.waiting("m") == 1, "the second one in the queue")
        assert await used(served, "queued_bytes") == 41 * 1_000
        model.gate.open()
        await asyncio.gather(*calls)


@pytest.mark.usefixtures("frontends")
async def test_texts_in_shared_memory_may_not_exceed_a_message_but_numbers_may(tmp_path: Path) -> None:
    """Texts are read when their request arrives, and all other requests wait meanwhile. The request may be small, and
    the memory may cost its client nothing."""
    limits = Limits(message_bytes=1_000, request_elements=250)
    settings = Settings(paths=(tmp_path,), allow_client_shm=True, limits=limits)
    models = {"m": echo_model("FP32"), "t": echo_model("BYTES")}

    def lying(model: str, datatype: str, size: int, elements: int = 0) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=model)
        add_shared_input(request, "a", datatype, [1, elements or size // 4], "r", size)
        return request

    with shared_object(4096) as memory:
        async with serving(tmp_path, models, settings=settings) as served:
            await register(served, "r", memory.key, 4096)
            assert (await served.infer(lying("t", "BYTES", 1_000))).outputs
            code, text = await failure_of(served.infer(lying("t", "BYTES", 1_004)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "expected at most 1000 bytes of BYTES (--grpc-max-message-bytes), got 1004" in text
            code, text = await failure_of(served.infer(lying("t", "BYTES", 1_000, elements=251)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "expected at most 250 elements of BYTES (--max-request-elements), got 251" in text
            assert (await served.infer(lying("m", "FP32", 4_096))).outputs


@pytest.mark.usefixtures("frontends")
async def test_headers_beyond_the_limit_are_refused_while_the_connection_keeps_working(tmp_path: Path) -> None:
    settings = limited(tmp_path, metadata_bytes=4096)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        witness = Stream(served)
        for size, code in (
            (3000, None),
            (4096, Code.RESOURCE_EXHAUSTED),
            (100_000, Code.RESOURCE_EXHAUSTED),
            (1, None),
        ):
            call = served.stub.ModelInfer(one(), metadata=[("x-large", "v" * size)], timeout=20)
            if code is None:
                await call
            else:
                assert (await failure_of(call))[0] is code
            await witness.send(one())
            assert (await witness.message()).infer_response.outputs


# ---- Queues ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "text"),
    [({"queued_requests": 3}, "3 requests of all models"), ({"queued_bytes": 12}, "12 bytes of all models")],
)
@pytest.mark.usefixtures("frontends")
async def test_queues_of_all_models_together_are_limited(tmp_path: Path, limits: dict[str, int], text: str) -> None:
    models = {"m": echo_model(), "n": echo_model()}
    async with serving(tmp_path, models, config=NO_BATCHES, settings=limited(tmp_path, **limits)) as served:
        calls = [await executing(served, models[name], name) for name in models]
        calls += [asyncio.create_task(served.infer(one(name))) for name in ("m", "m", "n")]
        await eventually_async(lambda: (served.waiting("m"), served.waiting("n")) == (2, 1), "all that may wait")
        for name in models:
            assert await failure_of(served.infer(one(name))) == (
                Code.RESOURCE_EXHAUSTED,
                f"model '{name}': Exceeds maximum queue size of {text}",
            )
        assert (await used(served, "queued_requests"), await used(served, "queued_bytes")) == (3, 12)
        calls.pop().cancel()
        await eventually_async(lambda: served.waiting("n") == 0, "the cancelled one gone")
        calls.append(asyncio.create_task(served.infer(one("m"))))
        await eventually_async(lambda: served.waiting("m") == 3, "another in its place")
        for model in models.values():
            model.gate.open()
        assert all([(await call).raw_output_contents == one().raw_input_contents for call in calls])
        assert (await used(served, "queued_requests"), await used(served, "queued_bytes")) == (0, 0)
        reason = "queue_full_requests" if "queued_requests" in limits else "queue_full_bytes"
        for name in models:
            labels = f'model="{name}",reason="{reason}",version="1"'
            assert await served.metric("paceline_dropped_requests", labels) == 1
            await served.infer(one(name))


async def test_closed_queue_leaves_nothing_counted(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=NO_BATCHES) as served:
        calls = [await executing(served, model)]
        calls += [asyncio.create_task(served.infer(one())) for _ in range(3)]
        await eventually_async(lambda: served.waiting("m") == 3, "three waiting")
        batcher = served.server.repository.get("m", "").batcher
        assert await used(served, "queued_requests") == 3
        batcher.close()
        assert (await used(served, "queued_requests"), await used(served, "queued_bytes")) == (0, 0)
        for call in calls:
            assert (await failure_of(call))[0] is Code.UNAVAILABLE


# ---- Models ----------------------------------------------------------------------------------------------------------


async def test_models_beyond_the_limit_are_refused_until_another_is_unloaded(tmp_path: Path) -> None:
    models = {"m": echo_model(), "n": echo_model()}
    (tmp_path / "broken" / "1").mkdir(parents=True)
    settings = explicit(tmp_path, load=("m",), limits=Limits(models=1))
    async with serving(tmp_path, models, settings=settings) as served:
        text = "load failed for model 'n': there are 1 models already, as many as --max-models allows"
        assert await failure_of(load(served, "n")) == (Code.RESOURCE_EXHAUSTED, text)
        touch(tmp_path / "m")
        await load(served, "m")  # it already has its place
        assert await used(served, "models") == 1
        await served.infer(one("m"))
        await unload(served, "m")
        assert (await failure_of(load(served, "broken")))[0] is Code.INVALID_ARGUMENT
        assert await used(served, "models") == 0
        await load(served, "n")
        await served.infer(one("n"))
        assert (await failure_of(load(served, "m")))[0] is Code.RESOURCE_EXHAUSTED
        assert await used(served, "models") == 1
        assert await served.metric("paceline_limit_refusals", 'limit="models"') == 2


async def test_only_the_latest_failed_loads_stay_in_the_index(tmp_path: Path) -> None:
    settings = explicit(tmp_path, load=("m",), limits=Limits(models=3))
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        await load(served, "m")
        for number in range(10):
            name = f"n{number}"
            assert (await failure_of(load(served, name, config="{}", **{"file:notes": b"no version"})))[0] in (
                Code.INVALID_ARGUMENT,
                Code.NOT_FOUND,
            )
            await unload(served, f"u{number}")
        assert [line[0] for line in await index(served)] == ["m", "n7", "n8", "n9"]
        await served.infer(one("m"))


async def test_models_beyond_the_limit_at_the_start_are_missing_and_the_others_serve(tmp_path: Path) -> None:
    models = {name: echo_model() for name in ("a", "b", "c")}
    async with serving(tmp_path, models, settings=limited(tmp_path, models=2)) as served:
        failures = served.server.repository.failures
        assert len(failures) == 1
        assert "as many as --max-models allows" in next(iter(failures.values()))
        for name in set(models) - set(failures):
            await served.infer(one(name))


# ---- The table of the docs -------------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    """The metrics that the docs name for each limit, refusals last: `name{label="value"}`, as in a scrape."""
    text = DOCS.read_text(encoding="utf-8").partition("### Limits\n")[2].partition("\n### ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[sample for cell in line[3:] for sample in re.findall("`(.+?)`", cell)] for line in lines[2:]]


def is_among(sample: str, metrics: set[str]) -> bool:
    """Whether the scrape has the sample; samples of models have additional labels there."""
    name, brace, labels = sample.rstrip("}").partition("{")
    wanted = {*labels.split(",")} if brace else set()
    return any(
        one.partition("{")[0] == name and wanted <= {*one.rstrip("}").partition("{")[2].split(",")} for one in metrics
    )


async def test_all_limits_are_exported_as_documented(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=Settings(paths=(tmp_path,), frontends=2)) as served:
        metrics = set(await served.metrics())
    of_one = {"message_bytes", "metadata_bytes", "request_elements", "connection_calls", "stream_requests"}
    without_use = of_one | {"connections"}
    limits = {name.partition('"')[2].rstrip('"}') for name in metrics if name.startswith("paceline_limit{")}
    told = [sample for row in rows() for sample in row]
    assert [sample for sample in told if not is_among(sample, metrics)] == []
    assert {sample for sample in told if sample.startswith("paceline_limit{")} == {
        f'paceline_limit{{limit="{name}"}}' for name in limits
    }
    assert {name for name in metrics if name.startswith("paceline_limit_used{")} == {
        f'paceline_limit_used{{limit="{name}"}}' for name in limits - without_use
    }
    # Every metric that counts refusals is in the table.
    refusing = {name for name in metrics if "queue_full_" in name or name.startswith("paceline_limit_refusals{")}
    assert {name for name in refusing if not any(is_among(sample, {name}) for row in rows() for sample in row)} == set()
