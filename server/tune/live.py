"""A server with a setting, in a process of its own on this machine, and a load on it, made as `paceline load` does.

Lives here: starting and ending it, the load, and what a request cost both sides. Must not: choose, or predict.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, NamedTuple

from google.protobuf import json_format

from paceline.clients.base import blocking
from paceline.clients.errors import ClientError
from paceline.clients.inputs import TypedInputs
from paceline.clients.load.arrivals import Arrivals
from paceline.clients.load.control import ControlClient, Served, Statistics
from paceline.clients.load.extent import FixedTime
from paceline.clients.load.histogram import Histogram
from paceline.clients.load.measuring import measure
from paceline.clients.load.outcome import Outcome
from paceline.clients.load.tally import merged
from paceline.clients.load.worker import NOT_SENT, Load
from paceline.clients.messages import infer_request
from paceline.protos import inference_pb2
from paceline.protos import model_config_pb2 as pb
from paceline.server.tune.measuring import TuneError
from paceline.server.tune.simulation import rows_per_batch

__all__ = ["FEWEST", "MUCH_OTHERS", "WARMUP_S", "Live", "LiveServer", "serving"]

_SERVES = re.compile(r"(?:ready|serving, not ready: .*): gRPC on .*:(\d+)$", re.DOTALL)
_OF_SERVERS = ("PACELINE_", "INFERENCE_SERVICE_NAME")
_END_S, _KEPT_LINES = 20.0, 5
WARMUP_S = 1.0
"""Of each load, at most."""
MUCH_OTHERS = 0.1
"""Of the machine's processor time: a measurement beside which other processes had more isn't one."""
_TIMEOUT_S = 60.0
"""Of requests that may take any time."""
FEWEST = 10
"""So many requests are to come while something is tried, of a rate on average: then one does."""
_MOST_S = 60.0
"""As long clients are waited for, at most."""
_SIGTERM = 15
# The server ends with this process, whatever ends that: PR_SET_PDEATHSIG of prctl(2).
_CODE = f"""import ctypes, sys
ctypes.CDLL(None).prctl(1, {_SIGTERM})
sys.path[:] = {{path!r}}
from paceline.server.__main__ import main
main()
"""

_OF_OVERLOAD = {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", NOT_SENT}


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """What a load has met in so many `seconds`, as `Simulated` says it. `loop_ns` and `sender_ns`: the processor time
    of the server's event loop, and of whoever sent it, for a request. `executed_ns`: how long its batch was in the
    model, on average. `not_sent`: requests that the sender was too slow for. `doubts`: why the figures may not be what
    they seem. `lag_ns`: how late 99 % of the requests were sent, at most. `others`: the share of the machine's
    processor time that other processes had, or other machines on the same host. `halves_ns`: the 99th percentile of
    each half of the time."""

    offered: float
    throughput: float
    latencies: Histogram
    refused: int
    batches: Mapping[int, int]
    loop_ns: int
    sender_ns: int
    executed_ns: int
    seconds: float
    not_sent: int = 0
    doubts: Sequence[str] = ()
    lag_ns: float = 0.0
    others: float = 0.0
    halves_ns: Sequence[float] = ()

    @property
    def rows_per_batch(self) -> float:
        return rows_per_batch(self.batches)

    @property
    def batches_per_request(self) -> float:
        return sum(self.batches.values()) / max(1.0, self.throughput * self.seconds)


class _Look(NamedTuple):
    statistics: Statistics | None
    loop_ns: int
    ours_ns: int
    all_ns: int


class _Client(ControlClient):
    """Also loads models."""

    @blocking
    async def load_model(self, config: pb.ModelConfig) -> str:
        """Load the only model that the server has, with `config` in place of its own. Returns its name."""
        (entry,) = self.repository_index()
        request = inference_pb2.RepositoryModelLoadRequest(model_name=entry.name)
        request.parameters["config"].string_param = json_format.MessageToJson(config, preserving_proto_field_name=True)
        await self._call("RepositoryModelLoad", request, None, ())
        return entry.name


class LiveServer:
    """Serves one model, on `target`."""

    def __init__(self, target: str, pid: int, config: pb.ModelConfig, requests: Sequence[TypedInputs]) -> None:
        self._target, self._pid = target, pid
        with _Client(target, tls=False) as client:
            self._model = client.load_model(config)
        messages = [infer_request(self._model, one.arrays, datatypes=one.datatypes) for one in requests]
        self._messages = tuple([message.SerializeToString() for message in messages])

    def load(
        self,
        seconds: float,
        *,
        clients: int = 0,
        arrivals: Arrivals | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Live:
        """What `clients` in a closed loop, or `arrivals` of an open one, meet for so long, after a warm-up of a second
        at most; of clients, until two requests of each have ended, on average. Raises LoadError, and TuneError if
        requests fail for other reasons than that they are too many, or none was due."""
        load = Load(self._target, self._messages, timeout_s, clients=clients, arrivals=arrivals)
        with ControlClient(self._target, tls=False) as client:
            measured = measure(
                load,
                FixedTime(
                    *(min(WARMUP_S, seconds), seconds),
                    # How many of a rate come is known before. Clients wait for their answers, which may take long, and
                    # all may come at once.
                    *((0, 1) if arrivals is not None else (max(FEWEST, 2 * clients), math.ceil(_MOST_S / seconds))),
                ),
                lambda: _Look(client.statistics(self._model, ""), _loop_ns(self._pid), *_used_ns(self._pid)),
            )
        served = Served.between(measured.before.statistics, measured.after.statistics)
        outcome = Outcome(measured, served, 1, arrivals is not None)
        total = outcome.total
        if not total.due:
            why = "due" if arrivals is not None else "answered"
            raise TuneError(f"no request was {why} in the {measured.seconds:g} s that count: --seconds gives more")
        if wrong := total.errors.keys() - _OF_OVERLOAD:
            status = min(wrong)
            raise TuneError(f"requests fail when the model is served: {status}: {total.reasons[status]}")
        not_sent = total.errors[NOT_SENT].count if NOT_SENT in total.errors else 0
        # What `paceline load` advises, more processes, can't be had here.
        doubts = [doubt.partition(":")[0] for doubt in outcome.doubts()]
        if not_sent:
            doubts.append(f"{not_sent} requests weren't sent, as their sender was too slow, or too many were under way")
        before, after, counted = measured.before, measured.after, measured.counted
        others_ns = after.all_ns - before.all_ns - (after.ours_ns - before.ours_ns) - total.cpu_ns
        others = max(0.0, others_ns / (measured.seconds * 1e9 * (os.cpu_count() or 1)))
        if others > MUCH_OTHERS:
            doubts.append(
                f"others had {others:.0%} of the processors' time, so that figures may be worse than on an idle machine"
            )
        halves = [merged(part).latencies for part in (counted[: len(counted) // 2], counted[len(counted) // 2 :])]
        return Live(
            offered=total.due / measured.seconds,
            throughput=total.answered / measured.seconds,
            latencies=total.latencies,
            refused=total.failed - not_sent,
            batches=served.executions if served else {},
            loop_ns=(after.loop_ns - before.loop_ns) // max(1, total.answered),
            sender_ns=total.cpu_ns // max(1, total.due),
            executed_ns=round((served.compute_ms or 0.0) * 1e6) if served else 0,
            seconds=measured.seconds,
            not_sent=not_sent,
            doubts=doubts,
            lag_ns=outcome.value("lag.p99") or 0.0,
            others=others,
            halves_ns=[half.percentile_ns(99) or 0.0 for half in halves],
        )


@contextmanager
def serving(
    path: Path, config: pb.ModelConfig, requests: Sequence[TypedInputs], flags: Sequence[str]
) -> Iterator[LiveServer]:
    """Serve the model at `path` with `config` in place of its own, for loads that send `requests` in turn. Raises
    TuneError if that doesn't come to serve, and for whatever fails within."""
    command = [
        *(sys.executable, "-P", "-c", _CODE.format(path=sys.path), "serve", str(path)),
        *("--grpc-address", "127.0.0.1", "--grpc-port", "0", "--allow-metrics=false"),
        *("--model-control-mode", "explicit", "--log-format", "json", "--log-level", "info", *flags),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # What a server is told there is meant for others: tokens, certificates, repositories.
        env={name: value for name, value in os.environ.items() if not name.startswith(_OF_SERVERS)},
        process_group=0,  # Ctrl-C is for this process, which then ends the server
    )
    assert process.stderr is not None
    reader = Thread(target=deque, args=(process.stderr, 0), daemon=True)
    try:
        port = _port(process.stderr)
        reader.start()  # a server whose log nobody reads stands still
        yield LiveServer(f"127.0.0.1:{port}", process.pid, config, requests)
    except ClientError as error:
        raise TuneError(f"what was found can't be tried: {error}") from error
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stderr.close()


