"""Which changes of a model's folder a load sees, and which configuration it keeps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.json_format import MessageToJson

from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from tests.differential.comparing import Call, answer_of
from tests.differential.messages import load
from tests.differential.pair import Both, One, serving_both
from tests.differential.scenes import MODELS, asking
from tests.differential.test_scenes import answers, counted
from tests.polling import eventually

PLAIN = MODELS["plain"]
MORE_INSTANCES = PLAIN.replace("size: 8", "size: 4").replace("count: 1", "count: 2")


@dataclass(frozen=True, slots=True)
class Change:
    """Something done to a model's folder, and whether a load afterwards loads it in Triton, and here."""

    what: str
    do: Callable[[Path], object]
    triton: bool = True
    here: bool = True


def write(path: Path, text: str = "anything") -> None:
    path.write_text(text)


# In this order: each follows those before it.
CHANGES = [
    Change("nothing", lambda folder: None, triton=False, here=False),
    Change("its code", lambda folder: os.utime(folder / "1" / "model.py")),
    Change("its configuration, which says the same", lambda folder: os.utime(folder / "config.pbtxt"), triton=False),
    Change("its rows", lambda folder: write(folder / "config.pbtxt", PLAIN.replace("size: 8", "size: 4"))),
    Change("its instances", lambda folder: write(folder / "config.pbtxt", MORE_INSTANCES), triton=False),
    Change("a file beside its code", lambda folder: write(folder / "1" / "beside.txt")),
    Change("a file beside its configuration", lambda folder: write(folder / "beside.txt")),
    Change("a folder of no version", lambda folder: (folder / "notes").mkdir()),
    Change("a new version", lambda folder: shutil.copytree(folder / "1", folder / "2")),
    Change("a version that is gone", lambda folder: shutil.rmtree(folder / "2")),
    Change("nothing more", lambda folder: None, triton=False, here=False),
]


@pytest.fixture(scope="module")
def loading(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with serving_both(tmp_path_factory.mktemp("loading"), {"plain": PLAIN}) as serving:
        yield serving


def process_of(one: One) -> Any:
    """Which process executes the model."""
    return answers(one, [asking("plain", "response = answer(os.getpid())")])


def rows_of(one: One) -> int:
    reply = answer_of(one.channel, Call("", pb.ModelConfigRequest(name="plain"))).reply
    return int(reply["config"]["max_batch_size"])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.what)
@pytest.mark.parametrize("who", ["triton", "here"])
def test_load_sees_changes(change: Change, who: str, loading: Both) -> None:
    one: One = getattr(loading, who)
    # Triton's model has written beside its file since it was loaded, which is a change, too.
    assert answer_of(one.channel, Call("", load("plain"))).status == "OK"
    process_of(one)
    eventually(lambda: counted(one, "plain")[0] > 0, "a request that counts")
    change.do(one.repository / "plain")
    assert answer_of(one.channel, Call("", load("plain"))).status == "OK"
    # Statistics begin anew with a load.
    assert (counted(one, "plain")[0] == 0) == getattr(change, who)


@pytest.mark.parametrize("who", ["triton", "here"])
def test_load_without_configuration_keeps_anothers_only_in_triton(who: str, loading: Both) -> None:
    one: One = getattr(loading, who)
    write(one.repository / "plain" / "config.pbtxt", PLAIN)
    assert answer_of(one.channel, Call("", load("plain"))).status == "OK"
    written = PLAIN.replace("size: 8", "size: 3")
    config = MessageToJson(text_format.Parse(written, config_pb.ModelConfig()))
    processes = []
    for request in (load("plain", config=config), load("plain", config=config), load("plain")):
        assert answer_of(one.channel, Call("", request)).status == "OK"
        processes.append(str(process_of(one)))
    assert (len({*processes}), rows_of(one)) == ((1, 3) if who == "triton" else (3, 8))
