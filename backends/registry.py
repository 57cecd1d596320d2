"""Which backend a configuration means.

Lives here: the names. Must not: work at import; a runtime is imported when a model first asks for it.
"""

from __future__ import annotations

from backends.base import Backend
from backends.errors import LoadError

__all__ = ["BACKENDS", "backend"]

BACKENDS = ("identity", "onnxruntime")
"""The backends of this build, by the names that `backend` in a `config.pbtxt` knows."""

_ONNX = {"onnxruntime", "onnxruntime_onnx"}


def backend(name: str) -> Backend:
    """A new backend for `name`, a configuration's `backend` or its `platform`; LoadError if there is none."""
    if name in _ONNX:
        from backends.onnx import OnnxBackend

        return OnnxBackend()
    if name == "identity":
        from backends.memory import IdentityBackend

        return IdentityBackend()
    raise LoadError(f"backend: expected one of {', '.join(BACKENDS)}, got '{name}', which this build doesn't have")
