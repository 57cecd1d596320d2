"""The data of samples that a configuration lists: zeros, random numbers or a file, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.protos.datatypes import DATATYPES, by_name
from paceline.server.limits import LARGEST_MESSAGE_BYTES
from tests.unit.server.models.warmup_bench import Bench, sample, values
from tests.wire import bytes_element


@pytest.mark.parametrize("datatype", DATATYPES)
def test_sample_of_zeros_of_each_datatype_is_zero(datatype: str) -> None:
    bench = Bench(datatype)
    bench.warm(sample(datatype=datatype))
    (inputs,) = bench.seen
    assert inputs[0].dtype == by_name(datatype).dtype
    assert inputs[0].tolist() == [[b"", b""] if datatype == "BYTES" else [0, 0]]


@pytest.mark.parametrize("datatype", DATATYPES)
def test_random_sample_of_each_datatype_has_its_dtype_and_is_the_same_each_time(datatype: str) -> None:
    bench, again = Bench(datatype, (500,)), Bench(datatype, (500,))
    for one in (bench, again):
        one.warm(sample("random_data: true", "500", datatype))
    array = bench.seen[0][0]
    assert array.dtype == by_name(datatype).dtype
    assert array.tolist() == again.seen[0][0].tolist()
    if datatype == "BYTES":
        assert set(array.ravel().tolist()) == {b""}
    else:
        assert len(set(array.ravel().tolist())) >= 2
    if array.dtype.kind == "f":
        assert ((array >= 0) & (array <= 1)).all()
    if datatype == "BF16":
        floats = (array.astype("<u4") << 16).view("<f4")
        assert ((floats >= 0) & (floats <= 1)).all()


@pytest.mark.parametrize("datatype", DATATYPES)
def test_sample_from_a_file_of_each_datatype_is_its_raw_bytes(tmp_path: Path, datatype: str) -> None:
    dtype = by_name(datatype).dtype
    data = bytes_element(b"ab") + bytes_element(b"") if dtype.hasobject else np.array([1, 0]).astype(dtype).tobytes()
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "data").write_bytes(data)
    bench = Bench(datatype)
    bench.warm(sample('input_data_file: "data"', datatype=datatype), tmp_path)
    assert bench.seen[0][0].tolist() == [[b"ab", b""] if dtype.hasobject else [1, 0]]


def test_file_larger_than_any_message_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    with (tmp_path / "warmup" / "data").open("wb") as file:
        file.truncate(LARGEST_MESSAGE_BYTES + 1)  # and takes no room
    text = Bench().refusal(sample('input_data_file: "data"'), tmp_path)
    assert text.endswith(f"expected a file of at most {LARGEST_MESSAGE_BYTES} bytes, got more: 'data'")


def test_sample_from_a_file_in_a_folder_or_behind_a_link_within_is_read(tmp_path: Path) -> None:
    (tmp_path / "warmup" / "sub").mkdir(parents=True)
    (tmp_path / "warmup" / "sub" / "data").write_bytes(bytes(8))
    (tmp_path / "warmup" / "link").symlink_to("sub/data")
    bench = Bench()
    bench.warm(sample('input_data_file: "sub/data"') + sample('input_data_file: "link"'), tmp_path)
    assert values(bench) == [[[[0, 0]]]] * 2


@pytest.mark.parametrize("file", ["/etc/hostname", "../secret", "sub/../../secret", "link"])
def test_sample_from_a_file_outside_of_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "warmup" / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "warmup" / "link").symlink_to(tmp_path / "secret")
    bench = Bench()
    assert bench.refusal(sample(f'input_data_file: "{file}"'), tmp_path) == (
        f"warmup sample 's': input 'a': expected a file inside the model's folder 'warmup', got '{file}'"
    )
    assert not bench.seen


def test_sample_from_a_missing_file_is_refused(tmp_path: Path) -> None:
    text = Bench().refusal(sample('input_data_file: "gone"'), tmp_path)
    assert text == f"warmup sample 's': input 'a': {tmp_path}/warmup/gone: No such file or directory"


def test_sample_from_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    os.mkfifo(tmp_path / "warmup" / "data")
    text = Bench().refusal(sample('input_data_file: "data"'), tmp_path)
    assert text == f"warmup sample 's': input 'a': {tmp_path}/warmup/data: expected a file, got something else"


def test_sample_from_a_file_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "data").write_bytes(bytes(7))
    text = Bench().refusal(sample('input_data_file: "data"'), tmp_path)
    assert text == "warmup sample 's': input 'a': expected 8 bytes for FP32 of shape [1, 2], got 7"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (sample(more="batch_size: 5"), "expected a batch_size up to 4, got 5"),
        ('model_warmup { name: "s" batch_size: 1 }', "input 'a': missing; expected ['a'], got []"),
        (
            sample().replace('key: "a"', 'key: "b"'),
            "unexpected inputs ['b'], expected ['a']",
        ),
        (
            sample().replace("model_warmup {", 'model_warmup { inputs { key: "b" value { zero_data: true } }'),
            "unexpected inputs ['b'], expected ['a']",
        ),
        (sample(datatype="FP64"), "input 'a': expected data_type FP32, got FP64"),
        (sample().replace("data_type: TYPE_FP32", ""), "input 'a': expected data_type FP32, got TYPE_INVALID"),
        (sample(dims="3"), "input 'a': expected dims [2], got [3]"),
        (sample(dims=""), "input 'a': expected dims [2], got []"),
        (sample(dims="1, 2"), "input 'a': expected dims [2], got [1, 2]"),
        (sample(data=""), "input 'a': expected zero_data, random_data or input_data_file, got none"),
    ],
)
def test_sample_that_does_not_fit_is_refused_naming_sample_and_input(text: str, fault: str) -> None:
    bench = Bench()
    assert bench.refusal(text) == f"warmup sample 's': {fault}"
    assert not bench.seen


def test_sample_of_a_negative_size_is_refused() -> None:
    text = Bench(dims=(-1,)).refusal(sample(dims="-1"))
    assert text.startswith("warmup sample 's': input 'a': shape: expected no negative dimension")


def test_sample_batch_size_of_a_model_without_batch_axis_is_at_most_1() -> None:
    bench = Bench(rows=0)
    bench.warm(sample(more="batch_size: 1"))
    assert [inputs[0].shape for inputs in bench.seen] == [(2,)]
    assert bench.refusal(sample(more="batch_size: 2")) == "warmup sample 's': expected a batch_size up to 1, got 2"


def test_sample_that_fails_fails_the_load_with_the_models_error() -> None:
    bench = Bench()
    bench.model.faults.raise_next(ExecutionError("bad luck"))
    assert bench.refusal(sample()) == "failed to run warmup sample 's': bad luck"
