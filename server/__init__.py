"""The server: the only package that names gRPC status codes, signals and files."""
