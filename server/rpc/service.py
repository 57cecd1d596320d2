"""`inference.GRPCInferenceService`: the RPCs about the server and its models, and the registration of all RPCs.

Lives here: converting requests and results, and the calls in between. Must not: checks (codec), look-ups (repository)
or waiting policy (batcher). All other RPCs come from groups, one module each, so that each can be read or left out by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.backends.spec import TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.limits import Limits
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.inference import Inference
from paceline.server.rpc.calls import Context, answering
from paceline.server.rpc.gate import Handler, Registry
from paceline.server.rpc.handlers import METHODS, add_handlers, handler_of


class RpcGroup(Protocol):
    """Some RPCs: coroutine methods named after them, taking `(request, context)`, each decorated with `answering`.

    `extensions` are the names that ServerMetadata advertises for them.
    """

    @property
    def extensions(self) -> Sequence[str]: ...


class InferenceService:
    """The service over a repository of models. RPCs that aren't here come from `groups`."""

    extensions = ("binary_tensor_data", "classification", "schedule_policy", "sequence", "sequence(string_id)")

    def __init__(
        self,
        inference: Inference,
        repository: ModelLookup,
        server_id: str,
        version: str,
        groups: Sequence[RpcGroup],
        max_elements: int = Limits().request_elements,
    ) -> None:
        self._inference = inference
        self._repository = repository
        self._server_id = server_id
        self._version = version
        self._groups: tuple[RpcGroup, ...] = (self, *groups)
        self._max_elements = max_elements

    def add_to(self, server: Registry) -> None:
        """Register the service with `server`, as the generated function does, except for bytes that are no message:
        gRPC would answer those with UNKNOWN and log a traceback, this service answers with INVALID_ARGUMENT."""
        add_handlers(server, self.handlers())

    def handlers(self) -> dict[str, Handler]:
        """gRPC's handler of each RPC, by its name."""
        return {
            method.name: handler_of(method, getattr(group, method.name), self._max_elements)
            for method in METHODS
            for group in self._groups
            if hasattr(group, method.name)
        }

    @answering
    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @answering
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._inference.ready and self._repository.ready)

    @answering
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        ready = self._repository.is_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready and self._inference.ready)

    @answering
    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        extensions = [name for group in self._groups for name in group.extensions]
        return pb.ServerMetadataResponse(name=self._server_id, version=self._version, extensions=extensions)

    @answering
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        model = self._repository.get(request.name, request.version)
        versions = [model.version] if request.version else self._repository.versions(model.name)
        return _metadata(model, versions)


def _metadata(model: ServedModel, versions: list[str]) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=filter(None, versions),  # a model of another server may have none
        platform=model.platform,
        inputs=[_tensor_metadata(one, model.spec.batched) for one in model.spec.inputs],
        outputs=[_tensor_metadata(one, model.spec.batched) for one in model.spec.outputs],
    )


def _tensor_metadata(tensor: TensorSpec, batched: bool) -> pb.ModelMetadataResponse.TensorMetadata:
    lead = [-1] if batched and not tensor.shape_tensor else []
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=[*lead, *tensor.dims]
    )
