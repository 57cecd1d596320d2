"""Between wire messages and the arrays that models take.

Lives here: every check of a request against its model, so that nothing faulty is ever queued; and encoding responses.
Most requests are known, and most responses plain: these are read by `known_requests` and made by `answers`. Must not:
wait for anything, or know about batches. The rule: what `read` returns can be stacked with any other request of equal
key, if their rows together fit a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, islice

from paceline.backends.open_request import Told
from paceline.backends.spec import MISSING, Array, ModelSpec
from paceline.protos.datatypes import Datatype, by_name
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from paceline.protos.tensors import (
    MAX_RANK,
    TensorError,
    decode_contents,
    decode_raw,
    element_count,
)
from paceline.server.bounded_cache import BoundedCache
from paceline.server.codec.answers import Answerable, AnswerPlans, Pieces
from paceline.server.codec.array_request import ArrayAnswer, ArrayRequest, NamedArray
from paceline.server.codec.classification import Labels, class_count
from paceline.server.codec.known_requests import Group, KnownRequests, Targets
from paceline.server.codec.parameters import NO_PARAMETERS, RequestOptions, parse_parameters
from paceline.server.codec.response_messages import ResponseMessages
from paceline.server.codec.sizes import Sizes
from paceline.server.codec.wire_request import AnyMessage
from paceline.server.errors import InvalidRequest, value_or_error
from paceline.server.memory.region_tensors import (
    NOWHERE,
    ClientMemory,
    Input,
    Inputs,
    RegionTensor,
    Span,
)
from paceline.server.memory.regions import Regions

InputTensor = ModelInferRequest.InferInputTensor

AnyResponse = ModelInferResponse | bytes
"""A response as a message, or already serialized."""

_MAX_DIMS = 1_000
"""The most dimensions of a shape that is read at all, if only to say what is wrong with it."""
_ELEMENT_BYTES = 8 + sys.getsizeof(b"")
"""What an element of an array of texts takes besides its text: a reference, and the rest of the object."""
_BOTH = "expected either contents or raw_input_contents, got both"


class ModelCodec:
    """Decodes requests for, and encodes responses of, one version of a model.

    `max_batch_rows` is the most rows a request may carry, 0 if the model has no batch axis. `labels` are the names of
    its outputs' classes. `regions` are the shared memory that clients have registered, None if they may not register
    any.
    """

    def __init__(
        self,
        model: str,
        version: str,
        spec: ModelSpec,
        max_batch_rows: int,
        labels: Labels | None = None,
        regions: Regions | None = None,
    ) -> None:
        self._model = model
        self._version = version
        self._spec = spec
        self._max_batch_rows = max_batch_rows
        self._memory = ClientMemory(model, spec, regions)
        self._inputs = {tensor.name: index for index, tensor in enumerate(spec.inputs)}
        self._outputs = {tensor.name: index for index, tensor in enumerate(spec.outputs)}
        self._input_types: list[Datatype] = [by_name(tensor.datatype) for tensor in spec.inputs]
        self._output_types: list[Datatype] = [by_name(tensor.datatype) for tensor in spec.outputs]
        self._known = KnownRequests(spec, regions)
        self._answers = AnswerPlans(model, version, spec)
        self._messages = ResponseMessages(model, version, spec, labels or {}, self._memory, batched=max_batch_rows > 0)
        # How many axes of each input come before its dims.
        self._lead = [0 if tensor.shape_tensor or not max_batch_rows else 1 for tensor in spec.inputs]
        # Inputs that are stacked and whose sizes the configuration leaves open. Sizes of other inputs don't keep
        # requests apart.
        self._free = [
            index
            for index, tensor in enumerate(spec.inputs)
            if (tensor.any_rank or -1 in tensor.dims) and not (tensor.ragged or tensor.shape_tensor)
        ]
        self._sizes = Sizes(model, spec)
        # Of requests from within, by signature; none if there is more to see in a request than its shapes.
        self._array_options = BoundedCache[Hashable, RequestOptions]()
        self._looks_into_inputs = any(tensor.utf8 or tensor.shape_tensor for tensor in spec.inputs)

    # hot path: see bench/
    def read(self, first: AnyMessage, more: Iterable[AnyMessage] = ()) -> Group:
        """Check `first` against the model and read its tensors, and those of as many of `more` as ask for the same and
        are known.

        Raises InvalidRequest, RegionNotFound, or NotSupported for extensions that this build lacks or that are switched
        off; all are about `first`, and name the model and the tensor.
        """
        if isinstance(first, ModelInferRequest):
            return self._parse(first)
        if isinstance(first, ArrayRequest):
            return self._read_arrays(first, more)
        group = self._known.read(first, more)
        if group is None:
            message = first.message()
            group = self._parse(message)
            self._known.learn(first.form.signature, message, group)
        return group

    def _read_arrays(self, first: ArrayRequest, more: Iterable[AnyMessage]) -> Group:
        """As `read`. Requests from within are known by their shapes, as each brings its datatypes and arrays; only
        texts are looked at in each of them."""
        signature, group = first.signature, None
        options = self._array_options.get(signature)
        if options is None:
            group = self._parse(first.message(), first.inputs)
            options = group.options
            if options.classes or self._looks_into_inputs:
                return group
            if not any(array.dtype.hasobject for _, _, array in first.inputs):
                options.size_bytes = sum(array.nbytes for _, _, array in first.inputs)
            self._array_options.remember(signature, options)
        inputs: list[Inputs] = []
        for request in chain((first,), more):
            if not isinstance(request, ArrayRequest) or request.signature != signature:
                break
            given = {name: array for name, _, array in request.inputs}
            inputs.append(tuple([given.get(name, MISSING) for name in self._inputs]))
            if options.size_bytes < 0:
                break  # requests of a group have the same size, and this one's has to be counted
        return Group(options, inputs, [NOWHERE] * len(inputs))

    def _parse(self, request: ModelInferRequest, given: Sequence[NamedArray] | None = None) -> Group:
        """Check and read `request`; the contents of its tensors are in `given`, if it is from within."""
        try:
            parameters = parse_parameters(request.parameters) if request.parameters else NO_PARAMETERS
        except InvalidRequest as error:
            raise self._invalid(str(error)) from None
        outputs, targets = self._wanted_outputs(request)
        for index in outputs if parameters.typed_outputs else ():
            if self._output_types[index].contents_field is None:
                raise self._invalid(
                    f"output '{self._spec.outputs[index].name}': expected binary_data_output to be true or left "
                    f"out, as typed contents can't carry {self._output_types[index].name}, got false"
                )
        order = self._input_order(request)
        for tensor in request.inputs:
            if len(tensor.shape) > _MAX_DIMS:
                what = f"expected at most {MAX_RANK} dimensions, got {len(tensor.shape)}"
                raise self._invalid(f"input '{tensor.name}': shape: {what}")
        shapes = [tuple(tensor.shape) for tensor in request.inputs]
        rows = self._rows(request.inputs, shapes)
        spans = [*map(self._span_checked, request.inputs, shapes, order)]
        inputs = self._arrays(request, shapes, order, spans, given)
        if targets:
            self._memory.check_targets(targets, rows)
        # Without a batch axis nothing is merged, but execution times are learned for each key separately.
        lead = 1 if self._max_batch_rows else 0
        sizes, fixed = self._sizes.of([one.shape for one in inputs])
        free = tuple(fixed[index][lead:] for index in self._free)
        classes = self._wanted_classes(request, outputs) if request.outputs else None
        plain = not (classes or parameters.typed_outputs or parameters.batch_info)
        options = RequestOptions(rows, free, outputs, parameters, classes, plain=plain, sizes=sizes)
        return Group.of_one(options, inputs, targets)

    # hot path: see bench/
    def encode(self, requests: Sequence[Answerable]) -> list[AnyResponse | Exception]:
        """The response to each request, with the outputs that its `options` ask for: raw, or in typed contents. Outputs
        that have `targets` are written there, in the order asked for, if all of them fit. A response that is bytes is
        in the request's `envelope`.

        In place of a response: ExecutionError for elements that no message can carry, AnswerTooLarge for more of them
        than a message can carry, InvalidRequest for classes of too large an output and for shared memory that is too
        small or gone, and MemoryError. The backend has checked what else could be wrong.
        """
        answers, message = self._answers.pieces(requests), self._messages.message
        pairs = zip(requests, answers, strict=True)
        return [b"".join(pieces) if pieces else value_or_error(message, request) for request, pieces in pairs]

    def pieces(self, request: Answerable) -> Pieces:
        """What `encode` joins to the response, for those who copy it elsewhere; nothing if it makes a message of it."""
        return self._answers.pieces((request,))[0]

    def _input_order(self, request: ModelInferRequest) -> list[int]:
        """For each input of the message, its place in the spec. Raises InvalidRequest for unknown or repeated inputs,
        and if one is missing that isn't optional."""
        order: list[int] = []
        # One more than the model has is enough to read: they can't all be right.
        for tensor in islice(request.inputs, len(self._inputs) + 1):
            index = self._inputs.get(tensor.name)
            if index is None:
                raise self._invalid(f"unexpected input '{tensor.name}', expected {list(self._inputs)}")
            order.append(index)
        if len(set(order)) != len(order):
            twice = next(tensor.name for tensor in request.inputs if order.count(self._inputs[tensor.name]) > 1)
            raise self._invalid(f"input '{twice}' is given more than once")
        if len(order) != len(self._inputs):
            needed = [tensor.name for tensor in self._spec.inputs if not tensor.optional]
            missing = [name for name in needed if self._inputs[name] not in order]
            got = [tensor.name for tensor in request.inputs]
            if missing:
                raise self._invalid(f"missing inputs {missing}: expected {needed}, got {got}")
        return order

    def _wanted_outputs(self, request: ModelInferRequest) -> tuple[tuple[int, ...], Targets]:
        """The indices of the outputs asked for, and where those belong that go into shared memory."""
        if not request.outputs:
            return tuple(range(len(self._outputs))), NOWHERE
        wanted: dict[int, None] = {}
        targets: dict[int, Span] = {}
        for output in request.outputs:
            index = self._outputs.get(output.name)
            if index is None:
                raise InvalidRequest(
                    f"unexpected inference output '{output.name}' for model '{self._model}': expected some of "
                    f"{list(self._outputs)}"
                )
            if index in wanted:
                raise self._invalid(f"output '{output.name}' is requested more than once")
            # `class_count` refuses both together.
            may = output.parameters and "classification" not in output.parameters
            if may and (span := self._memory.span("output", output)) is not None:
                targets[index] = span
            wanted[index] = None
        return tuple(wanted), targets

    def _wanted_classes(self, request: ModelInferRequest, outputs: Sequence[int]) -> Mapping[int, int] | None:
        """How many classes are wanted, by index of the output; None if of no output."""
        classes: dict[int, int] = {}
        for output, index in zip(request.outputs, outputs, strict=True):
            if output.parameters and "classification" in output.parameters:
                try:
                    classes[index] = class_count(output.parameters, self._spec.outputs[index].datatype)
                except InvalidRequest as error:
                    raise self._invalid(f"output '{output.name}': {error}") from None
        return classes or None

    def _rows(self, tensors: Sequence[InputTensor], shapes: Sequence[tuple[int, ...]]) -> int:
        """The size of the batch axis, agreed on by all inputs; 1 if the model has none."""
        limit = self._max_batch_rows
        if not limit:
            return 1
        for tensor, shape in zip(tensors, shapes, strict=True):
            if shape and 0 < shape[0] <= limit and shape[0] == shapes[0][0]:
                continue
            index = self._inputs[tensor.name]
            if self._lacks_batch_axis(index, shape):
                raise self._unexpected_shape(index, shape)
            if not shape:
                raise self._invalid(f"input '{tensor.name}': expected a leading batch dimension, got shape []")
            if not 0 < shape[0] <= limit:
                raise self._invalid(
                    f"input '{tensor.name}': expected a batch of 1 to {limit} rows, "
                    f"got {shape[0]} in shape {list(shape)}"
                )
            raise self._invalid(
                f"input '{tensor.name}': expected {shapes[0][0]} rows as in input '{tensors[0].name}', "
                f"got {shape[0]} in shape {list(shape)}"
            )
        return shapes[0][0]

    def _span_checked(self, tensor: InputTensor, shape: tuple[int, ...], index: int) -> Span | None:
        """Where the tensor lies if it is in shared memory. Checks its datatype and shape."""
        spec, lead = self._spec.inputs[index], self._lead[index]
        if tensor.datatype != spec.datatype:
            raise self._invalid(f"input '{spec.name}': expected datatype {spec.datatype}, got '{tensor.datatype}'")
        dims = shape[1:] if lead else shape
        wanted = spec.dims_of(len(dims))
        if dims != wanted and not _fits(dims, wanted):
            raise self._unexpected_shape(index, shape)
        return self._memory.span("input", tensor) if tensor.parameters else None

    def _lacks_batch_axis(self, index: int, shape: tuple[int, ...]) -> bool:
        """Whether this is the shape of a single row, as callers send it who don't expect a batch axis."""
        spec = self._spec.inputs[index]
        return self._lead[index] == 1 and not (spec.any_rank or spec.assumed) and _fits(shape, spec.dims)

    def _unexpected_shape(self, index: int, shape: tuple[int, ...]) -> InvalidRequest:
        spec = self._spec.inputs[index]
        wanted = [-1] * self._lead[index] + list(spec.dims_of(len(shape) - self._lead[index]))
        text = (
            f"unexpected shape for input '{spec.name}' for model '{self._model}': expected {wanted}, got {list(shape)}"
        )
        if self._lacks_batch_axis(index, shape):
            text += f": the batch axis is missing; send shape {[1, *shape]} for one row"
        return InvalidRequest(text)

    def _arrays(
        self,
        request: ModelInferRequest,
        shapes: Sequence[tuple[int, ...]],
        order: Sequence[int],
        spans: Sequence[Span | None],
        given: Sequence[NamedArray] | None,
    ) -> tuple[Input, ...]:
        """The inputs in the spec's order: from within, in shared memory, in typed contents, or raw."""
        raw = request.raw_input_contents
        if raw and len(raw) != spans.count(None):
            mixed = next((f"input '{one.name}': {_BOTH}" for one in request.inputs if one.HasField("contents")), "")
            raise self._invalid(
                mixed
                or f"expected {spans.count(None)} entries in raw_input_contents, one per input"
                f"{' that is not in shared memory' if any(spans) else ''}, got {len(raw)}"
            )
        entries = iter(raw)
        arrays: list[Input] = [MISSING] * len(self._inputs)
        for number, (tensor, shape, index, span) in enumerate(zip(request.inputs, shapes, order, spans, strict=True)):
            datatype = self._input_types[index]
            array: Input
            try:
                if given is not None:
                    array = given[number][2]
                    if array.dtype != datatype.dtype:
                        what = f"expected an array of {datatype.dtype} for {datatype.name}, got {array.dtype}"
                        raise TensorError(what)
                elif span is not None:
                    array = self._memory.input(tensor, shape, index, span)
                elif not raw:
                    if not tensor.HasField("contents") and element_count(shape):
                        raise TensorError("expected data in contents or raw_input_contents, got neither")
                    array = decode_contents(tensor.contents, datatype, shape)
                elif tensor.HasField("contents"):
                    raise TensorError(_BOTH)
                else:
                    array = decode_raw(next(entries), datatype, shape)
                if self._spec.inputs[index].utf8 and not isinstance(array, RegionTensor):
                    _check_utf8(array)
            except (TensorError, InvalidRequest) as error:
                raise self._invalid(f"input '{tensor.name}': {error}") from None
            arrays[index] = array
        return tuple(arrays)

    def outputs_of(self, request: Answerable) -> ArrayAnswer:
        """What an answer to a request from within consists of: its share of the outputs that its `options` ask for, as
        a client would see them; views. What the model has left out is missing."""
        options, results = request.options, request.value
        assert options is not None
        named = ((self._spec.outputs[index].name, results[index]) for index in options.outputs)
        answer = ArrayAnswer({name: array for name, array in named if array is not MISSING})
        if type(results) is Told:
            answer.parameters = results.parameters
        return answer

    def _invalid(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"model '{self._model}': {what}")


def memory_bytes(array: Input) -> int:
    """The bytes that an input takes in memory, or will once it is read, to count against a queue's bound."""
    if isinstance(array, RegionTensor) or not array.dtype.hasobject:
        return array.nbytes
    return _ELEMENT_BYTES * array.size + sum(map(len, array.flat))


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(
        got == want or (want == -1 and got >= 0) for got, want in zip(shape, dims, strict=True)
    )


def _check_utf8(array: Array) -> None:
    for number, element in enumerate(array.flat):
        try:
            element.decode()
        except UnicodeDecodeError as error:
            raise TensorError(f"expected UTF-8 text in each element, got {error.reason} in element {number}") from None
