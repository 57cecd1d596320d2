"""Measures the product against what bounds it: see README.md. It may import anything; nobody imports it."""

import os

# Servers are started while clients run in this process. gRPC's fork handlers, which a child goes through before it
# becomes another program, kill some of them (grpc/grpc#43055). Everything that is measured is started with this
# setting.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# No telemetry is sent about what is measured either: see backends/__init__.py.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
