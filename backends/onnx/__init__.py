"""ONNX Runtime: sessions, execution providers, and instances on the CPU and on GPUs."""
