"""What batching decides, measured: see ../README.md. Simulations on the pure core, and runs over gRPC to check them."""
