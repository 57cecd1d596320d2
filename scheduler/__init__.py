"""The dynamic batcher: stdlib only, no numpy, no gRPC.

`policy` says what is allowed, `batch_queue` decides (pure), `batcher` and `runner` act on that.
"""
