"""Which backend a configuration means.

Lives here: the names. Must not: work at import; a runtime is imported when a model first needs it.
"""

from __future__ import annotations

from paceline.backends.base import Backend
from paceline.backends.errors import LoadError

BACKENDS = ("identity", "onnxruntime", "python")
"""The backends of this build, by their names for `backend` in a `config.pbtxt`."""

_ONNX = {"onnxruntime", "onnxruntime_onnx"}


def backend(name: str, shared_threads: bool = False) -> Backend:
    """A new backend for `name`, a configuration's `backend` or its `platform`; LoadError if there is none.

    `shared_threads`: whether `share_threads` was called; ONNX Runtime then opens no session with threads of its own.
    """
    if name in _ONNX:
        from paceline.backends.installed import check_installed

        check_installed()
        from paceline.backends.onnx.backend import OnnxBackend

        return OnnxBackend(shared_threads=shared_threads)
    if name == "identity":
        from paceline.backends.identity import IdentityBackend

        return IdentityBackend()
    if name == "python":
        from paceline.backends.python.backend import PythonBackend

        return PythonBackend()
    text = f"backend: expected one of {', '.join(BACKENDS)}, got '{name}', which this build doesn't have"
    raise LoadError(f"{text}; as platform, expected onnxruntime_onnx")


def share_threads(intra_op: int, inter_op: int) -> None:
    """Make all of ONNX Runtime's sessions compute on one pool of this many threads (0: ONNX Runtime decides). To be
    called once in the life of a process, before any model is opened; LoadError if that isn't possible."""
    from paceline.backends.installed import check_installed

    check_installed()
    from paceline.backends.onnx import sessions

    sessions.share_threads(intra_op, inter_op)
