#!/usr/bin/env bash
# With ngh2 a reset overtakes a response that is submitted before it; with h2 both are sent.
#
# A good guess: frames leave in the order in which they are submitted, as RFC 9113 (8.1) wants it of a server that answers
# before the request is complete: the whole response, then RST_STREAM with NO_ERROR.
# Seen instead: send_response(end_stream=True) or send_trailers, then reset_stream, then data_to_send: the client gets the
# reset alone, and no response. data_to_send must be called in between. h2 4.4.1 sends HEADERS and RST_STREAM.
# Seen with: ngh2 0.3.0 (nghttp2), h2 4.4.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ngh2==0.3.0 h2==4.4.1
cat > "$folder/look.py" <<'PYTHON'
import h2.config
import h2.connection
import ngh2

ASKED = [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "x")]
ANSWER = [(":status", "200"), ("x-answer", "1")]


def client() -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    made.initiate_connection()
    made.send_headers(1, ASKED)  # and no end: more of the request is to come
    return made


def seen_by(peer: h2.connection.H2Connection, data: bytes) -> list[str]:
    names = [type(event).__name__ for event in peer.receive_data(data)]
    return [name for name in names if name in ("ResponseReceived", "StreamReset")]


def by_ngh2(flushes: bool) -> list[str]:
    peer, server = client(), ngh2.Connection(ngh2.Role.SERVER)
    server.initiate_connection()
    server.receive_data(peer.data_to_send())
    server.events()
    server.send_response(1, [(name.encode(), value.encode()) for name, value in ANSWER], end_stream=True)
    data = server.data_to_send() if flushes else b""
    server.reset_stream(1, 0)
    return seen_by(peer, data + server.data_to_send())


def by_h2() -> list[str]:
    peer, server = client(), h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(peer.data_to_send())
    server.send_headers(1, ANSWER, end_stream=True)
    server.reset_stream(1, 0)
    return seen_by(peer, server.data_to_send())


seen = {"h2": by_h2(), "ngh2": by_ngh2(False), "ngh2, flushed in between": by_ngh2(True)}
for name, events in seen.items():
    print(f"{name}: {events}")
assert seen["h2"][0] == "ResponseReceived"
assert seen["ngh2"] == ["StreamReset"]
assert seen["ngh2, flushed in between"][0] == "ResponseReceived"
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
