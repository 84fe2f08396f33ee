"""TLS: a real server that asks clients for certificates, one that does not, and files that are wrong."""

import json
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from cryptography import x509
from tritonclient.utils import InferenceServerException

from gangway.clients import command as client_command
from gangway.clients.perf import command as perf_command
from gangway.server.access import TlsError, TlsFiles
from gangway.server.options.command_line import parse_options
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.serving.tls import Certificates
from testing.live_server import LiveServer, live_server
from testing.perf_analyzer import Mode, run_one
from tests.helpers.certificates import Authority, Identity

Inputs = Callable[..., list[triton.InferInput]]
INTERVAL_MS = 100


@dataclass(frozen=True)
class Pki:
    """Two authorities that do not know each other; the server and one client are of the first."""

    ours: Authority
    others: Authority
    server: Identity
    client: Identity
    stranger: Identity


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    return Pki(ours, others, ours.issue("server"), ours.issue("client"), others.issue("stranger"))


@pytest.fixture(scope="module")
def mutual(compiled_zoo: Any, pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`gangway serve` with mutual TLS, a restricted protocol, short-lived connections and flags made for Triton."""
    repository = tmp_path_factory.mktemp("tls-models")
    (repository / "simple").symlink_to(compiled_zoo.repository / "simple")
    flags = [
        f"--cache-dir={compiled_zoo.cache_dir}",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={pki.server.certificate}",
        f"--grpc-server-key={pki.server.key}",
        f"--grpc-root-cert={pki.ours.root}",
        "--grpc-restricted-protocol=model-config:admin=yes",
        "--grpc-keepalive-time=10000",
        "--grpc-keepalive-timeout=5000",
        "--grpc-keepalive-permit-without-calls=1",
        "--grpc-http2-max-pings-without-data=0",
        "--grpc-http2-min-recv-ping-interval-without-data=100",
        "--grpc-http2-max-ping-strikes=0",
        "--grpc-max-connection-age=300000",
        "--grpc-max-connection-age-grace=10000",
        "--grpc-infer-response-compression-level=low",
        "--id=tester",
        "--pinned-memory-pool-byte-size=268435456",
        "--pinned-memory-pool-byte-size=0",
        "--allow-sagemaker=false",
    ]
    credentials = grpc.ssl_channel_credentials(
        pki.ours.root.read_bytes(), pki.client.key.read_bytes(), pki.client.certificate.read_bytes()
    )
    with live_server(repository, flags, credentials) as server:
        yield server
    assert server.process.returncode == 0


def client(url: str, root: Path, identity: Identity | None = None, **options: Any) -> triton.InferenceServerClient:
    key, certificate = (str(identity.key), str(identity.certificate)) if identity else (None, None)
    return triton.InferenceServerClient(
        url, ssl=True, root_certificates=str(root), private_key=key, certificate_chain=certificate, **options
    )


def test_a_client_with_a_certificate_is_served(mutual: LiveServer, pki: Pki, simple_inputs: Inputs) -> None:
    keepalive = triton.KeepAliveOptions(
        keepalive_time_ms=200, keepalive_timeout_ms=2000, keepalive_permit_without_calls=True
    )
    with client(mutual.url, pki.ours.root, pki.client, keepalive_options=keepalive) as trusted:
        assert trusted.is_server_ready()
        assert trusted.get_server_metadata().name == "tester"
        for algorithm in (None, "gzip", "deflate"):
            result = trusted.infer("simple", simple_inputs(), compression_algorithm=algorithm)
            assert result.as_numpy("OUTPUT0").tolist() == [list(range(1, 17))]
        with pytest.raises(InferenceServerException, match="expecting header 'triton-grpc-protocol-admin'"):
            trusted.get_model_config("simple")
        assert trusted.get_model_config("simple", headers={"triton-grpc-protocol-admin": "yes"})


def test_everybody_else_is_turned_away(mutual: LiveServer, pki: Pki) -> None:
    strangers = (
        client(mutual.url, pki.ours.root),  # has no certificate
        client(mutual.url, pki.ours.root, pki.stranger),  # has one of somebody else
        client(mutual.url, pki.others.root, pki.client),  # takes the server for somebody else
        triton.InferenceServerClient(mutual.url),  # speaks no TLS
    )
    for stranger in strangers:
        with stranger, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            stranger.is_server_live(client_timeout=20)


def test_our_own_clients(mutual: LiveServer, pki: Pki, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trusted = [f"--url={mutual.url}", "--ssl", f"--root-certificates={pki.ours.root}"]
    known = [f"--private-key={pki.client.key}", f"--certificate-chain={pki.client.certificate}"]
    assert client_command.main(["simple", *trusted, *known]) == 0
    assert "OUTPUT0" in capsys.readouterr().out
    assert client_command.main(["simple", *trusted, "--timeout-ms=5000"]) == 3
    load = ["--mix=simple=1", "--rate=100", "--seconds=0.2", "--warmup=0", "--qos=1000", "--isolated=simple=1"]
    assert perf_command.main([*load, f"--json={tmp_path / 'result.json'}", *trusted, *known]) == 0
    (run,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert (run["total"]["queries"] > 0, run["total"]["errors"]) == (True, {})
    assert perf_command.main([*load, *trusted]) == 3
    assert "no server answers" in capsys.readouterr().err


def test_the_log_says_what_has_no_effect(mutual: LiveServer) -> None:
    log = mutual.log.read_text()
    assert log.count("--pinned-memory-pool-byte-size has no effect: no GPU is used") == 1
    assert "--allow-sagemaker" not in log
    assert "TLS" in log.split("gRPC ", 1)[1].splitlines()[0]


@pytest.fixture
def plain_tls(start_front_end: Any, tmp_path: Path) -> Iterator[Any]:
    """A front end that knows its clients no further; its authority, and the certificate's files."""
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    # The fixture's own client speaks no TLS; it is not used.
    yield start_front_end(GrpcOptions(tls=TlsFiles(identity.certificate, identity.key))), authority, identity


def test_perf_analyzer(start_front_end: Any, pki: Pki) -> None:
    tls = TlsFiles(pki.server.certificate, pki.server.key, pki.ours.root, mutual=True)
    server = start_front_end(GrpcOptions(tls=tls))
    known = ["--ssl-grpc-private-key-file", str(pki.client.key)]
    known += ["--ssl-grpc-certificate-chain-file", str(pki.client.certificate)]
    trusting = ["--ssl-grpc-use-ssl", "--ssl-grpc-root-certifications-file", str(pki.ours.root)]
    assert run_one(server.url, "simple", "TLS", Mode((*trusting, *known)), INTERVAL_MS).problem == ""
    assert run_one(server.url, "simple", "TLS", Mode(tuple(trusting)), INTERVAL_MS).problem != ""


def serial_shown(address: str) -> int:
    """The number of the certificate that a new connection is shown."""
    host, port = address.split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain) as secured:
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_changed_files_are_used_for_new_connections(plain_tls: Any, simple_inputs: Inputs) -> None:
    server, authority, identity = plain_tls
    first = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
    with client(server.url, authority.root) as old:
        old.infer("simple", simple_inputs())
        assert serial_shown(server.url) == first.serial_number
        authority.issue("server")
        second = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
        assert serial_shown(server.url) == second.serial_number != first.serial_number
        identity.key.write_text("half a k")
        assert serial_shown(server.url) == second.serial_number
        old.infer("simple", simple_inputs())
    with client(server.url, authority.root) as new:
        new.infer("simple", simple_inputs())


