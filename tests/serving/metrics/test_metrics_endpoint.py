"""The port of the metrics: what it serves, to whom, and who holds nobody."""

import gzip
import http.client
import socket
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from testing.live_server import LiveServer, live_server
from testing.processes import open_descriptors
from testing.waiting import until
from tests.helpers.scraped_metrics import TIMEOUT_S, Scraped


@pytest.fixture
def scraped(gangway_server: LiveServer) -> Scraped:
    return Scraped(gangway_server)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics?name=x", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/v2/health/live", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/metrics", 405),
        ("NONSENSE", "/metrics", 501),
    ],
)
def test_only_metrics_are_served(scraped: Scraped, method: str, path: str, status: int) -> None:
    response, body = scraped.get(path, method)
    assert response.status == status
    assert (method == "HEAD") == (body == b"")
    assert "Traceback" not in body.decode()


def test_compression_is_the_clients_choice(scraped: Scraped) -> None:
    response, body = scraped.get(Accept_Encoding="deflate, gzip;q=1.0, *;q=0")
    assert response.getheader("Content-Encoding") == "gzip"
    text = gzip.decompress(body)
    assert len(text) > 5 * len(body)
    assert b"nv_inference_count{" in text
    response, _ = scraped.get(Accept_Encoding="gzip;q=0")
    assert response.getheader("Content-Encoding") is None


def test_scrapes_over_one_connection(scraped: Scraped) -> None:
    host, port = scraped.address()
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.connect()
    own = connection.sock
    for method, headers in (("GET", {}), ("HEAD", {}), ("GET", {"Accept-Encoding": "gzip"}), ("GET", {})):
        connection.request(method, "/metrics", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        assert (answer.status, bool(body)) == (200, method == "GET")
        assert connection.sock is own, "the server has not closed it"
    assert b"gangway_cores " in body
    connection.close()


def test_stalled_and_hostile_scrapers_hold_nobody(scraped: Scraped) -> None:
    (front_end,) = scraped.server.pids()["front end"]
    before = open_descriptors(front_end)
    stalled = []
    for begin in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nX: ", b"\xff\x00\r\n\r\n", b"A" * 70_000):
        for _ in range(12):
            stalled.append(socket.create_connection(scraped.address(), timeout=TIMEOUT_S))
            with suppress(ConnectionError):  # the server may close while the longest one is sent
                stalled[-1].sendall(begin)
    assert scraped.scrape()("gangway_cores") >= 1
    tensor = triton.InferInput("input", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 16), np.float32))
    with triton.InferenceServerClient(scraped.server.url) as client:
        client.infer("mlp", [tensor], client_timeout=TIMEOUT_S)
    until(lambda: open_descriptors(front_end) < before + 30)
    for connection in stalled:
        connection.close()
    until(lambda: open_descriptors(front_end) <= before + 1)
    assert "Traceback" not in scraped.server.log.read_text()


def test_a_taken_port_ends_the_start(compiled_zoo: Any, scraped: Scraped, tmp_path: Any) -> None:
    (tmp_path / "simple").symlink_to(compiled_zoo.repository / "simple")
    flags = [f"--cache-dir={compiled_zoo.cache_dir}"]
    said = r"cannot serve metrics on 127\.0\.0\.1:\d+: Address already in use"
    with (
        pytest.raises(RuntimeError, match=said),
        live_server(tmp_path, [*flags, f"--metrics-port={scraped.address()[1]}"]),
    ):
        pytest.fail("two servers on one port")
