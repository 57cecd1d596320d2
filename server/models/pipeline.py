"""An ensemble joined with the models that execute its steps: who waits for whom, and which steps an answer needs.

Lives here: the checks that need these models, and plans of execution. Must not: execute (`server.requests.pipelines`).
Key phrases of errors are Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.server.bounded_cache import BoundedCache
from paceline.server.codec.classification import Labels
from paceline.server.errors import ConfigError
from paceline.server.models.ensemble_config import EnsembleStep
from paceline.server.models.loader import LoadedVersion

ROOT = -1
"""The level of what exists once for each request. Answers of a decoupled step begin a level of their own, which is
that step's number: what follows from one of them exists once for each."""


class Version(Protocol):
    """A served version that executes a step."""

    name: str
    version: str
    spec: ModelSpec
    labels: Labels
    max_batch_rows: int
    max_request_rows: int
    decoupled: bool
    pipeline: Pipeline | None


class _Tensor(NamedTuple):
    """A tensor as one of the models that know it has it: `whose` is the model's name, `lead` whether a batch axis comes
    before its dims."""

    spec: TensorSpec
    whose: str
    lead: bool

    @property
    def rank(self) -> int:
        """How many axes its arrays have; 0: not known."""
        return 0 if self.spec.any_rank or self.spec.assumed else self.lead + len(self.spec.dims)

    @property
    def shape(self) -> list[int]:
        return [-1] * self.lead + list(self.spec.dims)

    def may_be(self, other: _Tensor) -> bool:
        """Whether one array may be both. A batch axis that only one of them has may be an axis of size one."""
        mine, others = self.spec.dims, other.spec.dims
        return not (self.rank and other.rank) or _meet(mine, others) or _meet(self.shape, other.shape)


class PlannedStep(NamedTuple):
    """A step that has to be executed, once its `needs` are there. `inputs` are, for each tensor that its model gets:
    the ensemble's name of it, the model's, the datatype, its `rank`, and whether a batch axis is in that. `wanted` are
    the model's names of the outputs that somebody needs, `outputs` these with the ensemble's."""

    number: int
    model: Version
    inputs: Sequence[tuple[str, str, str, int, bool]]
    outputs: Sequence[tuple[str, str]]
    wanted: Sequence[str]
    needs: frozenset[str]


class Ending(NamedTuple):
    """The `outputs`, index and name, of an answer that is complete once its `needs` are there."""

    outputs: Sequence[tuple[int, str]]
    needs: frozenset[str]


class Plan(NamedTuple):
    """What has to be executed for some of an ensemble's outputs, and where answers are complete; both by level."""

    steps: Mapping[int, Sequence[PlannedStep]]
    endings: Mapping[int, Ending]


