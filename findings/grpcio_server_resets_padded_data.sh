#!/usr/bin/env bash
# grpcio's server resets a call whose DATA frame is padded, with PROTOCOL_ERROR, even by no byte at all.
#
# A good guess: padding is HTTP/2's own (RFC 9113, 6.1), below what gRPC defines, so any peer strips it; clients and
# proxies that hide lengths may pad.
# Seen instead: the flag alone decides, so a pad length of 0 fails, too. The same bytes to nghttp2 arrive without their
# padding.
# Seen with: grpcio 1.85.1, h2 4.4.1, ngh2 0.3.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    grpcio==1.85.1 h2==4.4.1 ngh2==0.3.0
cat > "$folder/look.py" <<'PYTHON'
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import h2.config
import h2.connection
import h2.events
import ngh2

ASKED = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/any/echo"),
    (":authority", "x"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
MESSAGE = b"\0\0\0\0\5hello"


class Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


def sent(pad_length: int | None) -> tuple[h2.connection.H2Connection, bytes]:
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    peer.initiate_connection()
    peer.send_headers(1, ASKED)
    peer.send_data(1, MESSAGE, end_stream=True, pad_length=pad_length)
    return peer, peer.data_to_send()


def grpcio_says(port: int, pad_length: int | None) -> str:
    peer, data = sent(pad_length)
    with socket.create_connection(("127.0.0.1", port), 10) as link:
        link.sendall(data)
        while data := link.recv(65536):
            for event in peer.receive_data(data):
                if isinstance(event, h2.events.StreamReset):
                    return f"reset, error {int(event.error_code)}"
                if isinstance(event, h2.events.TrailersReceived):
                    return f"grpc-status {dict(event.headers)['grpc-status']}"
            link.sendall(peer.data_to_send())
    return "closed"


def nghttp2_gets(pad_length: int) -> bytes:
    server = ngh2.Connection(ngh2.Role.SERVER)
    server.initiate_connection()
    server.receive_data(sent(pad_length)[1])
    return b"".join(event.data for event in server.events() if type(event).__name__ == "DataReceived")


server = grpc.server(ThreadPoolExecutor(1), [Echo()])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
seen = {
    "no padding": grpcio_says(port, None),
    "DATA padded by 0": grpcio_says(port, 0),
    "DATA padded by 10": grpcio_says(port, 10),
}
server.stop(None)
for name, answer in seen.items():
    print(f"grpcio, {name}: {answer}")
got = nghttp2_gets(10)
print(f"nghttp2, DATA padded by 10: {got!r}")
assert list(seen.values()) == ["grpc-status 0", "reset, error 1", "reset, error 1"]
assert got == MESSAGE
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
