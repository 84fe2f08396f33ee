"""The access log: what lines say of requests by each protocol, formats, sampling, files that move or are slow."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from gangway.server.options.endpoints import GrpcOptions
from gangway.server.options.server import AccessLogOptions
from gangway.server.serving.access_log import MOST_WAITING, AccessLog
from testing.waiting import until
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.http_requests import ask_http
from tests.helpers.raw_stream import RawStream, simple_request
from tests.helpers.served import serving
from tests.helpers.ways import WAYS, request_of
from tests.server.conftest import Server

BODY = {"id": "7", "inputs": [{"name": "x", "datatype": "INT8", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
PATH = "/v2/models/identity_int8/infer"
TIMES = ("queue_us", "compute_us", "total_us")


class Lines:
    """The lines of a file that have come since it was looked at last."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen = 0

    def next(self, count: int = 1) -> list[str]:
        """So many further lines, and no more."""
        until(lambda: len(self._all()) >= self._seen + count, lambda: str(self._all()[self._seen :]))
        found = self._all()[self._seen :]
        self._seen += len(found)
        assert len(found) == count, found
        return found

    def json(self, count: int = 1) -> list[dict[str, Any]]:
        """The same as objects."""
        return list(map(json.loads, self.next(count)))

    def _all(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []


@pytest.fixture(scope="module")
def logged(start_front_end: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Lines]:
    lines = Lines(tmp_path_factory.mktemp("logs") / "access.log")
    server = start_front_end(GrpcOptions(), None, AccessLogOptions(str(lines.file)))
    server.client.update_log_settings({"log_format": "json"})
    lines.next()
    return server, lines


def of(line: dict[str, Any], *names: str) -> list[Any]:
    return [line.get(name) for name in names]


@pytest.mark.parametrize("way", WAYS)
def test_an_inference_has_one_line(logged: tuple[Server, Lines], way: str) -> None:
    server, lines = logged
    request = simple_request("seven")
    answer = WAYS[way](server, request)
    (line,) = lines.json()
    assert of(line, "model", "version", "id") == ["simple", "1", "seven"]
    is_http = way in ("HTTP", "JSON")
    assert line["status"] == (200 if is_http else "OK")
    assert line["protocol"] == ("HTTP" if is_http else "GRPC")
    assert line["method"] == ("POST" if is_http else "ModelStreamInfer" if way == "stream" else "ModelInfer")
    assert line.get("path") == ("/v2/models/simple/infer" if is_http else None)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", line["client"])
    assert min(line[name] for name in TIMES) >= 0
    if way == "gRPC":
        assert of(line, "bytes_in", "bytes_out") == [request.ByteSize(), answer.ByteSize()]
    assert min(of(line, "bytes_in", "bytes_out")) > 50
    assert abs(time.time() - time.mktime(time.strptime(line["time"][:19], "%Y-%m-%dT%H:%M:%S")) + time.timezone) < 60


def test_every_request_of_a_stream_has_one(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    with RawStream(server.url) as stream:
        for model in ("simple", "simple", "nobody"):
            stream.send(simple_request(model, model=model))
            stream.receive()
        found = lines.json(3)
    assert [of(line, "model", "status") for line in found] == [["simple", "OK"]] * 2 + [["nobody", "NOT_FOUND"]]


def test_bytes_of_http_are_those_of_bodies(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    body = json.dumps(BODY).encode()
    answer = ask_http(server.http_url, "POST", PATH, body)
    (line,) = lines.json()
    assert of(line, "bytes_in", "bytes_out", "id") == [len(body), len(answer.body), "7"]
    large = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3, 224, 224], "data": [0.5] * 150528}]}
    answer = ask_http(server.http_url, "POST", "/v2/models/image/infer", large)
    (line,) = lines.json()
    assert of(line, "bytes_in", "bytes_out") == [len(json.dumps(large)), len(answer.body)]


