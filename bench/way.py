"""The way of a request through the code, as a running server takes it: `python -m bench.way`.

Lives here: a server with one small model in this process, requests sent to it, and a profiler (`sys.setprofile`) that
writes down which functions of the product are called, on every thread. Must not: measure time; the profiler would be
most of it.

A *move* is a call into another file of the product than the call before it. They are what a reader does who follows
one request, so they are counted, and a test holds the bound. Threads take turns in real time, so a count may differ by
a few between requests; the median is told.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpc

from bench import models
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.tuning import new_loop

__all__ = ["Way", "middle", "one_by_one", "together"]

_PRODUCT = f"{Path(__file__).parents[1] / 'paceline'}/"
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_WARM = 30
_SAMPLES = 15


@dataclass(frozen=True, slots=True)
class Way:
    """The calls that `requests` requests caused, in order. `files` and `functions` are counted once each."""

    calls: Sequence[CodeType]
    requests: int

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.calls})

    @property
    def functions(self) -> int:
        return len(set(self.calls))

    @property
    def moves(self) -> float:
        """Per request."""
        files = [code.co_filename for code in self.calls]
        return (1 + sum(a != b for a, b in pairwise(files))) / self.requests

    def lines(self) -> Iterator[str]:
        """Each stretch of calls in one file, as `file: functions`."""
        file = ""
        names: list[str] = []
        for code in self.calls:
            if code.co_filename != file:
                if names:
                    yield f"{file.removeprefix(_PRODUCT)}: {', '.join(names)}"
                file, names = code.co_filename, []
            names.append(code.co_qualname)
        yield f"{file.removeprefix(_PRODUCT)}: {', '.join(names)}"


class _Calls:
    """What is called, in all threads, while `recorded` has a list."""

    def __init__(self) -> None:
        self.recorded: list[CodeType] | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self.recorded is not None and frame.f_code.co_filename.startswith(_PRODUCT):
            self.recorded.append(frame.f_code)


def one_by_one() -> list[Way]:
    """What several warm requests did, each sent when the one before was answered."""
    with _serving() as (calls, server, _), grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        infer = channel.unary_unary(_METHOD)
        return _counted(calls, 1, lambda: infer(_request(), timeout=60))


def together(requests: int) -> list[Way]:
    """What several groups of warm requests did, each of which the event loop finds waiting when it comes back from
    something else. They are called past gRPC, which hands over one request a turn."""
    with _serving() as (calls, server, loop):
        handler = server._service.handlers()["ModelInfer"]

        async def ask() -> None:
            read = map(handler.request_deserializer, [_request()] * requests)
            await asyncio.gather(*(handler.unary_unary(one, _Context()) for one in read))

        return _counted(calls, requests, lambda: _on(loop, ask()))


class _Context:
    """What is used of gRPC's context of a call."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> float | None:
        return None


def _request() -> bytes:
    return models.request("tiny", models.MODELS["tiny"].shape)


def _counted(calls: _Calls, requests: int, ask: Callable[[], object]) -> list[Way]:
    found = []
    for number in range(_WARM + _SAMPLES):
        calls.recorded = recorded = []
        ask()
        calls.recorded = None
        if number >= _WARM:
            found.append(Way(recorded, requests))
    return found


def middle(found: Sequence[Way]) -> Way:
    """The one with the median number of moves."""
    return sorted(found, key=lambda way: way.moves)[len(found) // 2]


@contextmanager
def _serving() -> Iterator[tuple[_Calls, Server, asyncio.AbstractEventLoop]]:
    calls = _Calls()
    with tempfile.TemporaryDirectory() as folder:
        models.add("tiny", models.write("tiny", Path(folder)), repository := Path(folder) / "models")
        loop = new_loop()
        thread = threading.Thread(target=partial(_run, loop, calls))
        thread.start()
        server = Server(Settings((repository,), grpc_address="127.0.0.1", grpc_port=0, metrics_port=None))
        try:
            _on(loop, server.start())
            try:
                yield calls, server, loop
            finally:
                _on(loop, server.stop())
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def _run(loop: asyncio.AbstractEventLoop, calls: _Calls) -> None:
    # The threads of instances are started from here, and get the profiler, too.
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        loop.run_forever()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed has no None here


def _on(loop: asyncio.AbstractEventLoop, doing: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(doing, loop).result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.way", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", action="store_true", help="show the calls of one request")
    one = middle(one_by_one())
    if parser.parse_args().calls:
        print("\n".join(one.lines()))
    print(f"one warm request: {one.files} files, {one.functions} functions, {one.moves:g} moves")
    print(f"32 together: {middle(together(32)).moves:.0f} moves for each")


if __name__ == "__main__":
    main()
