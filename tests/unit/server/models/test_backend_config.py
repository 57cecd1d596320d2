"""`--backend-config`: what is read, and what is refused by name."""

from __future__ import annotations

import pytest

from paceline.server.models.defaults import BackendConfig, parse_backend_config


def test_nothing_given_leaves_everything_to_the_models() -> None:
    given = parse_backend_config([])
    assert (given, given.parameters) == (BackendConfig(), {})


def test_each_key_is_read() -> None:
    texts = ("default-max-batch-size=8", "intra_op_thread_count=2", "inter_op_thread_count=3")
    given = parse_backend_config([f"onnxruntime,{text}" for text in texts])
    assert given == BackendConfig(8, 2, 3)
    assert given.parameters == {"intra_op_thread_count": "2", "inter_op_thread_count": "3"}


@pytest.mark.parametrize(("text", "shared"), [("0", False), ("1", True), ("true", True), ("False", False)])
def test_shared_threads_take_the_counts_from_the_models(text: str, shared: bool) -> None:
    given = parse_backend_config(
        [f"onnxruntime,enable-global-threadpool={text}", "onnxruntime,intra_op_thread_count=2"]
    )
    assert (given.shared_threads, given.intra_op_threads) == (shared, 2)
    assert given.parameters == ({} if shared else {"intra_op_thread_count": "2"})


def test_cache_directory_is_a_parameter_even_with_shared_threads() -> None:
    given = parse_backend_config(["onnxruntime,cache-directory=/some/where", "onnxruntime,enable-global-threadpool=1"])
    assert given.parameters == {"paceline.cache_directory": "/some/where"}


@pytest.mark.parametrize(("text", "own"), [("1", "true"), ("true", "true"), ("0", "false")])
def test_own_process_becomes_a_parameter_of_models(text: str, own: str) -> None:
    assert parse_backend_config([f"onnxruntime,own-process={text}"]).parameters == {"paceline.own_process": own}


def test_later_values_overrule_earlier_ones() -> None:
    given = parse_backend_config(["onnxruntime,default-max-batch-size=8", "onnxruntime,default-max-batch-size=0"])
    assert given.max_batch_rows == 0


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected BACKEND,KEY=VALUE, got ''"),
        ("default-max-batch-size=8", "expected BACKEND,KEY=VALUE, got 'default-max-batch-size=8'"),
        ("onnxruntime,default-max-batch-size", "expected BACKEND,KEY=VALUE, got 'onnxruntime,default-max-batch-size'"),
        ("tensorrt,a=1", "expected backend onnxruntime, the only one with such settings, got 'tensorrt'"),
        (",a=1", "expected backend onnxruntime, the only one with such settings, got ''"),
        (
            "onnxruntime,version=2",
            "expected one of default-max-batch-size, enable-global-threadpool, intra_op_thread_count, "
            "inter_op_thread_count, cache-directory, own-process, got 'version', which this build doesn't have",
        ),
        (
            "onnxruntime,default-max-batch-size=",
            "default-max-batch-size: expected a whole number from 0 to 2147483647, got ''",
        ),
        (
            "onnxruntime,default-max-batch-size=-1",
            "default-max-batch-size: expected a whole number from 0 to 2147483647, got '-1'",
        ),
        (
            "onnxruntime,default-max-batch-size=2147483648",
            "default-max-batch-size: expected a whole number from 0 to 2147483647, got '2147483648'",
        ),
        (
            "onnxruntime,intra_op_thread_count=1.5",
            "intra_op_thread_count: expected a whole number from 0 to 1024, got '1.5'",
        ),
        (
            "onnxruntime,inter_op_thread_count=1025",
            "inter_op_thread_count: expected a whole number from 0 to 1024, got '1025'",
        ),
        ("onnxruntime,own-process=", "own-process: expected 0 or 1, got ''"),
        ("onnxruntime,enable-global-threadpool=yes", "enable-global-threadpool: expected 0 or 1, got 'yes'"),
    ],
)
def test_anything_else_is_refused_saying_what_was_expected(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        parse_backend_config([text])
    assert str(caught.value) == fault
