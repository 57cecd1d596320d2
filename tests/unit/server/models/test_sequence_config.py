"""Controls, strategies and limits of `sequence_batching`, what is left for clients, and what is refused."""

from __future__ import annotations

import pytest

from paceline.backends.spec import ControlKind, ModelSpec, TensorSpec
from tests.unit.server.models.sequence_texts import (
    control,
    corrid,
    own,
    planned,
    refusal,
    sequence,
    sequences,
    state,
)

ALL = (
    control()
    + control("READY", "READY", "int32_false_true: [5, 7]")
    + control("END", "END", "bool_false_true: [true, false]")
    + corrid()
)
PYTHON = 'backend: "python" '


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "paceline.{key}" value {{ string_value: "{value}" }} }} '


def test_controls_are_the_models_inputs_of_their_kind() -> None:
    found = sequence(ALL, own("START", "READY", "END", "ID")).controls

    assert [(one.kind, one.tensor.name, one.tensor.datatype, one.values) for one in found] == [
        (ControlKind.START, "START", "FP32", (0.0, 1.0)),
        (ControlKind.READY, "READY", "INT32", (5, 7)),
        (ControlKind.END, "END", "BOOL", (True, False)),
        (ControlKind.CORRID, "ID", "UINT64", ()),
    ]
    assert [one.tensor.model_dims for one in found] == [(1,), (), (1,), (1,)]


@pytest.mark.parametrize("datatype", ["UINT64", "INT64", "UINT32", "INT32", "BYTES"])
def test_corrid_has_the_datatype_of_the_model(datatype: str) -> None:
    model = ModelSpec((*own().inputs, TensorSpec("ID", datatype, (-1, 1))), own().outputs)
    config_type = "STRING" if datatype == "BYTES" else datatype

    (left_open,) = sequence(corrid(), model).controls
    (said,) = sequence(corrid(more=f"data_type: TYPE_{config_type}"), model).controls

    assert left_open == said
    assert said.tensor.datatype == datatype


@pytest.mark.parametrize(("dims", "mine"), [((1,), (1,)), ((-1,), (1,)), ((), ())])
def test_controls_without_a_batch_axis_have_one_element(dims: tuple[int, ...], mine: tuple[int, ...]) -> None:
    model = ModelSpec((TensorSpec("a", "FP32", (4,)), TensorSpec("START", "FP32", dims)), own().outputs)

    (start,) = sequence(control(), model, rows=0).controls

    assert start.tensor.model_dims == mine


def test_clients_see_neither_controls_nor_states() -> None:
    spec = planned(sequences(control() + state()), own("START", "h", "h_out")).spec

    assert [one.name for one in spec.inputs] == ["a"]
    assert [one.name for one in spec.outputs] == ["x"]
    assert [one.name for one in spec.executed.inputs] == ["a", "START", "h"]
    assert [one.name for one in spec.executed.outputs] == ["x", "h_out"]


def test_output_of_a_state_is_a_clients_if_listed() -> None:
    more = 'output { name: "h_out" data_type: TYPE_FP32 dims: [ 2 ] }'

    spec = planned(sequences(state(), more=more), own("h", "h_out")).spec

    assert [one.name for one in spec.outputs] == ["h_out"]
    assert [one.name for one in spec.executed.outputs] == ["h_out"]


@pytest.mark.parametrize(("declared", "dims"), [("", ()), ("dims: []", ()), ("dims: [ 1 ]", (1,))])
def test_input_without_dimensions_is_a_shape_tensor(declared: str, dims: tuple[int, ...]) -> None:
    more = f'input [ {{ name: "rate" data_type: TYPE_INT64 {declared} }}, {{ name: "a" }} ]' if declared else ""

    spec = planned(sequences(state(), more=more), own("rate", "h", "h_out")).spec

    rate = next(one for one in spec.inputs if one.name == "rate")
    assert (rate.shape_tensor, rate.dims, rate.model_dims) == (True, dims, ())


def test_without_a_batch_axis_nothing_is_a_shape_tensor() -> None:
    spec = planned(sequences(state("c"), 0, 'input { name: "rate" } input { name: "a" } output { name: "x" }'),
                   own("rate", "c", "c_out")).spec  # fmt: skip

    assert not any(one.shape_tensor for one in spec.inputs)


