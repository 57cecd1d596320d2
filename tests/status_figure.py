"""Makes the picture of the status page in the documents: `make status-figure`.

Lives here: a server with models of three kinds, a load that rises and falls for a minute, and the picture of the page
that `paceline top --html` writes of that. Must not: make up any number.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx

from paceline import AsyncInferenceClient
from paceline.clients import ClientError
from tests import decoder_models, models, state_models
from tests.browser import picture
from tests.decoder_models import Decoder
from tests.harness import ServerProcess, run_command

_INTERVAL_S, _COUNT = 1, 60
_SCORER = """
    max_batch_size: 16
    dynamic_batching { default_queue_policy { max_queue_size: 24 } }
"""
_LISTENER = """
    max_batch_size: 16
    sequence_batching {
      max_sequence_idle_microseconds: 60000000
      state { input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 2 ] }
    }
"""


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, page = Path(folder), Path(folder) / "status.html"
        for name, config, built in (
            ("scorer", _SCORER, models.mlp((1024, 4096, 4096, 1024))),
            ("listener", _LISTENER, state_models.accumulator()),
        ):
            (root / "models" / name / "1").mkdir(parents=True)
            (root / "models" / name / "config.pbtxt").write_text(config)
            onnx.save(built, root / "models" / name / "1" / "model.onnx")
        decoder_models.write(Decoder(end_tokens=(), positions=4_096), root / "models" / "writer" / "1")
        with ServerProcess(root / "models") as server:
            asyncio.run(_load(server, page))
        picture(page.as_uri(), file, 900, 785)


async def _load(server: ServerProcess, page: Path) -> None:
    began_s = time.monotonic()

    async def callers(count: int, ask: Callable[[], Awaitable[object]]) -> None:
        """Up to `count` of them at a time, more and fewer, three times."""

        async def caller(number: int) -> None:
            while (at := (time.monotonic() - began_s) / (_INTERVAL_S * _COUNT)) < 1:
                if number < count * (0.55 - 0.45 * math.cos(5 * math.pi * at)):
                    with suppress(ClientError):  # the queue is full
                        await ask()
                await asyncio.sleep(0.02)

        await asyncio.gather(*map(caller, range(count)))

    async with AsyncInferenceClient(server.target) as client:

        async def listen() -> None:
            async with client.sequence("listener") as sequence:
                for left in reversed(range(20)):
                    await sequence.infer({"INPUT0": np.ones((1, 2), np.float32)}, last=left == 0)

        async def write() -> None:
            async for _ in client.generate("writer", np.arange(3, 40), max_tokens=60):
                pass

        arguments = ["--interval", f"{_INTERVAL_S}", "--count", f"{_COUNT}", "--html", str(page)]
        done, *_ = await asyncio.gather(
            asyncio.to_thread(run_command, "top", "--metrics", f"127.0.0.1:{server.metrics_port}", *arguments),
            callers(60, lambda: client.infer("scorer", {"INPUT0": np.ones((1, 1024), np.float32)})),
            callers(8, listen),
            callers(12, write),
        )
        assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