def test_a_long_message_of_grpc_counts_whole(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    request = request_of("image", {"x": np.ones((1, 3, 224, 224), np.float32)})
    answer = WAYS["gRPC"](server, request)
    (line,) = lines.json()
    assert of(line, "bytes_in", "bytes_out") == [request.ByteSize(), answer.ByteSize()]


def test_what_is_refused_has_a_line(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    for path, status, model in (
        ("/nowhere", 404, None),
        ("/v2/models/nobody/infer", 404, "nobody"),
        (PATH, 400, "identity_int8"),
        ("/v2/repository/index", 403, None),
    ):
        assert ask_http(server.http_url, "POST", path, {"inputs": []}).status == status
        (line,) = lines.json()
        assert of(line, "path", "status", "model") == [path, status, model]
        assert "queue_us" not in line
    with suppress(InferenceServerException):
        server.client.get_model_metadata("nobody")
    (line,) = lines.json()
    assert of(line, "method", "status") == ["ModelMetadata", "NOT_FOUND"]


def test_clients_that_leave_have_a_line(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    server.scheduler.holding = True
    try:
        connection = HTTPConnection(server.http_url, timeout=20)
        connection.request("POST", PATH, json.dumps(BODY))
        server.scheduler.held.get(timeout=20)
        connection.close()
        (line,) = lines.json()
        assert of(line, "path", "status") == [PATH, 499]
        with RawStream(server.url) as stream:
            stream.send(simple_request("gone"))
            server.scheduler.held.get(timeout=20)
        (line,) = lines.json()
        assert of(line, "method", "status") == ["ModelStreamInfer", "CANCELLED"]
    finally:
        server.scheduler.holding = False


def test_events_are_one_request(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    answer = ask_http(server.http_url, "POST", "/v2/models/identity_int8/generate_stream", {"x": [1, 2, 3, 4]})
    (line,) = lines.json()
    assert of(line, "status", "bytes_out", "model") == [200, len(answer.body), "identity_int8"]


def test_no_client_can_begin_a_line(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    for form, moment in (
        ("default", r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"),
        ("ISO8601", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"),
    ):
        server.client.update_log_settings({"log_format": form})
        lines.next()
        ask_http(server.http_url, "POST", PATH, {**BODY, "id": 'a\n2026 status=200 "b'})
        (line,) = lines.next()
        assert re.match(
            moment + r" protocol=HTTP client=127\.0\.0\.1:\d+ method=POST path=/v2/models/identity_int8/infer"
            r' model=identity_int8 version=1 id="a\\n2026 status=200 \\"b" status=200 bytes_in=\d+ bytes_out=\d+'
            r" queue_us=\d+ compute_us=\d+ total_us=\d+$",
            line,
        )
    server.client.update_log_settings({"log_format": "json"})
    lines.next()


def test_the_file_may_be_moved_or_truncated(logged: tuple[Server, Lines]) -> None:
    server, lines = logged
    moved = lines.file.with_suffix(".1")
    lines.file.rename(moved)
    ask_http(server.http_url, "GET", "/v2/health/live")
    assert Lines(lines.file).json()[0]["path"] == "/v2/health/live"
    assert "/v2/health/live" not in moved.read_text()
    os.truncate(lines.file, 0)
    ask_http(server.http_url, "GET", "/v2/health/ready")
    assert Lines(lines.file).json()[0]["path"] == "/v2/health/ready"
    os.truncate(lines.file, 0)
    moved.unlink()


def test_one_of_some_requests(tmp_path: Path) -> None:
    log = AccessLog(AccessLogOptions(str(tmp_path / "log"), sample=10), "json")
    for number in range(100):
        if access := log.begin("HTTP", "", f"M{number}"):
            access.end(200)
            access.end(500)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["method"], line["status"]) for line in lines] == [(f"M{each}", 200) for each in range(9, 100, 10)]


def test_a_file_that_is_slow_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    reads, writes = os.pipe()
    log = AccessLog(AccessLogOptions(f"/dev/fd/{writes}"), "default")
    count = MOST_WAITING + 10_000
    begin_s = time.thread_time()
    for _ in range(count):
        access = log.begin("HTTP", ("127.0.0.1", 1), "GET", b"/" + b"x" * 100)
        assert access is not None
        access.end(200)
    assert time.thread_time() - begin_s < 2
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.extend(iter(lambda: os.read(reads, 1 << 16), b"")))
    with caplog.at_level(logging.WARNING):
        reader.start()
        until(lambda: "lines of the access log were lost" in caplog.text)
    log.close()
    os.close(writes)
    reader.join()
    os.close(reads)
    lines = b"".join(read).splitlines()
    lost = sum(int(each) for each in re.findall(r"(\d+) lines of the access log were lost", caplog.text))
    assert 0 < lost <= 10_000
    assert len(lines) == count - lost
    assert {line.split(b" ", 2)[2] for line in lines}.pop().startswith(b"protocol=HTTP client=127.0.0.1:1 method=GET")


def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(AccessLogOptions("/dev/full"), "default")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            access = log.begin("HTTP", "", "GET", b"/")
            assert access is not None
            access.end(200)
        log.close()
    assert caplog.messages == ["cannot write the access log to /dev/full: No space left on device"]


def test_a_folder_that_goes_closes_no_other_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines are lost until it is back; a number that the log has closed belongs to whoever opens the next file."""
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AccessLog(AccessLogOptions(str(folder / "log")), "default")
    rmtree(folder)
    _end(log, "lost")
    until(lambda: "cannot write the access log" in caplog.text)
    with ExitStack() as others:
        for number in range(5):
            others.enter_context((tmp_path / str(number)).open("w"))
        folder.mkdir()
        _end(log, "again")
        until(lambda: (folder / "log").exists() and "method=again" in (folder / "log").read_text())
        log.close()


def test_a_pipe_that_nobody_reads_holds_up_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "log"
    log = AccessLog(AccessLogOptions(str(file)), "default")
    file.unlink()
    os.mkfifo(file)
    _end(log, "lost")
    until(lambda: "cannot write the access log" in caplog.text)
    file.unlink()
    _end(log, "again")
    until(lambda: file.exists() and "method=again" in file.read_text())
    log.close()


def _end(log: AccessLog, method: str) -> None:
    access = log.begin("HTTP", "", method)
    assert access is not None
    access.end(200)


def test_a_line_that_did_not_fit_cuts_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "log"
    log = AccessLog(AccessLogOptions(str(file)), "json")
    _end(log, "whole")
    until(lambda: file.stat().st_size > 0)
    with files_of_at_most(file.stat().st_size + 10):
        _end(log, "cut")
        until(lambda: "cannot write the access log" in caplog.text)
    _end(log, "again")
    until(lambda: '"again"' in file.read_text())
    log.close()
    first, cut, last = file.read_text().splitlines()
    assert json.loads(first)["method"] == "whole" and len(cut) == 10 and json.loads(last)["method"] == "again"


def test_a_pipe_without_a_reader_ends_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device or address"):
        AccessLog(AccessLogOptions(str(tmp_path / "pipe")), "default")


@pytest.mark.long
def test_front_ends_write_to_standard_output(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with serving(tmp_path / "models", "--access-log=-", "--front-ends=2", "--log-format=json") as served:
        for _ in range(20):
            ask_http(served.server.http_url, "GET", "/v2/health/live")
        until(lambda: served.log().count('"path": "/v2/health/live"') == 20, served.log)
        found = [json.loads(line) for line in served.log().splitlines() if '"protocol"' in line]
        assert {line["status"] for line in found if line["protocol"] == "HTTP"} == {200}
