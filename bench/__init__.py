"""Measures the product against what bounds it: see README.md. It may import anything; nobody imports it."""

import os

# Servers are started while clients run in this process. gRPC's fork handlers, which a child goes through before it
# becomes another program, kill some of them (grpc/grpc#43055). All that is measured is started under this.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Nor is anybody told of what is measured: backends/__init__.py.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
