"""The composition root: builds the parts, starts them in order, stops them in order.

Lives here: which part gets which, and that order. Must not: what any part does. The order is the promise: the gRPC port
opens when every model that is to serve from the start is loaded or has failed; at the end, health says NOT_SERVING
first, accepted requests are answered, and only then is anything taken down.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline.backends import registry
from paceline.backends.base import Backend
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import DeviceError, LoadError
from paceline.backends.model_call import OnCall
from paceline.backends.spec import Tensors
from paceline.scheduler.waiting import SharedQueueLimits
from paceline.server.addresses import host_and_port, reason_of, refuse_unless_free, socket_path
from paceline.server.bounded_pool import BoundedPool
from paceline.server.config import ControlMode, Settings
from paceline.server.errors import StartError
from paceline.server.fronts.pool import FRONT_METRICS, FrontPool, StartFront, start_front
from paceline.server.health import Health, LoopProbe, index_page
from paceline.server.memory.cuda_region import CudaRegions
from paceline.server.memory.regions import Regions
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.layout import Layout, ModelFolder
from paceline.server.models.load_queue import LoadQueue
from paceline.server.models.poller import Poller
from paceline.server.models.repository import Repository
from paceline.server.models.upstream import Upstream
from paceline.server.requests.inference import Inference
from paceline.server.requests.model_calls import ModelCalls
from paceline.server.rpc.calls import HeaderRules
from paceline.server.rpc.listener import Listener, check_access, until_quiet
from paceline.server.rpc.model_rpcs import ModelRpcs
from paceline.server.rpc.service import InferenceService, RpcGroup
from paceline.server.rpc.settings_rpcs import SettingsRpcs
from paceline.server.rpc.shared_memory import SharedMemory
from paceline.server.rpc.streaming import Streaming
from paceline.server.rpc.unary_inference import UnaryInference
from paceline.server.telemetry.generation_metrics import generation_families
from paceline.server.telemetry.gpu_metrics import GpuCollector, open_nvml
from paceline.server.telemetry.metrics import LIMITS, REFUSED_CALLS, Families, LimitShown, Metrics
from paceline.server.telemetry.metrics_endpoint import MetricsEndpoint
from paceline.server.telemetry.status import StatusPage
from paceline.server.telemetry.tracing import Tracer

_log = logging.getLogger("paceline.server")

_MIN_FINAL_STOP_S, _MAX_FINAL_STOP_S = 1.0, 3.0
"""How long gRPC's server may take to stop, at least and at most: when everything is answered or the grace is over,
answers may still be on their way out. gRPC's own stop waits for any client that keeps a connection open and doesn't
react, so it doesn't get the rest of the grace, however long that is."""

_FAILED_START_S = 3.0
"""How long, at most, models that load, warm up or are being closed get when the start has failed."""

_MIN_GRACE_S = 0.5
"""Even without grace, the event loop and a thread need some turns to see that nothing runs and to close the models; on
a machine that is busy otherwise, these take a while."""


def product_version() -> str:
    """The installed version of paceline."""
    try:
        return version("paceline")
    except PackageNotFoundError:
        return "0+unknown"


def _made_once(make: Callable[[str], Backend]) -> Callable[[str], Backend]:
    """`make`, called once per name: all who ask for a name get the same backend, even at the same time, as loads do."""
    made, lock = cache(make), threading.Lock()

    def one(name: str) -> Backend:
        with lock:
            return made(name)

    return one


def _load_defaults(settings: Settings, on_call: OnCall | None) -> LoadDefaults:
    given = settings.backend_config
    rows = LoadDefaults().max_batch_rows if given.max_batch_rows is None else given.max_batch_rows
    return LoadDefaults(
        settings.batching,
        rows,
        given.parameters,
        settings.auto_complete,
        settings.allow_op_libraries,
        int(settings.execution_timeout_secs * 1e9),
        allow_python_models=settings.allow_python_models,
        on_call=on_call,
        keeps_responses=settings.cache_bytes > 0,
        offline=settings.offline,
    )