def _port(log: IO[str]) -> int:
    last = deque[str](maxlen=_KEPT_LINES)
    for line in log:
        said = _message(line)
        if found := _SERVES.match(said):
            return int(found[1])
        last.append(said)
    raise TuneError(f"a server to try what was found doesn't start: {' / '.join(last)}")


def _message(line: str) -> str:
    try:
        record: Mapping[str, object] = json.loads(line)
        return str(record["message"])
    except (ValueError, KeyError, TypeError):  # what libraries write by themselves
        return line.strip()


def _used_ns(pid: int) -> tuple[int, int]:
    """The processor time of a server with its processes, and of this one; and of all processes here, with what the host
    gave to other machines meanwhile: proc(5)."""
    tick_ns, ours_ns, pids = 1_000_000_000 // os.sysconf("SC_CLK_TCK"), time.process_time_ns(), [pid]
    for one in pids:
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ours_ns += (int(fields[11]) + int(fields[12])) * tick_ns
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return ours_ns, (user + nice + system + steal) * tick_ns


def _loop_ns(pid: int) -> int:
    """The processor time of a server's first thread, which has its event loop: proc(5)."""
    place = Path(f"/proc/{pid}/task/{pid}")
    try:
        return int((place / "schedstat").read_text().split()[0])
    except OSError:  # kernels needn't have it; this counts in hundredths of a second
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
