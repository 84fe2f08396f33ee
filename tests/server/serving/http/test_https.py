"""HTTPS: clients that trust the server and those it trusts, certificates that change, clients that say nothing."""

import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509

from gangway.server.access import TlsFiles
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.serving.http import front_end as http_front_end
from gangway.server.serving.tls import Certificates
from tests.helpers.certificates import Authority, Identity

READY = "/v2/health/ready"
IMAGE = np.random.default_rng(0).random((1, 3, 224, 224), np.float32)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("https"))


@pytest.fixture(scope="module")
def identity(authority: Authority) -> Identity:
    return authority.issue("server")


@pytest.fixture(scope="module")
def secured(start_front_end: Callable[..., Any], identity: Identity) -> Any:
    """A front end whose HTTP speaks TLS."""
    return start_front_end(GrpcOptions(), TlsFiles(identity.certificate, identity.key))


@pytest.fixture(scope="module")
def mutual(start_front_end: Callable[..., Any], authority: Authority, identity: Identity) -> Any:
    """One that wants certificates of its clients."""
    return start_front_end(GrpcOptions(), TlsFiles(identity.certificate, identity.key, authority.root, mutual=True))


def trusting(authority: Authority, own: Identity | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.root)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def asking(server: Any, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(server.http_url, timeout=20, context=context)


def answer_to(connection: http.client.HTTPConnection, path: str, *body: Any) -> tuple[int, bytes]:
    connection.request("POST" if body else "GET", path, *body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_requests_of_all_sizes_over_one_connection(secured: Any, authority: Authority) -> None:
    given = {"name": "x", "shape": list(IMAGE.shape), "datatype": "FP32"}
    request = {"inputs": [{**given, "parameters": {"binary_data_size": IMAGE.nbytes}}]}
    text = json.dumps({**request, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    connection = asking(secured, trusting(authority))
    for _ in range(3):
        assert answer_to(connection, READY) == (200, b'{"ready":true}')
        status, body = answer_to(connection, "/v2/models/image/infer", text + IMAGE.tobytes(), headers)
        assert (status, body[-IMAGE.nbytes :]) == (200, IMAGE.tobytes())
    connection.close()


def test_requests_that_come_together(secured: Any, authority: Authority) -> None:
    host, _, port = secured.http_url.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 20) as plain,
        trusting(authority).wrap_socket(plain, server_hostname="localhost") as own,
    ):
        assert own.version() in ("TLSv1.2", "TLSv1.3")
        last = b"GET /v2/health/live HTTP/1.1\r\nconnection: close\r\n\r\n"
        own.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n" * 20 + last)
        replies = b"".join(iter(lambda: own.recv(1 << 16), b""))
    assert replies.count(b"HTTP/1.1 200 OK") == 21


@pytest.mark.parametrize("protocols", [["http/1.1"], ["h2", "http/1.1"], ["h2"], []])
def test_a_client_may_offer_other_protocols(secured: Any, authority: Authority, protocols: list[str]) -> None:
    context = trusting(authority)
    if protocols:
        context.set_alpn_protocols(protocols)
    connection = asking(secured, context)
    assert answer_to(connection, READY)[0] == 200
    assert connection.sock.selected_alpn_protocol() == ("http/1.1" if "http/1.1" in protocols else None)
    connection.close()


def test_who_speaks_no_tls_gets_no_answer(secured: Any) -> None:
    connection = http.client.HTTPConnection(secured.http_url, timeout=20)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        answer_to(connection, READY)
    connection.close()


def test_clients_need_a_certificate_of_the_authority(
    mutual: Any, authority: Authority, tmp_path: Path, identity: Identity
) -> None:
    known = asking(mutual, trusting(authority, authority.issue("client")))
    assert answer_to(known, READY)[0] == 200
    known.close()
    strangers = (None, Authority(tmp_path, "others").issue("stranger"))
    for stranger in strangers:
        connection = asking(mutual, trusting(authority, stranger))
        with pytest.raises((OSError, http.client.HTTPException)):
            answer_to(connection, READY)
        connection.close()


def serial_shown(address: str) -> int:
    """The number of the certificate that a new connection is shown."""
    host, port = address.split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain) as own:
        shown = own.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_changed_files_are_used_for_new_connections(start_front_end: Callable[..., Any], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    server = start_front_end(GrpcOptions(), TlsFiles(identity.certificate, identity.key))
    old = asking(server, trusting(authority))
    assert answer_to(old, READY)[0] == 200
    first = serial_shown(server.http_url)
    authority.issue("server")
    second = x509.load_pem_x509_certificate(identity.certificate.read_bytes()).serial_number
    assert serial_shown(server.http_url) == second != first
    identity.key.write_text("half a k")
    assert serial_shown(server.http_url) == second
    assert answer_to(old, READY)[0] == 200
    old.close()


def test_the_authority_of_clients_may_change(tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    identity, root = first.issue("server"), tmp_path / "root.crt"
    root.write_bytes(first.root.read_bytes())
    certificates = Certificates(TlsFiles(identity.certificate, identity.key, root, mutual=True), ["http/1.1"])
    trusted = [each["subject"] for each in certificates.context().get_ca_certs()]
    root.write_bytes(second.root.read_bytes())
    assert [each["subject"] for each in certificates.context().get_ca_certs()] != trusted, "one in place of the other"
    assert len(certificates.context().get_ca_certs()) == 1


@pytest.fixture(scope="module")
def narrow(start_front_end: Callable[..., Any], identity: Identity) -> Iterator[Any]:
    """One that has room for four connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_front_end, "MAX_CONNECTIONS", 4)
        yield start_front_end(GrpcOptions(), TlsFiles(identity.certificate, identity.key))


def test_clients_that_begin_no_handshake_give_way(narrow: Any, authority: Authority) -> None:
    host, _, port = narrow.http_url.rpartition(":")
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)), 20)) for _ in range(20)]
        for _ in range(3):
            connection = asking(narrow, trusting(authority))
            stack.callback(connection.close)
            assert answer_to(connection, READY)[0] == 200
        assert all(each.recv(1) == b"" for each in silent[:16]), "they were closed"
