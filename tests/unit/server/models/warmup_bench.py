"""A model whose instances record the inputs of their warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf import text_format

from paceline.backends.base import Device, ModelInstance
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.model_config import plan
from paceline.server.models.warmup import WarmUp
from tests.memory_models import MemoryModel

Executed = list[list[Array]]


class Bench:
    """Instances of one model that record their inputs; its input `a` and output `x` have `datatype` and `dims`."""

    def __init__(
        self,
        datatype: str = "FP32",
        dims: tuple[int, ...] = (2,),
        rows: int = 4,
        instances: int = 1,
        any_rank: bool = False,
    ) -> None:
        whole = (-1, *dims) if rows else dims
        a, x = (TensorSpec(name, datatype, whole, any_rank=any_rank) for name in "ax")
        self.own = ModelSpec((a,), (x,))
        self.rows = rows
        self.seen: Executed = []
        self.model = MemoryModel(self.own, self._keep)
        self.count = instances
        self.execution_ns = 0
        self._time_ns = 10**15

    def _keep(self, inputs: Tensors) -> Tensors:
        self.seen.append(list(inputs))
        self._time_ns += self.execution_ns
        return inputs

    def now_ns(self) -> int:
        """A clock on which each execution takes `execution_ns`."""
        return self._time_ns

    def warm(self, text: str, folder: Path = Path()) -> None:
        config = text_format.Parse(f'name: "m" max_batch_size: {self.rows} {text}', pb.ModelConfig())
        served = plan(config, self.own)
        instances: Sequence[ModelInstance] = [self.model.instance(served.spec, Device()) for _ in range(self.count)]
        WarmUp(config, served, folder, self.now_ns).run(instances)

    def refusal(self, text: str, folder: Path = Path()) -> str:
        with pytest.raises(ConfigError) as caught:
            self.warm(text, folder)
        return str(caught.value)


def sample(data: str = "zero_data: true", dims: str = "2", datatype: str = "FP32", more: str = "batch_size: 1") -> str:
    name = "STRING" if datatype == "BYTES" else datatype
    return f"""model_warmup {{ name: "s" {more}
        inputs {{ key: "a" value {{ data_type: TYPE_{name} dims: [ {dims} ] {data} }} }} }}"""


def values(bench: Bench) -> list[object]:
    """The inputs of each execution, as lists."""
    return [[array.tolist() for array in inputs] for inputs in bench.seen]
