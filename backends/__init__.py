"""Backends: model files in, batched executions out. Knows numpy and the runtimes (another server is one: `remote`,
which alone knows gRPC), but not the scheduler."""

import os

# Since 1.29 ONNX Runtime reports what it executes to Microsoft, unless this is set when it is imported. Processes of
# models inherit it. To allow reporting, set it to 0.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
