"""`--grpc-header-forward-pattern`: off by default, and what it does to calls and streams."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from paceline.server.config import Settings
from tests.integration.scripted import Script, mark_of, request
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream

pytestmark = pytest.mark.usefixtures("frontends")

REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, "header 'timeout' is reserved and can't be forwarded as a parameter")
RESERVED = [("timeout", "1")]


async def both(served: Served, metadata: list[tuple[str, str]]) -> list[float]:
    alone = await served.stub.ModelInfer(request(1), metadata=metadata, timeout=20)
    stream = Stream(served, metadata=metadata)
    await stream.send(request(2))
    answer = await stream.next()
    assert isinstance(answer, float)
    return [mark_of(alone), answer]


async def test_headers_have_no_effect_by_default(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": Script().model}) as served:
        assert await both(served, RESERVED) == [1, 2]


async def test_forwarded_headers_are_checked_as_parameters_are(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), grpc_header_forward_pattern="^(x-|time)")
    async with serving(tmp_path, {"m": Script().model}, settings=settings) as served:
        assert await both(served, [("x-tenant", "a"), ("priority", "no number")]) == [1, 2]
        assert await failure_of(served.stub.ModelInfer(request(1), metadata=RESERVED, timeout=20)) == REFUSED
        stream = Stream(served, metadata=RESERVED)
        assert (await stream.rest(), await stream.status()) == ([], REFUSED)
