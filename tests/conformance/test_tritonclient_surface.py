"""Everything public in NVIDIA's client has a test: the names that the installed one offers are compared with this
table.

A name that a newer client adds has to be added here, with a test that uses it against our server.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from types import ModuleType

import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.utils
import tritonclient.utils.shared_memory

from tests.harness import REPO

_CLIENT, _ERRORS, _STREAMS = "test_tritonclient", "test_tritonclient_errors", "test_triton_streaming"
_OBJECTS, _SETTINGS, _CONTROL = "test_tritonclient_objects", "test_tritonclient_settings", "test_model_control"
_SHM, _STATISTICS, _CLASSES = "test_shared_memory", "test_triton_statistics", "test_tritonclient_classification"

# Methods of the clients; the tests run with both.
CLIENTS = {
    "close": f"{_OBJECTS}::test_plugin_that_adds_headers_leaves_answers_as_they_are",
    "get_cuda_shared_memory_status": f"{_SHM}::test_unregister_all_of_both_kinds_comes_first_and_succeeds",
    "get_inference_statistics": f"{_STATISTICS}::test_statistics_of_one_model_name_it_and_its_version",
    "get_log_settings": f"{_SETTINGS}::test_settings_may_be_asked_for_by_everybody",
    "get_model_config": "test_tritonclient_configuration::"
    "test_model_config_of_a_batched_model_has_everything_filled_in",
    "get_model_metadata": f"{_CLIENT}::test_model_metadata_batched_model_has_free_batch_axis",
    "get_model_repository_index": f"{_CONTROL}::test_index_as_json_leaves_out_what_is_empty",
    "get_server_metadata": f"{_CLIENT}::test_server_metadata_names_server_and_extensions",
    "get_system_shared_memory_status": f"{_SHM}::test_add_sub_in_regions_of_their_own_registered_at_an_offset",
    "get_trace_settings": f"{_SETTINGS}::test_trace_settings_of_a_model_stand_above_everybodys",
    "infer": f"{_CLIENT}::test_infer_identity_of_each_datatype_returns_the_very_bits",
    "is_model_ready": f"{_CLIENT}::test_model_ready_loaded_model_is_true",
    "is_server_live": f"{_CLIENT}::test_health_server_started_is_live_and_ready",
    "is_server_ready": f"{_CLIENT}::test_health_server_started_is_live_and_ready",
    "load_model": f"{_CONTROL}::test_load_infer_unload_and_load_again",
    "plugin": f"{_OBJECTS}::test_plugin_that_adds_headers_leaves_answers_as_they_are",
    "register_cuda_shared_memory": f"{_OBJECTS}::"
    "test_cuda_shared_memory_switched_off_is_unimplemented_and_has_no_regions",
    "register_plugin": f"{_OBJECTS}::test_plugin_that_adds_headers_leaves_answers_as_they_are",
    "register_system_shared_memory": f"{_SHM}::test_add_sub_with_all_tensors_in_shared_memory",
    "unload_model": f"{_CONTROL}::test_unload_with_dependents_and_of_the_unknown_is_fine",
    "unregister_cuda_shared_memory": f"{_SHM}::test_unregister_all_of_both_kinds_comes_first_and_succeeds",
    "unregister_plugin": f"{_OBJECTS}::test_plugin_that_adds_headers_leaves_answers_as_they_are",
    "unregister_system_shared_memory": f"{_SHM}::test_register_twice_is_refused_and_unregister_works_before_and_after",
    "update_log_settings": f"{_SETTINGS}::test_log_settings_changed_are_told_and_hold",
    "update_trace_settings": f"{_SETTINGS}::test_trace_settings_of_a_model_stand_above_everybodys",
}
BLOCKING = {
    "async_infer": f"{_CLIENT}::test_async_infer_many_at_once_each_callback_gets_its_own_answer",
    "async_stream_infer": f"{_STREAMS}::test_stream_answers_come_in_order_and_say_that_they_are_final",
    "start_stream": f"{_STREAMS}::test_stream_answers_come_in_order_and_say_that_they_are_final",
    "stop_stream": f"{_STREAMS}::test_stream_stopped_with_cancelling_takes_its_requests_out_of_the_queue",
}
AIO = {
    "stream_infer": f"{_STREAMS}::test_aio_stream_answers_come_in_order_with_errors_in_their_place",
}
INPUT = {
    "datatype": f"{_OBJECTS}::test_input_given_another_shape_and_data_is_sent_with_these",
    "name": f"{_OBJECTS}::test_input_given_another_shape_and_data_is_sent_with_these",
    "set_data_from_numpy": f"{_OBJECTS}::test_input_given_another_shape_and_data_is_sent_with_these",
    "set_shape": f"{_OBJECTS}::test_input_given_another_shape_and_data_is_sent_with_these",
    "set_shared_memory": f"{_OBJECTS}::test_input_in_shared_memory_given_data_is_sent_with_the_data",
    "shape": f"{_OBJECTS}::test_input_given_another_shape_and_data_is_sent_with_these",
}
REQUESTED_OUTPUT = {
    "name": f"{_OBJECTS}::test_result_as_numpy_output_and_response_say_the_same",
    "set_shared_memory": f"{_SHM}::wanted",
    "unset_shared_memory": f"{_SHM}::test_unset_shared_memory_brings_the_output_back_into_the_response",
}
RESULT = {
    "as_numpy": f"{_OBJECTS}::test_result_as_numpy_output_and_response_say_the_same",
    "get_output": f"{_OBJECTS}::test_result_as_numpy_output_and_response_say_the_same",
    "get_response": f"{_OBJECTS}::test_result_as_numpy_output_and_response_say_the_same",
}
CLASSES = {
    "InferInput": f"{_OBJECTS}::test_input_given_another_shape_and_data_is_sent_with_these",
    "InferRequestedOutput": f"{_CLASSES}::test_infer_class_count_returns_so_many_classes_a_row",
    "InferResult": "",  # made by the client
    "InferenceServerClient": f"{_OBJECTS}::test_client_with_any_options_of_the_connection_is_served",
    "InferenceServerClientPlugin": f"{_OBJECTS}::Noting",
    "InferenceServerException": f"{_ERRORS}::test_infer_faulty_request_is_refused_with_status_and_reason",
    "KeepAliveOptions": f"{_OBJECTS}::KEEPALIVE",
    "Request": "",  # what a plugin is given
}
HELPERS = {
    "deserialize_bytes_tensor": f"{_OBJECTS}::test_helpers_for_texts_make_and_read_what_ours_does",
    "np_to_triton_dtype": f"{_OBJECTS}::test_helpers_for_datatypes_agree_with_ours",
    "raise_error": "",  # used by the client itself
    "serialize_byte_tensor": f"{_OBJECTS}::test_helpers_for_texts_make_and_read_what_ours_does",
    "serialized_byte_size": f"{_OBJECTS}::test_helpers_for_texts_make_and_read_what_ours_does",
    "triton_to_np_dtype": f"{_OBJECTS}::test_helpers_for_datatypes_agree_with_ours",
}
SHARED_MEMORY = {
    "create_shared_memory_region": f"{_SHM}::created",
    "destroy_shared_memory_region": f"{_SHM}::created",
    "get_contents_as_numpy": f"{_SHM}::copied",
    "mapped_shared_memory_regions": f"{_SHM}::created",
    "set_shared_memory_region": f"{_SHM}::test_add_sub_with_all_tensors_in_shared_memory",
}


def methods(of: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(of, callable) if not name.startswith("_")}


def functions(of: ModuleType) -> set[str]:
    found = inspect.getmembers(of, inspect.isfunction)
    return {name for name, one in found if not name.startswith("_") and one.__module__ == of.__name__}


OFFERED = {
    "InferenceServerClient": (methods(tritonclient.grpc.InferenceServerClient), CLIENTS | BLOCKING),
    "aio.InferenceServerClient": (methods(tritonclient.grpc.aio.InferenceServerClient), CLIENTS | AIO),
    "InferInput": (methods(tritonclient.grpc.InferInput), INPUT),
    "InferRequestedOutput": (methods(tritonclient.grpc.InferRequestedOutput), REQUESTED_OUTPUT),
    "InferResult": (methods(tritonclient.grpc.InferResult), RESULT),
    "grpc": (set(tritonclient.grpc.__all__), CLASSES),
    "utils": (functions(tritonclient.utils), HELPERS),
    "utils.shared_memory": (functions(tritonclient.utils.shared_memory), SHARED_MEMORY),
}
USES = sorted({(name, where) for _, table in OFFERED.values() for name, where in table.items() if where})


@cache
def defined_in(file: str) -> dict[str, ast.stmt]:
    """The top-level definitions of a file of this folder, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse((REPO / "tests" / "conformance" / f"{file}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def names_within(node: ast.AST) -> set[str]:
    attributes = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return attributes | {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


@pytest.mark.parametrize(("offered", "table"), OFFERED.values(), ids=OFFERED)
def test_table_lists_exactly_what_the_client_offers(offered: set[str], table: dict[str, str]) -> None:
    assert offered, "nothing found: the client looks different now"
    assert offered == set(table)


@pytest.mark.parametrize(("name", "where"), USES)
def test_table_names_tests_that_use_the_listed_names(name: str, where: str) -> None:
    """In their own code, or in code of their file or the helpers' that they call."""
    file, _, test = where.partition("::")
    everything = {**defined_in("triton"), **defined_in(file)}
    assert test in everything, f"{where} isn't there"
    used, seen = {test}, set[str]()
    while unseen := used & set(everything) - seen:
        seen |= unseen
        used |= {found for one in unseen for found in names_within(everything[one])}
    assert name in used, f"{where} doesn't use {name}"


@pytest.mark.parametrize("where", sorted(set(CLIENTS.values())))
def test_table_of_both_clients_names_tests_that_run_with_both(where: str) -> None:
    file, _, test = where.partition("::")
    node = defined_in(file)[test]
    assert isinstance(node, ast.AsyncFunctionDef)
    annotations = {ast.unparse(one.annotation) for one in node.args.args if one.annotation}
    with_both = any("tritonclient.grpc.aio" in ast.unparse(one) for one in node.decorator_list)
    assert "Triton" in annotations or with_both, f"{where} asks one client alone"
