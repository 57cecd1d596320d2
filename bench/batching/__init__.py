"""What batching decides, measured: see ../README.md. Simulations on the pure queue, and runs over gRPC as a check."""
