"""Log and trace settings, and clients' shared memory."""

from __future__ import annotations

import secrets

from paceline.protos import inference_pb2 as pb
from tests.differential.comparing import Call
from tests.differential.messages import floats, infer, logs, of_input, raw, traces, wanting

__all__ = ["CALLS", "KEYS", "KEY_BYTES"]

KEY, OTHER, THIRD = KEYS = [f"/paceline-test-{secrets.token_hex(6)}" for _ in range(3)]
"""Keys of the objects that have to exist while these calls are made, of KEY_BYTES each."""
PAGE = 4096
KEY_BYTES = 2 * PAGE

FORMAT = ("log_format",)
"""Not the default: tests start this server with another format."""
TRACE_RULES = "trace settings that make no sense"
KEY_RULES = "a shared memory key that"
LOGS = [
    Call("log settings", logs(), free=FORMAT),
    Call("log_verbose_level", logs(log_verbose_level=0), free=FORMAT),
    Call("log_info", logs(log_info=True), free=FORMAT),
    Call("log_warning", logs(log_warning=True), free=FORMAT),
    Call("log_error", logs(log_error=True), free=FORMAT),
    Call("log_format", logs(log_format="ISO8601")),
    Call("log_format back", logs(log_format="default")),
    Call("log_format of nobody", logs(log_format="xml"), "INVALID_ARGUMENT"),
    Call("log_info as text", logs(log_info="yes"), "INVALID_ARGUMENT"),
    Call("log_info as number", logs(log_info=1), "INVALID_ARGUMENT"),
    Call("log_verbose_level as text", logs(log_verbose_level="1"), "INVALID_ARGUMENT"),
    Call("log_file", logs(log_file="/tmp/x"), "UNIMPLEMENTED"),
    Call("log setting of nobody", logs(mine=True), "OK", "INVALID_ARGUMENT", "a setting of nobody"),
    Call("log settings as before", logs()),
]

TRACES = [
    Call("trace settings", traces()),
    Call("trace settings of a model", traces("pair")),
    Call("trace settings of nobody", traces("nobody"), "INVALID_ARGUMENT"),
    Call("trace settings of what didn't load", traces("broken"), "INVALID_ARGUMENT", "OK", "trace settings of a model"),
    Call("trace_rate", traces(trace_rate=["5"])),
    Call("trace_rate of a model", traces("pair", trace_rate=["7"])),
    Call("trace_rate of all when a model has its own", traces(trace_rate=["9"])),
    Call("that model's", traces("pair")),
    Call("trace_rate of a model left to all", traces("pair", trace_rate=[])),
    Call("trace_rate left to the start", traces(trace_rate=[])),
    Call("trace_count", traces(trace_count=["3"])),
    Call("trace_count without bound", traces(trace_count=["-1"])),
    Call("trace_count below that", traces(trace_count=["-2"]), "INVALID_ARGUMENT"),
    Call("log_frequency", traces(log_frequency=["3"])),
    Call("log_frequency back", traces(log_frequency=[])),
    Call("trace_rate as a word", traces(trace_rate=["x"]), "INVALID_ARGUMENT"),
    Call("trace_rate and more", traces(trace_rate=["5x"]), "OK", "INVALID_ARGUMENT", TRACE_RULES),
    Call("trace_rate of 0", traces(trace_rate=["0"]), "OK", "INVALID_ARGUMENT", TRACE_RULES),
    Call("trace_rate of -1", traces(trace_rate=["-1"]), "OK", "INVALID_ARGUMENT", TRACE_RULES),
    Call("trace_rate as before", traces(trace_rate=[])),
    Call("two trace_rates", traces(trace_rate=["1", "2"]), "INVALID_ARGUMENT"),
    Call(
        "trace_level", traces(trace_level=["TIMESTAMPS"]), "INVALID_ARGUMENT", "UNIMPLEMENTED", "tracing where no file"
    ),
    Call("trace_level off", traces(trace_level=["OFF"])),
    Call("trace_level left to the start", traces(trace_level=[])),
    Call("trace_level of nobody", traces(trace_level=["ALL"]), "OK", "INVALID_ARGUMENT", TRACE_RULES),
    Call("trace_level in small letters", traces(trace_level=["timestamps"]), "OK", "INVALID_ARGUMENT", TRACE_RULES),
    Call("trace_level off and on", traces(trace_level=["OFF", "TIMESTAMPS"]), "INVALID_ARGUMENT"),
    Call(
        "trace_level TENSORS",
        traces(trace_level=["TENSORS"]),
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "tracing where no file",
    ),
    Call("trace_level off after that", traces(trace_level=["OFF"])),
    Call("trace_file", traces(trace_file=["/tmp/x"]), "UNIMPLEMENTED"),
    Call("trace_mode", traces(trace_mode=["opentelemetry"]), "OK", "UNIMPLEMENTED", "`trace_mode` changed"),
    Call("trace setting of nobody", traces(mine=["1"]), "OK", "INVALID_ARGUMENT", "a setting of nobody"),
    Call("one good and one bad", traces(trace_rate=["11"], trace_count=["x"]), "INVALID_ARGUMENT"),
    Call("trace settings as before", traces()),
]


