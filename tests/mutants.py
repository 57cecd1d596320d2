"""Faults planted on purpose, each of which some test has to catch: `python -m tests.mutants`, or `make mutants`.

Lives here: the faults, each a few characters of the product, and running the tests of its part on a copy of the
checkout that has it. Must not: be run by the suite; with 39 faults it takes most of an hour. It is for whoever removes
tests: what caught a fault before has to be caught after.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant"]

REPO = Path(__file__).resolve().parents[1]
_LIMIT_S = 1800

_SCHEDULER = ("tests/unit/scheduler", "tests/property", "tests/integration/test_batching.py")
_CODEC = ("tests/unit/server/codec", "tests/unit/protos", "tests/property", "tests/integration/test_bad_requests.py")
_REQUESTS = (
    "tests/unit/server/requests",
    "tests/integration/test_alike.py",
    "tests/integration/test_statistics.py",
    "tests/integration/test_metrics.py",
)
_SEQUENCES = tuple(f"tests/unit/server/models/test_sequence_{part}.py" for part in ("config", "states", "loads"))
_PROXY = (
    "tests/unit/server/models",
    "tests/integration/test_proxy.py",
    "tests/integration/test_proxy_models.py",
    "tests/integration/test_proxy_upstream_states.py",
)
_FRONTS = (
    "tests/integration/test_frontends.py",
    "tests/integration/test_frontends_memory.py",
    "tests/fault/test_frontends.py",
    "tests/fault/test_faulty_models.py",
)
_BULK = ("tests/unit/server/bulk", "tests/fault/test_bulk_kills.py")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` stands once in `file`; with `new` instead, `breaks` is broken."""

    breaks: str
    file: str
    old: str
    new: str
    tests: Sequence[str]


