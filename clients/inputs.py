"""Input tensors from the command line: files, JSON, or random numbers, in the datatypes that the model asks for.

Lives here: what an --input may look like, and the arrays made from it. Must not live here: options of the command line,
servers, printing. Rule: whatever is wrong with what the user gave raises an InputError that says what to give.

An input is one of

    NAME=FILE.npy    one array                      FILE.npz     one array per name
    NAME=FILE.json   one array as nested lists      FILE.json    {"name": nested lists, ...}, or the v2 REST form
    NAME=JSON        one array as nested lists                   {"inputs": [{"name", "datatype", "shape", "data"}]}

The steps of a sequence are lines of a file, each like the content of a FILE.json of several inputs.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paceline.clients.casting import Array, cast, datatype_of, to_array
from paceline.clients.messages import ModelMetadata, ParameterValue, TensorMetadata
from paceline.protos.datatypes import by_name

_STOP = "stop"
"""The parameter of models that generate which is a text, or a list of them, whatever it looks like."""
_OF_GENERATION = "sampling_parameters"
"""An input of models that generate texts, here and in Triton's vLLM backend. The first one is for a prompt."""

T = TypeVar("T")

_RANDOM_INTEGERS_BELOW = 10
_RANDOM_TEXT_BYTES = 8
_MOST_WRITTEN = 16


class InputError(ValueError):
    """The user gave an input that can't be used; the message is one line, for the user."""


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """What the user wrote: the array as written, the datatype if the user named one, and what errors begin with."""

    array: Array
    datatype: str | None = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class RandomInputs:
    """How to generate the inputs that aren't given.

    `rows` is the size of the first dimension where the model leaves it free, 1 if None. `shapes` are whole shapes by
    input name, and come from `option`. The same `seed` gives the same tensors.
    """

    rows: int | None
    shapes: Mapping[str, tuple[int, ...]]
    seed: int | None
    option: str = "--shape"


@dataclass(frozen=True, slots=True)
class TypedInputs:
    """Inputs ready for `infer`: arrays and their v2 datatypes, by input name."""

    arrays: dict[str, Array]
    datatypes: dict[str, str]


def read_inputs(arguments: Iterable[str]) -> dict[str, GivenTensor]:
    """Reads every --input. Raises InputError, also for a name given twice."""
    given: dict[str, GivenTensor] = {}
    for argument in arguments:
        for name, tensor in _read_input(argument).items():
            if name in given:
                raise InputError(f"input {name!r} is given twice")
            given[name] = tensor
    return given


