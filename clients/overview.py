"""A server's models and what they are, as text for people and as JSON for programs.

Lives here: pure formatting, for the commands `describe`, `models` and `check`. Must not: call anything. The rule: names
come from servers, so each line is made printable here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from paceline.clients.description import Batching, Instances, ModelDescription, PipelineStep, Sequences
from paceline.clients.messages import IndexEntry, TensorMetadata
from paceline.clients.options import one_line, printable

_LABEL_COLUMNS = 11
_STRATEGIES = {
    "direct": "each sequence keeps its row of the batch",
    "oldest": "requests that have waited longest share a batch, in any row",
}
_CONTROLS = {
    "START": "whether the request is the first of its sequence",
    "READY": "whether the row has a request at all",
    "END": "whether the request is the last of its sequence",
    "CORRID": "the sequence's id",
}


def models_text(entries: Sequence[IndexEntry]) -> str:
    """A table with a line for each version of each model."""
    rows = [("MODEL", "VERSION", "STATE", "REASON")]
    # A model that was never asked for has no state, and one without a loaded version none of those.
    rows += [(one.name, one.version or "-", one.state or "-", one.reason) for one in entries]
    return "\n".join(_columns(rows))


def models_json(entries: Sequence[IndexEntry]) -> str:
    return json.dumps({"models": [asdict(one) for one in entries]})


def description_json(model: ModelDescription) -> str:
    return json.dumps(asdict(model))


def description_lines(model: ModelDescription, found: Mapping[str, str] | None = None) -> list[str]:
    """The model, a line for each of its facts. Those that every model has come first, those of few last. What is
    `found`, unless it is empty, says more than the fact of that name, or is another."""
    versions = f"version{'s'[: len(model.versions) > 1]} {', '.join(model.versions)}" if model.versions else ""
    lines = [printable("  ".join(filter(None, (model.name, versions, model.platform))))]
    more = {label: [one_line(text)] for label, text in (found or {}).items() if text}
    for label, values in {**dict(_facts(model)), **more}.items():
        names = [label, *[""] * (len(values) - 1)]
        lines += [f"  {name:{_LABEL_COLUMNS}}{value}" for name, value in zip(names, values, strict=True)]
    return lines


def pipeline_lines(steps: Iterable[PipelineStep]) -> list[str]:
    """A line for each step: what it takes, which model it is, what it makes. Tensors have the pipeline's names, with
    the model's own where that differs."""
    return [
        one_line(
            f"{_tensors_of(step.inputs)} -> {step.model}{step.version and f' version {step.version}'} -> "
            f"{_tensors_of(step.outputs)}"
        )
        for step in steps
    ]


def _facts(model: ModelDescription) -> Iterator[tuple[str, list[str]]]:
    rows = model.batching is not None
    yield "inputs", _tensors(model.inputs, rows, model.optional_inputs) or ["none"]
    yield "outputs", _tensors(model.outputs, rows) or ["none"]
    if not model.is_configured:
        yield "batching", ["unknown: the server has no ModelConfig"]
        return
    yield "batching", [_batching(model.batching, bool(model.steps))]
    if model.batching is not None and model.batching.lengths:
        yield "lengths", [one_line(f"filled up to the longest of a batch: {', '.join(model.batching.lengths)}")]
    if model.instances and not model.steps:
        yield "instances", [", ".join(map(_instances, model.instances))]
    if model.sequences is not None:
        yield "sequences", list(_sequences(model.sequences))
    if model.is_decoupled:
        yield "answers", ["any number for each request (decoupled)"]
    if model.is_cached:
        yield "cache", ["answers are kept for equal requests"]
    if model.steps:
        yield "pipeline", pipeline_lines(model.steps)
    if model.calls:
        yield "calls", [one_line(", ".join(model.calls))]


def _tensors(tensors: Sequence[TensorMetadata], has_rows: bool, optional: Sequence[str] = ()) -> list[str]:
    def size(axis: int, number: int) -> str:
        if number >= 0:
            return str(number)
        return "rows" if has_rows and axis == 0 else "any"

    rows = [
        (
            tensor.name,
            tensor.datatype,
            f"[{', '.join(size(axis, number) for axis, number in enumerate(tensor.shape))}]",
            "optional" if tensor.name in optional else "",
        )
        for tensor in tensors
    ]
    return _columns(rows)


def _batching(batching: Batching | None, is_pipeline: bool) -> str:
    if batching is None:
        return "each step as its model does" if is_pipeline else "none: requests run one by one"
    if is_pipeline:
        return f"up to {batching.max_rows} rows a request; each step as its model does"
    if not batching.is_dynamic:
        return f"none: requests of up to {batching.max_rows} rows run one by one"
    parts = [f"up to {batching.max_rows} rows"]
    if batching.preferred_rows not in ((), (batching.max_rows,)):
        parts.append(f"preferred {', '.join(map(str, batching.preferred_rows))}")
    if batching.max_delay_us:
        parts.append(f"waits up to {batching.max_delay_us} us for more")
    if batching.max_queue_size:
        parts.append(f"at most {batching.max_queue_size} requests in the queue")
    if batching.timeout_us:
        parts.append(f"for {batching.timeout_us} us each")
    return ", ".join(parts)


def _instances(group: Instances) -> str:
    if group.gpus:
        return f"{group.count} on each of GPU {', '.join(map(str, group.gpus))}"
    places = {"CPU": "on the CPU", "GPU": "on each GPU", "MODEL": "where the model says"}
    return f"{group.count} {places.get(group.kind, 'where there is room')}"


def _sequences(sequences: Sequences) -> Iterator[str]:
    yield f"a sequence ends after {sequences.idle_us / 1e6:g} s without a request"
    yield f"strategy {sequences.strategy}: {_STRATEGIES[sequences.strategy]}"
    for name, kinds in sequences.controls.items():
        told = ", ".join(f"{_CONTROLS[kind]} ({kind})" for kind in kinds)
        yield one_line(f"input {name} is filled in by the server: {told}")
    for output, kept in sequences.states.items():
        yield one_line(f"output {output} is kept as state, and is input {kept} of the next request")


def _tensors_of(tensors: Mapping[str, str]) -> str:
    named = (tensor if tensor == own else f"{tensor} as {own}" for own, tensor in tensors.items())
    return ", ".join(named) or "nothing"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, printable, with cells below each other."""
    printed = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*printed, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in printed]
