"""From `dynamic_batching` and our own parameters to a policy: every field, every limit, every refusal."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy, QueueLimits, QueuePolicy, TimeoutAction
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import OwnSettings, PadAxis, batch_policy, own_settings
from paceline.server.models.defaults import BatchDefaults

U64_MAX = 2**64 - 1
REJECT, DELAY = TimeoutAction.REJECT, TimeoutAction.DELAY


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "paceline.{key}" value {{ string_value: "{value}" }} }}'


def made(text: str, max_rows: int = 8, *, merges: bool = True, defaults: BatchDefaults | None = None) -> BatchPolicy:
    return batch_policy(text_format.Parse(text, pb.ModelConfig()), max_rows, merges=merges, defaults=defaults)


def batching(text: str, max_rows: int = 8) -> BatchPolicy:
    return made(f"dynamic_batching {{ {text} }}", max_rows)


def refusal(text: str, max_rows: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        made(text, max_rows)
    return str(caught.value)


def own(*texts: str) -> OwnSettings:
    return own_settings(text_format.Parse(" ".join(texts), pb.ModelConfig()))


def test_policy_has_all_fields_at_once_in_rows_and_nanoseconds() -> None:
    policy = made(
        """
        dynamic_batching {
          preferred_batch_size: [ 4, 8 ]
          max_queue_delay_microseconds: 7
          priority_levels: 3
          default_priority_level: 2
          default_queue_policy { max_queue_size: 9 default_timeout_microseconds: 5 }
          priority_queue_policy { key: 3 value { timeout_action: DELAY default_timeout_microseconds: 1 } }
        }
        """
        + parameter("batch_sizes", "2,8")
        + parameter("max_queue_rows", "100")
        + parameter("max_queue_bytes", "1000")
        + parameter("isolate_failures", "false")
        + parameter("deadline_aware", "false")
        + parameter("max_batch_elements", "512")
        + parameter("batch_growth", "always")
    )
    assert policy == BatchPolicy(
        max_batch_rows=8,
        preferred_batch_rows=(4, 8),
        max_queue_delay_ns=7_000,
        priority_levels=3,
        default_priority_level=2,
        queue=QueuePolicy(max_queue_size=9, default_timeout_ns=5_000),
        priority_queue={3: QueuePolicy(default_timeout_ns=1_000, timeout_action=DELAY)},
        limits=QueueLimits(100, 1000),
        batch_sizes=(2, 8),
        isolate_failures=False,
        deadline_aware=False,
        max_batch_elements=512,
        grows_always=True,
    )


@pytest.mark.parametrize(("sizes", "preferred"), [("8", ()), ("8, 8", ()), ("4", (4,)), ("4, 8", (4, 8))])
def test_policy_leaves_out_a_preference_for_only_the_largest_size(sizes: str, preferred: tuple[int, ...]) -> None:
    assert batching(f"preferred_batch_size: [ {sizes} ]").preferred_batch_rows == preferred


def test_policy_of_a_model_whose_requests_do_not_merge_has_one_request_per_batch() -> None:
    assert made("", merges=False).max_batch_requests == 1


@pytest.mark.parametrize(
    ("levels", "default"), [(1, 1), (3, 1), (3, 3), (U64_MAX, 1), (U64_MAX, U64_MAX), (2**63, 2**40)]
)
def test_policy_priority_levels_up_to_64_bits_are_accepted(levels: int, default: int) -> None:
    policy = batching(f"priority_levels: {levels} default_priority_level: {default}")
    assert (policy.priority_levels, policy.default_priority_level) == (levels, default)
    assert policy.level_of(0) == default
    assert policy.level_of(levels) == levels
    assert policy.level_of(levels + 1) == default


def test_policy_of_the_last_level_is_separate() -> None:
    text = f"priority_levels: {U64_MAX} default_priority_level: 1"
    policy = batching(f"{text} priority_queue_policy {{ key: {U64_MAX} value {{ max_queue_size: 4 }} }}")
    assert policy.queue_policy(U64_MAX) == QueuePolicy(max_queue_size=4)
    assert policy.queue_policy(1) == QueuePolicy()


@pytest.mark.parametrize(("action", "expected"), [("", REJECT), ("REJECT", REJECT), ("DELAY", DELAY), ("1", DELAY)])
def test_policy_timeout_action_by_name_or_number_is_accepted(action: str, expected: TimeoutAction) -> None:
    text = f"timeout_action: {action}" if action else ""
    assert batching(f"default_queue_policy {{ {text} }}").queue.timeout_action is expected


@pytest.mark.parametrize("text", ["", "priority_levels: 1 default_priority_level: 1"])
def test_policy_preserve_ordering_with_at_most_one_level_is_accepted(text: str) -> None:
    assert batching(f"preserve_ordering: true {text}").preserve_ordering
    assert not batching(text).preserve_ordering


def test_policy_preserve_ordering_with_delay_but_without_timeouts_is_accepted() -> None:
    assert batching("preserve_ordering: true default_queue_policy { timeout_action: DELAY }").preserve_ordering


@pytest.mark.parametrize("text", ["default_priority_level: 1", "priority_queue_policy { key: 1 value { } }"])
def test_policy_settings_of_priorities_without_levels_mean_nothing(text: str) -> None:
    assert batching(text) == batching("")


LEVELS = "priority_levels: 2 default_priority_level: 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preferred_batch_size: [ 9 ]", "preferred_batch_size: expected 1 to max_batch_size, 8, got 9"),
        ("priority_levels: 2", "default_priority_level: expected 1 to 2, the number of priority levels, got 0"),
        (
            "priority_levels: 2 default_priority_level: 3",
            "default_priority_level: expected 1 to 2, the number of priority levels, got 3",
        ),
        (
            f"{LEVELS} priority_queue_policy {{ key: 3 value {{ }} }}",
            "priority_queue_policy: expected 1 to 2, the number of priority levels, got 3",
        ),
        (
            f"preserve_ordering: true {LEVELS}",
            "preserve_ordering: expected at most one priority level with it, got 2",
        ),
        (
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
            "preserve_ordering: expected no timeout_action DELAY of queue timeouts with it, got DELAY",
        ),
        (
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY allow_timeout_override: true }",
            "preserve_ordering: expected no timeout_action DELAY of queue timeouts with it, got DELAY",
        ),
        (
            "default_queue_policy { timeout_action: 7 }",
            "default_queue_policy.timeout_action: expected REJECT or DELAY, got 7",
        ),
        (
            f"{LEVELS} priority_queue_policy {{ key: 2 value {{ timeout_action: -1 }} }}",
            "priority_queue_policy[2].timeout_action: expected REJECT or DELAY, got -1",
        ),
    ],
)
def test_invalid_policy_is_refused_naming_field_expected_and_got(text: str, message: str) -> None:
    assert refusal(f"dynamic_batching {{ {text} }}") == f"dynamic_batching.{message}"


@pytest.mark.parametrize(
    ("sizes", "got"), [("2,4", [2, 4]), ("4,2,8", [4, 2, 8]), ("0,8", [0, 8]), ("8,8", [8, 8]), ("-1,8", [-1, 8])]
)
def test_batch_sizes_that_do_not_ascend_to_the_largest_batch_are_refused(sizes: str, got: list[int]) -> None:
    assert refusal(parameter("batch_sizes", sizes)) == (
        f"paceline.batch_sizes: expected ascending sizes from 1 up, the last 8, the largest batch, got {got}"
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (parameter("batch_sizes", "1"), "paceline.batch_sizes: expected none"),
        (parameter("split_oversized", "true"), "paceline.split_oversized: expected false"),
    ],
)
def test_settings_about_rows_of_a_model_without_batch_axis_are_refused(text: str, what: str) -> None:
    message = refusal(text, max_rows=0)
    assert message.startswith(f"{what}, as the model has no batch axis (max_batch_size 0), got ")


def test_policy_of_a_model_without_batch_axis_has_one_row_and_no_delay() -> None:
    policy = made("dynamic_batching { max_queue_delay_microseconds: 9 }", max_rows=0, merges=False)
    assert (policy.max_batch_rows, policy.max_batch_requests, policy.max_queue_delay_ns) == (1, 1, 0)


def test_own_settings_without_parameters_are_the_defaults() -> None:
    assert own() == OwnSettings(
        batch_sizes=(),
        max_queue_rows=0,
        max_queue_bytes=0,
        isolate_failures=True,
        deadline_aware=True,
        split_oversized=False,
    )


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("batch_sizes", "8", (8,)),
        ("batch_sizes", "1, 2 ,8", (1, 2, 8)),
        ("max_queue_rows", "0", 0),
        ("max_queue_rows", "1000000", 1_000_000),
        ("max_queue_bytes", "9223372036854775807", 2**63 - 1),
        ("isolate_failures", "false", False),
        ("isolate_failures", "0", False),
        ("deadline_aware", "FALSE", False),
        ("await_returns", "true", True),
        ("deadline_aware", " true ", True),
        ("split_oversized", "1", True),
        ("execution_timeout_ms", "0", 0),
        ("execution_timeout_ms", "1500", 1500),
        ("execution_timeout_ms", "9223372036854775807", 2**63 - 1),
        ("pad", " off", ()),
        ("pad", "ids[1]", (PadAxis("ids", 1),)),
        ("pad", "ids[1]=0, mask[1] = 0", (PadAxis("ids", 1, 0), PadAxis("mask", 1, 0))),
        ("pad", "image[2]=-1.5,image[3]", (PadAxis("image", 2, -1.5), PadAxis("image", 3, -1.5))),
        ("pad", "in[0]:0[1]=-inf", (PadAxis("in[0]:0", 1, float("-inf")),)),
        ("pad_sizes", "32", (32,)),
        ("pad_sizes", "1, 64,128", (1, 64, 128)),
        ("max_batch_elements", "16384", 16384),
        ("batch_growth", "always", "always"),
        ("batch_growth", "auto", "auto"),
    ],
)
def test_valid_own_setting_is_read(key: str, text: str, value: object) -> None:
    assert getattr(own(parameter(key, text)), key) == value


WHOLE = "a whole number from 0 to 9223372036854775807"
SIZES = "sizes from 1 on in ascending order with commas between them"
AXES = (
    "off, or inputs with axes from 1 on, each once, and one fill for an input, as in "
    "input_ids[1]=0, attention_mask[1]=0"
)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("batch_sizes", "", "numbers of rows with commas between them"),
        ("batch_sizes", "1,,8", "numbers of rows with commas between them"),
        ("batch_sizes", "[1, 8]", "numbers of rows with commas between them"),
        ("batch_sizes", "1 8", "numbers of rows with commas between them"),
        ("max_queue_rows", "-1", WHOLE),
        ("max_queue_rows", "1.5", WHOLE),
        ("max_queue_bytes", "64M", WHOLE),
        ("max_queue_bytes", "", WHOLE),
        ("isolate_failures", "off", "true or false"),
        ("deadline_aware", "", "true or false"),
        ("split_oversized", "2", "true or false"),
        ("execution_timeout_ms", "1.5", WHOLE),
        ("execution_timeout_ms", "9223372036854775808", WHOLE),
        *[("pad", text, AXES) for text in ("", "on", "ids", "ids[0]", "ids[-1]", "ids[1]=x", "ids[1]=nan", "ids[1],")],
        *[("pad", text, AXES) for text in ("[1]", "ids[1], ids[1]", "ids[1]=0, ids[2]=1")],
        *[("pad_sizes", text, SIZES) for text in ("", "0,8", "-1", "8,8", "16,8", "8,,16", "9223372036854775808")],
        ("max_batch_elements", "many", WHOLE),
        ("batch_growth", "never", "auto or always"),
    ],
)
def test_invalid_own_setting_is_refused_naming_it_expected_and_got(key: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own(parameter(key, text))
    assert str(caught.value) == f"paceline.{key}: expected {expected}, got '{text}'"


@pytest.mark.parametrize(("own_ms", "expected_ns"), [("", 5_000), ("7", 7_000_000), ("0", 0)])
def test_execution_limit_is_the_models_own_or_else_that_of_the_flag(own_ms: str, expected_ns: int) -> None:
    config = pb.ModelConfig()
    if own_ms:
        config.parameters["paceline.execution_timeout_ms"].string_value = own_ms
    made = batch_policy(config, 4, merges=True, defaults=None, execution_limit_ns=5_000)
    assert made.execution_limit_ns == expected_ns


def test_unknown_own_setting_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        own(parameter("pipelines", "true"))
    assert str(caught.value) == (
        "parameters: expected one of ['paceline.await_returns', 'paceline.batch_growth', 'paceline.batch_sizes', "
        "'paceline.calls', 'paceline.deadline_aware', 'paceline.execute_delay_per_row_us', "
        "'paceline.execution_timeout_ms', 'paceline.generate', "
        "'paceline.isolate_failures', 'paceline.max_batch_elements', 'paceline.max_cache_bytes', "
        "'paceline.max_generations', 'paceline.max_open_requests', "
        "'paceline.max_queue_bytes', 'paceline.max_queue_rows', 'paceline.max_sequences', "
        "'paceline.max_state_bytes', 'paceline.own_process', "
        "'paceline.pad', 'paceline.pad_sizes', 'paceline.prefill_tokens', "
        "'paceline.python_executable', 'paceline.sequence_backlog', "
        "'paceline.split_oversized', 'paceline.state_batch_axis'], got 'paceline.pipelines'"
    )


def test_misspelt_own_setting_is_refused_naming_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        own(parameter("isolate_failure", "true"))
    assert str(caught.value) == "parameters: expected paceline.isolate_failures, got 'paceline.isolate_failure'"


def test_own_settings_ignore_other_parameters() -> None:
    text = 'parameters { key: "intra_op_thread_count" value { string_value: "two" } }'
    assert own(text, parameter("execute_delay_per_row_us", "5")) == OwnSettings()


def test_defaults_apply_to_a_model_without_configuration() -> None:
    defaults = BatchDefaults(max_batch_rows=5, max_queue_delay_ns=9, queue_timeout_ns=7)
    assert made("", 5, defaults=defaults) == BatchPolicy(
        max_batch_rows=5, max_queue_delay_ns=9, queue=QueuePolicy(default_timeout_ns=7), grows_always=False
    )


def test_defaults_without_a_batch_axis_set_the_timeout_but_no_delay() -> None:
    policy = made("", 0, defaults=BatchDefaults(max_queue_delay_ns=9, queue_timeout_ns=7))
    assert (policy.max_queue_delay_ns, policy.queue.default_timeout_ns) == (0, 7)


def test_defaults_are_32_rows_and_no_delay() -> None:
    assert BatchDefaults() == BatchDefaults(max_batch_rows=32, max_queue_delay_ns=0, queue_timeout_ns=0)