def read_steps(
    lines: Iterable[str], given: Mapping[str, GivenTensor], option: str = "--sequence"
) -> Iterator[tuple[str, dict[str, GivenTensor]]]:
    """The option and the line of each step, and its inputs: those of its line, and `given` ones. Blank lines are left
    out. Raises InputError, naming the option and the line."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{option}, line {number}"
            try:
                document = _json(line)
            except ValueError as error:
                text = f"not JSON ({error})" if isinstance(error, json.JSONDecodeError) else error
                raise InputError(f"{where}: {text}") from error
            step = _tensors_in(where, document)
            twice = given.keys() & step.keys()
            if twice:
                raise InputError(f"{where}: input {min(twice)!r} is given with --input too")
            yield where, {**given, **step}


def _read_input(argument: str) -> dict[str, GivenTensor]:
    name, separator, value = argument.partition("=")
    # Unlike `Path.is_file`, this returns False for JSON of any length, rather than raising.
    if separator and not os.path.isfile(argument):
        return {name: GivenTensor(_read_value(name, value))}
    suffix = Path(argument).suffix
    if suffix == ".npz":
        arrays = _load(argument, _numpy_file)
        if isinstance(arrays, np.ndarray):
            raise InputError(f"{argument}: expected an archive of named arrays; give a single array as NAME=FILE.npy")
        return {key: GivenTensor(array) for key, array in arrays.items()}
    if suffix == ".json":
        return _tensors_in(argument, _load(argument, _json_file))
    raise InputError(f"--input {argument!r}: expected NAME=FILE.npy, NAME=JSON, FILE.npz or FILE.json")


def _read_value(name: str, value: str) -> Array:
    if value.endswith(".npy"):
        array = _load(value, _numpy_file)
        if not isinstance(array, np.ndarray):
            raise InputError(f"{value}: expected one array; give archives without NAME=")
        return array
    if value.endswith(".json"):
        return _array_of(name, _load(value, _json_file))
    try:
        return _array_of(name, _json(value))
    except json.JSONDecodeError as error:
        raise InputError(
            f"input {name!r}: neither FILE.npy nor JSON ({error}); text is quoted, as in '{name}=\"text\"'"
        ) from error


def _load(path: str, load: Callable[[Path], T]) -> T:
    try:
        return load(Path(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except Exception as error:
        # For a damaged file, numpy and the readers of archives raise whatever they come across.
        raise InputError(f"{path}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _numpy_file(path: Path) -> Array | dict[str, Array]:
    # numpy leaves a file open if it opens it itself and finds that it isn't an archive.
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else dict(loaded.items())


def _json_file(path: Path) -> Any:
    return _json(path.read_text(encoding="utf-8-sig"))


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_float=_finite)
    except RecursionError:
        raise InputError("expected JSON that is nested less deeply") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | InputError):
            raise
        raise InputError("expected numbers with fewer digits") from None


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise InputError(f"{digits}: too large for FP64; write infinity as Infinity")
    return number


def _array_of(name: str, value: Any, where: str = "") -> Array:
    try:
        return to_array(value)
    except ValueError as error:
        raise InputError(f"{where}input {name!r}: {error}") from error


def _tensors_in(path: str, document: Any) -> dict[str, GivenTensor]:
    if not isinstance(document, dict):
        raise InputError(f"{path}: expected an object of names and values, got {type(document).__name__}")
    listed = document.get("inputs")
    if isinstance(listed, list) and listed and all(isinstance(entry, dict) for entry in listed):
        return _rest_tensors(path, document, listed)
    where = f"{path}: "
    return {name: GivenTensor(_array_of(name, value, where), where=where) for name, value in document.items()}


def _rest_tensors(path: str, document: dict[str, Any], listed: Sequence[dict[str, Any]]) -> dict[str, GivenTensor]:
    others = sorted(document.keys() - {"inputs"})
    if others:
        raise InputError(f"{path}: only inputs are read, got also {', '.join(others)}; use --output and --parameter")
    tensors: dict[str, GivenTensor] = {}
    for entry in listed:
        missing = [key for key in ("name", "datatype", "shape", "data") if key not in entry]
        if missing:
            raise InputError(f"{path}: an input lacks {', '.join(missing)}")
        name, shape = entry["name"], entry["shape"]
        if not isinstance(name, str):
            raise InputError(f"{path}: expected the name of an input as text, got {name!r}")
        if name in tensors:
            raise InputError(f"{path}: input {name!r} is given twice")
        # The data may be flat or nested, whatever the shape.
        array = _array_of(name, entry["data"], f"{path}: ")
        if not isinstance(shape, list) or not all(isinstance(dim, int) and dim >= 0 for dim in shape):
            raise InputError(f"{path}: input {name!r}: expected a list of sizes as its shape, got {shape!r}")
        try:
            tensors[name] = GivenTensor(array.reshape(shape), entry["datatype"], f"{path}: ")
        except ValueError as error:
            raise InputError(f"{path}: input {name!r}: {array.size} values for shape {shape}") from error
    return tensors


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`NAME=1,2,3` as name and dimensions; `NAME=` is a scalar. Raises InputError."""
    name, separator, dims = text.partition("=")
    try:
        shape = tuple(int(dim) for dim in dims.split(",")) if dims else ()
    except ValueError:
        separator = ""
    if not separator or not name or any(dim < 0 for dim in shape):
        raise InputError(f"--shape {text!r}: expected NAME=1,2,3")
    return name, shape