MUTANTS = (
    Mutant(
        "a bulk job's unit is on disk before it is said to be finished",
        "server/bulk/durable.py",
        "        os.fsync(file.fileno())\n    publish(",
        "        pass\n    publish(",
        _BULK,
    ),
    Mutant(
        "what a killed bulk job has half written has no name that anybody reads",
        "server/bulk/folder.py",
        'Part(self._temporary(f"part-{unit.number:05d}")',
        'Part(os.path.join(self.path, f"part-{unit.number:05d}.{self._format}")',
        _BULK,
    ),
    Mutant(
        "a state's batch axis is the one that is called like the inputs'",
        "server/models/sequence_states.py",
        "    likely = named or fitting\n",
        "    likely = fitting\n",
        _SEQUENCES,
    ),
    Mutant(
        "free dims of a state begin with 1",
        "server/models/sequence_states.py",
        "1 if dim == -1 else dim for dim in tensor.dims",
        "0 if dim == -1 else dim for dim in tensor.dims",
        _SEQUENCES,
    ),
    Mutant(
        "clients see no outputs of states",
        "server/models/sequence_config.py",
        "if one.name not in kept",
        "if one.name",
        _SEQUENCES,
    ),
    Mutant(
        "a request of too many rows is refused",
        "scheduler/batch_queue.py",
        "        if not 0 < rows <= self._max_rows:\n",
        "        if not 0 < rows:\n",
        _SCHEDULER,
    ),
    Mutant(
        "nothing waits at or after its deadline",
        "scheduler/batch_queue.py",
        "(first := timers.first_rank()) is not None and first <= now_ns",
        "(first := timers.first_rank()) is not None and first < now_ns",
        _SCHEDULER,
    ),
    Mutant(
        "a delayed request comes after the others of its level",
        "scheduler/batch_queue.py",
        "order_of(request.level, self._arrived, demoted=True)",
        "order_of(request.level, self._arrived)",
        _SCHEDULER,
    ),
    Mutant(
        "the count of waiting requests is exact when a batch leaves",
        "scheduler/batch_queue.py",
        "        self.waiting.remove(leaving)\n",
        "",
        _SCHEDULER,
    ),
    Mutant(
        "once a request has waited for the whole delay, all that waits leaves",
        "scheduler/lanes.py",
        "        if lane.prefix and lane.oldest_ns + self._delay_ns > now_ns:\n",
        "        if lane.prefix:\n",
        _SCHEDULER,
    ),
    Mutant(
        "a cancelled request leaves the queue at once",
        "scheduler/request.py",
        "            self.batcher.on_cancel(self)\n",
        "            pass\n",
        _SCHEDULER,
    ),
    Mutant(
        "answers keep the order of arrival where that is configured",
        "scheduler/answering.py",
        "            if answer is None:\n                break\n",
        "            if answer is None:\n                self._waiting.move_to_end(first)\n                break\n",
        _SCHEDULER,
    ),
    Mutant(
        "cancelled requests of a batch aren't counted as failed",
        "scheduler/answering.py",
        "            cancelled += 1\n",
        "            refused += 1\n",
        _SCHEDULER,
    ),
    Mutant(
        "a failed batch is searched in halves",
        "scheduler/failures.py",
        "(self.requests[:middle], self.requests[middle:])",
        "(self.requests[:middle], self.requests[middle + 1 :])",
        _SCHEDULER,
    ),
    Mutant(
        "memory that didn't suffice halves the rows of later batches",
        "scheduler/sizing.py",
        "self._allowed(max(1, rows // 2))",
        "self._allowed(max(1, rows))",
        _SCHEDULER,
    ),
    Mutant(
        "requests whose instances keep ending fail for good",
        "scheduler/failures.py",
        "        return failed\n",
        "        return []\n",
        _SCHEDULER,
    ),
    Mutant(
        "a missing input is refused",
        "server/codec/codec.py",
        "            if missing:\n",
        "            if missing and len(missing) > 1:\n",
        _CODEC,
    ),
    Mutant(
        "all inputs have the same rows",
        "server/codec/codec.py",
        "            if shape and 0 < shape[0] <= limit and shape[0] == shapes[0][0]:\n",
        "            if shape and 0 < shape[0] <= limit and shape[0] <= shapes[0][0]:\n",
        _CODEC,
    ),
    Mutant(
        "an input's datatype is the model's",
        "server/codec/codec.py",
        "        if tensor.datatype != spec.datatype:\n",
        "        if not tensor.datatype:\n",
        _CODEC,
    ),
    Mutant(
        "shapes that differ keep requests apart",
        "server/codec/codec.py",
        "        free = tuple(fixed[index][lead:] for index in self._free)\n",
        "        free = tuple(inputs[index].ndim for index in self._free)\n",
        _CODEC,
    ),
    Mutant(
        "typed and raw contents aren't mixed",
        "server/codec/codec.py",
        '                elif tensor.HasField("contents"):\n                    raise TensorError(_BOTH)\n',
        "",
        _CODEC,
    ),
    Mutant(
        "an answer that no message can carry is refused",
        "server/codec/response_messages.py",
        "        if size_bytes > left_bytes:\n",
        "        if size_bytes > 2 * left_bytes:\n",
        _CODEC,
    ),
    Mutant(
        "a parameter that isn't a key and a value alone is protobuf's to read",
        "protos/wire.py",
        "            if value_end != end:\n",
        "            if value_end > end:\n",
        _CODEC,
    ),
    Mutant(
        "a step without an id isn't read as one of a group",
        "server/codec/adapting_codec.py",
        "        if step is None or not step.id:\n",
        "        if step is None:\n",
        _CODEC,
    ),
    Mutant(
        "requests with other shape tensors aren't of one group",
        "server/codec/known_requests.py",
        "                if inputs and held != before:\n",
        "                if inputs and held is None:\n",
        _CODEC,
    ),
    Mutant(
        "requests are known again only if all that stays is equal",
        "server/codec/wire_request.py",
        "                if data[start:end] != part:\n                    break\n",
        "                if data[start : start + 8] != part[:8]:\n                    break\n",
        _CODEC,
    ),
    Mutant(
        "each answer has its own rows of a batch's outputs",
        "server/codec/answers.py",
        "            begin = row * row_bytes\n            return start",
        "            begin = 0 * row_bytes\n            return start",
        (*_CODEC, *_REQUESTS),
    ),
    Mutant(
        "each request is counted once, also when many are answered together",
        "server/requests/inference.py",
        ".statistics.on_success(*[now_ns - flight.arrived_ns for flight in answered])\n",
        ".statistics.on_success(*[now_ns - flight.arrived_ns for flight in answered[1:]])\n",
        _REQUESTS,
    ),
    Mutant(
        "a request's own deadline counts if it is nearer than the call's",
        "server/requests/inference.py",
        "flight.deadline_ns = min(flight.deadline_ns, own_ns)",
        "flight.deadline_ns = max(flight.deadline_ns, own_ns)",
        ("tests/integration/test_batching_deadlines.py", "tests/integration"),
    ),
    Mutant(
        "requests with other headers don't share a call to another server",
        "server/codec/remote.py",
        "        return self.headers, self.extras\n",
        "        return self.extras\n",
        _PROXY,
    ),
    Mutant(
        "traces that differ aren't passed on with a batch",
        "backends/remote_messages.py",
        "all(one.tracing == first.tracing for one in requests)",
        "True",
        _PROXY,
    ),
    Mutant(
        "a sequence keeps to one connection to another server",
        "backends/remote.py",
        "self._connection if step is None else hash(step[0])",
        "self._connection",
        ("tests/integration/test_proxy_sequences.py",),
    ),
    Mutant(
        "a call to another server lasts as long as the most patient of its requests",
        "backends/remote.py",
        "        deadline_ns = max(one.deadline_ns for one in requests)\n",
        "        deadline_ns = min(one.deadline_ns for one in requests)\n",
        _PROXY,
    ),
    Mutant(
        "answers of another server have the rows that were asked for",
        "backends/remote_messages.py",
        "        if array.shape[:1] != (sum(rows),):\n",
        "        if array.shape[:1] < (sum(rows),):\n",
        ("tests/property/test_remote_messages.py",),
    ),
    Mutant(
        "models that the other server has unloaded aren't served any longer",
        "server/models/upstream.py",
        "            await self._repository.unload(name)\n",
        "",
        _PROXY,
    ),
    Mutant(
        "a client that goes is told to the process with the models",
        "server/fronts/inference.py",
        "is not None:\n            self._link.send((Kind.CANCEL, number))\n",
        "is not None:\n            pass\n",
        _FRONTS,
    ),
    Mutant(
        "what a front that died waited for is given up",
        "server/fronts/session.py",
        "        for one in waited_for.values():\n            self._inference.give_up(one)\n",
        "",
        _FRONTS,
    ),
    Mutant(
        "an answer that has no room in a front's memory is refused",
        "server/fronts/session.py",
        "        if size_bytes <= self.link.size_bytes:\n",
        "        if size_bytes <= 2 * self.link.size_bytes:\n",
        _FRONTS,
    ),
    Mutant(
        "errors keep their status on the way to a front",
        "server/fronts/protocol.py",
        "    return status.name, text\n",
        '    return "INTERNAL", text\n',
        _FRONTS,
    ),
)


def _catching(mutant: Mutant, workers: str) -> str:
    """The first test of its part that fails with it, or "". Raises ValueError if the product has changed there."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPO, capture_output=True, check=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        file = Path(folder) / mutant.file
        if (text := file.read_text()).count(mutant.old) != 1:
            raise ValueError(f"{mutant.file}: expected these lines once, got them {text.count(mutant.old)} times")
        file.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", workers, "--dist", "loadfile", *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": folder}
        try:
            ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return ""  # a test that waits for ever fails by its own timeout, long before
        output = ended.stdout.decode()
        failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
        if ended.returncode and failed is None:
            raise ValueError(f"pytest ended with {ended.returncode}: {output[-2000:]}")
        return "" if failed is None else failed[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plants faults and runs the tests.")
    parser.add_argument("words", nargs="*", help="only the faults whose description or file has one of these words")
    parser.add_argument("--workers", default="3")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.words or any(w in one.breaks + one.file for w in options.words)]
    survived = 0
    for mutant in chosen:
        test = _catching(mutant, options.workers)
        survived += not test
        # Which test it was shows whether it failed because of the fault.
        print(f"{f'caught by {test}' if test else 'SURVIVED'}: {mutant.breaks} ({mutant.file})", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} faults were caught")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
