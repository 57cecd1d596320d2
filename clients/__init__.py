"""Client library and command line. Of this project, it imports `protos` alone.

    from paceline import InferenceClient

    with InferenceClient("127.0.0.1:8001") as client:
        result = client.infer("scorer", {"x": np.zeros((1, 4), np.float32)})
        print(result["y"])

`AsyncInferenceClient` is the same with `async with` and `await`. `tls=True` or `tls=Tls(ca="ca.crt")` makes the
connection TLS, and `token=` identifies the caller.
"""

from paceline.clients.aio import InferenceClient as AsyncInferenceClient
from paceline.clients.connection import Tls
from paceline.clients.description import Batching, Instances, ModelDescription, PipelineStep, Sequences
from paceline.clients.errors import (
    Cancelled,
    ClientClosed,
    ClientError,
    DeadlineExceeded,
    InferenceError,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    ResponseError,
    SequenceLost,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from paceline.clients.generations import GenerationChunk
from paceline.clients.messages import IndexEntry, InferResult, ModelMetadata, ServerMetadata, TensorMetadata
from paceline.clients.sequences import AsyncInferenceSequence, InferenceSequence
from paceline.clients.sync import InferenceClient

__all__ = [
    "AsyncInferenceClient",
    "AsyncInferenceSequence",
    "Batching",
    "Cancelled",
    "ClientClosed",
    "ClientError",
    "DeadlineExceeded",
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
    "TensorMetadata",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
]
