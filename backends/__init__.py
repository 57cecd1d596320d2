"""Backends: model files in, batched executions out. Knows numpy and the runtimes, of which another server
is one (`remote`, which alone knows gRPC), and not the scheduler."""
