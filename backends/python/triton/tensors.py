"""Tensors of Triton's Python backend: a name and an array.

Lives here: the class that models make and get. Must not: requests. The rule: what a model gets is its own, so it may
write into it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.backends.python.loaded_model import as_array
from paceline.backends.python.triton.conversions import numpy_to_triton_type
from paceline.backends.python.triton.errors import TritonModelException
from paceline.backends.spec import Array

__all__ = ["Tensor"]

_ON_CPU = (1, 0)
"""DLPack's device: its type and number."""


class Tensor:
    """A name and an array in this process's memory. Those of requests are writable copies, made when asked for."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(name, str) or not name:
            raise TritonModelException(f"Tensor: expected a name, got {name!r}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{name}': expected a numpy array, got {type(array).__name__}")
        if numpy_to_triton_type(array.dtype) is None:
            raise TritonModelException(f"Tensor '{name}': expected a datatype that Triton has, got {array.dtype}")
        self._name = name
        self._array = array

    @classmethod
    def received(cls, name: str, array: Array) -> Tensor:
        """One that the server has sent, maybe read-only."""
        made = cls.__new__(cls)
        made._name = name
        made._array = array
        return made

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """The array. Texts are `bytes`."""
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def encoded(self) -> Array:
        """The array as it travels, in which texts are `bytes`."""
        array = self._array
        if array.dtype.kind not in "SUO":
            return array if array.dtype.kind != "b" else as_array(self._name, array)
        made: Array = np.empty(array.size, np.object_)
        made[:] = [one if isinstance(one, bytes) else str(one).encode() for one in array.ravel().tolist()]
        return made.reshape(array.shape)

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int | None:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the array."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of another library's tensor, or of a capsule, in the host's memory."""
        exporter = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        device = exporter.__dlpack_device__()
        if device[0] != _ON_CPU[0]:
            raise TritonModelException(
                f"Tensor '{name}': expected a tensor in the host's memory, got one on DLPack's device {tuple(device)}"
            )
        return Tensor(name, np.from_dlpack(exporter))

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.as_numpy().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CPU


class _Capsule:
    """What numpy takes, made of a capsule alone."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CPU
