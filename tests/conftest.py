"""What has to be so before any test imports gRPC."""

from __future__ import annotations

import os

# Tests start processes while servers and clients run in their own. gRPC's fork handlers, which the harness's children
# go through before they become another program, kill one in five of them then. Nothing here goes on after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
