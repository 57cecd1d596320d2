"""The chosen settings as a configuration: what changes is set and said, all else stays."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf import text_format

from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune.choosing import Setting
from paceline.server.tune.config_file import changes_of, config_text, plain
from paceline.server.tune.curve import Curve, Curves
from paceline.server.tune.measuring import Layout

OWN = pb.ModelConfig()
CURVES = Curves({1: Curve({1: [1_000_000], 8: [4_000_000]})}, 1)
NOW = Setting(Layout(Offline(), 1, CURVES), BatchPolicy(max_batch_rows=4, preferred_batch_rows=(2,)))
BEST = Setting(Layout(Offline(2, 1), 2, CURVES), BatchPolicy(max_batch_rows=8, max_queue_delay_ns=500_000))


def parsed(text: str) -> pb.ModelConfig:
    return text_format.Parse(text, pb.ModelConfig())


def test_changed_settings_are_set_and_explained() -> None:
    config = parsed('name: "m" max_batch_size: 4 dynamic_batching { preferred_batch_size: [2] priority_levels: 2 }')
    changes = changes_of(OWN, NOW, BEST)
    text = config_text(config, BEST, changes, ["Tuned: for a test."])
    assert parsed(text) == parsed(
        """name: "m" max_batch_size: 8
        dynamic_batching { priority_levels: 2 max_queue_delay_microseconds: 500 }
        instance_group { count: 2 } parameters { key: "intra_op_thread_count" value { string_value: "1" } }"""
    )
    assert text.startswith("# Tuned: for a test.\n# max_batch_size: 8, was 4: such a batch executes for 4 ms\n")
    assert [one.field for one in changes] == [
        "max_batch_size",
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.max_queue_delay_microseconds",
        "instance_group.count",
        "parameters.intra_op_thread_count",
    ]


def test_smaller_largest_batch_says_what_is_refused() -> None:
    (smaller, *_), (larger, *_) = changes_of(OWN, BEST, NOW), changes_of(OWN, NOW, BEST)
    assert smaller.why == "such a batch executes for 2.29 ms; requests with more rows are refused"
    assert "refused" not in larger.why
    splits = parsed('parameters { key: "paceline.split_oversized" value { string_value: "true" } }')
    assert changes_of(splits, BEST, NOW)[0].why == "such a batch executes for 2.29 ms"


def test_threads_of_the_model_itself_are_told() -> None:
    own = parsed('parameters { key: "intra_op_thread_count" value { string_value: "4" } }')
    before = {one.field: one.before for one in changes_of(own, NOW, BEST)}
    assert before["parameters.intra_op_thread_count"] == "4"


def test_figures_for_people_have_no_exponents() -> None:
    figures = (0.125, 99.96, 150.5, 999.6, 16_140.2)
    assert [plain(one) for one in figures] == ["0.125", "99.96", "150.5", "1,000", "16,140"]


def test_model_without_configuration_gets_one_that_batches() -> None:
    text = config_text(pb.ModelConfig(backend="onnxruntime"), NOW, changes_of(OWN, NOW, NOW), ())
    assert parsed(text) == parsed('backend: "onnxruntime" max_batch_size: 4 dynamic_batching {}')


def test_spinning_is_switched_off_where_it_was_on() -> None:
    still = replace(NOW, layout=replace(NOW.layout, allow_spinning=False))
    assert changes_of(OWN, NOW, NOW) == []
    (change,) = changes_of(OWN, NOW, still)
    assert change.field == "parameters.session.intra_op.allow_spinning"
    config = parsed(config_text(parsed('name: "m" max_batch_size: 4'), still, [change], ()))
    assert config.parameters["session.intra_op.allow_spinning"].string_value == "0"


def test_configuration_for_gpus_counts_instances_on_each() -> None:
    now = replace(NOW, layout=replace(NOW.layout, instances=2, gpus=2), policy=BatchPolicy(max_batch_rows=4))
    policy = BatchPolicy(max_batch_rows=4, batch_sizes=(1, 2, 4))
    best = replace(now, layout=replace(now.layout, offline=Offline(3), instances=6), policy=policy)
    changes = changes_of(OWN, now, best)
    assert [(one.field, one.before, one.after) for one in changes] == [
        ("instance_group.count", "1", "3"),
        ("parameters.paceline.batch_sizes", "any", "1,2,4"),
    ]
    config = parsed("max_batch_size: 4 dynamic_batching {} instance_group { kind: KIND_GPU }")
    assert parsed(config_text(config, best, changes, ())) == parsed(
        """max_batch_size: 4 dynamic_batching {} instance_group { kind: KIND_GPU count: 3 }
        parameters { key: "paceline.batch_sizes" value { string_value: "1,2,4" } }"""
    )


def test_smaller_batches_leave_nothing_that_is_larger() -> None:
    # A preferred size that is the largest is the same as none.
    now = replace(NOW, policy=BatchPolicy(max_batch_rows=8))
    chosen = replace(NOW, policy=BatchPolicy(max_batch_rows=4))
    config = parsed(
        """max_batch_size: 8 dynamic_batching { preferred_batch_size: [8] }
        model_warmup { name: "w" batch_size: 8 } model_warmup { name: "one" batch_size: 1 }"""
    )
    assert parsed(config_text(config, chosen, changes_of(OWN, now, chosen), ())) == parsed(
        """max_batch_size: 4 dynamic_batching {}
        model_warmup { name: "w" batch_size: 4 } model_warmup { name: "one" batch_size: 1 }"""
    )


def test_model_that_batches_nothing_stays_so() -> None:
    alone = replace(NOW, policy=BatchPolicy(max_batch_requests=1))
    assert changes_of(OWN, alone, alone) == []
    assert config_text(pb.ModelConfig(name="m"), alone, (), ()) == 'name: "m"\n'
