"""The short way of one version's requests and answers: what was learned from earlier ones.

Lives here: which plan belongs to which request, and when one is made; the plans are in `server.codec.shortcuts`. Must
not: refuse anything. What doesn't fit takes the long way, through messages, in `server.codec.codec`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from paceline.backends.packed import Packed, PackedLayout
from paceline.backends.shares import Share
from paceline.backends.spec import MISSING, ModelSpec, Tensors
from paceline.protos.datatypes import Datatype, by_name
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from paceline.protos.tensors import element_count
from paceline.server.bounded_cache import BoundedCache
from paceline.server.codec.decoded import DecodedRequest, RequestOptions
from paceline.server.codec.shortcuts import (
    AnswerPlan,
    BatchAnswers,
    Envelope,
    InputPlan,
    Located,
    RegionInputPlan,
    RequestPlan,
)
from paceline.server.codec.wire_request import AnyRequest, WireRequest
from paceline.server.memory.client_memory import NOWHERE, ClientMemory, set_shared_memory_parameters
from paceline.server.memory.region_tensors import REGION, Inputs, RegionTensor, Span
from paceline.server.memory.regions import Regions, all_intact

__all__ = ["AlikeRequests", "ShortWay", "Targets"]

_SHAPE = attrgetter("shape")

Targets = Mapping[int, Span]


class AlikeRequests(NamedTuple):
    """Requests that ask for the same: the inputs of each, and which of its outputs belong in shared memory, and
    where."""

    options: RequestOptions
    inputs: Sequence[Inputs]
    targets: Sequence[Targets]


class ShortWay:
    """The short way of one version of a model, which serves `spec`."""

    def __init__(
        self, model: str, version: str, spec: ModelSpec, memory: ClientMemory, regions: Regions | None
    ) -> None:
        self._model = model
        self._version = version
        self._spec = spec
        self._memory = memory
        self._regions = regions
        self._inputs = {tensor.name: index for index, tensor in enumerate(spec.inputs)}
        self._input_types: list[Datatype] = [by_name(tensor.datatype) for tensor in spec.inputs]
        self._output_types: list[Datatype] = [by_name(tensor.datatype) for tensor in spec.outputs]
        self._plans = BoundedCache[bytes, RequestPlan]()
        self._layouts = BoundedCache[Hashable, PackedLayout]()
        self._options = BoundedCache[Hashable, RequestOptions]()
        self._answer_plans = BoundedCache[Hashable, AnswerPlan]()
        self._nowhere = Located([MISSING] * len(spec.inputs), NOWHERE, ())

    # hot path: see bench/
    def decode(self, request: WireRequest) -> DecodedRequest | None:
        """The decoded request, if the plan learned from one like it fits; else None."""
        plan = self._plans.get(request.mold.head)
        if plan is None or (found := self._tensors(request, plan, None)) is None:
            return None
        inputs, located = found
        return DecodedRequest(inputs, plan.options, located.targets)

    # hot path: see bench/
    def decode_alike(self, requests: Iterable[AnyRequest]) -> AlikeRequests | None:
        """As many of the first requests as ask for the same, decoded. Their inputs' sizes are known, and they have no
        deadline parameter. None if the first one has to be decoded by itself."""
        options: RequestOptions | None = None
        located: Located | None = None
        inputs: list[Inputs] = []
        targets: list[Targets] = []
        for request in requests:
            if not isinstance(request, WireRequest):
                break
            mold = request.mold
            plan = self._plans.get(mold.head)
            if plan is None:
                break
            if options is None:
                options = plan.options
                if options.size_bytes < 0 or options.parameters.deadline_ns:
                    return None
            if plan.options is not options:
                break
            note = mold.note
            if note is not None and note[0] is plan and note[1] is not None and not plan.targets:
                # Most requests are like this. This is what `_tensors` would find for them.
                inputs.append(Packed(request.data, plan.layout, note[1]))
                targets.append(NOWHERE)
                continue
            found = self._tensors(request, plan, located)
            if found is None:
                break
            its_inputs, located = found
            inputs.append(its_inputs)
            targets.append(located.targets)
        return AlikeRequests(options, inputs, targets) if options is not None and inputs else None

    # hot path: see bench/
    def _tensors(self, request: WireRequest, plan: RequestPlan, last: Located | None) -> tuple[Inputs, Located] | None:
        """The request's inputs, and what it has in shared memory, its outputs' places included. None if they aren't
        what the plan says, or not where it says. If it has the same there as the `last` request, that isn't checked
        again."""
        located = plan.nowhere
        if located is None:
            located = self._regions.known(plan, plan.locate) if self._regions is not None else None
            if located is None or not (located is last or all_intact(located.regions)):
                return None
        mold = request.mold
        if mold.note is None or mold.note[0] is not plan:
            mold.note = plan, plan.starts(mold.raw)
        starts = mold.note[1]
        if starts is not None and plan.layout is not None:
            return Packed(request.data, plan.layout, starts), located
        inputs = plan.read(request.data, mold.raw, located.inputs)
        return (inputs, located) if inputs is not None else None

    # hot path: see bench/
    def encode(
        self, request_id: str, decoded: DecodedRequest, results: Tensors, envelope: Envelope | None
    ) -> bytes | None:
        """The response to a `plain` request; None if the short way can't make it."""
        if type(results) is not Share:
            return self._respond(request_id, decoded, results, envelope)
        answers = self.answers(decoded, results, envelope)
        if answers is None:
            return self._respond(request_id, decoded, tuple(results), envelope)
        return answers.answer(request_id, results.start)

    def answers(self, decoded: DecodedRequest, results: Share, envelope: Envelope | None) -> BatchAnswers | None:
        """What makes the answers to all requests that want these outputs in the same places and have equally large
        shares of the same batch's outputs. For those that want them in the response it is made once, with the first of
        them. None if there is no such thing."""
        wanted, targets = decoded.options.outputs, decoded.targets
        if targets:
            return self._plan_for(wanted, results, envelope, targets).of(results.outputs, targets)
        kind = wanted, results.stop - results.start, envelope
        notes = results.outputs.notes
        if kind not in notes:
            notes[kind] = self._plan_for(wanted, results, envelope).of(results.outputs)
        answers: BatchAnswers | None = notes[kind]
        return answers

    def _respond(
        self, request_id: str, decoded: DecodedRequest, results: Tensors, envelope: Envelope | None
    ) -> bytes | None:
        """The same for results of any kind, some of which may belong in shared memory."""
        wanted, targets = decoded.options.outputs, decoded.targets
        if targets:
            targets = {index: targets[index] for index in wanted if index in targets}
        answer = self._plan_for(wanted, results, envelope, targets).answer(request_id, results)
        if answer is None or (targets and not self._memory.write_results(targets, results, self._output_types)):
            return None
        return answer

    def learn(self, head: bytes, request: ModelInferRequest, decoded: DecodedRequest) -> None:
        """Remember how to decode requests with this head, if nothing but their tensors has to be read."""
        options = decoded.options
        if options.classes or any(self._spec.inputs[self._inputs[tensor.name]].utf8 for tensor in request.inputs):
            return
        inputs, region_inputs = [], []
        for tensor in request.inputs:
            index, shape = self._inputs[tensor.name], tuple(tensor.shape)
            datatype, read = self._input_types[index], decoded.inputs[index]
            if isinstance(read, RegionTensor):
                region_inputs.append(RegionInputPlan(index, read.what, read.dtype, shape, read.place))
                continue
            if REGION in tensor.parameters or tensor.HasField("contents"):
                return  # its content matters, so it was read at once; or typed contents: nothing is raw here
            size_bytes = element_count(shape) * datatype.item_bytes
            plain = size_bytes > 0 and datatype.name != "BOOL"
            inputs.append(InputPlan(index, datatype, shape, size_bytes if plain else -1))
        layout = None if region_inputs else self._layout(inputs)
        sizes = [*(one.size_bytes for one in inputs), *(one.where.byte_size for one in region_inputs)]
        size_bytes = sum(sizes) if min(sizes, default=0) >= 0 else options.size_bytes
        plan = RequestPlan(
            tuple(inputs),
            tuple(region_inputs),
            tuple((index, span.place) for index, span in decoded.targets.items()),
            len(self._inputs),
            self._same(replace(options, size_bytes=size_bytes)),
            layout,
            None if region_inputs or decoded.targets else self._nowhere,
        )
        self._plans.remember(head, plan, len(head))

    def _same(self, options: RequestOptions) -> RequestOptions:
        """One object for all requests that ask for the same, even if their heads differ, as in the shared memory that
        they name."""
        what = options.rows, options.key, options.outputs, options.parameters, options.size_bytes
        if what not in self._options:
            self._options.remember(what, options)
        return self._options[what]

    def _layout(self, inputs: Sequence[InputPlan]) -> PackedLayout | None:
        """The layout of the model's inputs, one object for all requests with the same. None if some inputs are left
        out, or their content has to be checked."""
        if len(inputs) < len(self._inputs) or any(one.size_bytes < 0 for one in inputs):
            return None
        ordered = sorted(inputs, key=attrgetter("place"))
        tensors = tuple((one.datatype.dtype, one.shape, one.size_bytes) for one in ordered)
        if tensors not in self._layouts:
            self._layouts.remember(tensors, PackedLayout(tensors))
        return self._layouts[tensors]

    def _plan_for(
        self,
        wanted: tuple[int, ...],
        results: Tensors,
        envelope: Envelope | None,
        targets: Mapping[int, Span] = NOWHERE,
    ) -> AnswerPlan:
        layout: tuple[object, ...] = (envelope, wanted, *_shapes(results))
        if targets:
            layout += tuple((index, span.region.name, span.offset) for index, span in targets.items())
        plan = self._answer_plans.get(layout)
        if plan is None:
            plan = self._plan_answer(wanted, results, targets, envelope)
            self._answer_plans.remember(layout, plan)
        return plan

    def _plan_answer(
        self, wanted: Sequence[int], results: Tensors, targets: Mapping[int, Span], envelope: Envelope | None
    ) -> AnswerPlan:
        made = ModelInferResponse(model_name=self._model, model_version=self._version)
        outputs = []
        for index in wanted:
            datatype, shape = self._output_types[index], results[index].shape
            output = made.outputs.add(name=self._spec.outputs[index].name, datatype=datatype.name, shape=shape)
            if index in targets:
                set_shared_memory_parameters(output, targets[index], element_count(shape) * datatype.item_bytes)
            outputs.append((index, datatype))
        return AnswerPlan(made, outputs, targets.keys(), envelope)


def _shapes(results: Tensors) -> Iterable[tuple[int, ...]]:
    if type(results) is not Share:
        return map(_SHAPE, results)
    rows = results.stop - results.start
    return [(rows, *array.shape[1:]) for array in results.outputs.arrays]
