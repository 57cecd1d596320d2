"""Train the classifier that models/digits needs, on the handwritten digits that come with scikit-learn.

python examples/digits/train.py [examples/digits/models/classifier/1/model.onnx]

It is a small classifier for an example: a weight for each of 8 x 8 pixels and each digit, from 1,347 digits, white on
black. It knows nothing but single digits that fill the image. It needs `pip install scikit-learn onnx`.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits

LABELS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def digits():
    """Pixels from 0 to 1, [digits, 64], and the digits; those to train with, and those to test with."""
    pixels, numbers = load_digits(return_X_y=True)
    return train_test_split((pixels / 16).astype(np.float32), numbers, test_size=0.25, random_state=0)


def trained(pixels, numbers):
    with threadpool_limits(1):  # on matrices as small as these, threads would only wait for each other
        return LogisticRegression(max_iter=500).fit(pixels, numbers)


def as_onnx(classifier):
    """The classifier, with the name of the likeliest digit as another output."""
    constants = {
        "weights": classifier.coef_.T.astype(np.float32),
        "bias": classifier.intercept_.astype(np.float32),
        "labels": np.array(LABELS, object),
    }
    nodes = [
        helper.make_node("Gemm", ["pixels", "weights", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=-1),
        helper.make_node("ArgMax", ["probabilities"], ["best"], axis=1, keepdims=1),
        helper.make_node("Gather", ["labels", "best"], ["label"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["rows", 64])],
        [
            helper.make_tensor_value_info("label", TensorProto.STRING, ["rows", 1]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", 10]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


if __name__ == "__main__":
    here = Path(__file__).parent / "models" / "classifier" / "1" / "model.onnx"
    train_pixels, test_pixels, train_numbers, test_numbers = digits()
    classifier = trained(train_pixels, train_numbers)
    print(
        f"right on {classifier.score(test_pixels, test_numbers):.1%} of {len(test_numbers)} digits that it hasn't seen"
    )
    onnx.save(as_onnx(classifier), sys.argv[1] if len(sys.argv) > 1 else str(here))