class Server:
    """One server: models, gRPC port, metrics port. `start` and `stop` must run on the same event loop.

    `load` opens a shared library by name; it opens CUDA's driver for clients' memory on GPUs. `start_front` starts the
    processes that speak gRPC, if there are any.
    """

    def __init__(
        self,
        settings: Settings,
        backend_of: Callable[[str], Backend] | None = None,
        load: Callable[[str], object] = ctypes.CDLL,
        start_front: StartFront = start_front,
    ) -> None:
        self._settings = settings
        self._start_front = start_front
        self._metrics = Metrics()
        limits, self._regions = settings.limits, None
        if settings.allow_client_shm:
            self._regions = Regions(settings.max_client_shm_regions, limits.message_bytes, limits.request_elements)
        self._tracer = Tracer(settings.trace)
        self._shared_limits = SharedQueueLimits(limits.queued_requests, limits.queued_bytes)
        self._response_pool = BoundedPool[Tensors](settings.cache_bytes) if settings.cache_bytes else None
        loads = LoadQueue(
            backend_of or _made_once(partial(registry.backend, shared_threads=settings.backend_config.shared_threads)),
            _load_defaults(settings, lambda call: self._calls.take(call)),
            threads=settings.model_load_thread_count,
            retries=settings.model_load_retry_count,
            give_way=lambda: self._grpc.give_way(),
        )
        self.repository = Repository(
            self._metrics,
            loads,
            strict_readiness=settings.strict_readiness,
            regions=self._regions,
            tracer=self._tracer,
            max_models=limits.models,
            shared_limits=self._shared_limits,
            response_pool=self._response_pool,
        )
        self._layout = Layout(settings.paths, settings.model_config_name, settings.model_name)
        if settings.model_control_mode is ControlMode.EXPLICIT:
            self.repository.find_needed = lambda name: lambda: self._layout.find(name)
        self.poller = Poller(self._layout, self.repository, settings.repository_poll_secs)
        self._polling: asyncio.Task[None] | None = None
        self._upstream = Upstream(settings.upstream, self.repository, settings.batching) if settings.upstream else None
        self.inference = Inference(self.repository, self._tracer)
        self._calls = ModelCalls(self.repository, self.inference)
        self._cuda = CudaRegions(load)
        self._shared_memory = SharedMemory(self._regions, partial(count_gpus, load), self._cuda)
        rules = HeaderRules.of(settings)
        self._streaming = Streaming(self.inference, settings.grpc_max_stream_requests, rules)
        self._settings_rpcs = SettingsRpcs(self.repository, self._tracer, settings.allow_remote_settings)
        groups: list[RpcGroup] = [
            ModelRpcs(self.repository, self._layout, settings.model_control_mode),
            self._shared_memory,
            self._settings_rpcs,
            UnaryInference(self.inference, rules),
            self._streaming,
        ]
        self._service = InferenceService(
            self.inference, self.repository, settings.server_id, product_version(), groups, limits.request_elements
        )
        self._endpoint: MetricsEndpoint | None = None
        self._threads = AsyncExitStack()
        """Ends what runs on threads of its own, the last to start first."""
        self._threads.push_async_callback(asyncio.to_thread, self._tracer.close)
        self._grpc: FrontPool | Listener = self._fronts() or Listener(
            settings, self._service.add_to, self._streaming.close
        )
        self._health = Health(self.repository, self._cuda, self._metrics, self._grpc)
        self._show_limits()
        self.grpc_port = 0

    @property
    def metrics_port(self) -> int | None:
        """The port that metrics are on; None if they are off."""
        return self._endpoint.port if self._endpoint else None

    async def start(self) -> None:
        """Load the models and accept requests. Raises StartError; then nothing is left running."""
        try:
            # What is wrong in the settings is told whether or not a port is free.
            check_access(self._settings)
            if self._upstream is None:
                self._layout.open(may_be_empty=self._settings.model_control_mode is not ControlMode.NONE)
            self._open_metrics()
            refuse_unless_free(self._settings.grpc_address, self._settings.grpc_port, self._settings.grpc_socket_mode)
            self._tracer.start()
            await self._show_gpus()
            await self._shared_memory.look_for_gpus()
            await self.load()
            self.judge_loads()
            self.inference.serving = self.inference.ready = True
            self._health.admit()
            self.grpc_port = await self._grpc.open(self._settings.grpc_port)
        except BaseException:
            self.inference.serving = self.inference.ready = False
            self._health.close()
            # Nobody has been promised an answer. A cancellation meanwhile cuts this short; the first error is raised.
            with suppress(asyncio.CancelledError):
                await self._stop_models(min(self._settings.exit_timeout_secs, _FAILED_START_S))
            await self._stop_all()
            raise
        metrics = f", metrics on port {self.metrics_port}" if self._endpoint else ""
        self._health.open(f"gRPC on {host_and_port(self._settings.grpc_address, self.grpc_port)}{metrics}")
        if self._settings.model_control_mode is ControlMode.POLL:
            self._polling = asyncio.create_task(self.poller.run())

    async def unload(self, grace_s: float) -> bool:
        """After `load` alone: release the models. False if that takes longer than `grace_s`, or something hangs."""
        in_time = await self._stop_models(grace_s)
        await self._stop_all()
        return in_time and not self.repository.hangs

    async def stop(self, grace_s: float | None = None) -> bool:
        """Report not ready, and after the configured grace for load balancers accept nothing more. Then answer what was
        accepted within `grace_s`, by default the configured time, and take everything down.

        False if executions ran longer than that or hang, or a model is being loaded; those threads run on until the
        process ends.
        """
        self.inference.ready = False
        self._health.close()
        # Those who watch readiness may need this time until they have stopped sending.
        if (pause_s := self._settings.drain_grace_secs) > 0:
            _log.info("shutting down: reporting not ready, still accepting requests for %g s", pause_s)
            await asyncio.sleep(pause_s)
        grace_s = self._settings.exit_timeout_secs if grace_s is None else grace_s
        began = time.monotonic()
        _log.info("stopping: accepted requests have up to %g s to finish", grace_s)
        for model in self.repository.models:
            model.batcher.take_announced()
        self.inference.serving = False
        if self._polling is not None:
            self._polling.cancel()
        if self._upstream is not None:
            self._upstream.stop()
        self._grpc.announce_end()
        leaving = asyncio.get_running_loop().create_task(self._leave())
        in_time = await self._stop_models(grace_s)
        await leaving
        left_s = grace_s - (time.monotonic() - began)
        await self._stop_all(min(max(_MIN_FINAL_STOP_S, left_s), _MAX_FINAL_STOP_S))
        _log.info("stopped after %.1f s", time.monotonic() - began)
        return in_time and not self.repository.hangs

    async def _stop_models(self, grace_s: float) -> bool:
        """False if executions, or the release of models, take longer than `grace_s`."""
        try:
            await asyncio.wait_for(self.repository.stop(), max(grace_s, _MIN_GRACE_S))
        except TimeoutError:
            _log.warning("gave up waiting after %g s for models that still execute, load or are being closed", grace_s)
            return False
        return True

    async def _leave(self) -> None:
        """Refuse what still arrives for a moment, then have clients go elsewhere; accepted requests go on. Fronts wait
        for that moment themselves: this process doesn't know what has reached them."""
        if self._settings.frontends == 1:
            self.inference.serving = self.inference.ready = False
            await until_quiet(lambda: self.inference.refused)
        self._grpc.leave()

    def _fronts(self) -> FrontPool | None:
        """The processes that speak gRPC, if it isn't this one."""
        if self._settings.frontends == 1:
            return None
        fronts = FrontPool(self._settings, self.inference, self.repository, self._service.handlers(), self._start_front)
        self._metrics.add_collector(Families(FRONT_METRICS, lambda: [({}, fronts)]))
        self._settings_rpcs.on_log_change = fronts.tell_log_settings
        return fronts

    def _show_limits(self) -> None:
        settings, limits, regions = self._settings, self._settings.limits, self._regions
        limits_shown = {
            "message_bytes": LimitShown(lambda: limits.message_bytes),
            "metadata_bytes": LimitShown(lambda: limits.metadata_bytes),
            "request_elements": LimitShown(lambda: limits.request_elements),
            "connections": LimitShown(lambda: min(limits.connections, self._grpc.usage.max_connections)),
            "connection_calls": LimitShown(lambda: limits.connection_calls),
            "rpcs": LimitShown(lambda: limits.rpcs, lambda: self._grpc.usage.rpcs),
            "streams": LimitShown(lambda: limits.streams, lambda: self._grpc.usage.streams),
            "stream_requests": LimitShown(lambda: settings.grpc_max_stream_requests),
            "queued_requests": LimitShown(lambda: limits.queued_requests, lambda: self._shared_limits.requests),
            "queued_bytes": LimitShown(lambda: limits.queued_bytes, lambda: self._shared_limits.size_bytes),
            "client_shm_regions": LimitShown(
                lambda: settings.max_client_shm_regions,
                lambda: regions.registered if regions else 0,
                lambda: regions.refused if regions else 0,
            ),
            "models": LimitShown(
                lambda: limits.models, lambda: self.repository.places, lambda: self.repository.refused_loads
            ),
        }
        if (pool := self._response_pool) is not None:
            limits_shown["response_cache_bytes"] = LimitShown(lambda: pool.max_bytes, lambda: pool.used_bytes)
        shown = [({"limit": name}, one) for name, one in limits_shown.items()]
        self._metrics.add_collector(Families(LIMITS, lambda: shown))
        self._metrics.add_collector(generation_families(self._metrics))
        self._metrics.add_collector(Families([REFUSED_CALLS], lambda: [({}, self._grpc.usage.refused_by_reason)]))

    def _open_metrics(self) -> None:
        settings = self._settings
        if settings.metrics_port is None:
            return
        # Who asks for a Unix socket wants nobody from elsewhere.
        of_grpc = settings.grpc_address if socket_path(settings.grpc_address) is None else "127.0.0.1"
        address = settings.metrics_address or of_grpc
        title, more = f"{settings.server_id} {product_version()}", dict[str, str]()
        index = LoopProbe(asyncio.get_running_loop(), lambda: index_page(title, self.repository.index(), more))
        pages: dict[str, Callable[[], str]] = {"/": index}
        switched_off = {"/status": "this page is off: --status-page true switches it on"}
        status = StatusPage(self._metrics, title, settings.status_interval_s) if settings.status_page else None
        if status is not None:
            pages["/status"], more["/status"] = status.text, "what the server has done in the last minutes"
        try:
            self._endpoint = MetricsEndpoint(
                self._metrics, address, settings.metrics_port, self._health.probes(), pages, switched_off
            )
        except OSError as error:
            where = host_and_port(address, settings.metrics_port)
            raise StartError(f"metrics can't listen on {where}: {reason_of(error)}") from None
        if status is not None:
            status.start()
            self._threads.push_async_callback(asyncio.to_thread, status.close)
        self._threads.push_async_callback(asyncio.to_thread, self._endpoint.close)

    async def _show_gpus(self) -> None:
        """Add metrics of GPUs; on a thread, since finding them takes up to a second."""
        if self._endpoint is None or not self._settings.allow_gpu_metrics:
            return
        try:
            self._metrics.add_collector(await asyncio.to_thread(lambda: GpuCollector(open_nvml())))
        except DeviceError as error:
            _log.debug("no GPU metrics: %s", error)

    async def load(self) -> None:
        """Load the models that are to serve from the start, without accepting requests: the repository then knows which
        failed and why. Raises StartError if there is nothing to load from."""
        self._calls.start()
        if self._upstream is not None:
            await self._upstream.start()
            return
        given, mode = self._settings.backend_config, self._settings.model_control_mode
        try:
            if given.shared_threads:
                registry.share_threads(given.intra_op_threads, given.inter_op_threads)
        except LoadError as error:
            raise StartError(f"--backend-config onnxruntime,enable-global-threadpool: {error}") from None
        self._layout.open(may_be_empty=mode is not ControlMode.NONE)
        try:
            if mode is ControlMode.POLL:
                await self.poller.start()
            else:
                folders = self._layout.models()
                self.repository.take_note(folders)
                await self.repository.load_all(self._wanted(folders))
        except OSError as error:
            raise StartError(f"{error.filename}: {error.strerror}") from None

    def judge_loads(self) -> None:
        """Raise StartError if a failure is to end the start; log what else has failed."""
        if self._upstream is not None:
            return
        failures = [f"model '{name}': {reason}" for name, reason in self.repository.failures.items()]
        none_serves = self._settings.model_control_mode is ControlMode.NONE and not self.repository.models
        if failures and (self._settings.exit_on_error or none_serves):
            raise StartError(f"failed to load {'; '.join(failures)}")
        if self._response_pool is not None and not any(model.responses for model in self.repository.models):
            _log.warning("--cache-config has no effect: no model has response_cache { enable: true }")
        for failure in failures:
            _log.error("failed to load %s; the other models are served", failure)

    def _wanted(self, folders: Sequence[ModelFolder]) -> Sequence[ModelFolder]:
        """All, or in mode EXPLICIT those whose names were given."""
        names = self._settings.load_models
        if self._settings.model_control_mode is ControlMode.NONE or names == ("*",):
            return folders
        there = {folder.name: folder for folder in folders}
        absent = f"no model of that name in {self._layout}"
        return [there.get(name) or ModelFolder(name, Path(name), {}, problem=absent) for name in dict.fromkeys(names)]

    async def _stop_all(self, grace_s: float = _MIN_FINAL_STOP_S) -> None:
        self.repository.abandon()
        await self._grpc.stop(grace_s)
        if self._upstream is not None:
            await self._upstream.close()
        if self._regions is not None:
            self._regions.clear()
        await self._threads.aclose()
