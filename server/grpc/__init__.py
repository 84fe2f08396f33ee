"""gRPC: the protocol's methods, their calls and streams."""
