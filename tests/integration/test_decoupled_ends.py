"""How open requests of decoupled models end other than by their last answer: by callers, deadlines or errors, with
their process, or with the model."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests.integration.controlling import explicit, unload
from tests.integration.decoupled_serving import (
    ENDLESS,
    KEEP,
    ONE_BY_ONE,
    answers_with_one,
    asking,
    counts,
    one,
    rest,
    served,
    settled,
    told,
)
from tests.integration.regions import register
from tests.integration.serving import Served, failure_of
from tests.integration.streams import Stream
from tests.polling import eventually_async, eventually_awaited
from tests.shared_objects import held_by, request_shared_output, shared_object


async def all_cancelled(started: Served) -> bool:
    """Whether the model knows of all requests that it has kept that they are cancelled."""
    return await one(started, "send(int(all(kept.cancelled for kept in model.kept)), True)") == 1


@pytest.mark.parametrize("how", ["parameter", "stream", "channel"])
@pytest.mark.usefixtures("frontends")
async def test_cancelling_is_told_to_the_model_while_it_executes(tmp_path: Path, how: str) -> None:
    async with (
        served(tmp_path, ONE_BY_ONE) as started,
        grpc.aio.insecure_channel(started.target) as channel,
    ):
        stream = Stream(Served(started.server, channel, None))
        await stream.send(asking(ENDLESS, "endless"))
        assert told(await stream.message()) == ("endless", 1, False)
        if how == "parameter":
            cancelling = pb.InferParameter(bool_param=True)
            await stream.send(pb.ModelInferRequest(id="endless", parameters={"paceline_cancel": cancelling}))
            answers = await rest(stream)
            assert answers[-1] == ("endless", "the request was cancelled", True)
        elif how == "stream":
            stream.call.cancel()
        else:
            await channel.close(0)
        assert await one(started, "send(2, True)") == 2, "the model goes on with others"
        assert (await settled(started)).inference_stats.fail.count == 1


@pytest.mark.parametrize("code", [KEEP, ENDLESS])
async def test_deadline_ends_a_request_and_is_told(tmp_path: Path, code: str) -> None:
    async with served(tmp_path, ONE_BY_ONE) as started:
        for deadline_us in (200_000, 2_000_000, 15_000_000):  # later if a busy machine takes longer to begin
            stream = Stream(started)
            await stream.send(asking("send(1)\n" + code, "late", paceline_deadline_us=deadline_us))
            *answers, last = await rest(stream)
            if ("late", 1, False) in answers:
                break
        assert ("late", 1, False) in answers
        assert last == ("late", "model 'm': Deadline Exceeded: the model hasn't sent its last answer", True)
        await eventually_awaited(lambda: all_cancelled(started), "the model is told")
        await settled(started)


@pytest.mark.usefixtures("frontends")
async def test_process_killed_between_answers_fails_what_is_open(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        pid = await one(started, "send(os.getpid(), True)")
        assert isinstance(pid, int)
        stream = Stream(started)
        await stream.send(*[asking(f"send(1)\n{KEEP}", str(number)) for number in range(20)])
        assert [told(await stream.message())[1:] for _ in range(20)] == [(1, False)] * 20
        os.kill(pid, signal.SIGKILL)
        answers = await rest(stream)
        # The last ones' execution may not have ended yet.
        killed = "model 'm': the model's process was killed by SIGKILL"
        assert all(str(answer[1]).startswith(killed) and answer[2] for answer in answers)
        assert Counter(answer[0] for answer in answers) == {str(number): 1 for number in range(20)}
        assert await one(started, "send(1, True)") == 1
        assert counts(await settled(started)) == (2, 20)


async def test_hanging_execution_fails_its_requests_and_those_kept(tmp_path: Path) -> None:
    config = 'max_batch_size: 8 parameters { key: "paceline.execution_timeout_ms" value { string_value: "300" } }'
    async with served(tmp_path, config) as started:
        for _ in range(20):  # again if a busy machine takes as long as a hang to get there
            stream = Stream(started)
            await stream.send(asking(KEEP, "kept"), asking("send(1)\nthreading.Event().wait()", "hangs"))
            answers = await rest(stream)
            assert {answer[0] for answer in answers if answer[2]} == {"kept", "hangs"}
            if ("hangs", 1, False) in answers:
                break
        assert ("hangs", 1, False) in answers
        await eventually_awaited(lambda: answers_with_one(started), "another process")
        await settled(started)


async def test_unload_waits_for_open_requests(tmp_path: Path) -> None:
    async with served(tmp_path, settings=explicit(tmp_path, allow_python_models=True)) as started:
        await started.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), timeout=20)
        stream = Stream(started)
        go = tmp_path / "go"
        waiting = f"while not pathlib.Path({str(go)!r}).exists(): pass"
        code = f"def run():\n    {waiting}\n    send(2, True)\nthread(run)\nsend(1)"
        await stream.send(asking(code))
        assert told(await stream.message()) == ("", 1, False)
        model = started.server.repository.get("m", "")
        await unload(started, "m")
        assert (await failure_of(started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))))[0]
        go.touch()
        assert told(await stream.message()) == ("", 2, True)
        await eventually_async(lambda: not model.open_requests, "nothing is open")


async def test_stop_ends_what_stays_open(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking(f"send(1)\n{KEEP}"))
        assert told(await stream.message()) == ("", 1, False)
        await started.server.stop(0)
        text = "model 'm': the model is being unloaded or the server is stopping"
        assert told(await stream.message()) == ("", text, True)


async def test_unread_answers_keep_no_shared_memory(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), allow_python_models=True, allow_client_shm=True)
    with shared_object(4096) as memory:
        async with served(tmp_path, settings=settings) as started:
            own, _ = held_by(key=memory.key)
            await register(started, "r", memory.key, 4096)
            # Ids fill what gRPC takes for a client that reads nothing, so that answers wait here.
            request = asking("for n in range(14): send(n)\nrequest.end()", "x" * 500_000)
            del request.outputs[:]
            request_shared_output(request, "y", "r", 8)
            stream = Stream(started)
            await stream.send(request)
            await eventually_awaited(lambda: _ended(started), "the request has ended")
            await started.stub.SystemSharedMemoryUnregister(
                pb.SystemSharedMemoryUnregisterRequest(name="r"), timeout=20
            )
            await eventually_async(lambda: held_by(key=memory.key)[0] == own, "the region is closed", timeout_s=5)
            stream.call.cancel()


async def _ended(started: Served) -> bool:
    return counts(await settled(started)) == (1, 0)


async def test_first_error_ends_a_stream_that_wants_it(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started, metadata=[("triton_grpc_error", "true")])
        await stream.send(asking(KEEP), asking("send(1)\nrequest.fail('no', end=False)\nmodel.kept.append(request)"))
        assert told(await stream.message()) == ("", 1, False)
        assert await stream.status() == (grpc.StatusCode.INTERNAL, "model 'm': no")
        await eventually_awaited(lambda: all_cancelled(started), "the model is told of both")
        assert counts(await settled(started))[1] == 2
