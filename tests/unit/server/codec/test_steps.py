"""Requests of models whose requests are steps of sequences: what is refused, and what their groups say of each."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from paceline.backends.batching import Outputs, Share
from paceline.backends.spec import Control, ControlKind, ModelSpec, SequenceSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.errors import NoSequence
from paceline.scheduler.request import SequenceStep
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.wire_request import AnyMessage, RequestReader, WireRequest
from paceline.server.errors import InvalidRequest
from paceline.server.rpc.handlers import serialized
from tests.codecs import encoded, encoded_as_message
from tests.wire import Array, infer, rows_of_floats

INPUT, RATE = TensorSpec("a", "FP32", (2,)), TensorSpec("sr", "INT64", (), shape_tensor=True)


def stateful(*inputs: TensorSpec, controls: tuple[Control, ...] = (), rows: int = 4) -> ModelCodec:
    spec = ModelSpec(inputs or (INPUT,), (TensorSpec("x", "FP32", (2,)),), rows > 0, sequence=SequenceSpec(controls))
    return codec_for("m", "1", spec, rows)


def told_id(datatype: str) -> ModelCodec:
    return stateful(controls=(Control(ControlKind.CORRID, TensorSpec("C", datatype, (1,))),))


def step(rows: int = 1, rate: Array | None = None, **parameters: Any) -> pb.ModelInferRequest:
    inputs = {"a": rows_of_floats(rows), **({} if rate is None else {"sr": rate})}
    return infer("m", inputs, parameters=parameters)


class Known:
    """Requests as they are read once `codec` and reader have seen others like them."""

    def __init__(self, codec: ModelCodec) -> None:
        self.codec = codec
        self._read = RequestReader()

    def of(self, message: pb.ModelInferRequest) -> AnyMessage:
        for _ in range(2):
            read = self._read(message.SerializeToString())
            assert not isinstance(read, Exception)
            with suppress(NoSequence):
                self.codec.read(read)
        assert isinstance(read, WireRequest)
        return read


def test_request_without_an_id_is_refused_even_if_it_starts() -> None:
    for given in ({}, {"sequence_id": 0}, {"sequence_id": ""}, {"sequence_start": True}):
        with pytest.raises(NoSequence, match="'m' must specify a non-zero or non-empty correlation ID"):
            stateful().read(step(**given))


def test_request_of_two_rows_is_refused_before_its_missing_id() -> None:
    with pytest.raises(InvalidRequest) as caught:
        stateful().read(step(rows=2))
    assert str(caught.value) == (
        "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher: expected 1 "
        "row, as a request is a step of one sequence, got 2"
    )


def test_faulty_tensors_are_refused_before_anything_of_sequences() -> None:
    request = step(rows=2)
    request.inputs[0].datatype = "INT32"
    with pytest.raises(InvalidRequest, match="expected datatype FP32, got 'INT32'"):
        stateful().read(request)


def test_model_without_a_batch_axis_takes_steps() -> None:
    request = infer("m", {"a": rows_of_floats(1)[0]}, parameters={"sequence_id": 3})
    assert stateful(rows=0).read(request).steps == [SequenceStep(3)]


def test_model_without_sequences_ignores_where_steps_are() -> None:
    codec = codec_for("m", "1", ModelSpec((INPUT,), (INPUT,), batched=True), 4)
    known = Known(codec)
    requests = [known.of(step(sequence_id=number, sequence_end=True)) for number in (1, 300, 70_000)]
    group = codec.read(requests[0], requests[1:])
    assert (len(group.inputs), group.steps) == (3, ())


@pytest.mark.parametrize(
    ("datatype", "sequence_id", "got", "wanted"),
    [("UINT64", "seven", "BYTES", "int64_param"), ("INT32", "7", "BYTES", "int64_param"),
     ("BYTES", 7, "UINT64", "string_param")],
)  # fmt: skip
def test_id_that_the_model_cannot_be_told_is_refused(
    datatype: str, sequence_id: int | str, got: str, wanted: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        told_id(datatype).read(step(sequence_id=sequence_id))
    assert str(caught.value) == (
        f"sequence batching control 'C' data-type is '{got}', but model 'm' expects '{datatype}': expected sequence_id "
        f"as {wanted}, got {sequence_id!r}"
    )


@pytest.mark.parametrize(("datatype", "sequence_id"), [("INT32", 2**40 + 7), ("UINT64", 7), ("BYTES", "seven")])
def test_id_of_the_controls_kind_is_taken(datatype: str, sequence_id: int | str) -> None:
    assert told_id(datatype).read(step(sequence_id=sequence_id)).steps == [SequenceStep(sequence_id)]


def test_known_steps_are_a_group_wherever_they_are_in_their_sequences() -> None:
    known = Known(stateful())
    told: list[dict[str, Any]] = [
        {"sequence_id": 7, "sequence_start": True, "sequence_end": False},
        {"sequence_end": True, "sequence_start": False, "sequence_id": 2**40},
        {"sequence_id": -1},
        {"sequence_id": "seven", "sequence_end": False},
    ]
    first, *more = [known.of(step(**given)) for given in told]
    group = known.codec.read(first, more)
    assert len(group.inputs) == 4
    assert group.steps == [
        SequenceStep(7, start=True),
        SequenceStep(2**40, end=True),
        SequenceStep(2**64 - 1),
        SequenceStep("seven"),
    ]


def test_step_without_an_id_ends_the_group() -> None:
    known = Known(stateful())
    good, bad = known.of(step(sequence_id=7)), known.of(step(sequence_id=0))
    assert known.codec.read(good, [good, bad, good]).steps == [SequenceStep(7)] * 2
    with pytest.raises(NoSequence):
        known.codec.read(bad, [good])


def test_steps_of_other_priorities_are_not_a_group() -> None:
    known = Known(stateful())
    one, other = known.of(step(sequence_id=7)), known.of(step(sequence_id=8, priority=1))
    assert known.codec.read(one, [other]).steps == [SequenceStep(7)]
    assert known.codec.read(other, [one]).options.parameters.priority == 1


def test_steps_with_equal_shape_tensors_are_a_group() -> None:
    known = Known(stateful(INPUT, RATE))
    wide, narrow = np.array(16_000), np.array(8_000)
    first, second, other = [known.of(step(rate=rate, sequence_id=n)) for n, rate in enumerate((wide, wide, narrow), 1)]
    group = known.codec.read(first, [second, other, second])
    assert group.steps == [SequenceStep(1), SequenceStep(2)]
    assert [one[1].item() for one in group.inputs] == [16_000, 16_000]
    assert known.codec.read(other).options.key != group.options.key


@pytest.mark.parametrize("reshape", [None, (1, 2)], ids=["as the model has it", "reshaped"])
@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
def test_answer_has_the_clients_outputs_and_no_states(reshape: tuple[int, ...] | None, typed: bool) -> None:
    output = TensorSpec("x", "FP32", (2,), reshape=reshape)
    codec = codec_for("m", "1", ModelSpec((INPUT,), (output,), True, sequence=SequenceSpec()), 4)
    request = step(sequence_id=1, binary_data_output=not typed)
    group = codec.read(request)
    outputs = rows_of_floats(3).reshape(3, *(reshape or (2,)))
    states = np.zeros((2, 3, 4), np.float32)
    for results in ((outputs[1:2], states[:, 1:2]), Share(Outputs([outputs, states]), 1, 2)):
        answer = encoded_as_message(codec, request, group, results)
        fast = pb.ModelInferResponse.FromString(serialized(encoded(codec, request, group, results)))
        assert fast == answer
        (one,) = answer.outputs
        assert (one.name, list(one.shape)) == ("x", [1, 2])
        values = one.contents.fp32_contents if typed else np.frombuffer(answer.raw_output_contents[0], "<f4")
        assert list(values) == [2, 3]
