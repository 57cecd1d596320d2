"""Models with memory, loaded from files: what is tried, warmed up and executed, and with which tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from paceline.backends import registry
from paceline.backends.errors import BackendError
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import Supervise, Trial, unsupervised
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.loader import LoadedVersion, load_model
from tests import models, state_models
from tests.unit.server.found import find_models
from tests.unit.server.models.shelf import Model, VersionBackend, folder

STATE = 'state { input_name: "STATE" output_name: "STATE_OUT" %s }'
BARE = f"sequence_batching {{ {STATE % ''} }}"
BATCHED = f"max_batch_size: 4 {BARE}"
OWN_PROCESS = 'parameters { key: "paceline.own_process" value { string_value: "true" } }'

Maker = Callable[[], onnx.ModelProto]


@contextmanager
def loading(
    root: Path, made: Maker | str, config: str, files: dict[str, bytes] | None = None
) -> Iterator[LoadedVersion]:
    """Model m, of the ONNX model that is `made`, or of Python code."""
    home = root / "m"
    if isinstance(made, str):
        (home / "1").mkdir(parents=True)
        (home / "1" / "model.py").write_text(made)
    else:
        models.write(made(), home / "1" / "model.onnx")
    for name, content in (files or {}).items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_bytes(content)
    (home / "config.pbtxt").write_text(config)
    (found,) = find_models([root])
    (loaded,) = load_model(found, registry.backend, LoadDefaults(allow_python_models=True))
    try:
        yield loaded
    finally:
        loaded.close()


def refusal(root: Path, made: Maker, config: str) -> str:
    with pytest.raises((ConfigError, BackendError)) as caught, loading(root, made, config):
        pass
    return str(caught.value)


def run(loaded: LoadedVersion, *requests: Sequence[Array]) -> list[Tensors]:
    """The results of requests that have all tensors of the executed spec."""
    results = loaded.instances[0].execute(requests).results
    assert not any(isinstance(one, Exception) for one in results)
    return [*results]


def row(*numbers: float) -> Array:
    return np.array([numbers], np.float32)


@pytest.mark.parametrize("more", ["", OWN_PROCESS], ids=["in the server", "in its own process"])
def test_states_are_executed_with_the_requests_tensors(tmp_path: Path, more: str) -> None:
    with loading(tmp_path, state_models.accumulator, f"{BATCHED} {more}") as loaded:
        sequence = loaded.plan.spec.sequence
        assert sequence is not None
        (first,) = (one.initial for one in sequence.states)
        one, other = run(loaded, (row(1, 2), first), (row(3, 4), row(10, 20)))
    np.testing.assert_array_equal(one[1], row(1, 2))
    np.testing.assert_array_equal(other[1], row(13, 24))


def test_steps_begin_with_the_file_of_their_model(tmp_path: Path) -> None:
    initial = 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] data_file: "hundred" }'
    config = f"max_batch_size: 4 sequence_batching {{ {STATE % initial} }}"
    files = {"initial_state/hundred": row(100, 200).tobytes()}
    with loading(tmp_path, state_models.accumulator, config, files) as loaded:
        assert loaded.plan.spec.sequence is not None
        np.testing.assert_array_equal(loaded.plan.spec.sequence.states[0].initial, row(100, 200))


def test_state_may_begin_without_elements(tmp_path: Path) -> None:
    initial = 'dims: [ -1 ] initial_state { name: "i" dims: [ 0 ] zero_data: true }'
    config = f"max_batch_size: 4 sequence_batching {{ {STATE % initial} }}"
    with loading(tmp_path, state_models.growing, config) as loaded:
        assert loaded.plan.spec.sequence is not None
        state = loaded.plan.spec.sequence.states[0].initial
        for number in (1, 2):
            ((_, state),) = run(loaded, (row(number), state))
    np.testing.assert_array_equal(state, row(1, 2))


def test_model_without_max_batch_size_is_tried_with_its_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "paceline.server.loader"),
        loading(tmp_path, state_models.accumulator, BARE) as it,
    ):
        assert it.plan.max_batch_rows == 32
    assert "batches of up to 32 rows" in caplog.text


def test_model_whose_trial_shows_dependent_rows_is_not_batched(tmp_path: Path) -> None:
    spec = ModelSpec(
        (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("STATE", "FP32", (-1, 2))),
        (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("STATE_OUT", "FP32", (-1, 2))),
    )

    class Dependent(Model):
        def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
            return Trial(self.spec, "its rows depend on each other")

    backend = VersionBackend(v1=Dependent(spec=spec))
    (loaded,) = load_model(folder(tmp_path, 1, config=BARE), backend.of)
    assert loaded.plan.max_batch_rows == 0
    assert loaded.plan.spec.sequence is not None
    assert loaded.plan.spec.sequence.states[0].initial.shape == (1, 2)
    loaded.close()


def test_model_that_max_batch_size_could_batch_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.server.loader"), loading(tmp_path, state_models.recurrent, BARE) as it:
        assert it.plan.max_batch_rows == 0
        request = (row(1, 2, 3), np.array(2), np.zeros((2, 1, 3), np.float32))
        ((output, state),) = run(it, request)
    np.testing.assert_array_equal(output, row(4, 8, 12))
    np.testing.assert_array_equal(state, np.array([row(1, 2, 3), row(1, 2, 3)]))
    assert "no batch axis, requests run one by one (input 'RATE' has no dimensions; to batch it, set max" in caplog.text


def test_model_that_max_batch_size_could_not_batch_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = models.model(
        [helper.make_node("Add", ["INPUT0", "STATE"], [name]) for name in ("OUTPUT0", "STATE_OUT")],
        [models.tensor("INPUT0", "FP32", ["batch", 2]), models.tensor("STATE", "FP32", [1, 2])],
        [models.tensor(name, "FP32", ["batch", 2]) for name in ("OUTPUT0", "STATE_OUT")],
    )
    with caplog.at_level(logging.INFO, "paceline.server.loader"), loading(tmp_path, lambda: made, BARE) as loaded:
        assert loaded.plan.max_batch_rows == 0
    assert caplog.text.rstrip().endswith("(input 'STATE' has a first dimension of 1)")


def test_states_that_wait_for_their_like_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.server.loader"), loading(tmp_path, state_models.growing, BATCHED):
        assert "; steps share a batch if states have the same size: STATE" in caplog.text


def test_state_with_the_batch_on_its_second_axis_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "paceline.server.loader"),
        loading(tmp_path, state_models.recurrent, BATCHED) as loaded,
    ):
        spec = loaded.plan.spec
    assert "; the batch is axis 1 of STATE, steps share a batch if they have the same RATE" in caplog.text
    assert spec.sequence is not None
    (state,) = spec.sequence.states
    assert (state.input.batch_axis, state.input.dims, state.initial.shape) == (1, (2, 3), (1, 2, 3))
    assert [(one.name, one.shape_tensor) for one in spec.inputs] == [("INPUT0", False), ("RATE", True)]


@pytest.mark.parametrize("padded_rows", [0, 4])
@pytest.mark.parametrize("more", ["", OWN_PROCESS], ids=["in the server", "in its own process"])
def test_states_are_joined_and_cut_along_their_axis(tmp_path: Path, more: str, padded_rows: int) -> None:
    steps = [(row(one, one, one), np.array(2), np.full((1, 2, 3), 2 * one, np.float32)) for one in range(3)]
    with loading(tmp_path, state_models.recurrent, f"{BATCHED} {more}") as loaded:
        results = loaded.instances[0].execute(steps, padded_rows).results
    for number, (output, state) in enumerate(results):
        np.testing.assert_array_equal(output, row(*[8 * number] * 3))
        np.testing.assert_array_equal(state, np.full((1, 2, 3), 2 * number))


def test_export_for_one_size_of_batches_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, lambda: state_models.accumulator(dims=(4, 2)), BATCHED)
    assert (
        "state 'STATE': expected a free axis for the batch in the model's input 'STATE', which has shape [4, 2]" in said
    )


def test_export_for_one_size_keeps_its_whole_shape_without_a_batch_axis(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "paceline.server.loader"),
        loading(tmp_path, lambda: state_models.accumulator(dims=(4, 2)), BARE) as loaded,
    ):
        assert "all its tensors have a fixed first dimension of 4, and a batch may have steps of fewer" in caplog.text
        assert (loaded.plan.max_batch_rows, loaded.plan.spec.fixed_rows) == (0, 0)
        assert loaded.plan.spec.sequence is not None
        assert loaded.plan.spec.sequence.states[0].initial.shape == (4, 2)


def test_text_and_bfloat16_may_be_states(tmp_path: Path) -> None:
    """In models of their own: the runtime can't have both in one."""
    for datatype, begin in (("BYTES", b""), ("BF16", 0)):
        made = models.identity(datatype, ("batch", 2), count=2)
        config = 'max_batch_size: 4 sequence_batching { state { input_name: "INPUT1" output_name: "OUTPUT1" } }'
        with loading(tmp_path / datatype, lambda made=made: made, config) as loaded:
            assert loaded.plan.spec.sequence is not None
            initial = loaded.plan.spec.sequence.states[0].initial
            ((_, state),) = run(loaded, (initial, initial))
        assert state.tolist() == initial.tolist() == [[begin, begin]]


