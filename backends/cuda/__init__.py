"""CUDA's driver: devices, contexts, memory, streams. Nothing here knows ONNX Runtime."""
