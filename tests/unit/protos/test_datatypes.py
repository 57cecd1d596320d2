"""The table of datatypes and its look-ups."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from paceline.protos import inference_pb2, model_config_pb2
from paceline.protos.datatypes import (
    CONFIG_DATATYPES,
    CONFIG_NUMBERS,
    DATATYPES,
    Datatype,
    UnknownDatatypeError,
    by_dtype,
    by_name,
)

V2_DATATYPES = {
    "BOOL": ("?", 1, "bool_contents"),
    "UINT8": ("u1", 1, "uint_contents"),
    "UINT16": ("<u2", 2, "uint_contents"),
    "UINT32": ("<u4", 4, "uint_contents"),
    "UINT64": ("<u8", 8, "uint64_contents"),
    "INT8": ("i1", 1, "int_contents"),
    "INT16": ("<i2", 2, "int_contents"),
    "INT32": ("<i4", 4, "int_contents"),
    "INT64": ("<i8", 8, "int64_contents"),
    "FP16": ("<f2", 2, None),
    "FP32": ("<f4", 4, "fp32_contents"),
    "FP64": ("<f8", 8, "fp64_contents"),
    "BF16": ("<u2", 2, None),
    "BYTES": ("O", 0, "bytes_contents"),
}


def test_datatypes_all_names_are_those_of_the_protocol() -> None:
    assert set(DATATYPES) == set(V2_DATATYPES)


@pytest.mark.parametrize("name", V2_DATATYPES)
def test_datatype_each_name_has_its_dtype_size_and_field(name: str) -> None:
    dtype, item_bytes, field = V2_DATATYPES[name]
    assert DATATYPES[name] == Datatype(name, np.dtype(dtype), item_bytes, field)


@pytest.mark.parametrize("name", V2_DATATYPES)
def test_datatype_contents_field_exists_in_the_message(name: str) -> None:
    field = DATATYPES[name].contents_field
    assert field is None or field in inference_pb2.InferTensorContents.DESCRIPTOR.fields_by_name


def test_datatype_assignment_is_refused() -> None:
    with pytest.raises(FrozenInstanceError):
        DATATYPES["FP32"].name = "FP64"  # type: ignore[misc]


def test_datatypes_assignment_is_refused() -> None:
    with pytest.raises(TypeError):
        DATATYPES["FP8"] = DATATYPES["FP16"]  # type: ignore[index]


@pytest.mark.parametrize("name", V2_DATATYPES)
def test_by_name_known_name_returns_the_row(name: str) -> None:
    assert by_name(name) is DATATYPES[name]


@pytest.mark.parametrize("name", ["", "fp32", "FP8", "TYPE_FP32", "STRING", "FP32 "])
def test_by_name_unknown_name_raises_error_with_expected_and_got(name: str) -> None:
    with pytest.raises(UnknownDatatypeError, match="expected one of BOOL, UINT8") as caught:
        by_name(name)
    assert repr(name) in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", sorted(set(V2_DATATYPES) - {"BF16"}))
def test_by_dtype_own_dtype_returns_the_row(name: str) -> None:
    assert by_dtype(DATATYPES[name].dtype) is DATATYPES[name]


@pytest.mark.parametrize("name", sorted(set(V2_DATATYPES) - {"BF16", "BYTES"}))
def test_by_dtype_big_endian_returns_the_same_row(name: str) -> None:
    assert by_dtype(DATATYPES[name].dtype.newbyteorder(">")) is DATATYPES[name]


@pytest.mark.parametrize("dtype", ["O", "S", "S7", "U", "U7"])
def test_by_dtype_objects_bytes_and_text_are_bytes(dtype: str) -> None:
    assert by_dtype(np.dtype(dtype)) is DATATYPES["BYTES"]


def test_by_dtype_bfloat16_of_ml_dtypes_is_bf16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert by_dtype(np.dtype(ml_dtypes.bfloat16)) is DATATYPES["BF16"]


def test_by_dtype_float8_of_ml_dtypes_raises_error() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(UnknownDatatypeError, match="got float8_e4m3fn"):
        by_dtype(np.dtype(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("dtype", ["c8", "c16", "M8[ns]", "m8[s]", "V2", "V4", "g", [("a", "<f4")]])
def test_by_dtype_dtype_without_datatype_raises_error(dtype: object) -> None:
    with pytest.raises(UnknownDatatypeError, match="no datatype for numpy dtype"):
        by_dtype(np.dtype(dtype))  # type: ignore[call-overload]


def test_datatypes_import_does_not_import_ml_dtypes() -> None:
    program = "import sys, protos.datatypes, protos.tensors; sys.exit('ml_dtypes' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_config_datatypes_every_number_but_invalid_has_a_v2_name() -> None:
    numbers = set(model_config_pb2.DataType.values()) - {model_config_pb2.TYPE_INVALID}
    assert set(CONFIG_DATATYPES) == numbers
    assert set(CONFIG_DATATYPES.values()) == set(DATATYPES)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (model_config_pb2.TYPE_STRING, "BYTES"),
        (model_config_pb2.TYPE_FP32, "FP32"),
        (model_config_pb2.TYPE_BF16, "BF16"),
        (model_config_pb2.TYPE_BOOL, "BOOL"),
    ],
)
def test_config_datatypes_number_maps_to_name_and_back(number: int, name: str) -> None:
    assert CONFIG_DATATYPES[number] == name
    assert CONFIG_NUMBERS[name] == number


def test_config_numbers_is_the_inverse_of_config_datatypes() -> None:
    assert {number: name for name, number in CONFIG_NUMBERS.items()} == dict(CONFIG_DATATYPES)
