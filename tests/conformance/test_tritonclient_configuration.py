"""NVIDIA's client reads the models' configurations: they are complete, and as tools such as perf_analyzer expect
them."""

from __future__ import annotations

import pytest
from tritonclient.utils import InferenceServerException

from tests.conformance import zoo
from tests.conformance.triton import Triton


@pytest.mark.parametrize("version", ["", "1"])
async def test_model_config_of_a_batched_model_has_everything_filled_in(triton: Triton, version: str) -> None:
    config = (await triton.get_model_config("simple", version)).config
    assert (config.name, config.platform, config.backend) == ("simple", "onnxruntime_onnx", "onnxruntime")
    assert config.max_batch_size == 32
    assert list(config.dynamic_batching.preferred_batch_size) == [32]
    assert config.default_model_filename == "model.onnx"
    assert config.version_policy.latest.num_versions == 1
    assert [(one.name, list(one.dims)) for one in config.input] == [("INPUT0", [16]), ("INPUT1", [16])]
    assert [(one.name, list(one.dims)) for one in config.output] == [("OUTPUT0", [16]), ("OUTPUT1", [16])]
    (group,) = config.instance_group
    assert (group.name, group.count, config.parameters["intra_op_thread_count"].string_value) == ("simple_0", 1, "1")


async def test_model_config_as_json_has_the_field_names_of_the_text_format(triton: Triton) -> None:
    config = (await triton.get_model_config("mlp_six", as_json=True))["config"]
    assert config["max_batch_size"] == 8
    assert config["dynamic_batching"]["preferred_batch_size"] == [6]
    assert config["input"] == [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": ["16"]}]
    assert config["instance_group"] == [{"name": "mlp_six_0", "kind": "KIND_CPU", "count": 1}]


async def test_model_config_of_a_model_without_batch_axis_has_no_scheduler(triton: Triton) -> None:
    config = (await triton.get_model_config("unbatched")).config
    assert (config.max_batch_size, config.WhichOneof("scheduling_choice")) == (0, None)
    assert list(config.input[0].dims) == [16]


@pytest.mark.parametrize("datatype", zoo.DATATYPES)
async def test_model_config_and_metadata_agree_as_perf_analyzer_needs(triton: Triton, datatype: str) -> None:
    """It looks up each input of the configuration in the metadata, and drops the first dimension if the model is
    batched."""
    name = zoo.identity_of(datatype)
    config, metadata = (await triton.get_model_config(name)).config, await triton.get_model_metadata(name)
    assert config.max_batch_size > 0
    assert [(one.name, list(one.dims)) for one in config.input] == [
        (one.name, list(one.shape)[1:]) for one in metadata.inputs
    ]
    expected = {"BYTES": "STRING"}.get(datatype, datatype)
    assert config.DESCRIPTOR.fields_by_name["input"].message_type.fields_by_name["data_type"].enum_type.values_by_name[
        f"TYPE_{expected}"
    ].number == (config.input[0].data_type)


@pytest.mark.parametrize(("name", "version"), [("nosuch", ""), ("simple", "2")])
async def test_model_config_of_an_unknown_model_or_version_is_not_found(
    triton: Triton, name: str, version: str
) -> None:
    with pytest.raises(InferenceServerException, match=f"'{name}'") as raised:
        await triton.get_model_config(name, version)
    assert raised.value.status() == "StatusCode.NOT_FOUND"


async def test_server_metadata_advertises_the_configuration(triton: Triton) -> None:
    assert "model_configuration" in (await triton.get_server_metadata()).extensions
