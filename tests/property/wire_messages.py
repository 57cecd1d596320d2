"""Requests' messages with any contents, whether they make sense or not.

Lives here: strategies that properties of the codec share. Must not: assertions about behaviour.
"""

from __future__ import annotations

from hypothesis import strategies as st

from paceline.protos import inference_pb2 as pb

__all__ = ["messages", "parameters", "texts"]

texts = st.text(max_size=5)
parameters = st.dictionaries(
    st.sampled_from(["priority", "timeout", "mine", "paceline_batch_info", "binary_data_output"]),
    st.one_of(
        st.builds(pb.InferParameter, bool_param=st.booleans()),
        st.builds(pb.InferParameter, int64_param=st.integers(-1, 3)),
        st.builds(pb.InferParameter, string_param=texts),
    ),
    max_size=2,
)
messages = st.builds(
    pb.ModelInferRequest,
    model_name=texts,
    model_version=texts,
    id=texts,
    parameters=parameters,
    inputs=st.lists(
        st.builds(
            pb.ModelInferRequest.InferInputTensor,
            name=texts,
            datatype=texts,
            shape=st.lists(st.integers(-1, 300), max_size=3),
            contents=st.none()
            | st.builds(pb.InferTensorContents, fp32_contents=st.lists(st.floats(width=32, allow_nan=False))),
        ),
        max_size=2,
    ),
    outputs=st.lists(st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=texts), max_size=2),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=3),
)