def test_auto_complete_that_is_off_wants_datatypes_of_states(tmp_path: Path) -> None:
    tensors = (
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 }'
    )
    models.write(state_models.accumulator(), tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text(f"{BATCHED} {tensors}")
    (found,) = find_models([tmp_path])
    with pytest.raises(ConfigError, match="'STATE': expected a data_type, as --disable-auto-complete-config is given"):
        load_model(found, registry.backend, LoadDefaults(auto_complete=False))


PYTHON = """
class Model:
    inputs = {"a": ("FP32", [-1, 2])}
    outputs = {"x": ("FP32", [-1, 2])}

    def execute(self, inputs):
        total = inputs["a"] + inputs["sum"] + inputs["START"] * 1000
        return {"x": total, "sum_out": total}
"""


def test_python_model_gets_controls_and_states_undeclared(tmp_path: Path) -> None:
    control = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }'
    state = 'state { input_name: "sum" output_name: "sum_out" data_type: TYPE_FP32 dims: [ 2 ] }'
    with loading(tmp_path, PYTHON, f"max_batch_size: 4 sequence_batching {{ {control} {state} }}") as loaded:
        ((output, state_out),) = run(loaded, (row(1, 2), row(1), row(10, 20)))
        assert loaded.plan.policy.sequences is not None
        assert loaded.plan.policy.sequences.places == 4
    np.testing.assert_array_equal(output, row(1011, 1022))
    np.testing.assert_array_equal(state_out, row(1011, 1022))


