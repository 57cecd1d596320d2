"""The server's settings, in the user's units, as the command line and the environment give them.

Lives here: the values and their defaults. Must not: parse flags (`server.cli`), or act on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from paceline.server.limits import Connections, Limits
from paceline.server.models.defaults import BackendConfig, BatchDefaults, Offline
from paceline.server.models.upstream_settings import UpstreamSettings
from paceline.server.rpc.credentials import Restriction
from paceline.server.rpc.tls import TlsFiles
from paceline.server.telemetry.trace_settings import TraceConfig


class ControlMode(Enum):
    """What decides which models serve: nothing after the start, what lies in the repositories, or RPCs."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve. Names follow Triton's flags. `paths` are model repositories, single models' folders or `.onnx`
    files. Ports: 0 takes a free one. A `grpc_address` that is `unix:PATH` has no port; the socket has the permissions
    `grpc_socket_mode`. `grpc_message_timeout_secs`: how long the request of a call with one may take to arrive (0: no
    limit). `metrics_port` None switches metrics off, `allow_gpu_metrics` False those of GPUs.
    `status_page`: whether there is one, with new numbers every `status_interval_s`.
    `batching` is for models without a configuration, `backend_config` for all; without `auto_complete`, models have to
    spell out their tensors. `model_config_name`: the configuration to read from the folder `configs` in a model's
    folder, instead of `config.pbtxt`. `model_name`: the name of the one model that isn't in a repository.
    `cache_bytes`: how much may be kept of answers, of models whose configuration asks for that (0: nothing).
    `allow_op_libraries`: whether models may bring libraries of operators, which run in this process.
    `allow_python_models`: whether models may be Python code, which runs in processes of its own.
    `allow_remote_settings`: whether RPCs may change how the server logs and traces; traces start with `trace`.
    `drain_grace_secs`: how long requests are accepted at the end, while the server reports not ready.
    `execution_timeout_secs`: how long a batch may execute before its instance is given up (0: no limit).
    `frontends` is the number of processes that speak gRPC; 1: the one with the models does. Up to `frontend_memory_mb`
    MiB of tensors may be in transit to each front, and as many from it. A front that is silent for
    `frontend_timeout_secs` is replaced (0: never). `load_models` are the models to load at the start in mode EXPLICIT;
    "*" alone: all. With `upstream` there are no `paths`: that server's models are served. `offline`: the models are for
    work of that kind; None: for requests that share batches."""

    paths: tuple[Path, ...]
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    grpc_socket_mode: int = 0o600
    grpc_max_stream_requests: int = 1024
    grpc_message_timeout_secs: float = 300.0
    grpc_header_forward_pattern: str = ""
    grpc_infer_response_compression_level: str = "none"
    frontends: int = 1
    frontend_memory_mb: int = 1024
    frontend_timeout_secs: int = 30
    metrics_address: str | None = None
    metrics_port: int | None = 8002
    allow_gpu_metrics: bool = True
    status_page: bool = False
    status_interval_s: float = 5.0
    allow_client_shm: bool = False
    max_client_shm_regions: int = 256
    drain_grace_secs: float = 0.0
    exit_timeout_secs: float = 30.0
    execution_timeout_secs: float = 0.0
    exit_on_error: bool = False
    strict_readiness: bool = True
    model_control_mode: ControlMode = ControlMode.NONE
    repository_poll_secs: float = 15.0
    load_models: tuple[str, ...] = ()
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    server_id: str = "paceline"
    batching: BatchDefaults = field(default_factory=BatchDefaults)
    backend_config: BackendConfig = field(default_factory=BackendConfig)
    auto_complete: bool = True
    model_config_name: str = ""
    model_name: str = ""
    cache_bytes: int = 0
    allow_remote_settings: bool = False
    allow_op_libraries: bool = False
    allow_python_models: bool = False
    trace: TraceConfig = field(default_factory=TraceConfig)
    upstream: UpstreamSettings | None = None
    offline: Offline | None = None
    tls: TlsFiles | None = None
    token_file: Path | None = None
    restrictions: Mapping[str, Restriction] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    connections: Connections = field(default_factory=Connections)
