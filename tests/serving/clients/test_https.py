"""`gangway serve` with HTTPS: curl, Triton's HTTP client and `gangway top`; metrics stay plain."""

import json
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from testing.live_server import LiveServer, live_server
from testing.repository import GANGWAY
from tests.helpers.certificates import Authority, Identity

TIMEOUT_S = 60


@dataclass(frozen=True)
class Secured:
    """A server that knows its clients, an authority for both, and a client."""

    server: LiveServer
    authority: Authority
    client: Identity


@pytest.fixture(scope="module")
def secured(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    repository, folder = tmp_path_factory.mktemp("https-models"), tmp_path_factory.mktemp("https")
    (repository / "simple").symlink_to(compiled_zoo.repository / "simple")
    authority = Authority(folder)
    own = authority.issue("server")
    flags = [
        f"--cache-dir={compiled_zoo.cache_dir}",
        "--http-use-ssl-mutual=true",
        f"--http-server-cert={own.certificate}",
        f"--http-server-key={own.key}",
        f"--http-root-cert={authority.root}",
    ]
    with live_server(repository, flags) as server:
        yield Secured(server, authority, authority.issue("client"))


def test_curl(secured: Secured) -> None:
    url = f"https://{secured.server.http_url}/v2/models/simple"
    known = ["--cert", secured.client.certificate, "--key", secured.client.key]
    command = ["curl", "--silent", "--show-error", "--cacert", secured.authority.root, url]
    told = subprocess.run([*command, *known], capture_output=True, timeout=TIMEOUT_S, check=True)
    assert json.loads(told.stdout)["name"] == "simple"
    stranger = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert stranger.returncode != 0


def test_tritons_client(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=secured.authority.root)
    context.load_cert_chain(secured.client.certificate, secured.client.key)
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for given in inputs:
        given.set_data_from_numpy(np.full((1, 16), 3, np.int32))
    with triton.InferenceServerClient(
        secured.server.http_url, ssl=True, ssl_context_factory=lambda: context, insecure=False
    ) as client:
        assert client.is_server_ready()
        for _ in range(3):
            assert client.infer("simple", inputs).as_numpy("OUTPUT0").tolist() == [[6] * 16]


def test_gangway_top(secured: Secured) -> None:
    command = [*GANGWAY, "top", secured.server.http_url, "--once"]
    flags = ["--ssl", f"--root-certificates={secured.authority.root}", f"--private-key={secured.client.key}"]
    flags.append(f"--certificate-chain={secured.client.certificate}")
    shown = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert " simple " in shown.stdout
    without = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert without.returncode == 3


def test_metrics_need_no_certificate(secured: Secured) -> None:
    with urllib.request.urlopen(secured.server.metrics_url, timeout=TIMEOUT_S) as answer:
        assert b"nv_inference_count{" in answer.read()


def test_the_summary_names_tls(secured: Secured) -> None:
    assert "TLS" in secured.server.log.read_text().split("HTTP ", 1)[1].splitlines()[0]
