"""Metrics of models that generate, under vLLM's names, as a scraper gets them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.server.config import Settings
from tests import decoder_models
from tests.decoder_models import TINY, Decoder
from tests.generation_truth import Asked, NaiveLoop
from tests.harness import touch
from tests.integration.controlling import explicit, load
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.integration.test_generations import asking, served, tokens_of
from tests.polling import eventually_async

ENDLESS = Decoder(end_tokens=(), positions=100_000)


async def vllm(started: Served, name: str, more: str = "") -> float:
    return await started.metric(f"vllm:{name}", f'{more}model_name="m",version="1"')


@pytest.mark.parametrize("frontends", [1, 2])
async def test_tokens_and_times_of_calls_and_streams_are_counted_once(tmp_path: Path, frontends: int) -> None:
    settings = Settings(paths=(tmp_path,), frontends=frontends)
    async with served(tmp_path, settings=settings) as started:
        prompts = [[9, 8, 7], [5] * 40]
        whole = [tokens_of(await started.infer(asking(prompt, max_tokens=6))) for prompt in prompts]
        stream = Stream(started)
        await stream.send(asking([3, 4], max_tokens=5))
        streamed = 0
        while not (message := await stream.message()).infer_response.parameters["triton_final_response"].bool_param:
            streamed += len(tokens_of(message.infer_response))
        streamed += len(tokens_of(message.infer_response))
        await stream.end()
        ended = await vllm(started, "request_success_total", 'finished_reason="stop",')
        assert ended + await vllm(started, "request_success_total", 'finished_reason="length",') == 3
        tokens = sum(map(len, whole)) + streamed + ended
        assert await vllm(started, "prompt_tokens_total") == 3 + 40 + 2
        assert await vllm(started, "generation_tokens_total") == tokens
        assert await vllm(started, "time_to_first_token_seconds_count") == 3
        assert await vllm(started, "inter_token_latency_seconds_count") == tokens - 3
        assert await vllm(started, "e2e_request_latency_seconds_count") == 3
        first_s, whole_s = [
            await vllm(started, f"{name}_seconds_sum") for name in ("time_to_first_token", "e2e_request_latency")
        ]
        assert 0 < first_s + await vllm(started, "inter_token_latency_seconds_sum") <= whole_s
        assert await started.metric("nv_inference_request_success") == 3


async def test_end_token_counts_as_one_that_was_chosen(tmp_path: Path) -> None:
    folder = decoder_models.write(TINY, tmp_path / "other" / "m" / "1")
    first, second = NaiveLoop(folder).generate([9, 8], Asked(max_tokens=2)).tokens
    async with served(tmp_path / "served", Decoder(end_tokens=(second,))) as started:
        assert tokens_of(await started.infer(asking([9, 8], max_tokens=9))) == [first]
        assert await vllm(started, "generation_tokens_total") == 2
        assert await vllm(started, "request_success_total", 'finished_reason="stop",') == 1


async def test_running_and_waiting_generations_and_their_memory_are_shown(tmp_path: Path) -> None:
    config = 'parameters { key: "paceline.max_generations" value { string_value: "1" } }'
    async with served(tmp_path, ENDLESS, config) as started:
        streams = [Stream(started) for _ in range(3)]
        for stream in streams:
            await stream.send(asking([5], max_tokens=90_000))
        await streams[0].message()

        async def are_all_there() -> bool:
            return await vllm(started, "num_requests_running") == 1 and await vllm(started, "num_requests_waiting") == 2

        async with asyncio.timeout(60):
            while not await are_all_there():
                pass
        assert 0 < await vllm(started, "kv_cache_usage_perc") < 1
        for stream in streams:
            stream.call.cancel()
        model = started.server.repository.get("m", "")
        await eventually_async(lambda: not len(model.open_requests or ()), "no request is left")
        await started.infer(asking([5], max_tokens=1))
        async with asyncio.timeout(60):
            while await vllm(started, "num_requests_running"):
                pass
        assert await vllm(started, "num_requests_waiting") == await vllm(started, "kv_cache_usage_perc") == 0
        assert await vllm(started, "request_success_total", 'finished_reason="length",') == 1


async def test_generations_that_are_put_out_count_as_preemptions(tmp_path: Path) -> None:
    token_bytes = 2 * 2 * TINY.kv_heads * TINY.head_size * 4
    config = f'parameters {{ key: "paceline.max_cache_bytes" value {{ string_value: "{200 * token_bytes}" }} }}'
    async with served(tmp_path, Decoder(end_tokens=()), config) as started:
        calls = [started.infer(asking([number] * 20, max_tokens=120), 60) for number in range(1, 6)]
        await asyncio.gather(*calls)
        assert await vllm(started, "num_preemptions_total") > 0
        assert await vllm(started, "prompt_tokens_total") == 5 * 20
        assert await vllm(started, "generation_tokens_total") == 5 * 120


async def test_counts_go_on_when_the_model_is_loaded_again(tmp_path: Path) -> None:
    async with served(tmp_path, settings=explicit(tmp_path, load=("m",))) as started:
        await started.infer(asking([9, 8], max_tokens=3))
        touch(tmp_path / "m")
        await load(started, "m")
        await started.infer(asking([9, 8], max_tokens=3))
        assert await vllm(started, "prompt_tokens_total") == 4
        assert await vllm(started, "time_to_first_token_seconds_count") == 2


async def test_failed_and_other_requests_have_no_such_numbers(tmp_path: Path) -> None:
    decoder_models.write(TINY, tmp_path / "raw" / "1")
    (tmp_path / "raw" / "config.pbtxt").write_text(
        'parameters { key: "paceline.generate" value { string_value: "off" } }'
    )
    decoder_models.write(TINY, tmp_path / "m" / "1")
    async with serving(tmp_path) as started:
        await failure_of(started.infer(asking([128])))
        found = {name: value for name, value in (await started.metrics()).items() if name.startswith("vllm:")}
        assert set(found.values()) == {0.0}
        assert all('model_name="m"' in name for name in found)
