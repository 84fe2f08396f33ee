"""What gRPC's core is told: limits of messages, metadata and streams, keepalive, compression."""

from gangway.executor.memory_budget import memory_budget
from gangway.server.options.grpc import Compression, GrpcOptions

AMPLE_BYTES = 4 << 30  # of memory: what clients send unasked may be as much as the speed of their links suggests
MAX_METADATA_BYTES = 16 * 1024  # of one call; traces and tokens fit
MAX_STREAMS_PER_CONNECTION = 4096  # what is in flight is limited by request slots, long before
HANDSHAKE_TIMEOUT_MS = 20_000  # who connects and then says nothing
# Core's levels. It chooses the algorithm among those that the client accepts: gzip, for higher levels deflate.
_LEVELS = {Compression.LOW: 1, Compression.MEDIUM: 2, Compression.HIGH: 3}


def channel_options(options: GrpcOptions, max_connections: int | None = None) -> list[tuple[str, int]]:
    """Return the arguments for grpc.server."""
    keepalive = options.keepalive
    found: dict[str, int | None] = {
        # By default a second server on the same port would silently get every other connection.
        "grpc.so_reuseport": options.reuse_port,
        # Also of a message after decompression: core (1.85) stops inflating there.
        "grpc.max_receive_message_length": options.max_message_bytes,
        "grpc.max_send_message_length": options.max_message_bytes,
        # Without it a client sends no more than 64 KiB of a message before it is asked for (`threadless/arrivals.py`).
        # A large one is then a round trip more, which costs the front end a twentieth of its CPU.
        "grpc.http2.bdp_probe": memory_budget().limit.size_bytes >= AMPLE_BYTES,
        "grpc.max_metadata_size": MAX_METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.max_concurrent_streams": MAX_STREAMS_PER_CONNECTION,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_TIMEOUT_MS,
        "grpc.max_allowed_incoming_connections": max_connections,
        "grpc.default_compression_level": _LEVELS.get(options.compression),
        "grpc.keepalive_time_ms": keepalive.time_ms,
        "grpc.keepalive_timeout_ms": keepalive.timeout_ms,
        "grpc.keepalive_permit_without_calls": keepalive.permit_without_calls,
        "grpc.http2.max_pings_without_data": keepalive.max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": keepalive.min_recv_ping_interval_without_data_ms,
        "grpc.http2.max_ping_strikes": keepalive.max_ping_strikes,
        "grpc.max_connection_age_ms": keepalive.max_connection_age_ms,
        "grpc.max_connection_age_grace_ms": keepalive.max_connection_age_grace_ms,
    }
    return [(name, int(value)) for name, value in found.items() if value is not None]