def parse_parameter(text: str, kinds: Any = ParameterValue) -> tuple[str, Any]:
    """KEY=VALUE as key and value: JSON of these `kinds` is parsed, everything else is text, and so is a number where a
    model that generates takes a text."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise InputError(f"--parameter {text!r}: expected KEY=VALUE")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return key, value
    is_other = key == _STOP and not isinstance(parsed, (str, list))
    return key, parsed if isinstance(parsed, kinds) and not is_other else value


def prepare(model: ModelMetadata, given: Mapping[str, GivenTensor], random: RandomInputs | None) -> TypedInputs:
    """The inputs in the datatypes that the user, or else the model, asks for; if `random` is set, generates missing
    ones.

    Raises InputError for a name that the model doesn't have, values that the datatype can't hold, and shapes left open.
    """
    expected = {tensor.name: tensor for tensor in model.inputs}
    # A server may name no inputs at all; then only it knows whether these are right.
    unknown = [name for name in given if expected and name not in expected]
    if unknown:
        text = f"model {model.name!r} has no input {unknown[0]!r}; it takes {', '.join(expected)}"
        raise InputError(f"{given[unknown[0]].where}{text}")
    prepared = TypedInputs({}, {})
    for name, one in given.items():
        wanted = one.datatype or (expected[name].datatype if name in expected else None)
        _add(prepared, name, one.array, wanted, one.where)
    if random is None:
        return prepared
    if not model.inputs:
        raise InputError(f"the server names no inputs of model {model.name!r}, so --random can't generate any")
    open_inputs = [tensor for tensor in model.inputs if tensor.name not in given]
    if _OF_GENERATION in expected:
        # The others are optional, or prompts in another form.
        first = model.inputs[0]
        open_inputs = [] if given.keys() & {first.name, "text_input"} else [first]
    useless = random.shapes.keys() - {tensor.name for tensor in open_inputs}
    if useless:
        name = min(useless)
        left = ", ".join(tensor.name for tensor in open_inputs) or "none"
        text = f"model {model.name!r} has no such input, or it is already given; left to generate: {left}"
        raise InputError(f"{random.option} {name}: {text}")
    generator = np.random.default_rng(random.seed)
    for tensor in open_inputs:
        shape = random.shapes[tensor.name] if tensor.name in random.shapes else _shape(tensor, random.rows)
        _add(prepared, tensor.name, _random_array(tensor.datatype, shape, generator), tensor.datatype)
    return prepared


def input_options(model: ModelMetadata) -> str:
    """Options to copy that give the model its inputs: zeros or texts in the least shapes, a file where that is long."""
    inputs = model.inputs[:1] if any(one.name == _OF_GENERATION for one in model.inputs) else model.inputs
    options = []
    for tensor in inputs:
        shape = [1 if size < 0 else size for size in tensor.shape]
        written = "FILE.npy"
        if math.prod(shape) <= _MOST_WRITTEN:
            written = json.dumps(np.full(shape, "text" if tensor.datatype == "BYTES" else 0, object).tolist())
        options.append(f"--input {shlex.quote(f'{tensor.name}={written}')}")
    return " ".join(options)


def _add(prepared: TypedInputs, name: str, array: Array, wanted: str | None, where: str = "") -> None:
    try:
        datatype = datatype_of(array) if wanted is None else by_name(wanted)
        prepared.arrays[name] = cast(array, datatype)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}input {name!r}: {error}") from error
    prepared.datatypes[name] = datatype.name


def _shape(tensor: TensorMetadata, rows: int | None) -> tuple[int, ...]:
    if not tensor.shape:
        return ()
    first, *rest = tensor.shape
    if rows is not None and first not in (-1, rows):
        raise InputError(f"input {tensor.name!r} always has {first} rows, --rows says {rows}")
    shape = (first if first >= 0 else rows or 1, *rest)
    if min(shape) < 0:
        example = ",".join("N" if dim < 0 else str(dim) for dim in shape)
        raise InputError(f"input {tensor.name!r} has more free dimensions: give --shape {tensor.name}={example}")
    return shape


def _random_array(datatype: str, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Floats in [0, 1), integers from 0 to 9 (so that they can be indices), booleans, eight lower-case letters."""
    kind = by_name(datatype).dtype.kind
    if datatype == "BYTES":
        letters = generator.integers(ord("a"), ord("z") + 1, (*shape, _RANDOM_TEXT_BYTES), np.uint8)
        return letters.view(f"S{_RANDOM_TEXT_BYTES}").reshape(shape).astype(object)
    if datatype == "BF16" or kind == "f":
        return generator.random(shape, np.float32)
    return generator.integers(0, 2 if kind == "b" else _RANDOM_INTEGERS_BELOW, shape)