def connections(certificates: Certificates, before: ssl.SSLContext) -> list[bool]:
    """Whether each of three connections uses something else than the one before."""
    used = [before, *(certificates.context() for _ in range(3))]
    return [old is not new for old, new in pairwise(used)]


@pytest.mark.parametrize("lost", ["key", "certificate"])
def test_a_missing_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str) -> None:
    """Not at each connection; a file that is back as it was is no news, and lost again it is said again."""
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    certificates = Certificates(TlsFiles(identity.certificate, identity.key), ("h2",))
    path, kept = getattr(identity, lost), tmp_path / "kept"
    for _ in range(2):
        before = certificates.context()
        caplog.clear()
        path.rename(kept)
        assert connections(certificates, before) == [False] * 3
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert record.getMessage().endswith(f"{path} cannot be read: No such file or directory")
        kept.rename(path)
        before = certificates.context()
    authority.issue("server")
    assert connections(certificates, before) == [True, False, False]


def test_a_file_that_can_be_read_later_is_used_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    certificates = Certificates(TlsFiles(identity.certificate, identity.key), ("h2",))
    before = certificates.context()
    identity.key.write_text("half a k")
    assert connections(certificates, before) == [False] * 3 and len(caplog.records) == 1
    authority.issue("server")
    assert connections(certificates, before) == [True, False, False]