def test_python_model_without_declarations_has_those_of_its_configuration(tmp_path: Path) -> None:
    code = PYTHON.replace("    inputs =", "    _ =").replace("    outputs =", "    _ =")
    text = """
        max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
        sequence_batching {
          oldest { }
          control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
          state { input_name: "sum" output_name: "sum_out" data_type: TYPE_FP32 dims: [ 2 ] }
        }
    """
    with loading(tmp_path, code, text) as loaded:
        ((output, _),) = run(loaded, (row(1, 2), row(0), row(10, 20)))
    np.testing.assert_array_equal(output, row(11, 22))


class Recording(Model):
    """Records what is executed."""

    def __init__(self, spec: ModelSpec) -> None:
        self.seen: list[list[object]] = []
        super().__init__(spec=spec, compute=self._record)

    def _record(self, inputs: Tensors) -> Tensors:
        self.seen.append([one.tolist() for one in inputs])
        return [inputs[0], inputs[-1]]


def warmed(tmp_path: Path, more: str, dims: tuple[int, ...] = (-1, 2)) -> list[list[object]]:
    """What the warm-up executes of a model with START, END, an id and a state of [1, 3, 5]."""
    model = Recording(
        ModelSpec(
            (
                TensorSpec("a", "FP32", dims),
                TensorSpec("START", "INT32", (-1, 1)),
                TensorSpec("END", "BOOL", (-1, 1)),
                TensorSpec("ID", "INT64", (-1, 1)),
                TensorSpec("STATE", "INT8", (-1, 3)),
            ),
            (TensorSpec("x", "FP32", dims), TensorSpec("STATE_OUT", "INT8", (-1, 3))),
        )
    )
    text = f"""
        max_batch_size: 2 {more} sequence_batching {{
          control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 5, 7 ] }} }}
          control_input {{ name: "END" control {{ kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] }} }}
          control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID }} }}
          {STATE % 'initial_state { name: "i" dims: [ 3 ] data_file: "f" }'}
        }}
    """
    place = folder(tmp_path, 1, config=text)
    (tmp_path / "m" / "initial_state").mkdir()
    (tmp_path / "m" / "initial_state" / "f").write_bytes(bytes((1, 3, 5)))
    (loaded,) = load_model(place, VersionBackend(v1=model).of)
    loaded.close()
    return model.seen


SAMPLE = 'inputs { key: "a" value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } }'
FIRST: list[object] = [[[7]], [[False]], [[0]], [[1, 3, 5]]]


def test_default_warm_up_is_a_first_step(tmp_path: Path) -> None:
    assert warmed(tmp_path, "") == [[[[0, 0]], *FIRST]]


def test_samples_of_a_warm_up_are_first_steps(tmp_path: Path) -> None:
    two: list[object] = [[[0, 0]] * 2, [[7]] * 2, [[False]] * 2, [[0]] * 2, [[1, 3, 5]] * 2]
    assert warmed(tmp_path, f"model_warmup {{ batch_size: 2 {SAMPLE} }}") == [two]


def test_samples_may_give_controls_themselves(tmp_path: Path) -> None:
    given = 'inputs { key: "START" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }'
    seen = warmed(tmp_path, f"model_warmup {{ batch_size: 1 {SAMPLE} {given} }}")
    assert seen == [[[[0, 0]], [[0]], *FIRST[1:]]]


def test_samples_may_not_give_states(tmp_path: Path) -> None:
    given = 'inputs { key: "STATE" value { data_type: TYPE_INT8 dims: [ 3 ] zero_data: true } }'
    with pytest.raises(ConfigError, match=r"unexpected inputs \['STATE'\], expected \['a', 'START', 'END', 'ID'\]"):
        warmed(tmp_path, f"model_warmup {{ batch_size: 1 {SAMPLE} {given} }}")
