"""Models without a server: sessions of ONNX Runtime, on a CPU or on a GPU.

Lives here: opening one, and how a server is told the same device. Must not: run it, or use the product, except to find
CUDA's libraries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench.load import BenchError

__all__ = ["instance_group", "open_session"]


def open_session(file: Path, device: str = "cpu", threads: int = 1, *, graphs: bool = False) -> ort.InferenceSession:
    """`device`: "cpu" or "cuda", there with the product's own options: the convolutions' algorithm by HEURISTIC.
    `threads`: 0 for as many as cores. `graphs`: runs after the first are replays of a CUDA graph, so tensors have to
    stay where they are. Libraries beside the file have operators that it may need. Raises BenchError if the GPU can't
    be used."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    for library in file.parent.glob("*.so"):
        options.register_custom_ops_library(str(library))
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        from paceline.backends.onnx.sessions import prepare_cuda

        prepare_cuda()
        settings = {"cudnn_conv_algo_search": "HEURISTIC", "device_id": "0", "enable_cuda_graph": str(int(graphs))}
        providers.insert(0, ("CUDAExecutionProvider", settings))
    session = ort.InferenceSession(str(file), options, providers=providers, enable_fallback=0)
    if device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise BenchError("onnxruntime couldn't use the GPU")
    return session


def instance_group(device: str) -> str:
    """One instance on that device, for a model's config.pbtxt."""
    return f"instance_group {{ kind: {'KIND_CPU' if device == 'cpu' else 'KIND_GPU'} count: 1 }}"