# --- files that are wrong


PROTOCOLS = ("grpc", "http")


@pytest.fixture(scope="module")
def bad_files(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").write_text("")
    (folder / "noise").write_text("-----BEGIN CERTIFICATE-----\nnoise\n-----END CERTIFICATE-----\n")
    return {
        "absent": folder / "absent",
        "folder": folder,
        "empty": folder / "empty",
        "noise": folder / "noise",
        "encrypted": pki.ours.issue("encrypted", b"password").key,
        "certificate": pki.server.certificate,
        "key": pki.server.key,
        "other key": pki.client.key,
        "root": pki.ours.root,
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("certificate", "key", "root", "said"),
    [
        (None, "key", "root", "argument --{}-server-cert: is needed for --{}-use-ssl-mutual"),
        ("certificate", None, "root", "argument --{}-server-key: is needed for --{}-use-ssl-mutual"),
        ("certificate", "key", None, "argument --{}-root-cert: is needed for --{}-use-ssl-mutual"),
        ("absent", "key", "root", "cannot be read: No such file or directory"),
        ("folder", "key", "root", "cannot be read: Is a directory"),
        ("empty", "key", "root", "has no PEM block CERTIFICATE"),
        ("key", "key", "root", "has no PEM block CERTIFICATE"),
        ("noise", "key", "root", "argument --{}-server-cert:"),
        ("certificate", "certificate", "root", "has no PEM block PRIVATE KEY"),
        ("certificate", "other key", "root", "key values mismatch"),
        ("certificate", "encrypted", "root", "is encrypted"),
        ("certificate", "key", "empty", "argument --{}-root-cert:"),
        ("certificate", "key", "noise", "argument --{}-root-cert:"),
    ],
)
def test_wrong_files_end_the_start(
    bad_files: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    protocol: str,
    certificate: str | None,
    key: str | None,
    root: str | None,
    said: str,
) -> None:
    flags = ["--model-repository=.", f"--{protocol}-use-ssl-mutual=true"]
    for flag, name in (("server-cert", certificate), ("server-key", key), ("root-cert", root)):
        flags += [f"--{protocol}-{flag}={bad_files[name]}"] if name else []
    with pytest.raises(SystemExit) as left:
        parse_options(flags)
    assert left.value.code == 2
    assert said.replace("{}", protocol) in capsys.readouterr().err


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_files_without_tls_are_remarked_upon(pki: Pki, protocol: str) -> None:
    flags = [
        "--model-repository=.",
        f"--{protocol}-server-cert={pki.server.certificate}",
        f"--{protocol}-root-cert={pki.ours.root}",
    ]
    options = parse_options(flags)
    assert getattr(options, protocol).tls is None
    expected = [f"--{protocol}-server-cert", f"--{protocol}-root-cert"]
    assert [warning.split()[0] for warning in options.warnings] == expected


def test_a_front_end_with_bad_files_says_so(pki: Pki) -> None:
    """The supervisor has checked them, but they may change before a successor starts."""
    with pytest.raises(TlsError, match="cannot be used with the key"):
        Certificates(TlsFiles(pki.server.certificate, pki.client.key), ("h2",))
