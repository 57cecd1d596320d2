"""A decoupled Python model that runs what its requests say, for tests of what happens then.

Lives here: its source, and making a repository of it. Must not: assertions.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CONFIG", "SOURCE", "write"]

SOURCE = """
import asyncio, os, pathlib, threading

HERE = pathlib.Path(__file__).parent


class Model:
    inputs = {"x": ("INT64", [-1, 1])}
    outputs = {"y": ("INT64", [-1, -1]), "z": ("BYTES", [-1])}

    def load(self, context):
        self.kept = []

    def execute(self, requests):
        self.batch = len(requests)
        for request in requests:
            self.run(request)

    def run(self, request):
        def send(number, end=False):
            request.send({"y": [[number]]}, end)

        def thread(function):
            threading.Thread(target=function).start()

        known = {"model": self, "request": request, "send": send, "thread": thread}
        exec(request.parameters.get("run", "request.end()"), {**globals(), **known})
"""

CONFIG = 'backend: "python" model_transaction_policy { decoupled: true }'


def write(root: Path, config: str = "max_batch_size: 8 dynamic_batching { }", source: str = SOURCE) -> Path:
    """Model `m` in the repository `root`. A request's parameter `run` is code, which finds `request`, `model`,
    `send(number, end)` and `thread(function)`. Its folder."""
    folder = root / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(source)
    (folder / "config.pbtxt").write_text(f"{CONFIG} {config}")
    return folder
