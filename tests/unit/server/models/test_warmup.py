"""Samples run before a model is ready: with which data, how often, and what happens if they fail."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from paceline.backends.base import Device
from paceline.backends.errors import DeviceLost, ExecutionError, InstanceError, LoadError, Unequipped
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.model_config import plan
from paceline.server.models.warmup import WarmUp
from tests.memory_models import MemoryInstance, MemoryModel
from tests.unit.server.models.sequence_texts import control, corrid, own, sequences
from tests.unit.server.models.warmup_bench import Bench, sample, values


def test_default_is_one_row_of_zeros_on_each_instance() -> None:
    bench = Bench(instances=3)
    bench.warm("")
    assert values(bench) == [[[[0, 0]]]] * 3


def test_default_without_batch_axis_is_the_whole_shape() -> None:
    bench = Bench(rows=0, dims=(2, 1))
    bench.warm("")
    assert values(bench) == [[[[0], [0]]]]


def test_default_of_text_is_a_digit() -> None:
    bench = Bench("BYTES")
    bench.warm("")
    assert values(bench) == [[[[b"0", b"0"]]]]


def test_default_with_an_unknown_dimension_runs_nothing() -> None:
    bench = Bench(dims=(2, -1))
    bench.warm("")
    assert not bench.seen


@pytest.mark.parametrize(
    "error",
    [DeviceLost("CUDA failure 719"), Unequipped("cuDNN is not available"), InstanceError("Failed to initialize CUDNN")],
)
def test_default_that_fails_as_any_input_would_fails_the_load(error: ExecutionError) -> None:
    bench = Bench(instances=2)
    bench.model.faults.raise_next(error)
    with pytest.raises(LoadError, match=f"its warm-up failed: {error}"):
        bench.warm("")


def test_default_that_fails_is_logged_and_does_not_fail_the_load(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(instances=2)
    bench.model.faults.raise_next(ExecutionError("zeros are no input"))
    with caplog.at_level(logging.WARNING, "paceline.server.warmup"):
        bench.warm("")
    (record,) = caplog.records
    assert record.getMessage() == (
        "model 'm' is served without warm-up, as it failed on zeros, maybe on any input; model_warmup can give it "
        "others: zeros are no input"
    )
    assert len(bench.seen) == 1


@pytest.mark.parametrize(
    ("rows", "compute", "text"),
    [
        (4, lambda inputs: [inputs[0][:, 0]], "output 'x': expected shape [1, 2], got [1]"),
        (4, lambda inputs: [inputs[0].sum()], "output 'x': expected shape [1, 2], got []"),
        (0, lambda inputs: [inputs[0][None]], "output 'x': expected shape [2], got [1, 2]"),
        (4, lambda inputs: [inputs[0].astype(np.float64)], "output 'x': expected FP32, got numpy's float64"),
        (4, lambda inputs: [*inputs, *inputs], "expected 1 outputs, got 2"),
        (1, lambda inputs: [inputs[0].squeeze()], "output 'x': expected shape [1, 2], got [2]"),
        (4, lambda inputs: [inputs[0][:, :1]], "output 'x': expected shape [1, 2], got [1, 1]"),
        (0, lambda inputs: [inputs[0].repeat(2)], "output 'x': expected shape [2], got [4]"),
        (4, lambda inputs: [inputs[0].repeat(2, axis=0)], "output 'x': expected shape [1, 2], got [2, 2]"),
    ],
    ids=["fewer axes", "none", "more axes", "datatype", "count", "one row only", "size", "size without rows", "rows"],
)
def test_default_whose_outputs_contradict_the_spec_fails_the_load(
    rows: int, compute: Callable[[Tensors], Tensors], text: str
) -> None:
    bench = Bench(rows=rows)
    bench.model = MemoryModel(bench.own, compute)
    assert bench.refusal("").startswith(f"the model's outputs aren't as declared, whatever its input: {text}")


@pytest.mark.parametrize(
    "compute",
    [
        lambda inputs: [inputs[0].squeeze()],
        lambda inputs: [inputs[0][:, : 1 + int(inputs[0].max())]],
        lambda inputs: [inputs[0][:, :0]],
        lambda inputs: [inputs[0][:0]],
    ],
    ids=["drops the axis of one row", "size by values", "nothing found", "no rows found"],
)
def test_default_whose_outputs_may_fit_for_other_inputs_is_only_logged(
    caplog: pytest.LogCaptureFixture, compute: Callable[[Tensors], Tensors]
) -> None:
    bench = Bench(rows=2)
    bench.model = MemoryModel(bench.own, compute)
    with caplog.at_level(logging.WARNING, "paceline.server.warmup"):
        bench.warm("")
    (record,) = caplog.records
    assert "is served without warm-up" in record.getMessage()


@pytest.mark.parametrize(("datatype", "size"), [("FP32", 2**26 + 1), ("FP32", 2**62), ("BYTES", 2**23)])
def test_default_of_a_large_row_runs_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture, datatype: str, size: int
) -> None:
    bench = Bench(datatype, dims=(size,))
    with caplog.at_level(logging.WARNING, "paceline.server.warmup"):
        bench.warm("")
    (record,) = caplog.records
    assert record.getMessage().startswith("model 'm' is served without warm-up, as a row has ")
    assert not bench.seen


@pytest.mark.parametrize("data", ["zero_data: true", "random_data: true"])
@pytest.mark.parametrize("size", [2**29, 2**57, 2**62])
def test_sample_larger_than_any_message_is_refused(data: str, size: int) -> None:
    text = Bench(dims=(-1,)).refusal(sample(data, str(size)))
    assert text == f"warmup sample 's': expected at most 2147483647 bytes in a batch, got {4 * size}"


@pytest.mark.parametrize(("dims", "rows"), [(2**27, 4), (1, 2**19)])
def test_sample_of_too_many_rows_together_is_refused(dims: int, rows: int) -> None:
    text = Bench(dims=(-1,), rows=rows).refusal(sample(dims=str(dims), more=f"batch_size: {rows}"))
    assert text == "warmup sample 's': expected at most 2147483647 bytes in a batch, got 2147483648"


def test_samples_too_large_to_be_kept_are_refused() -> None:
    text = Bench(dims=(-1,)).refusal(3 * sample(dims=str(2**28)))
    assert text == "warmup sample 's': expected at most 2147483647 bytes with the samples before it, got 2147483648"


def test_sample_that_the_model_lacks_memory_for_is_refused() -> None:
    bench = Bench()
    bench.model.faults.raise_next(MemoryError())
    assert bench.refusal(sample()) == "failed to run warmup sample 's': MemoryError"


def test_sample_of_zeros_replaces_the_default() -> None:
    bench = Bench(dims=(-1,))
    bench.warm(sample(dims="3"))
    assert values(bench) == [[[[0, 0, 0]]]]


def test_tensor_of_any_rank_is_warmed_up_only_by_samples_with_any_dims() -> None:
    bench = Bench(dims=(), rows=0, any_rank=True)
    bench.warm("")
    assert not bench.seen
    bench.warm(sample(dims="2, 3"))
    assert [inputs[0].shape for inputs in bench.seen] == [(2, 3)]
    assert "expected no negative dimension, got [-1]" in bench.refusal(sample(dims="-1"))


@pytest.mark.parametrize(("batch_size", "rows"), [(1, 1), (3, 3), (4, 4)])
def test_sample_batch_size_is_the_number_of_rows_in_one_batch(batch_size: int, rows: int) -> None:
    bench = Bench()
    bench.warm(sample(more=f"batch_size: {batch_size}"))
    assert [inputs[0].shape for inputs in bench.seen] == [(rows, 2)]
    assert bench.model.batches == [(1,) * rows]


def test_sample_batch_size_0_runs_nothing() -> None:
    bench = Bench()
    bench.warm(sample(more=""))
    assert not bench.seen


@pytest.mark.parametrize(("count", "times"), [(0, 1), (1, 1), (3, 3)])
def test_sample_count_is_how_often_it_runs_on_each_instance(count: int, times: int) -> None:
    bench = Bench(instances=2)
    bench.warm(sample(more=f"batch_size: 2 count: {count}"))
    assert bench.model.batches == [(1, 1)] * times * 2


ENDLESS = "batch_size: 1 count: 4294967295"


def test_samples_are_repeated_a_thousand_times_at_most(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(instances=2)
    with caplog.at_level(logging.WARNING, "paceline.server.warmup"):
        bench.warm(sample(more=ENDLESS) + sample(more=ENDLESS))
    assert len(bench.seen) == 2 * 2 + 1000
    assert caplog.messages == ["model 'm': its warm-up repeats no more samples after 1000 repeats, and is not complete"]


def test_slow_samples_are_repeated_for_ten_seconds_and_each_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.execution_ns = 10**9
    with caplog.at_level(logging.WARNING, "paceline.server.warmup"):
        bench.warm(sample(more=ENDLESS) + 3 * sample(more="batch_size: 1 count: 2"))
    assert len(bench.seen) == 11 + 3
    assert caplog.messages == ["model 'm': its warm-up repeats no more samples after 10 s, and is not complete"]


@pytest.mark.parametrize("text", ["", 20 * sample()])
def test_warm_up_begins_nothing_after_ten_minutes(text: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(instances=20)
    bench.execution_ns = 100 * 10**9
    with caplog.at_level(logging.WARNING, "paceline.server.warmup"):
        bench.warm(text)
    assert len(bench.seen) == 7
    assert caplog.messages == ["model 'm': its warm-up ends after 600 s, and is not complete"]


def test_sample_that_runs_is_logged_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "paceline.server.warmup"):
        Bench().warm(sample(more="batch_size: 1 count: 2"))
    assert [record.getMessage() for record in caplog.records] == [
        f"model 'm' is running warmup sample 's' for iteration {number}" for number in (1, 2)
    ]


def test_samples_run_in_order() -> None:
    bench = Bench(dims=(-1,))
    bench.warm(sample(dims="1") + sample(dims="2"))
    assert [inputs[0].shape for inputs in bench.seen] == [(1, 1), (1, 2)]


FEATURES = """
    name: "m" max_batch_size: 4
    input { name: "r" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
    input { name: "o" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
    output { name: "x" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
    dynamic_batching { }
"""


def warm_features(text: str, *, shape_tensor: bool = False) -> list[list[Array]]:
    """The inputs that the warm-up gives a model with a reshaped, an optional and perhaps a shape tensor."""
    seen: list[list[Array]] = []

    def compute(inputs: Tensors) -> Tensors:
        seen.append(list(inputs))
        return inputs[:1]

    given = [TensorSpec("r", "FP32", (-1, 2, 2)), TensorSpec("o", "FP32", (-1, -1))]
    if shape_tensor:
        given.append(TensorSpec("s", "INT64", (2,)))
        text += ' input { name: "s" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }'
    own = ModelSpec(tuple(given), (TensorSpec("x", "FP32", (-1, 2, 2)),))
    config = text_format.Parse(FEATURES + text, pb.ModelConfig())
    served = plan(config, own)
    WarmUp(config, served, Path()).run([MemoryModel(own, compute).instance(served.spec, Device())])
    return seen


def feature_sample(**inputs: str) -> str:
    given = "".join(f'inputs {{ key: "{name}" value {{ zero_data: true {text} }} }}' for name, text in inputs.items())
    return f'model_warmup {{ name: "s" batch_size: 2 {given} }}'


def test_default_is_in_the_models_shape_and_without_optional_inputs() -> None:
    ((reshaped, optional),) = warm_features("")
    assert reshaped.shape == (1, 2, 2)
    assert optional is MISSING


def test_default_with_a_shape_tensor_runs_nothing() -> None:
    assert not warm_features("", shape_tensor=True)


def test_sample_is_in_the_models_shape_with_the_optional_inputs_it_names() -> None:
    reshaped = "data_type: TYPE_FP32 dims: [ 4 ]"
    ((r, o),) = warm_features(feature_sample(r=reshaped, o="data_type: TYPE_FP32 dims: [ 3 ]"))
    assert (r.shape, o.shape) == ((2, 2, 2), (2, 3))
    ((r, o),) = warm_features(feature_sample(r=reshaped))
    assert (r.shape, o is MISSING) == ((2, 2, 2), True)


def test_sample_shape_tensor_has_no_batch_axis() -> None:
    text = feature_sample(r="data_type: TYPE_FP32 dims: [ 4 ]", s="data_type: TYPE_INT64 dims: [ 2 ]")
    ((r, _, s),) = warm_features(text, shape_tensor=True)
    assert (r.shape, s.shape) == ((2, 2, 2), (2,))


def test_model_of_only_optional_inputs_has_no_default_warmup() -> None:
    own = ModelSpec((TensorSpec("o", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))
    text = """max_batch_size: 4 input { name: "o" data_type: TYPE_FP32 dims: [ 2 ] optional: true }
        output { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }"""
    model = MemoryModel(own)

    def warm(more: str) -> None:
        config = text_format.Parse(text + more, pb.ModelConfig())
        served = plan(config, own)
        WarmUp(config, served, Path()).run([model.instance(served.spec, Device())])

    warm("")
    assert not model.batches
    with pytest.raises(ConfigError, match=r"^warmup sample 's': expected some of the inputs \['o'\], got none$"):
        warm(feature_sample())


class HoldingInstance(MemoryInstance):
    """Is told of the sequences that are over."""

    def __init__(self, own: ModelSpec, spec: ModelSpec) -> None:
        super().__init__(MemoryModel(own, lambda inputs: inputs[:1]), spec, Device())
        self.over: list[tuple[object, str]] = []

    def sequence_over(self, sequence: int | str | bytes, why: str) -> None:
        self.over.append((sequence, why))


@pytest.mark.parametrize(
    ("controls", "more", "over"),
    [
        (control(), "", [(0, "end")]),
        (corrid(), "", [(0, "end")]),
        (corrid("NAME"), "", [(b"", "end")]),
        (control(), sample(dims="4"), [(0, "end")]),
        (control(), sample(dims="4", more="batch_size: 0"), []),
    ],
    ids=["default", "id", "name", "sample", "nothing"],
)
def test_sequences_of_the_warm_up_end(controls: str, more: str, over: list[object]) -> None:
    model = own(*re.findall('name: "(.*?)"', controls))
    config = text_format.Parse(f'name: "m" backend: "python" {sequences(controls, more=more)}', pb.ModelConfig())
    served = plan(config, model)
    instances = [HoldingInstance(model, served.spec) for _ in range(2)]
    WarmUp(config, served, Path()).run(instances)
    assert [one.over for one in instances] == [over] * 2
