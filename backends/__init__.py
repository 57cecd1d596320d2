"""Backends: model files in, batched executions out. Knows numpy and the runtimes, of which another server
is one (`remote`, which alone knows gRPC), and not the scheduler."""

import os

# From 1.29 on ONNX Runtime tells Microsoft what it executes, unless it finds this when it is imported. Processes of
# models inherit it. Whoever wants to tell says 0.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
