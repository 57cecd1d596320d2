"""What a model's configuration asks of ONNX Runtime, as values.

Lives here: reading `parameters` and the graph level, with the names and meanings of Triton's backend
(github.com/triton-inference-server/onnxruntime_backend). Must not: execution accelerators (`provider_options`), or
onnxruntime; `sessions` turns the values into its objects. Parameters with other names belong to others and are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from paceline.backends.base import ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.onnx.provider_options import (
    ARENA_GROWTH,
    CONV_SEARCH,
    cuda_options,
    openvino_options,
    tensorrt_options,
)

CACHE_DIRECTORY = "paceline.cache_directory"
"""The parameter that a server flag sets; configurations may not."""
OWN_PROCESS = "paceline.own_process"
"""The parameter that makes each instance execute in a process of its own."""
_CUDA_GRAPHS = "enable_cuda_graph"


T = TypeVar("T")


class GraphLevel(Enum):
    """How far ONNX Runtime rewrites the graph; the values are its own names."""

    NONE = "ORT_DISABLE_ALL"
    BASIC = "ORT_ENABLE_BASIC"
    EXTENDED = "ORT_ENABLE_EXTENDED"
    ALL = "ORT_ENABLE_ALL"


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """Options of one model's sessions. Thread counts of 0 leave the number to ONNX Runtime.

    `session_entries` and `shrink_arenas` are its configuration strings, `cuda` the options of its CUDA provider.
    `shared_threads`: compute on the pool that all sessions share, whatever the thread counts. `tensorrt` and `openvino`
    are the options of the providers that execution accelerators ask for, None if none does; TensorRT caches its engines
    below `cache_directory`, for batches of up to `largest_rows` rows (0: not known). `op_libraries` have custom
    operators. `own_process`: each instance is in a process of its own.
    """

    graph_level: GraphLevel = GraphLevel.ALL
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    parallel: bool = False
    cpu_mem_arena: bool = True
    mem_pattern: bool = True
    session_entries: Mapping[str, str] = field(default_factory=dict)
    shrink_arenas: tuple[str, ...] = ()
    cuda: Mapping[str, str] = field(default_factory=dict)
    shared_threads: bool = False
    op_libraries: tuple[Path, ...] = ()
    tensorrt: Mapping[str, str] | None = None
    openvino: Mapping[str, str] | None = None
    cache_directory: str = ""
    largest_rows: int = 0
    own_process: bool = False

    @property
    def cuda_graphs(self) -> bool:
        """Whether the CUDA provider is to capture graphs."""
        return self.cuda.get(_CUDA_GRAPHS) == "1"


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """What a configuration says of a decoder: whether it is to generate, how many generations have a place at a time,
    how much memory their keys and values may take, and how many tokens of prompts are computed between two steps of
    the others."""

    generates: bool = True
    most_generations: int = 32
    most_cache_bytes: int = 2**30
    prefill_tokens: int = 256


def without_graphs(options: OnnxOptions) -> OnnxOptions:
    """`options` for a model that can't be captured."""
    return replace(options, cuda={key: value for key, value in options.cuda.items() if key != _CUDA_GRAPHS})


# Triton's numbers, which are not ONNX Runtime's: 0 is "not given" there.
_GRAPH_LEVELS = {-1: GraphLevel.BASIC, 0: GraphLevel.ALL, 1: GraphLevel.EXTENDED, 2: GraphLevel.NONE}
_SWITCH = {"0": False, "1": True, "false": False, "true": True}
_BITS = {name: str(int(on)) for name, on in _SWITCH.items()}
_ARENA = re.compile(r"cpu:0|gpu:\d+")

_MAX_THREADS = 1_024
"""More than machines have cores, and few enough to start: sessions create them all at once."""
_MAX_GENERATIONS = 1_024
_MAX_BYTES = (1 << 64) - 1
_MAX_DIGITS = 40

_DEVICE_INITIALIZERS = "session.use_device_allocator_for_initializers"
_ALLOW_SPINNING = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")
"""Whether idle threads wait for work by spinning. These names are ONNX Runtime's; Triton's backend has none."""
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"


