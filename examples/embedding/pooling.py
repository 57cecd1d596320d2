"""Write models/pooling/1/model.onnx: the mean of the tokens' vectors, at length 1. It needs `pip install onnx`.

python examples/embedding/pooling.py [FILE]
"""

import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper


def model():
    def node(operator, inputs, output, **attributes):
        return helper.make_node(operator, inputs, [output], **attributes)

    nodes = [
        node("Cast", ["attention_mask"], "mask", to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], "column"),
        node("Mul", ["token_embeddings", "column"], "own"),  # nothing of what texts were filled up with
        node("ReduceSum", ["own", "words"], "sum", keepdims=0),
        node("LpNormalization", ["sum"], "embedding", axis=-1, p=2),  # so the sum needn't be divided by the words
    ]
    constants = [
        helper.make_tensor("last", TensorProto.INT64, [1], [2]),
        helper.make_tensor("words", TensorProto.INT64, [1], [1]),
    ]
    inputs = [
        helper.make_tensor_value_info("token_embeddings", TensorProto.FLOAT, ["rows", "words", 384]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["rows", "words"]),
    ]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["rows", 384])]
    graph = helper.make_graph(nodes, "pooling", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return made


if __name__ == "__main__":
    here = Path(__file__).parent / "models" / "pooling" / "1" / "model.onnx"
    onnx.save(model(), sys.argv[1] if len(sys.argv) > 1 else str(here))
