"""gRPC as callers meet it: its server, who may call, and the RPCs.

Each RPC's object checks what its messages ask for and hands it on; what an inference request then goes through is in
`server.requests`.
"""
