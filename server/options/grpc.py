"""Flags of the gRPC server."""

import argparse
from dataclasses import dataclass

from gangway.server.options.values import port

TITLE = "gRPC"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # 445 float images of 3x224x224; Triton's own clients allow 2 GiB


@dataclass(frozen=True)
class GrpcOptions:
    """Where to listen (port 0: any free one), and the longest message in either direction."""

    address: str = "0.0.0.0"
    port: int = 8001
    max_message_bytes: int = MAX_MESSAGE_BYTES

    @property
    def target(self) -> str:
        """What gRPC listens on: "host:port"."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--grpc-port", type=port, default=GrpcOptions.port, metavar="PORT",
        help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    add("--grpc-address", default=GrpcOptions.address, metavar="HOST", help="address to listen on (%(default)s)")


def read(arguments: argparse.Namespace) -> GrpcOptions:
    """Return the values."""
    return GrpcOptions(address=arguments.grpc_address, port=arguments.grpc_port)
