"""Which package may import which: every import statement is checked against the table of docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

from tests.unit.product_modules import PACKAGES, REPO, modules, tree

# What each package may import besides the standard library and itself: a top-level name, or a module and what it holds.
ALLOWED = {
    "scheduler": set(),
    "protos": {"google.protobuf", "numpy"},
    "backends": {"protos.datatypes", "numpy"},
    "clients": {"protos", "grpc", "numpy", "click", "google.protobuf", "grpc_health"},
    "server": {
        "protos", "scheduler", "backends",
        "grpc", "numpy", "click", "google.protobuf", "grpc_health", "grpc_reflection", "prometheus_client", "uvloop",
    },
}  # fmt: skip

# Single modules that may import more.
EXCEPTIONS = {
    "protos.inference_pb2_grpc": {"grpc"},
    "protos.generate": {"grpc_tools"},
    "backends.onnx.backend": {"onnxruntime"},
    "backends.onnx.device_steps": {"onnxruntime"},
    "backends.onnx.generations": {"scheduler.iterations"},
    "backends.onnx.stepping": {"scheduler.iterations"},
    "backends.onnx.instance": {"onnxruntime"},
    "backends.onnx.providers": {"onnxruntime"},
    "backends.onnx.sessions": {"onnxruntime"},
    "backends.text": {"tokenizers"},
    "clients.load.worker": {"uvloop"},
    "clients.snapshots": {"prometheus_client"},
    "backends.remote": {"grpc", "google.protobuf"},
    "backends.remote_messages": {"protos", "google.protobuf"},
    "server.bulk": {"clients", "pyarrow", "ray", "rich"},  # all of its modules
    "server.check": {"clients"},
    "server.engine": {"clients"},
    "server.models.upstream": {"clients"},
    "server.models.upstream_settings": {"clients"},
    "server.telemetry.status": {"clients"},
    "server.telemetry.spans": {"opentelemetry"},
    "server.tune": {"clients"},
}

# The layers of the server, the lowest first: a module imports only from its own and from those below. Modules outside
# the folders are below all of them, except for `TOP`, which joins the parts.
LAYERS = ("memory", "codec", "telemetry", "models", "requests", "rpc", "fronts")
TOP = {
    "server.app",
    "server.check",
    "server.cli",
    "server.engine",
    "server.engine_settings",
    "server.health",
    "server.model_flags",
    "server.__main__",
}
# They gather the settings of all parts, each of which declares its own.
GATHERERS = {"server.config", "server.flags"}


@cache
def imports(module: str) -> frozenset[str]:
    """The modules that `module` imports anywhere in its text; for `from a import b` that is `a.b` if it is a module."""
    return frozenset(_imports(tree(module)))


def _imports(whole: ast.AST) -> Iterator[str]:
    for node in ast.walk(whole):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("paceline.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            assert node.module is not None
            for alias in node.names:
                module = node.module.removeprefix("paceline.")
                whole = alias.name if module == "paceline" else f"{module}.{alias.name}"
                yield whole if whole in modules() else module


def covers(allowed: str, imported: str) -> bool:
    return imported == allowed or imported.startswith(f"{allowed}.")


def test_modules_are_found_at_all() -> None:
    assert {"server.app", "scheduler.batch_queue", "backends.onnx.backend", "protos.tensors"} <= modules().keys()
    assert "server.app" in imports("server.cli")
    assert "scheduler.policy" in imports("scheduler.batcher")


def package_of(module: str) -> str:
    return module.partition(".")[0]


def strangers(module: str) -> set[str]:
    package = package_of(module)
    folder = module.rpartition(".")[0]
    allowed = ALLOWED[package] | EXCEPTIONS.get(module, set()) | EXCEPTIONS.get(folder, set()) | {package}
    others = {name for name in imports(module) if package_of(name) not in sys.stdlib_module_names}
    return {imported for imported in others if not any(covers(name, imported) for name in allowed)}


def test_each_module_imports_only_what_its_package_may() -> None:
    assert {module: found for module in modules() if (found := strangers(module))} == {}


def test_import_exceptions_are_still_needed() -> None:
    excepted = [(place, name) for place, names in EXCEPTIONS.items() for name in names]
    used = {place: {name for module in modules() if covers(place, module) for name in imports(module)}
            for place in EXCEPTIONS}  # fmt: skip
    assert [one for one in excepted if not any(covers(one[1], imported) for imported in used[one[0]])] == []


def test_no_other_package_imports_server_tests_or_bench() -> None:
    wrong = {package: {"server", "tests", "bench"} - {package} for package in PACKAGES}
    imported = [(module, name) for module in modules() for name in imports(module)]
    assert [(module, name) for module, name in imported if package_of(name) in wrong[package_of(module)]] == []


def test_modules_have_no_import_cycles() -> None:
    graph = {module: {name for name in imports(module) if name in modules()} for module in modules()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def layer(module: str) -> int:
    """The number of the server's layer that `module` is in, counted from the lowest."""
    if module in TOP or module.startswith(("server.bulk", "server.tune")):
        return len(LAYERS)
    folder = module.split(".")[1] if module.count(".") else ""
    return LAYERS.index(folder) if folder in LAYERS else -1


def test_modules_of_the_server_never_import_from_a_layer_above() -> None:
    own = [module for module in modules() if module.startswith("server") and module not in GATHERERS]
    imported = [(module, name) for module in own for name in imports(module) if name.startswith("server.")]
    assert [(module, name) for module, name in imported if layer(name) > layer(module)] == []


def test_each_folder_of_the_server_is_a_layer() -> None:
    assert {path.parent.name for path in (REPO / "server").rglob("*.py")} == {*LAYERS, "bulk", "server", "tune"}


def names(module: str, attribute: str) -> bool:
    """Whether `module` uses `grpc.<attribute>` or imports that name from grpc."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == attribute and ast.unparse(node.value) == "grpc")
        or (isinstance(node, ast.ImportFrom) and node.module == "grpc" and attribute in {a.name for a in node.names})
        for node in ast.walk(tree(module))
    )


def test_only_server_and_clients_use_grpc_status_codes() -> None:
    generated = {"protos.inference_pb2_grpc"}  # its stubs answer UNIMPLEMENTED
    users = {module for module in modules() if names(module, "StatusCode")} - generated
    assert {user.partition(".")[0] for user in users} == {"server", "clients"}


def test_only_commands_and_modules_for_processes_import_signal() -> None:
    own_processes = {
        "backends.python.process",
        "backends.python.worker",
    }  # how a process ended, and killing it; which signals one leaves to the server
    commands = {"server.cli", "server.bulk.foreground", "clients.top"}
    taken_back = {"server.bulk.on_ray"}  # what Ray takes of the command's
    users = {module for module in modules() if "signal" in imports(module)}
    assert users == commands | taken_back | own_processes


def test_modules_share_no_name_with_the_standard_library() -> None:
    own = {path.stem for path in modules().values()} - {"__init__", "__main__"}
    assert not own & sys.stdlib_module_names


def test_a_front_starts_without_runtime_repository_and_batcher() -> None:
    code = "import sys, paceline.server.fronts.process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout
    unwanted = {"onnxruntime", "prometheus_client", "paceline.server.models.model_lookup", "paceline.scheduler.batcher"}
    assert not unwanted & set(loaded.split())
