"""The parameters of a request: which have a meaning, of which type they must be, and which are ignored."""

from __future__ import annotations

import math

import pytest

from paceline.protos.inference_pb2 import InferParameter
from paceline.scheduler.request import SequenceStep
from paceline.server.codec.parameters import NO_PARAMETERS, RequestParameters, is_reserved, parse_parameters, step_of
from paceline.server.errors import InvalidRequest, NotSupported
from tests.wire import parameter

OURS = "['paceline_batch_info', 'paceline_cancel', 'paceline_deadline_us', 'paceline_unordered']"
U64_MAX = 2**64 - 1


def uint(value: int) -> InferParameter:
    return InferParameter(uint64_param=value)


def parse(**values: object) -> RequestParameters:
    return parse_parameters({key: parameter(value) for key, value in values.items()})


def refusal(key: str, value: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_parameters({key: parameter(value)})
    return str(caught.value)


def test_parse_without_parameters_gives_the_defaults() -> None:
    assert parse() == NO_PARAMETERS == RequestParameters(timeout_ns=0, typed_outputs=False)


def test_parse_takes_at_most_1024_parameters() -> None:
    assert parse(**{f"p{number}": number for number in range(1_024)}) == NO_PARAMETERS
    with pytest.raises(InvalidRequest, match="expected at most 1024 parameters, got 1025"):
        parse(**{f"p{number}": number for number in range(1_025)})


@pytest.mark.parametrize(("timeout", "ns"), [(0, 0), (1, 1_000), (uint(7), 7_000), (2**63 - 1, (2**63 - 1) * 1_000)])
def test_parse_timeout_is_in_microseconds(timeout: object, ns: int) -> None:
    assert parse(timeout=timeout).timeout_ns == ns


@pytest.mark.parametrize(
    ("priority", "level"), [(0, 0), (1, 1), (uint(3), 3), (2**63 - 1, 2**63 - 1), (uint(U64_MAX), U64_MAX)]
)
def test_parse_priority_is_any_number_of_64_bits(priority: object, level: int) -> None:
    assert parse(priority=priority).priority == level


def test_parse_deadline_is_in_microseconds() -> None:
    assert parse(paceline_deadline_us=7).deadline_ns == 7_000


def test_parse_batch_info_asks_for_facts_about_the_batch() -> None:
    assert parse(paceline_batch_info=True).batch_info
    assert not parse().batch_info


@pytest.mark.parametrize(("binary", "typed"), [(True, False), (False, True)])
def test_parse_binary_data_output_false_asks_for_typed_outputs(binary: bool, typed: bool) -> None:
    assert parse(binary_data_output=binary).typed_outputs is typed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("priority", 0),
        ("paceline_batch_info", False),
        ("sequence_id", 7),
        ("sequence_id", uint(7)),
        ("sequence_id", "seven"),
        ("sequence_start", True),
        ("sequence_end", False),
        ("triton_enable_empty_final_response", True),
        ("paceline_unordered", True),
        ("paceline_cancel", True),
        ("paceline_deadline_us", 0),
    ],
)
def test_parse_known_keys_without_an_effect_are_accepted(key: str, value: object) -> None:
    assert parse_parameters({key: parameter(value)}) == NO_PARAMETERS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("headers", "x"),
        ("my-own", "text"),
        ("my-own", 1.5),
        ("my-own", True),
        ("my-own", -1),
        ("Triton_upper", 1),
        ("", ""),
        ("\u00e4\u00f6\u00fc", "\U0001f600"),
    ],
)
def test_parse_unknown_keys_are_accepted_and_change_nothing(key: str, value: object) -> None:
    parsed = parse_parameters({key: parameter(value), "timeout": parameter(1)})
    assert parsed == RequestParameters(timeout_ns=1_000)


