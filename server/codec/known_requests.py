"""Requests like earlier ones of the same model, read without parsing them.

A request is *known* if one with the same signature (everything but its id and the bytes of its tensors, see
`server.codec.wire_request`) was parsed and checked before. Then a plan says where its tensors are and what it asks for,
so they are neither parsed nor checked again, and known requests that ask for the same are read as one group.

Lives here: the plans, learning one from a request that was checked, and reading by them. Must not: refuse anything. A
request that no plan fits is parsed, by `server.codec.codec`, which has the error texts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from paceline.backends.batching import Packed, PackedLayout
from paceline.backends.spec import MISSING, ModelSpec
from paceline.protos.datatypes import Datatype, by_name
from paceline.protos.inference_pb2 import ModelInferRequest
from paceline.protos.tensors import TensorError, decode_raw, element_count
from paceline.protos.wire import Data
from paceline.scheduler.request import SequenceStep
from paceline.server.bounded_cache import BoundedCache
from paceline.server.codec.parameters import RequestOptions
from paceline.server.codec.wire_request import AnyMessage, WireRequest
from paceline.server.memory.region_tensors import NOWHERE, REGION, Input, Inputs, Place, RegionTensor, Span
from paceline.server.memory.regions import Region, Regions, all_intact

Targets = Mapping[int, Span]
"""Which outputs belong in shared memory, by index, and where."""


class Group(NamedTuple):
    """Requests that ask for the same and differ only in their tensors; at least one. `inputs` has those of each, in the
    spec's order: views of the message where the datatype allows, or still in shared memory. `targets` has, for each,
    which of its outputs belong in shared memory, and where. `steps` has what each is in its sequence, if the model's
    requests are in some."""

    options: RequestOptions
    inputs: Sequence[Inputs]
    targets: Sequence[Targets]
    steps: Sequence[SequenceStep] = ()

    @classmethod
    def of_one(cls, options: RequestOptions, inputs: Inputs, targets: Targets = NOWHERE) -> Group:
        return cls(options, (inputs,), (targets,))


class KnownRequests:
    """The requests of one version of a model, which serves `spec`, that are known. `regions` are the shared memory that
    clients have registered, if they may. What `apart` returns for the inputs of a request keeps it out of groups of
    those with another."""

    def __init__(
        self, spec: ModelSpec, regions: Regions | None, apart: Callable[[Inputs], Hashable] | None = None
    ) -> None:
        self._spec = spec
        self._regions = regions
        self._apart = apart
        self._indices = {tensor.name: index for index, tensor in enumerate(spec.inputs)}
        # By signature.
        self._plans = BoundedCache[bytes, _Plan]()
        self._layouts = BoundedCache[Hashable, PackedLayout]()
        self._options = BoundedCache[Hashable, RequestOptions]()
        self._nowhere = _Located([MISSING] * len(spec.inputs), NOWHERE, ())

    # hot path: see bench/
    def read(self, first: WireRequest, more: Iterable[AnyMessage]) -> Group | None:
        """`first` and as many of `more` as ask for the same, as far as they are known. None if `first` isn't."""
        # A request with other options or another `apart`, that isn't known, or whose memory is gone, ends the group: it
        # is for its caller to begin the next one with.
        options: RequestOptions | None = None
        located: _Located | None = None
        apart, held = self._apart, None
        inputs: list[Inputs] = []
        targets: list[Targets] = []
        for request in chain((first,), more):
            if not isinstance(request, WireRequest) or (plan := self._plans.get(request.form.signature)) is None:
                break
            if options is not None and options is not plan.options:
                break
            form, there = request.form, plan.nowhere
            if there is None:
                there = self._regions.known(plan, plan.locate) if self._regions is not None else None
                # Clients may truncate their memory, but hardly between two requests that are read together.
                if there is None or not (there is located or all_intact(there.regions)):
                    break
            located = there
            # Requests of one form have their tensors in the same places, which are looked for once.
            if form.note is None or form.note[0] is not plan:
                form.note = plan, plan.starts(form.raw)
            starts = form.note[1]
            if starts is not None and plan.layout is not None:
                read: Inputs | None = Packed(request.data, plan.layout, starts)
            else:
                read = plan.read(request.data, form.raw, located.inputs)
            if read is None:
                break
            if apart is not None:
                before, held = held, apart(read)
                if inputs and held != before:
                    break
            inputs.append(read)
            targets.append(located.targets)
            options = plan.options
            if options.size_bytes < 0:
                break  # requests of a group have the same size, and this one's has to be counted
        return Group(options, inputs, targets) if options is not None else None

    def learn(self, signature: bytes, request: ModelInferRequest, group: Group) -> None:
        """Remember how to read requests with this signature, if nothing but their tensors has to be read. `group` is
        what was read of `request`."""
        options, read, targets = group.options, group.inputs[0], group.targets[0]
        if options.classes or any(self._spec.inputs[self._indices[tensor.name]].utf8 for tensor in request.inputs):
            return
        inputs: list[_Raw] = []
        region_inputs: list[_InRegion] = []
        for tensor in request.inputs:
            index, shape = self._indices[tensor.name], tuple(tensor.shape)
            datatype, one = by_name(self._spec.inputs[index].datatype), read[index]
            if isinstance(one, RegionTensor):
                region_inputs.append(_InRegion(index, one.what, one.dtype, shape, one.place))
                continue
            if REGION in tensor.parameters or tensor.HasField("contents"):
                return  # its content matters, so it was read at once; or typed contents: nothing is raw here
            size_bytes = element_count(shape) * datatype.item_bytes
            plain = size_bytes > 0 and datatype.name != "BOOL"
            inputs.append(_Raw(index, datatype, shape, size_bytes if plain else -1))
        sizes = [*(one.size_bytes for one in inputs), *(one.where.byte_size for one in region_inputs)]
        size_bytes = sum(sizes) if min(sizes, default=0) >= 0 else options.size_bytes
        # One object for all requests that ask for the same, even if their signatures differ, as in the shared memory
        # that they name.
        what = options.rows, options.key, options.sizes, options.outputs, options.parameters, size_bytes
        if what not in self._options:
            self._options.remember(what, replace(options, size_bytes=size_bytes))
        plan = _Plan(
            tuple(inputs),
            tuple(region_inputs),
            tuple((index, span.place) for index, span in targets.items()),
            len(self._indices),
            self._options[what],
            None if region_inputs else self._layout(inputs),
            None if region_inputs or targets else self._nowhere,
        )
        self._plans.remember(signature, plan, len(signature))

    def _layout(self, inputs: Sequence[_Raw]) -> PackedLayout | None:
        """The layout of the model's inputs, one object for all requests with the same. None if some inputs are left
        out, or their content has to be checked."""
        if len(inputs) < len(self._indices) or any(one.size_bytes < 0 for one in inputs):
            return None
        ordered = sorted(inputs, key=attrgetter("input"))
        tensors = tuple((one.datatype.dtype, one.shape, one.size_bytes) for one in ordered)
        if tensors not in self._layouts:
            self._layouts.remember(tensors, PackedLayout(tensors))
        return self._layouts[tensors]


