"""Ensembles of any graph, whose steps end when a test says so.

Each step adds up its inputs and a number of its own, so what reaches an output says which steps it went through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf import text_format
from hypothesis import strategies as st

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import MISSING, ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos.model_config_pb2 import ModelConfig
from paceline.scheduler.policy import NEVER
from paceline.scheduler.runner import Outcome
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.parameters import NO_PARAMETERS, RequestOptions
from paceline.server.models.ensemble_config import EnsembleModel, steps_of
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.model_config import plan
from paceline.server.models.pipeline import Pipeline
from paceline.server.models.tensor_config import declared_spec
from paceline.server.requests.in_flight import InFlight
from paceline.server.requests.inner_request import InnerRequest
from paceline.server.requests.pipelines import PipelineRun, Pipelines
from tests.ensembles import Step, ensemble_config

Value = np.ndarray[Any, np.dtype[np.float32]]
SPEC = ModelSpec(
    (TensorSpec("a", "FP32", (1,)), TensorSpec("b", "FP32", (1,), optional=True)),
    (TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))),
)


@dataclass(eq=False)
class StepModel:
    """`server.models.pipeline.Version` of a step that adds `number` to the sum of its inputs, as x, and has that times
    two as y. `why` is how it ends; below 0, nothing can be added."""

    number: int
    why: str
    name: str = ""
    version: str = "1"
    labels: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    max_batch_rows: int = 8
    max_request_rows: int = 8
    decoupled: bool = False
    pipeline: Pipeline | None = None
    spec: ModelSpec = SPEC

    def outputs(self, inputs: dict[str, Value]) -> dict[str, Value]:
        """Raises ExecutionError."""
        if self.why == "fails" or "a" not in inputs:
            raise ExecutionError(f"step {self.number} has no answer")
        if inputs["a"][0] < 0:
            raise ExecutionError(f"can't take {inputs['a'][0, 0]:.0f}")
        total = sum(inputs.values(), np.full((2, 1), self.number, np.float32))
        return {"x": total} if self.why == "leaves out" else {"x": total, "y": total * 2}


@dataclass
class Graph:
    steps: list[Step]
    models: list[StepModel]
    given: dict[str, Value]

    @property
    def makers(self) -> dict[str, tuple[int, str]]:
        """Step and its name of each tensor that a step makes."""
        return {tensor: (number, key) for number, (_, _, made) in enumerate(self.steps) for key, tensor in made.items()}

    def needed(self, tensors: Sequence[str]) -> set[int]:
        """The steps that these tensors need."""
        steps: set[int] = set()
        for tensor in tensors:
            if tensor in self.makers:
                number = self.makers[tensor][0]
                steps |= {number} | self.needed([*self.steps[number][1].values()])
        return steps

    def evaluated(self) -> dict[int, dict[str, Value] | None]:
        """What each step gives; None if it or one before it fails."""

        @cache
        def of(number: int) -> dict[str, Value] | None:
            inputs: dict[str, Value] = {}
            for key, tensor in self.steps[number][1].items():
                if tensor not in self.makers:
                    inputs |= {key: self.given[tensor]} if tensor in self.given else {}
                    continue
                maker, name = self.makers[tensor]
                if (before := of(maker)) is None:
                    return None
                inputs |= {key: before[name]} if name in before else {}
            try:
                return self.models[number].outputs(inputs)
            except ExecutionError:
                return None

        return {number: of(number) for number in range(len(self.steps))}


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    tensors, steps, models = ["in0", "in1"], [], []
    for number in range(draw(st.integers(1, 6))):
        keys = ("a", "b")[: draw(st.integers(1, 2))]
        reads = {key: draw(st.sampled_from(tensors)) for key in keys}
        writes = {key: f"{key}{number}" for key in ("x", "y")[: draw(st.integers(1, 2))]}
        tensors += writes.values()
        steps.append((f"m{number}", reads, writes))
        models.append(StepModel(number, draw(st.sampled_from(["", "", "", "fails", "leaves out"]))))
    given = {"in0": np.full((2, 1), 1000, np.float32), "in1": np.full((2, 1), 5000, np.float32)}
    if draw(st.booleans()):
        del given["in1"]
    order = draw(st.permutations(range(len(steps))))
    return Graph([steps[one] for one in order], [models[one] for one in order], given)


class Opened:
    """`OpenFlight` of a caller that is `told` a number, an error, or that there is no more; and which is the last."""

    def __init__(self) -> None:
        self.told: list[tuple[float | str | None, bool]] = []
        self.run: PipelineRun

    def open(self, run: PipelineRun, number: int) -> None:
        self.run = run

    def on_answer(self, answer: Any, *, last: bool) -> None:
        said = next(one for one in answer if one is not MISSING)[0, 0] if isinstance(answer, tuple) else answer
        self.told.append((str(said) if isinstance(said, Exception) else said, last))

    def let_go(self) -> None:
        pass


class Run:
    """A request to the ensemble `graph` for the outputs `wanted`. Its steps end when the test says so."""

    def __init__(self, graph: Graph, wanted: Sequence[str], opened: Any = None) -> None:
        self.graph = graph
        read = {tensor for _, reads, _ in graph.steps for tensor in reads.values()}
        inputs = [name for name in ("in0", "in1") if name in read]
        config = text_format.Parse(
            ensemble_config(
                graph.steps, dict.fromkeys(inputs, "FP32 1"), dict.fromkeys(graph.makers, "FP32 1")
            ).replace('"in1" data', '"in1" optional: true data'),
            ModelConfig(name="e"),
        )
        spec = declared_spec(config)
        assert spec is not None
        loaded = LoadedVersion("e", 1, config, plan(config, spec), {}, EnsembleModel(steps_of(config)), ())
        models = {f"m{model.number}": model for model in graph.models}
        for name, model in models.items():
            model.name = name
        pipeline = Pipeline(loaded, steps_of(config), lambda name, version: models[name])
        self.names = [tensor.name for tensor in loaded.plan.spec.outputs]
        self.under_way: list[tuple[StepModel, InnerRequest]] = []
        self.begun: list[int] = []
        self.given_up: list[InFlight] = []
        self.ends: list[Outcome[Any]] = []
        self.flight = InFlight(pb.ModelInferRequest(), NEVER, None, NO_PASSED_HEADERS)
        self.flight.model = SimpleNamespace(name="e", spec=loaded.plan.spec, pipeline=pipeline)
        self.flight.rows = 2
        outputs = tuple(self.names.index(name) for name in wanted)
        self.flight.options = RequestOptions(2, (), outputs, NO_PARAMETERS)
        run = PipelineRun(
            Pipelines(self.announce, self.given_up.append),
            self.flight,
            [graph.given.get(name, MISSING) for name in inputs],
            opened,
        )
        run.begin(self.ends.append)

    def announce(self, model: Any, request: InFlight) -> None:
        assert not self.ends
        assert isinstance(request, InnerRequest)
        self.begun.append(model.number)
        self.under_way.append((model, request))

    def end(self, place: int) -> None:
        """A step ends, by what its model does with what it got."""
        model, request = self.under_way.pop(place % len(self.under_way))
        if request in self.given_up:
            return
        message: Any = request.message
        try:
            made = model.outputs({name: array for name, _, array in message.inputs})
        except ExecutionError as error:
            request.on_failure(error)
        else:
            request.outputs = {name: made[name] for name in message.outputs if name in made}
        request.on_done()
