"""`--cache-config`: Triton's form, and the refusal of whatever this build lacks."""

from __future__ import annotations

import pytest

from paceline.server.models.defaults import parse_cache_config


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [((), 0), (("local,size=1048576",), 2**20), (("local,size=1", "local,size=7"), 7)],
    ids=str,
)
def test_size_of_the_cache_is_read(given: tuple[str, ...], size_bytes: int) -> None:
    assert parse_cache_config(given) == size_bytes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("redis,host=localhost,port=6379", "expected cache 'local', the only one in this build, got 'redis'"),
        ("size=5", "expected cache 'local', the only one in this build, got 'size=5'"),
        ("local", "local: expected a size of at least 1, as in local,size=104857600, got 'local'"),
        ("local,", "local: expected size=BYTES, got ''"),
        ("local,size=0", "local: expected a size of at least 1, as in local,size=104857600, got 'local,size=0'"),
        ("local,size=-1", "local: size: expected a whole number from 0 to 1152921504606846976, got '-1'"),
        ("local,size=1MB", "local: size: expected a whole number from 0 to 1152921504606846976, got '1MB'"),
        ("local,bytes=1", "local: expected size=BYTES, got 'bytes=1'"),
    ],
)
def test_other_settings_are_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - its whole text is compared
        parse_cache_config((given,))
    assert str(error.value) == said
