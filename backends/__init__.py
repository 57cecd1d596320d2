"""Backends: model files in, batched executions out. Knows numpy and the runtimes, not gRPC and not the scheduler."""