class Pipeline:
    """The steps of the ensemble `loaded`, for which `find` gives the versions that execute them. Raises ConfigError if
    these don't fit."""

    def __init__(self, loaded: LoadedVersion, steps: Sequence[EnsembleStep], find: Callable[[str, str], Version]):
        self._name = loaded.name
        self._rows = loaded.plan.max_batch_rows
        self._spec = loaded.plan.spec
        self._inputs = {tensor.name: self._own(tensor) for tensor in self._spec.inputs}
        self._outputs = {tensor.name: self._own(tensor) for tensor in self._spec.outputs}
        self._steps = [(step, find(step.model, step.version)) for step in steps]
        self.models: dict[Version, None] = {}
        """All versions that requests may need, those of ensembles among them included."""
        for _, model in self._steps:
            self.models[model] = None
            self.models.update(model.pipeline.models if model.pipeline is not None else {})
        self.decoupled = any(model.decoupled for _, model in self._steps)
        self.has_sequences = any(model.spec.sequence is not None for model in self.models)
        self._check()
        self._levels = self._levels_of_steps()
        self._plans = BoundedCache[tuple[int, ...], Plan]()  # callers choose outputs, in any order

    @property
    def labels(self) -> Labels:
        """Those that the steps' models have for what they make."""
        return {
            tensor: model.labels[name]
            for step, model in self._steps
            for name, tensor in step.outputs.items()
            if name in model.labels
        }

    def is_current(self, find: Callable[[str, str], Version]) -> bool:
        """Whether each step would be executed by the same version again, by what `find` gives now."""
        return all(find(step.model, step.version) is model for step, model in self._steps)

    def plan(self, outputs: tuple[int, ...]) -> Plan:
        """For the outputs of these indices."""
        if (plan := self._plans.get(outputs)) is None:
            plan = self._planned(outputs)
            self._plans.remember(outputs, plan)
        return plan

    def _own(self, tensor: TensorSpec) -> _Tensor:
        return _Tensor(tensor, self._name, self._rows > 0)

    def _check(self) -> None:
        known = dict(self._inputs)
        for step, model in self._steps:
            rows = model.max_request_rows
            if 0 < rows < self._rows:
                raise ConfigError(
                    f"ensemble {self._name} allows maximum batch size {self._rows}, but it contains model {model.name} "
                    f"which only allows maximum batch size to be {rows}"
                )
            self._check_names(step, model)
            for name, tensor in step.outputs.items():
                known[tensor] = _of_model(model, "output", name)
        for step, model in self._steps:
            for name, tensor in step.inputs.items():
                self._check_same(tensor, _of_model(model, "input", name), known[tensor])
        for name, tensor_of_mine in self._outputs.items():
            self._check_same(name, tensor_of_mine, known[name])

    def _check_names(self, step: EnsembleStep, model: Version) -> None:
        inputs = {tensor.name: tensor.optional for tensor in model.spec.inputs}
        outputs = [tensor.name for tensor in model.spec.outputs]
        for name, tensor in step.inputs.items():
            if name not in inputs:
                what = f"is mapping to non-existing input {name} in model {model.name}"
                raise self._unfit(f"ensemble tensor {tensor} {what}: expected one of {list(inputs)}")
        for name, optional in inputs.items():
            if not optional and name not in step.inputs:
                raise self._unfit(f"input {name} in model {model.name} is not mapped to any ensemble tensors")
        for name, tensor in step.outputs.items():
            if name not in outputs:
                what = f"is mapped from non-existing output {name} in model {model.name}"
                raise self._unfit(f"ensemble tensor {tensor} {what}: expected one of {outputs}")

    def _check_same(self, tensor: str, one: _Tensor, other: _Tensor) -> None:
        if one.spec.datatype != other.spec.datatype:
            what = f"inconsistent data type: TYPE_{one.spec.datatype} is inferred from model {one.whose} while"
            raise self._unfit(f"ensemble tensor {tensor}: {what} TYPE_{other.spec.datatype} from model {other.whose}")
        if not one.may_be(other):
            what = f"inconsistent shape: {one.shape} is inferred from model {one.whose} while {other.shape} is"
            raise self._unfit(f"ensemble tensor {tensor}: {what} inferred from model {other.whose}")

    def _levels_of_steps(self) -> dict[int, tuple[int, ...]]:
        """For each step, the decoupled steps whose answers it is executed for, from the first to the last."""
        lineages: dict[int, tuple[int, ...]] = {}
        of_tensors: dict[str, tuple[int, ...]] = dict.fromkeys(self._inputs, (ROOT,))
        for step, model in self._steps:
            lineage = max((of_tensors[one] for one in step.inputs.values()), key=len)
            if any(of_tensors[one] != lineage[: len(of_tensors[one])] for one in step.inputs.values()):
                what = "receives inputs originated from different decoupled models"
                raise self._unfit(f"step of model '{model.name}' {what} (step {step.number})")
            lineages[step.number] = lineage
            follows = (*lineage, step.number) if model.decoupled else lineage
            of_tensors.update(dict.fromkeys(step.outputs.values(), follows))
        return lineages

    def _planned(self, wanted: tuple[int, ...]) -> Plan:
        makers = {tensor: step for step, _ in self._steps for tensor in step.outputs.values()}
        models = {step.number: model for step, model in self._steps}
        names = [(index, self._spec.outputs[index].name) for index in wanted]
        needed, look_at = {name for _, name in names}, [name for _, name in names]
        chosen: dict[int, EnsembleStep] = {}
        while look_at:
            step = makers.get(look_at.pop())
            if step is not None and step.number not in chosen:
                chosen[step.number] = step
                needed.update(step.inputs.values())
                look_at += step.inputs.values()
        steps: dict[int, list[PlannedStep]] = {}
        for number, step in sorted(chosen.items()):
            model, level = models[number], self._levels[number][-1]
            tensors = ((tensor, _of_model(model, "input", name)) for name, tensor in step.inputs.items())
            inputs = [(name, one.spec.name, one.spec.datatype, one.rank, one.lead) for name, one in tensors]
            outputs = [(name, tensor) for name, tensor in step.outputs.items() if tensor in needed]
            wanted_names = tuple(name for name, _ in outputs)
            needs = frozenset(step.inputs.values())
            steps.setdefault(level, []).append(PlannedStep(number, model, inputs, outputs, wanted_names, needs))
        lineages: dict[str, tuple[int, ...]] = {}
        for _, name in names:
            number = makers[name].number
            lineage = self._levels[number]
            lineages[name] = (*lineage, number) if models[number].decoupled else lineage
        # An answer is complete where no further decoupled step adds to it; it has what exists there.
        ends = {
            one
            for one in lineages.values()
            if not any(other[: len(one)] == one != other for other in lineages.values())
        }
        endings: dict[int, Ending] = {}
        for end in ends:
            there = [(index, name) for index, name in names if end[: len(lineages[name])] == lineages[name]]
            endings[end[-1]] = Ending(there, frozenset(name for _, name in there))
        return Plan(steps, endings)

    def rank_of_output(self, name: str) -> tuple[int, bool]:
        """How many axes an output's arrays have (0: not known), and whether the batch's is one of them."""
        tensor = self._outputs[name]
        return tensor.rank, tensor.lead

    def _unfit(self, what: str) -> ConfigError:
        return ConfigError(f"in ensemble {self._name}, {what}")


def _of_model(model: Version, kind: str, name: str) -> _Tensor:
    spec = next(one for one in (model.spec.inputs if kind == "input" else model.spec.outputs) if one.name == name)
    return _Tensor(spec, model.name, model.max_batch_rows > 0 and not spec.shape_tensor)


def _meet(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))
