"""TLS of `gangway client` and `gangway perf`: large messages both ways, peers that are not who they say, files."""

import hashlib
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from gangway.clients import command, top
from gangway.clients.addresses import grpc_address
from gangway.clients.connection import SERVICE, UNLIMITED_MESSAGES
from gangway.clients.errors import UnreachableError
from gangway.clients.open_loop import CLIENTS, run_open_loop
from gangway.clients.perf import command as perf
from gangway.clients.tls import Tls
from gangway.protos import grpc_service_pb2 as pb
from gangway.workload.arrivals import Arrivals
from testing.live_server import free_port
from tests.helpers.certificates import Authority, Identity

ANSWER = pb.ModelInferResponse(raw_output_contents=[bytes(3_000_000)]).SerializeToString()


def _request(model: str, *contents: bytes) -> bytes:
    return pb.ModelInferRequest(model_name=model, raw_input_contents=contents).SerializeToString()


@dataclass(frozen=True)
class Secured:
    """A server of grpcio that answers with the digest of what it got, and many bytes more."""

    url: str
    authority: Authority
    identity: Identity
    seen: list[bytes]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    authority = Authority(tmp_path_factory.mktemp("pki"))
    identity, seen = authority.issue("server"), []

    def digest(request: bytes, _context: grpc.ServicerContext) -> bytes:
        seen.append(hashlib.sha256(request).digest())
        return ANSWER

    credentials = grpc.ssl_server_credentials(
        [(identity.key.read_bytes(), identity.certificate.read_bytes())],
        root_certificates=authority.root.read_bytes(),
        require_client_auth=True,
    )
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, options=[*UNLIMITED_MESSAGES, ("grpc.so_reuseport", 0)])
        handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(digest)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.strip("/"), handlers),))
        url = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
        server.start()
        yield Secured(url, authority, identity, seen)
        server.stop(0).wait()


@pytest.mark.parametrize("load_client", CLIENTS)
def test_large_messages_pass_both_ways(secured: Secured, load_client: str) -> None:
    secured.seen.clear()
    client = secured.authority.issue("client")
    tls = Tls(secured.authority.root, client.key, client.certificate)
    generator = np.random.default_rng(0)
    contents = {"a": generator.bytes(5_000_001), "b": generator.bytes(70_000), "c": b""}
    requests = {name: _request(name, content) for name, content in contents.items()}
    arrivals = Arrivals(np.arange(9) * 1000.0, np.arange(9) % 3)
    outcomes = run_open_loop(secured.url, requests, arrivals, tls=tls, client=load_client)
    assert outcomes.answered.all()
    assert sorted(secured.seen) == sorted([hashlib.sha256(request).digest() for request in requests.values()] * 3)


@pytest.mark.parametrize("load_client", CLIENTS)
@pytest.mark.parametrize("trusting", ["somebody else", "nobody in particular"])
def test_a_server_that_nobody_vouches_for(secured: Secured, tmp_path: Path, trusting: str, load_client: str) -> None:
    tls = Tls(Authority(tmp_path, "others").root) if trusting == "somebody else" else Tls()
    with pytest.raises(UnreachableError, match=r"(?i)certificate.verify.failed"):
        arrivals = Arrivals(np.zeros(1), np.zeros(1, int))
        run_open_loop(secured.url, {"m": _request("m")}, arrivals, tls=tls, client=load_client)


def test_a_server_that_speaks_no_tls(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        with ThreadPoolExecutor(1) as pool:

            def hang_up() -> None:
                peer, _ = listener.accept()
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            answered = pool.submit(hang_up)
            with pytest.raises(UnreachableError, match=r"does not speak TLS as expected"):
                run_open_loop(url, {"m": b"x"}, Arrivals(np.zeros(1), np.zeros(1, int)), tls=Tls())
            answered.result(10)


@pytest.mark.parametrize("main", [command.main, perf.main, top.main])
def test_a_port_of_tls_asks_for_the_flag(
    secured: Secured, capsys: pytest.CaptureFixture[str], main: Callable[[Sequence[str]], int]
) -> None:
    arguments = ["m"] if main is command.main else []
    assert main([*arguments, "--url", secured.url]) == UnreachableError.exit_status
    assert capsys.readouterr().err.endswith(f": {secured.url} speaks TLS: give --ssl\n")


@pytest.mark.parametrize("main", [command.main, perf.main, top.main])
def test_the_servers_variables_say_the_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: Callable[[Sequence[str]], int]
) -> None:
    port = free_port()
    for variable in ("GANGWAY_GRPC_PORT", "GANGWAY_HTTP_PORT"):
        monkeypatch.setenv(variable, str(port))
    assert main(["m"] if main is command.main else []) == UnreachableError.exit_status
    assert f":{port}" in capsys.readouterr().err


@pytest.mark.parametrize("main", [command.main, perf.main, top.main])
@pytest.mark.parametrize("url", ["localhost:99999", "localhost:0", "localhost:http", ":8001", "http://localhost:8001"])
def test_what_is_no_address_is_an_error_of_usage(
    capsys: pytest.CaptureFixture[str], main: Callable[[Sequence[str]], int], url: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*(["m"] if main is command.main else []), "--url", url])
    assert ended.value.code == 2
    assert f"expected HOST or HOST:PORT, got {url!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost", "localhost:8001"),
        ("10.0.0.7:9000", "10.0.0.7:9000"),
        ("[::1]", "[::1]:8001"),
        ("[::1]:9000", "[::1]:9000"),
        ("unix:/run/gangway.sock", "unix:/run/gangway.sock"),
    ],
)
def test_the_port_of_grpc_may_be_left_out(text: str, address: str) -> None:
    assert grpc_address(text) == address


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--root-certificates={root}"], "certificates and keys are for TLS: give --ssl, too"),
        (["--ssl", "--private-key={key}"], "a client's certificate has two files"),
        (["--ssl", "--root-certificates={absent}"], "--root-certificates {absent}: No such file"),
        (["--ssl", "--root-certificates={key}"], "--root-certificates {key}: "),
        (["--ssl", "--private-key={root}", "--certificate-chain={root}"], "--certificate-chain {root} and --private"),
        (["--ssl", "--private-key={encrypted}", "--certificate-chain={certificate}"], "the key is encrypted"),
    ],
)
def test_files_that_are_no_use(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    files = {
        "root": secured.authority.root,
        "key": secured.identity.key,
        "certificate": secured.identity.certificate,
        "absent": tmp_path / "absent",
        "encrypted": secured.authority.issue("encrypted", b"password").key,
    }
    given = [flag.format(**files) for flag in flags]
    assert command.main(["simple", f"--url={secured.url}", *given]) == 2
    assert said.format(**files) in capsys.readouterr().err
    assert perf.main(["--mix=simple=1", "--rate=1", f"--url={secured.url}", *given]) == 2
    assert said.format(**files) in capsys.readouterr().err