class _Raw(NamedTuple):
    """One tensor of raw_input_contents: its index among the model's inputs, and what it is."""

    input: int
    datatype: Datatype
    shape: tuple[int, ...]
    size_bytes: int
    """-1 if the content has to be checked, or there is none."""


class _InRegion(NamedTuple):
    """One tensor in a client's shared memory: its index among the model's inputs, what to call it, and what it is."""

    input: int
    what: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    where: Place


class _Located(NamedTuple):
    """What requests of one plan have in shared memory: inputs, in the model's order, with MISSING for all others; where
    outputs belong; and the regions that all this is in."""

    inputs: Inputs
    targets: Targets
    regions: Collection[Region]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What all requests of one signature have in common. `inputs` are in the order of the message. `region_inputs` and
    the outputs whose indices are in `targets` are in shared memory. `layout` describes the model's inputs, in its
    order, if nothing but their bytes has to be read; only then does `starts` find them. `nowhere` is what the requests
    have in shared memory if that is nothing; otherwise `locate` finds it."""

    inputs: tuple[_Raw, ...]
    region_inputs: tuple[_InRegion, ...]
    targets: tuple[tuple[int, Place], ...]
    model_inputs: int
    """How many inputs the model has."""
    options: RequestOptions
    layout: PackedLayout | None
    nowhere: _Located | None

    def starts(self, raw: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
        """Where the model's inputs begin in a request whose raw_input_contents begin and end at `raw`. None if they
        have to be read one by one: there is no `layout`, or they don't have the sizes that the signature promised."""
        if self.layout is None or len(raw) != len(self.inputs):
            return None
        starts = [0] * self.model_inputs
        for one, (start, end) in zip(self.inputs, raw, strict=True):
            if one.size_bytes != end - start:
                return None
            starts[one.input] = start
        return tuple(starts)

    def locate(self, regions: Regions) -> _Located | None:
        """What these requests have in `regions`; None if some of it isn't there. Valid for all requests of the plan, as
        long as the names mean these regions."""
        inputs: list[Input] = [MISSING] * self.model_inputs
        targets: dict[int, Span] = {}
        used: set[Region] = set()
        for index, what, dtype, shape, where in self.region_inputs:
            if (region := where.find(regions)) is None:
                return None
            inputs[index] = RegionTensor(what, region, where.offset, dtype, shape)
            used.add(region)
        for index, where in self.targets:
            if (region := where.find(regions)) is None:
                return None
            targets[index] = Span(region, where.offset, where.byte_size)
            used.add(region)
        return _Located(tuple(inputs), targets or NOWHERE, used)

    def read(self, data: Data, raw: Sequence[tuple[int, int]], located: Inputs) -> Inputs | None:
        """The model's inputs: those of the message, views of `data` where the datatype allows, and those that were
        `located` in shared memory. None if they aren't what the signature promised."""
        if len(raw) != len(self.inputs):
            return None
        if not raw:
            return located
        arrays: list[Input] = [*located]
        for (index, datatype, shape, size_bytes), (start, end) in zip(self.inputs, raw, strict=True):
            if size_bytes == end - start:
                arrays[index] = np.ndarray(shape, datatype.dtype, data, start)
            elif size_bytes >= 0:
                return None
            else:
                try:
                    arrays[index] = decode_raw(data[start:end], datatype, shape)
                except TensorError:
                    return None
        return tuple(arrays)