def test_default_rows_hold_if_every_first_dimension_is_free() -> None:
    text = f"sequence_batching {{ {state()} }}"

    assert planned(text, own("h", "h_out")).max_batch_rows == 32
    assert planned(text, own("h", "h_out", "rate")).max_batch_rows == 0
    assert planned(f"sequence_batching {{ {state('c')} }}", own("c", "c_out")).max_batch_rows == 0


@pytest.mark.parametrize(
    ("text", "more", "places", "rows"),
    [
        ("", "", 0, False),
        (control(), "", 0, False),
        ("oldest { }" + ALL, "", 0, False),
        ("direct { }" + control("READY", "READY", "int32_false_true: [0, 1]"), "", 4, True),
        (corrid(), "", 4, True),
        ("", PYTHON, 4, True),
        ("oldest { }", PYTHON, 4, False),
        ("oldest { max_candidate_sequences: 9 }", PYTHON, 9, False),
    ],
)
def test_sequences_stay_where_the_model_can_see_them(text: str, more: str, places: int, rows: bool) -> None:
    made = planned(sequences(text, more=more), own("START", "READY", "END", "ID"))

    assert made.spec.sequence is not None
    assert made.policy.sequences is not None
    assert (made.spec.sequence.places, made.spec.sequence.rows) == (places, rows)
    assert made.policy.sequences.places == places


@pytest.mark.parametrize(("kept", "isolates"), [("", False), (state("h", "data_type: TYPE_FP32 dims: [ 2 ]"), True)])
def test_what_a_model_keeps_itself_is_not_executed_again(kept: str, isolates: bool) -> None:
    assert planned(sequences(kept, more=PYTHON), own()).policy.isolate_failures is isolates


def test_one_slot_is_left_without_a_batch_axis() -> None:
    more = PYTHON + 'input { name: "a" } output { name: "x" }'

    made = planned(sequences("", 0, more), own()).spec.sequence

    assert made is not None
    assert (made.places, made.rows) == (1, False)


def test_python_models_need_not_declare_controls_and_states() -> None:
    text = control() + state("h", "data_type: TYPE_FP32 dims: [ 2 ]")

    spec = planned(sequences(text, more=PYTHON), own()).spec

    assert [(one.name, one.datatype, one.model_dims) for one in spec.executed.inputs[1:]] == [
        ("START", "FP32", (1,)),
        ("h", "FP32", (2,)),
    ]
    assert [one.name for one in spec.executed.outputs] == ["x", "h_out"]


def test_oldest_batches_as_the_dynamic_batcher() -> None:
    text = "oldest { preferred_batch_size: [2, 3] max_queue_delay_microseconds: 7 preserve_ordering: true }"

    policy = planned(sequences(text), own()).policy

    assert (policy.preferred_batch_rows, policy.max_queue_delay_ns) == ((2, 3), 7_000)
    assert policy.preserve_ordering
    assert (policy.max_batch_rows, policy.max_batch_requests) == (4, 0)


@pytest.mark.parametrize(
    ("share", "rows", "preferred"),
    [("0.5", 4, (2, 3, 4)), ("0.6", 4, (3, 4)), ("0.1", 10, tuple(range(1, 11))), ("1", 4, ()), ("0.001", 2, (1, 2))],
)
def test_direct_prefers_all_sizes_from_its_share_up(share: str, rows: int, preferred: tuple[int, ...]) -> None:
    text = f"direct {{ minimum_slot_utilization: {share} max_queue_delay_microseconds: 7 }}"

    policy = planned(sequences(text, rows), own()).policy

    assert (policy.preferred_batch_rows, policy.max_queue_delay_ns) == (preferred, 7_000)


def test_direct_without_a_share_waits_for_nothing() -> None:
    policy = planned(sequences("direct { max_queue_delay_microseconds: 7 }"), own()).policy

    assert (policy.preferred_batch_rows, policy.max_queue_delay_ns, policy.max_batch_requests) == ((), 0, 0)