def parse_options(source: ModelSource) -> OnnxOptions:
    """Options of `source`; LoadError naming the model, the parameter, what was expected and what came."""
    read = _Parameters(source)
    cpu_mem_arena = read.choice("enable_mem_arena", _SWITCH) is not False
    intra_op_threads = read.integer("intra_op_thread_count", 0, _MAX_THREADS) or 0
    level = 0 if source.graph_level is None else source.graph_level
    if level not in _GRAPH_LEVELS:
        raise LoadError(f"model '{source.name}': optimization graph level: expected one of -1, 0, 1, 2, got {level}")
    return OnnxOptions(
        graph_level=_GRAPH_LEVELS[level],
        intra_op_threads=intra_op_threads,
        inter_op_threads=read.integer("inter_op_thread_count", 0, _MAX_THREADS) or 0,
        parallel=read.choice("execution_mode", {"0": False, "1": True}) or False,
        cpu_mem_arena=cpu_mem_arena,
        mem_pattern=read.choice("enable_mem_pattern", _SWITCH) is not False,
        session_entries=_given({name: read.choice(name, _BITS) for name in (_DEVICE_INITIALIZERS, *_ALLOW_SPINNING)}),
        shrink_arenas=_shrink_arenas(read, cpu_mem_arena),
        cuda=_cuda(source, read),
        op_libraries=source.op_libraries,
        tensorrt=tensorrt_options(source),
        openvino=openvino_options(source, intra_op_threads),
        cache_directory=source.parameters.get(CACHE_DIRECTORY, ""),
        largest_rows=source.largest_rows,
        own_process=read.choice(OWN_PROCESS, _SWITCH) or False,
    )


def decoder_settings(source: ModelSource) -> DecoderSettings:
    """Raises LoadError as `parse_options`."""
    read, own = _Parameters(source), DecoderSettings()
    return DecoderSettings(
        read.choice("paceline.generate", {"auto": True, "off": False}) is not False,
        read.integer("paceline.max_generations", 1, _MAX_GENERATIONS) or own.most_generations,
        read.integer("paceline.max_cache_bytes", 1, _MAX_BYTES) or own.most_cache_bytes,
        read.integer("paceline.prefill_tokens", 1, _MAX_BYTES) or own.prefill_tokens,
    )


class _Parameters:
    """A model's parameters, read with errors that say where they came from."""

    def __init__(self, source: ModelSource) -> None:
        self._model = source.name
        self._values = source.parameters

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        return None if value is None else value.strip()

    def integer(self, key: str, minimum: int, maximum: int) -> int | None:
        value = self.text(key)
        if value is None:
            return None
        # isdecimal refuses what int() accepts: signs, underscores, blanks. int() itself refuses thousands of digits.
        decimal = value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS
        if not (decimal and minimum <= int(value) <= maximum):
            raise self.refused(key, f"an integer from {minimum} to {maximum}")
        return int(value)

    def choice(self, key: str, choices: Mapping[str, T]) -> T | None:
        value = self.text(key)
        if value is None:
            return None
        if value.lower() not in choices:
            raise self.refused(key, f"one of {', '.join(choices)}")
        return choices[value.lower()]

    def refused(self, key: str, expected: str) -> LoadError:
        return LoadError(f"model '{self._model}': parameter '{key}': expected {expected}, got '{self._values[key]}'")


def _shrink_arenas(read: _Parameters, cpu_mem_arena: bool) -> tuple[str, ...]:
    value = read.text(_SHRINKAGE)
    if value is None:
        return ()
    arenas = tuple(value.split(";"))
    if not all(_ARENA.fullmatch(arena) for arena in arenas):
        raise read.refused(_SHRINKAGE, "devices such as cpu:0;gpu:0")
    if "cpu:0" in arenas and not cpu_mem_arena:
        raise read.refused(_SHRINKAGE, "no cpu:0 where enable_mem_arena is 0")
    return arenas


def _cuda(source: ModelSource, read: _Parameters) -> dict[str, str]:
    """Options of the CUDA provider: our default, then the parameters, then what the accelerator `cuda` says."""
    gpu_mem_limit_bytes = read.integer("gpu_mem_limit", 1, _MAX_BYTES)
    given = {
        # ONNX Runtime's own default, EXHAUSTIVE, takes hundreds of milliseconds for each new input shape: it measures
        # every algorithm, or with cuDNN 9 queries its slower heuristics. Behind a batcher every batch size is a new
        # shape.
        "cudnn_conv_algo_search": read.choice("cudnn_conv_algo_search", CONV_SEARCH) or "HEURISTIC",
        "gpu_mem_limit": None if gpu_mem_limit_bytes is None else str(gpu_mem_limit_bytes),
        "arena_extend_strategy": read.choice("arena_extend_strategy", ARENA_GROWTH),
        _CUDA_GRAPHS: "1" if source.cuda_graphs else None,
        "do_copy_in_default_stream": read.choice("do_copy_in_default_stream", _BITS),
    }
    return _given(given) | cuda_options(source)


def _given(values: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in values.items() if value is not None}
