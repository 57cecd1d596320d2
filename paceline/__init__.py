"""A gRPC inference server with dynamic batching, and its client.

    from paceline import InferenceClient

    with InferenceClient("127.0.0.1:8001") as client:
        result = client.infer("scorer", {"x": np.zeros((1, 4), np.float32)})
        print(result["y"])

`Engine` is for models in an application's own process. The packages inside are folders at the top of the repository:
`paceline.server` is `server/`. The public names are those of `paceline.clients` and of the engine, imported when they
are first used: the server doesn't need them, and `import paceline` loads neither gRPC nor numpy.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - type checkers know the names from there

TYPE_CHECKING = False  # `typing` is slow to import, and signals are lost until the command has begun
if TYPE_CHECKING:
    from paceline.clients import *
    from paceline.server.engine import *
    from paceline.server.errors import StartError

__all__ = [
    "AsyncInferenceClient",
    "AsyncInferenceSequence",
    "Batching",
    "BlockingEngine",
    "Cancelled",
    "ClientClosed",
    "ClientError",
    "DeadlineExceeded",
    "Engine",
    "GenerationChunk",
    "IndexEntry",
    "InferResult",
    "InferenceClient",
    "InferenceError",
    "InferenceSequence",
    "Instances",
    "Internal",
    "InvalidArgument",
    "ModelDescription",
    "ModelMetadata",
    "NotFound",
    "PermissionDenied",
    "PipelineStep",
    "ResourceExhausted",
    "ResponseError",
    "SequenceLost",
    "Sequences",
    "ServerMetadata",
    "StartError",
    "TensorMetadata",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
]

_ELSEWHERE = {
    "BlockingEngine": "paceline.server.engine",
    "Engine": "paceline.server.engine",
    "StartError": "paceline.server.errors",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_ELSEWHERE.get(name, "paceline.clients")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