def test_steps_share_batches_although_the_tensors_are_declared() -> None:
    more = 'input { name: "a" } output { name: "x" }'

    assert planned(sequences("", 4, more), own()).policy.max_batch_requests == 0
    assert planned(sequences("", 0, more), own()).policy.max_batch_requests == 1


@pytest.mark.parametrize(
    ("text", "idle_ns"),
    [
        ("", 1_000_000_000),
        ("max_sequence_idle_microseconds: 0", 1_000_000_000),
        ("max_sequence_idle_microseconds: 7", 7_000),
        (f"max_sequence_idle_microseconds: {2**64 - 1}", 2**62 - 1),
    ],
)
def test_idle_limit_is_one_second_unless_configured(text: str, idle_ns: int) -> None:
    made = planned(sequences(text), own()).policy.sequences

    assert made is not None
    assert made.idle_ns == idle_ns


@pytest.mark.parametrize(
    ("text", "most", "backlog"),
    [
        (sequences(""), 10_000, 10_000),
        (sequences("", more=parameter("max_sequences", "3") + parameter("sequence_backlog", "0")), 3, 0),
        (sequences("oldest { max_candidate_sequences: 6000 }", more="instance_group { count: 2 }"), 12_000, 10_000),
        (sequences("", 6_000, "instance_group { count: 2 gpus: [0, 1] }"), 24_000, 10_000),
    ],
)
def test_bounds_are_generous_unless_configured(text: str, most: int, backlog: int) -> None:
    made = planned(text, own()).policy.sequences

    assert made is not None
    assert (made.max_sequences, made.backlog) == (most, backlog)


def test_ragged_inputs_go_with_states() -> None:
    flat = TensorSpec("flat", "FP32", (-1,))
    model = ModelSpec((*own("h").inputs, flat), own("h_out").outputs)
    more = 'input { name: "a" } input { name: "flat" dims: [ -1 ] allow_ragged_batch: true }'

    spec = planned(sequences(state(), more=more), model).spec

    assert [one.ragged for one in spec.executed.inputs] == [False, True, False]