def register(name: str, key: str = KEY, offset: int = 0, size: int = 64) -> pb.SystemSharedMemoryRegisterRequest:
    return pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)


def unregister(name: str = "") -> pb.SystemSharedMemoryUnregisterRequest:
    return pb.SystemSharedMemoryUnregisterRequest(name=name)


def status(name: str = "") -> pb.SystemSharedMemoryStatusRequest:
    return pb.SystemSharedMemoryStatusRequest(name=name)


def in_shared_memory(region: object = "a", size: object = 12, **more: object) -> pb.ModelInferRequest:
    """A request whose input, FP32 [1, 3], is in shared memory."""
    request = raw("free", ("INPUT0", "FP32", [1, 3], None))
    return of_input(request, shared_memory_region=region, shared_memory_byte_size=size, **more)


def put(region: object = "b", size: object = 12, **more: object) -> pb.ModelInferRequest:
    """The same tensor in the message; its output belongs in shared memory."""
    request = infer("free", {"INPUT0": floats(1, 3)})
    return wanting(request, "OUTPUT0", shared_memory_region=region, shared_memory_byte_size=size, **more)


OFFSET = "shared_memory_offset"
PARAMETERS = ("parameters",)
MEMORY = [
    Call("status of no regions", status()),
    Call("register", register("a")),
    Call("register more", register("b", OTHER, offset=PAGE)),
    Call("status", status()),
    Call("status of one", status("b")),
    Call("status of nobody", status("nobody"), "NOT_FOUND",
         phrase="Unable to find system shared memory region: 'nobody'"),
    Call("register again", register("a"), "ALREADY_EXISTS", phrase="already in manager"),
    Call("register at an offset within a page", register("c", THIRD, offset=64), "INVALID_ARGUMENT", "OK",
         "a region at an offset"),
    Call("unregister of that", unregister("c")),
    Call("register of the same key", register("c"), "INTERNAL", "OK", "two regions of one"),
    Call("unregister of the same key", unregister("c")),
    Call("register of no object", register("c", "/paceline-nobody"), "INTERNAL", "INVALID_ARGUMENT", KEY_RULES,
         "Unable to open shared memory region"),
    Call("register of no key", register("c", ""), "INTERNAL", "INVALID_ARGUMENT", KEY_RULES),
    Call("register of a slash", register("c", "/"), "INTERNAL", "INVALID_ARGUMENT", KEY_RULES),
    Call("register of two slashes", register("c", f"/{THIRD}"), "OK", "INVALID_ARGUMENT", "a shared memory key of"),
    Call("unregister of two slashes", unregister("c")),
    Call("register of a reserved key", register("c", "/triton_python_backend_shm_region_x"),
         "INTERNAL", "INVALID_ARGUMENT", KEY_RULES),
    Call("register beyond the object", register("c", THIRD, size=KEY_BYTES + 1), "INVALID_ARGUMENT"),
    Call("register beyond the object by offset", register("c", THIRD, offset=KEY_BYTES, size=1), "INVALID_ARGUMENT"),
    Call("register of no bytes", register("c", THIRD, size=0), "INVALID_ARGUMENT"),
    Call("register of too large numbers", register("c", THIRD, offset=2**63, size=2**63), "INVALID_ARGUMENT"),
    Call("status after all that", status()),
    Call("input in a region", in_shared_memory()),
    Call("input in a region at an offset", in_shared_memory(shared_memory_offset=52)),
    Call("input partly beyond its region", in_shared_memory(shared_memory_offset=53), "INVALID_ARGUMENT",
         phrase="Invalid offset + byte size"),
    Call("input beyond its region", in_shared_memory(shared_memory_offset=64), "INVALID_ARGUMENT"),
    Call("input at an offset below 0", in_shared_memory(shared_memory_offset=-1), "INVALID_ARGUMENT"),
    Call("input larger than its region", in_shared_memory(size=65), "INVALID_ARGUMENT"),
    Call("input of too few bytes", in_shared_memory(size=8), "INVALID_ARGUMENT", phrase="INPUT0"),
    Call("input of too many bytes", in_shared_memory(size=16), "INVALID_ARGUMENT", phrase="INPUT0"),
    Call("input of -1 bytes", in_shared_memory(size=-1), "INVALID_ARGUMENT"),
    Call("input in a region of nobody", in_shared_memory("nobody"), "NOT_FOUND",
         phrase="Unable to find shared memory region: 'nobody'"),
    Call("input, region as number", in_shared_memory(7), "INVALID_ARGUMENT", phrase="shared_memory_region"),
    Call("input, size as text", in_shared_memory(size="12"), "INVALID_ARGUMENT", phrase="shared_memory_byte_size"),
    Call("input, offset unsigned", in_shared_memory(shared_memory_offset=pb.InferParameter(uint64_param=0)),
         "INVALID_ARGUMENT", "OK", "`uint64_param`"),
    Call("input, offset as text", in_shared_memory(shared_memory_offset="0"), "INVALID_ARGUMENT", phrase=OFFSET),
    Call("input in a region without a size",
         of_input(raw("free", ("INPUT0", "FP32", [1, 3], None)), shared_memory_region="a"),
         "INVALID_ARGUMENT", phrase="shared_memory_byte_size"),
    Call("offset without a region", of_input(infer("free", {"INPUT0": floats(1, 3)}), shared_memory_offset=1),
         "INVALID_ARGUMENT", phrase=OFFSET),
    Call("size without a region", of_input(infer("free", {"INPUT0": floats(1, 3)}), shared_memory_byte_size=12),
         "INVALID_ARGUMENT"),
    Call("input in a region and in the message",
         of_input(infer("free", {"INPUT0": floats(1, 3)}), shared_memory_region="a",
         shared_memory_byte_size=12), "OK", "INVALID_ARGUMENT", "raw contents beyond"),
    Call("output in a region", put(), row="an output in shared memory", free=PARAMETERS),
    Call("output in a region at an offset", put(shared_memory_offset=4), row="an output in shared memory",
         free=PARAMETERS),
    Call("output in a larger place", put(size=64), row="an output in shared memory", free=PARAMETERS),
    Call("output in a smaller place", put(size=8), "INTERNAL", "INVALID_ARGUMENT", "an output larger"),
    Call("output beyond its region", put(shared_memory_offset=60), "OK", "INVALID_ARGUMENT",
         "an output beyond its region"),
    Call("output in a region of nobody", put("nobody"), "NOT_FOUND",
         phrase="Unable to find shared memory region: 'nobody'"),
    Call("output in a region and classified", put(classification=1), "INVALID_ARGUMENT"),
    Call("unregister", unregister("a")),
    Call("input in what was unregistered", in_shared_memory(), "NOT_FOUND"),
    Call("unregister again", unregister("a")),
    Call("unregister nobody", unregister("nobody")),
    Call("status after that", status()),
    Call("register without a name", register("", THIRD), "OK", "INVALID_ARGUMENT", "a region without a name"),
    Call("unregister all", unregister()),
    Call("status after all", status()),
    Call("cuda status", pb.CudaSharedMemoryStatusRequest()),
    Call("cuda status of nobody", pb.CudaSharedMemoryStatusRequest(name="nobody"), "NOT_FOUND"),
    Call("cuda register", pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=b"x" * 64, device_id=0, byte_size=64),
         "INVALID_ARGUMENT", "UNIMPLEMENTED", "CUDA shared memory without a GPU"),
    Call("register again after all", register("a")),
    Call("cuda unregister of what isn't of cuda", pb.CudaSharedMemoryUnregisterRequest(name="a"), "OK", "NOT_FOUND",
         "a region of the other kind"),
    Call("status of what is still there", status()),
    Call("unregister that", unregister("a")),
    Call("cuda unregister all", pb.CudaSharedMemoryUnregisterRequest()),
]  # fmt: skip

CALLS = [*LOGS, *TRACES, *MEMORY]
