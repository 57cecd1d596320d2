"""States of `sequence_batching`: what the model fills in, where their batch axis is, what they begin with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from paceline.backends.spec import ModelSpec, State, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.sequence_states import read_initial_data
from tests.unit.server.models.sequence_texts import own, planned, refusal, sequence, sequences, state

BOTH = own("h", "h_out", "c", "c_out")
AXIS = 'parameters { key: "paceline.state_batch_axis" value { string_value: "%s" } }'


def with_state(dims: tuple[int, ...], names: tuple[str, ...] = (), out: tuple[int, ...] | None = None,
               datatype: str = "FP32") -> ModelSpec:  # fmt: skip
    """A model with a state s of these dims and axis names, whose output has `out`."""
    output = TensorSpec("s_out", datatype, dims if out is None else out)
    return ModelSpec((*own().inputs, TensorSpec("s", datatype, dims, axis_names=names)), (*own().outputs, output))


def only(text: str, model: ModelSpec, rows: int = 4, data: bytes | None = None) -> State:
    (found,) = sequence(text, model, rows, None if data is None else {"s": data}).states
    return found


def initial(dims: str, more: str = "zero_data: true", data_type: str = "FP32") -> str:
    return f'initial_state {{ name: "i" data_type: TYPE_{data_type} dims: [ {dims} ] {more} }}'


def test_state_is_filled_in_from_the_model() -> None:
    h, c = sequence(state("h") + state("c"), BOTH).states

    assert [(one.name, one.datatype, one.dims, one.batch_axis) for one in (h.input, h.output, c.input, c.output)] == [
        ("h", "FP32", (2,), 0),
        ("h_out", "FP32", (2,), 0),
        ("c", "FP32", (3, 2), 1),
        ("c_out", "FP32", (3, 2), 1),
    ]
    assert not c.output.assumed
    assert (h.initial.shape, c.initial.shape) == ((1, 2), (1, 3, 2))


@pytest.mark.parametrize(
    ("dims", "names", "given", "asked", "axis"),
    [
        ((-1, -1, 8), (), "", "", 0),
        ((-1, -1, 8), (), "dims: [ -1, 8 ]", "", 0),
        ((-1, -1, 8), ("time", "batch", ""), "", "", 1),
        ((-1, -1, 8), ("time", "batch", ""), "dims: [ -1, 8 ]", "", 1),
        ((-1, -1, 8), ("time", "other", ""), "", "", 0),
        ((-1, -1, 8), (), "", "s=1", 1),
        ((-1, 2, -1, 8), (), "dims: [ -1, 2, 8 ]", "", 2),
        ((2, -1, -1), ("", "batch", "time"), "", "", 1),
        ((2, -1, -1), (), "", "s=2", 2),
        ((2, 3, -1), (), "dims: [ 2, 3 ]", "", 2),
    ],
)
def test_batch_axis_is_found_or_configured(
    dims: tuple[int, ...], names: tuple[str, ...], given: str, asked: str, axis: int
) -> None:
    text = sequences(state("s", given), more=AXIS % asked if asked else "")

    spec = planned(text, with_state(dims, names)).spec.sequence

    assert spec is not None
    (found,) = spec.states
    assert (found.input.batch_axis, found.output.batch_axis) == (axis, axis)
    assert found.input.dims == (*dims[:axis], *dims[axis + 1 :])
    assert found.initial.shape[0] == 1


@pytest.mark.parametrize(
    ("dims", "given", "axis", "said"),
    [
        ((2, -1, -1), "", "", "one free axis that can be the batch's in the model's input 's', which has shape [2, -1, "
         "-1], got [1, 2]; say which it is in paceline.state_batch_axis, as in s=2"),
        ((1, 4), "", "", "expected a free axis for the batch in the model's input 's', which has shape [1, 4]; export"),
        ((2, -1, -1), "", "s=0", "paceline.state_batch_axis: s: expected one of the free axes [1, 2] of the model's"),
        ((-1, 4), "", "t=0", "paceline.state_batch_axis: expected inputs of states, ['s'], got 't'"),
        ((-1, 4), "dims: [ 5 ]", "", "expected dims of the model's input 's', which has shape [-1, 4], with one of its "
         "free axes [0], the batch's, left out, got [5]"),
        ((-1, 4), "dims: [ -1, 4 ]", "s=0", "expected dims of the model's input 's', [4], got [-1, 4]; dims don't "
         "include the batch axis"),
        ((-1, 4), "dims: [ -2 ]", "", "expected dims >= -1, got [-2]"),
        ((-1, 4), "data_type: TYPE_INT32", "", "expected data_type of the model's input 's', FP32, got INT32"),
    ],
)  # fmt: skip
def test_states_that_are_not_the_models_are_refused(dims: tuple[int, ...], given: str, axis: str, said: str) -> None:
    text = sequences(state("s", given), more=AXIS % axis if axis else "")

    answer = refusal(text, with_state(dims))

    assert said in answer
    assert answer.startswith(("sequence_batching.state 's': ", "paceline.state_batch_axis: "))


@pytest.mark.parametrize(
    ("out", "datatype", "said"),
    [
        ((-1, 5), "FP32", "expected the model's output 's_out' to have the shape of its input 's', [-1, 4], whose free "
         "axis 0 is the batch's, got [-1, 5]"),
        ((1, 4), "FP32", "whose free axis 0 is the batch's, got [1, 4]"),
        ((-1, 4, 1), "FP32", "got [-1, 4, 1]"),
        ((-1, 4), "FP64", "expected an input and an output of the same datatype, got FP32 and FP64 in the model"),
    ],
)  # fmt: skip
def test_output_that_can_not_be_the_next_input_is_refused(out: tuple[int, ...], datatype: str, said: str) -> None:
    model = with_state((-1, 4), out=out)
    outputs = (model.outputs[0], TensorSpec("s_out", datatype, out))

    assert said in refusal(sequences(state("s")), ModelSpec(model.inputs, outputs))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (state("h") + state("h"), "State input name 'h' specified more than once for m"),
        ('state { input_name: "h" output_name: "c_out" } ' + state("c"), "expected an output_name of its own, got 'c_"),
        ('state { input_name: "h" }', "expected an input_name and an output_name, got input_name 'h', output_name ''"),
        (state("k"), "sequence_batching.state 'k': the model has no input 'k', only ['a', 'h', 'c']"),
        ('state { input_name: "h" output_name: "k" }', "the model has no output 'k', only ['x', 'h_out', 'c_out']"),
        (
            'control_input { name: "h" control { fp32_false_true: [ 0, 1 ] } } ' + state("h"),
            "state 'h': expected an input that nothing else fills, got a control_input",
        ),
        (state("h", "use_growable_memory: true"), "state 'h': use_growable_memory is not supported by this build"),
        (state("h", initial("2") * 2), "must contain exactly one or zero element. Found 2 elements"),
        (state("h", initial("2").replace('"i"', '""')), "Field 'name' must be set when using initial_state"),
        (state("h", initial("2", "")), "expects state to have state_data set, got none"),
        (
            state("h", initial("2", data_type="INT8")),
            "The data type used for 'initial_state' field does not match the state data type, expected FP32, got INT8",
        ),
        (
            state("h", "data_type: TYPE_FP32 " + initial("2", data_type="INT8")),
            "The data type used for 'initial_state' field does not match the state data type, expected FP32, got INT8",
        ),
        (state("h", initial("-1")), "'initial_state' field contains variable dimensions, expected known ones, got [-1"),
        (
            state("c", initial("2")),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions, expected [3, 2], "
            "got [2]",
        ),
        (
            state("c", initial("2, 3")),
            "'initial_state' dim doesn't match 'state' dim description, expected [3, 2], got [2, 3]",
        ),
    ],
)
def test_states_that_contradict_themselves_are_refused(text: str, said: str) -> None:
    assert said in refusal(sequences(text), BOTH)


def test_free_dims_begin_with_one_and_zeros() -> None:
    found = only(state("s"), with_state((-1, 3, -1)))

    np.testing.assert_array_equal(found.initial, np.zeros((1, 3, 1), np.float32))
    assert found.initial.dtype == np.float32
    assert not found.initial.flags.writeable


def test_text_begins_empty() -> None:
    found = only(state("s"), with_state((-1, -1), datatype="BYTES"))

    assert found.initial.tolist() == [[b""]]


@pytest.mark.parametrize(
    ("dims", "data", "expected"),
    [
        ("2", None, [[0, 0]]),
        ("0", None, [[]]),
        ("0", b"", [[]]),
        ("2", np.array([5, 6], np.float32).tobytes(), [[5, 6]]),
        ("1", np.array([5, 6], np.float32).tobytes(), [[5]]),
    ],
)
def test_initial_state_has_the_configured_dims_and_data(
    dims: str, data: bytes | None, expected: list[list[float]]
) -> None:
    of_data = "zero_data: true" if data is None else 'data_file: "f"'

    found = only(state("s", initial(dims, of_data)), with_state((-1, -1)), data=data)

    np.testing.assert_array_equal(found.initial, np.array(expected, np.float32).reshape(1, -1))
    assert found.input.dims == (-1,)


def test_initial_state_has_one_row_wherever_the_batch_axis_is() -> None:
    data = np.arange(6, dtype=np.float32)
    text = state("c", initial("3, 2", 'data_file: "f"'))

    (found,) = sequence(text, own("c", "c_out"), data={"c": data.tobytes()}).states

    np.testing.assert_array_equal(found.initial, data.reshape(1, 3, 2))


def test_initial_state_from_too_few_bytes_is_refused() -> None:
    text = sequences(state("h", initial("2", 'data_file: "f"')))

    said = refusal(text, own("h", "h_out"), {"h": b"1234567"})

    assert "initial_state setting expects 8 bytes, but the data provided from its data_file only has 7 bytes" in said


@pytest.mark.parametrize(("datatype", "dims"), [("FP32", 2**29), ("BYTES", 2**26)])
def test_initial_state_beyond_a_message_is_refused(datatype: str, dims: int) -> None:
    said = refusal(sequences(state("s")), with_state((-1, dims), datatype=datatype))

    assert "state 's': expected an initial state of at most 2147483647 bytes, got " in said


def test_initial_texts_are_read_exactly() -> None:
    text, model = state("s", initial("1", 'data_file: "f"', "STRING")), with_state((-1, -1), datatype="BYTES")

    assert only(text, model, data=b"\x02\x00\x00\x00ab").initial.tolist() == [[b"ab"]]
    assert "sequence_batching.state 's': initial_state: " in refusal(
        sequences(text), model, {"s": b"\x02\x00\x00\x00a"}
    )


@pytest.mark.parametrize(
    ("dims", "given", "expected"),
    [((), "", ()), ((), "dims: [ 1 ]", ()), ((), "dims: [ 1 ] " + initial("1"), ()), ((2, -1), "", (2, 1)),
     ((2, -1), "dims: [ 2, -1 ] " + initial("2, 0"), (2, 0))],
)  # fmt: skip
def test_states_without_a_batch_axis_have_whole_dims(
    dims: tuple[int, ...], given: str, expected: tuple[int, ...]
) -> None:
    text = sequences(state("s", given), 0, 'input { name: "a" } output { name: "x" }')

    spec = planned(text, with_state(dims)).spec.sequence

    assert spec is not None
    (found,) = spec.states
    assert found.initial.shape == expected
    assert found.input.dims == dims


def test_dims_without_the_batch_axis_are_refused_where_there_is_none() -> None:
    text = sequences(state("s", "dims: [ 4 ]"), 0, 'input { name: "a" } output { name: "x" }')

    said = refusal(text, with_state((-1, 4)))

    assert said.endswith("expected dims of the model's input 's', [-1, 4], got [4]; without a batch axis, dims are the "
                         "whole shape")  # fmt: skip


def test_state_of_any_rank_needs_its_dims() -> None:
    shapeless = TensorSpec("s", "FP32", (), any_rank=True)
    model = ModelSpec((*own().inputs, shapeless), (*own().outputs, TensorSpec("s_out", "FP32", (), any_rank=True)))

    assert "expected dims, as the model's input 's' may have any number of axes" in refusal(
        sequences(state("s")), model
    )
    found = only(state("s", "dims: [ 2, -1 ]"), model)
    assert (found.input.dims, found.output.dims, found.initial.shape) == ((2, -1), (2, -1), (1, 2, 1))
    second = planned(sequences(state("s", "dims: [ 2, -1 ]"), more=AXIS % "s=1"), model).spec.sequence
    assert second is not None
    assert second.states[0].initial.shape == (1, 2, 1)
    assert "expected one of the free axes [0, 1, 2] of the model's input 's', which has shape any, got 3" in refusal(
        sequences(state("s", "dims: [ 2, -1 ]"), more=AXIS % "s=3"), model
    )


def test_axis_of_a_state_needs_a_batch_axis() -> None:
    text = sequences(state("c"), 0, AXIS % "c=1" + 'input { name: "a" } output { name: "x" }')

    assert "paceline.state_batch_axis: expected a max_batch_size above 0 with it, got 0" in refusal(
        text, own("c", "c_out")
    )


def test_output_with_another_batch_axis_is_not_for_clients() -> None:
    text = sequences(state("c"), more='output { name: "x" } output { name: "c_out" dims: [ 2, 2 ] }')

    assert "output 'c_out': expected only outputs whose batch axis is the first" in refusal(text, own("c", "c_out"))


def files(folder: Path, name: str) -> dict[str, bytes]:
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "two").write_bytes(b"12345678")
    (folder / "secret").write_bytes(b"12345678")
    config = text_format.Parse(sequences(state("h", initial("2", f'data_file: "{name}"'))), pb.ModelConfig())
    return dict(read_initial_data(config, folder))


def test_initial_state_is_read_from_its_folder(tmp_path: Path) -> None:
    assert files(tmp_path, "two") == {"h": b"12345678"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "../secret",
            "sequence_batching.state 'h': expected a file inside the model's folder 'initial_state', got '../",
        ),
        ("/etc/hostname", "expected a file inside the model's folder 'initial_state', got '/etc/hostname'"),
        ("none", "initial_state/none: No such file or directory"),
    ],
)
def test_initial_state_from_elsewhere_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        files(tmp_path, name)

    assert said in str(caught.value)
