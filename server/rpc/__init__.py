"""gRPC as callers meet it: its server, who may call, and the RPCs.

Each RPC's object checks what its messages ask for and passes it on. The further steps of an inference request are in
`server.requests`.
"""