@pytest.mark.parametrize(
    ("key", "value", "expected", "got"),
    [
        ("timeout", "1", "int64_param or uint64_param", "string_param"),
        ("timeout", 1.0, "int64_param or uint64_param", "double_param"),
        ("timeout", True, "int64_param or uint64_param", "bool_param"),
        ("priority", "high", "int64_param or uint64_param", "string_param"),
        ("sequence_id", True, "int64_param or string_param or uint64_param", "bool_param"),
        ("sequence_start", 1, "bool_param", "int64_param"),
        ("sequence_end", "true", "bool_param", "string_param"),
        ("binary_data_output", 0, "bool_param", "int64_param"),
        ("paceline_batch_info", 1, "bool_param", "int64_param"),
        ("paceline_unordered", 1, "bool_param", "int64_param"),
        ("paceline_cancel", "x", "bool_param", "string_param"),
        ("paceline_deadline_us", 0.5, "int64_param or uint64_param", "double_param"),
        ("paceline_batch_info", "true", "bool_param", "string_param"),
        ("triton_enable_empty_final_response", 1, "bool_param", "int64_param"),
    ],
)
def test_parse_value_of_another_type_is_refused_in_tritons_words(
    key: str, value: object, expected: str, got: str
) -> None:
    assert refusal(key, value) == f"invalid value type for '{key}' parameter, expected {expected}, got {got}"


@pytest.mark.parametrize(
    ("key", "value", "expected", "got"),
    [
        ("timeout", -1, ">= 0", "-1"),
        ("priority", -(2**63), ">= 0", str(-(2**63))),
        ("paceline_deadline_us", -1, ">= 0", "-1"),
        ("my-own", math.nan, "a finite number", "nan"),
        ("my-own", math.inf, "a finite number", "inf"),
        ("my-own", -math.inf, "a finite number", "-inf"),
        ("my-own", InferParameter(), "a value", "none"),
        ("timeout", InferParameter(), "a value", "none"),
    ],
)
def test_parse_wrong_value_is_refused_naming_key_expected_and_got(
    key: str, value: object, expected: str, got: str
) -> None:
    assert refusal(key, value) == f"parameter '{key}': expected {expected}, got {got}"


@pytest.mark.parametrize("text", ["x" * 129, "ü" * 65])
def test_parse_sequence_id_over_128_bytes_is_not_supported(text: str) -> None:
    with pytest.raises(NotSupported) as caught:
        parse(sequence_id=text)
    assert str(caught.value) == (
        "parameter 'sequence_id': string correlation ID cannot be longer than 128 characters, as bytes of UTF-8, "
        f"got {len(text.encode())}"
    )


@pytest.mark.parametrize(
    ("value", "sequence"),
    [
        (5, 5),
        ("5", "5"),
        (uint(5), 5),
        (-1, U64_MAX),
        (uint(U64_MAX), U64_MAX),
        (-(2**63), 2**63),
        (0, 0),
        ("", ""),
        ("a\0b", "a\0b"),
        ("x" * 128, "x" * 128),
    ],
)
def test_step_of_any_id_has_one_form(value: object, sequence: int | str) -> None:
    given = {"sequence_id": parameter(value)}
    parse_parameters(given)
    assert step_of(given) == SequenceStep(sequence)


def test_step_begins_and_ends_as_its_parameters_say() -> None:
    flags = {"sequence_start": parameter(True), "sequence_end": parameter(True)}
    assert step_of(flags) == SequenceStep(0, start=True, end=True)
    assert step_of({"sequence_end": parameter(True), "sequence_id": parameter(7)}) == SequenceStep(7, end=True)
    assert step_of({"priority": parameter(1)}) is None


@pytest.mark.parametrize(
    ("key", "prefix", "known"),
    [
        ("triton_x", "triton_", "['triton_enable_empty_final_response']"),
        ("triton_", "triton_", "['triton_enable_empty_final_response']"),
        ("paceline_x", "paceline_", OURS),
        ("paceline_batch_id", "paceline_", OURS),
    ],
)
def test_parse_unknown_reserved_key_is_refused_naming_the_known_ones(key: str, prefix: str, known: str) -> None:
    assert refusal(key, 1) == f"parameter '{key}': keys starting with '{prefix}' are reserved; known: {known}"


@pytest.mark.parametrize(
    "key",
    ["timeout", "priority", "sequence_id", "binary_data_output", "headers", "triton_x", "paceline_unordered"],
)
def test_reserved_keys_have_a_meaning_or_may_get_one(key: str) -> None:
    assert is_reserved(key)


@pytest.mark.parametrize("key", ["", "my-own", "x-timeout", "header", "tritonx", "x-triton_"])
def test_other_keys_are_not_reserved(key: str) -> None:
    assert not is_reserved(key)


def test_parse_one_bad_key_among_good_ones_is_found() -> None:
    with pytest.raises(InvalidRequest, match="'sequence_start'"):
        parse(timeout=1, sequence_start="yes", custom="x")
