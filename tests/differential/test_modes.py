"""The other two model control modes: what is refused, and what a change on disk does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from paceline.protos import inference_pb2 as pb
from tests.differential.comparing import Answer, Call, answer_of, differences
from tests.differential.messages import floats, index, infer, load, metadata, ready, unload
from tests.differential.pair import Both, One, serving_both
from tests.differential.repository import MODELS, model_config, write_model
from tests.polling import eventually

ONE = {"free": MODELS["free"]}
REFUSED = [
    Call("load", load("free"), "UNAVAILABLE", "UNIMPLEMENTED", "loads and unloads in another mode",
         "explicit model load / unload is not allowed"),
    Call("unload", unload("free"), "UNAVAILABLE", "UNIMPLEMENTED", "loads and unloads in another mode",
         "explicit model load / unload is not allowed"),
    Call("load nobody", load("nobody"), "UNAVAILABLE", "UNIMPLEMENTED", "loads and unloads in another mode"),
    Call("index", index()),
    Call("ready", ready("free")),
    Call("metadata", metadata("free")),
    Call("server ready", pb.ServerReadyRequest()),
    Call("infer", infer("free", {"INPUT0": floats(1, 3)})),
]  # fmt: skip


@pytest.fixture(scope="module")
def fixed(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with serving_both(tmp_path_factory.mktemp("fixed"), ONE, ("--model-control-mode=none",)) as serving:
        yield serving


@pytest.fixture(scope="module")
def polling(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serving_both(tmp_path_factory.mktemp("polling"), ONE, flags) as serving:
        yield serving


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.what)
@pytest.mark.parametrize("mode", ["fixed", "polling"])
def test_call_in_another_mode(call: Call, mode: str, request: pytest.FixtureRequest) -> None:
    both: Both = request.getfixturevalue(mode)
    found = differences(call, answer_of(both.triton.channel, call), answer_of(both.here.channel, call))
    assert not found, "\n".join(found)


def test_polling_picks_up_new_changed_and_removed_models(polling: Both) -> None:
    """The same states on both sides, step by step."""

    def states(one: One) -> list[str]:
        models = ask(one, Call("", index())).reply["models"]
        return [" ".join((line["name"], line.get("state", ""), line.get("reason", ""))).strip() for line in models]

    def rows(one: One) -> int:
        return int(ask(one, Call("", pb.ModelConfigRequest(name="new"))).reply["config"]["max_batch_size"])

    for one in (polling.triton, polling.here):
        write_model(one.repository / "new", model_config("max_batch_size: 3"))
        eventually(lambda one=one: states(one) == ["free READY", "new READY"], "the new model")
        (one.repository / "new" / "config.pbtxt").write_text(model_config("max_batch_size: 5"))
        eventually(lambda one=one: rows(one) == 5, "its new configuration")
        shutil.rmtree(one.repository / "new")
        eventually(lambda one=one: states(one) == ["free READY"], "the model to be gone, from the index too")


def ask(one: One, call: Call) -> Answer:
    return answer_of(one.channel, call)
