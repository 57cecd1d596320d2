"""Create a model repository with magika's model, from the installed package.

python -m examples.magika.build models
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.resources import as_file, files
from pathlib import Path

CONFIG = """\
# Every line may be left out; the server then takes it from the model.
name: "magika"
platform: "onnxruntime_onnx"
max_batch_size: 64
input { name: "bytes" data_type: TYPE_INT32 dims: [ 2048 ] }
output { name: "target_label" data_type: TYPE_FP32 dims: [ 214 ] label_filename: "labels.txt" }
dynamic_batching { }
"""


def build(repository: Path) -> Path:
    """Write `<repository>/magika` in Triton's layout: configuration, labels, version 1. Returns the model's folder."""
    with as_file(files("magika") / "models") as models:
        (source,) = (folder for folder in models.iterdir() if (folder / "model.onnx").is_file())
        folder = repository / "magika"
        (folder / "1").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / "model.onnx", folder / "1" / "model.onnx")
        labels = json.loads((source / "config.min.json").read_text())["target_labels_space"]
    (folder / "labels.txt").write_text("\n".join(labels) + "\n")
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


if __name__ == "__main__":
    print("built", build(Path(sys.argv[1])))