TENSORS = own("START", "READY", "END", "ID", "NAME", "h", "h_out")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (control(""), "sequence batching control tensor must have a name for m"),
        ('control_input { name: "START" }', "control_input 'START': expected a control, got none"),
        (control() + corrid("START"), "control tensor 'START' is specified for multiple control kinds for m"),
        (
            'control_input { name: "START" control { bool_false_true: [0, 1] } control { fp32_false_true: [0, 1] } }',
            "control tensor 'START' is specified for multiple control kinds for m",
        ),
        (
            control() + control("READY", "START", "int32_false_true: [0, 1]"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (corrid() + corrid("NAME"), "sequence batching specifies multiple CONTROL_SEQUENCE_CORRID tensors for m"),
        (
            control(values=""),
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            "CONTROL_SEQUENCE_START for m, got none",
        ),
        (
            control(values="fp32_false_true: [0, 1] int32_false_true: [0, 1]"),
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            "'bool_false_true' for CONTROL_SEQUENCE_START for m, got int32_false_true, fp32_false_true",
        ),
        (
            control("END", "END", "bool_false_true: true"),
            "sequence batching control 'bool_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_END for m, "
            "got [True]",
        ),
        (control(values="data_type: TYPE_INT8 fp32_false_true: [0, 1]"), "expected data_type FP32, which"),
        (
            corrid(more="int32_false_true: [0, 1]"),
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            "CONTROL_SEQUENCE_CORRID for m, got int32_false_true",
        ),
        (
            corrid("START", "data_type: TYPE_FP32"),
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING, got FP32",
        ),
        (corrid("START"), "unexpected data type for control CONTROL_SEQUENCE_CORRID for m."),
        (
            control("begin"),
            "configuration specified sequence control 'begin', but model m does not provide that input, only ['a', ",
        ),
        (
            control(values="int32_false_true: [0, 1]"),
            "control_input 'START': the model expects data-type FP32 but the model configuration specifies data-type "
            "INT32",
        ),
        (
            control("a"),
            "sequence control 'a' in model m has dims [-1, 4] but dims [-1, 1] is expected",
        ),
        ("iterative_sequence: true", "sequence_batching.iterative_sequence is not supported by this build"),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m, got 1.5",
        ),
        ("oldest { preferred_batch_size: 0 }", "sequence batching preferred batch size must be positive for m, got 0"),
        (
            "oldest { preferred_batch_size: 5 }",
            "sequence batching preferred batch size must be <= max batch size for m, expected up to 4, got 5",
        ),
        ("oldest { max_candidate_sequences: -1 }", "max_candidate_sequences: expected >= 0, got -1"),
    ],
)
def test_contradictions_are_refused_in_tritons_words(text: str, said: str) -> None:
    assert said in refusal(sequences(text), TENSORS)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "response_cache { enable: true }",
            "Response Cache does not currently support model m with sequence batching scheduler. Please disable the "
            "response cache",
        ),
        (parameter("split_oversized", "true"), "paceline.split_oversized: expected none, as each request"),
        (parameter("batch_sizes", "2,4"), "paceline.batch_sizes: expected none, as sequences have rows of their own"),
        (parameter("max_batch_elements", "3"), "paceline.max_batch_elements: expected 0, as sequences have rows of"),
        (parameter("max_sequences", "many"), "paceline.max_sequences: expected a whole number"),
        (parameter("state_batch_axis", "h"), "paceline.state_batch_axis: expected inputs of states, each once, with"),
        (parameter("state_batch_axis", "h=1, h=1"), "paceline.state_batch_axis: expected inputs of states, each once"),
        (parameter("state_batch_axis", "h=-1"), "paceline.state_batch_axis: expected inputs of states, each once"),
        ('input { name: "h" dims: [ 2 ] }', "input 'h': expected only what clients send, got what sequence_batching"),
        ('input { name: "ID" dims: [ 1 ] }', "input 'ID': expected only what clients send, got what sequence_batching"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(more: str, said: str) -> None:
    assert said in refusal(sequences(corrid() + state(), more=more), own("ID", "h", "h_out"))


@pytest.mark.parametrize("key", ["state_batch_axis", "max_sequences", "sequence_backlog", "max_state_bytes"])
def test_settings_of_sequences_are_refused_without_them(key: str) -> None:
    value = "h=1" if key == "state_batch_axis" else "0"

    assert f"paceline.{key}: expected none, as it only means something with" in refusal(parameter(key, value), own())


def test_bound_is_refused_where_instances_hold_sequences() -> None:
    said = refusal(sequences(corrid(), more=parameter("max_sequences", "9")), own("ID"))

    assert said.startswith("paceline.max_sequences: expected none, as each instance holds 4 sequences, which")


def test_batch_sizes_are_allowed_where_rows_are_free() -> None:
    made = planned(sequences(state(), more=parameter("batch_sizes", "2,4")), own("h", "h_out"))

    assert made.policy.batch_sizes == (2, 4)


def test_bound_in_bytes_goes_with_states_that_fit() -> None:
    said = "paceline.max_state_bytes: expected"
    assert f"{said} none, as it only means something with a state, got 9" in refusal(
        sequences("", more=parameter("max_state_bytes", "9")), own()
    )
    assert f"{said} 0, or at least the 8 bytes of the states that a sequence begins with, got 7" in refusal(
        sequences(state(), more=parameter("max_state_bytes", "7")), own("h", "h_out")
    )


def test_bound_of_no_sequences_is_refused() -> None:
    assert refusal(sequences("", more=parameter("max_sequences", "0")), own()) == (
        "paceline.max_sequences: expected >= 1, got 0"
    )


def test_model_with_outputs_of_states_alone_is_refused() -> None:
    model = ModelSpec(own("h").inputs, own("h_out").outputs[1:])

    assert refusal(sequences(state()), model).startswith("output: expected one besides those of states, got only ['h_")


def test_many_preferred_sizes_are_refused() -> None:
    text = sequences("direct { minimum_slot_utilization: 0.1 }", 65_537)

    assert refusal(text, own()) == "max_batch_size: expected up to 65536 with minimum_slot_utilization, got 65537"
