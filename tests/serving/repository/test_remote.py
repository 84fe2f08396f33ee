"""`gangway serve s3://bucket/models`, and https://: repositories of other machines, with a store that speaks S3."""

import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
import pytest
import tritonclient.grpc as triton
from moto.server import ThreadedMotoServer
from tritonclient.utils import InferenceServerException

from gangway.server.control.repository.remote import sync
from gangway.server.options.server import RemoteSource
from testing.live_server import LiveServer, live_server
from testing.repository import GANGWAY
from tests.conftest import CompileKept
from tests.helpers.adder_models import Controlled, adder, fill_cache, write

pytestmark = pytest.mark.long

POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.2", "--strict-readiness=false")
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Path:
    return fill_cache(tmp_path_factory.mktemp("compiled"), compile_kept)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


class Bucket:
    """A repository in a bucket."""

    def __init__(self, name: str) -> None:
        self._client: Any = boto3.client("s3")
        self._name = name
        self._client.create_bucket(Bucket=name)
        self.url = f"s3://{name}/models"

    def write(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=self._name, Key=f"models/{key}", Body=content)

    def remove(self, key: str) -> None:
        self._client.delete_object(Bucket=self._name, Key=f"models/{key}")


@pytest.fixture
def bucket(store: ThreadedMotoServer, request: pytest.FixtureRequest) -> Bucket:
    made = Bucket(request.node.name.replace("_", "-").partition("[")[0][:60])
    made.write("first/1/model.onnx", adder(1))
    made.write("second/1/model.onnx", adder(2))
    return made


def controlled(server: LiveServer, client: triton.InferenceServerClient) -> Controlled:
    nowhere = Path("/nowhere")
    return Controlled(server, client, nowhere, nowhere, nowhere)


def copies(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "repositories").glob("*"))


def test_a_server_follows_a_bucket(bucket: Bucket, store: ThreadedMotoServer, cache_dir: Path) -> None:
    flags = (f"--cache-dir={cache_dir}", *POLL)
    with live_server(bucket.url, flags) as server, triton.InferenceServerClient(server.url) as client:
        served = controlled(server, client)
        assert (served.added("first"), served.added("second")) == (1, 2)
        bucket.write("first/1/model.onnx", adder(3))
        bucket.write("third/1/model.onnx", adder(1))
        bucket.write("third/config.pbtxt", b"max_batch_size: 8")
        served.wait_until(lambda: client.is_model_ready("third"))
        served.wait_until(lambda: served.added("first") == 3)
        assert served.added("third", rows=8) == 1
        bucket.remove("second/1/model.onnx")
        served.wait_until(lambda: not client.is_model_ready("second"))
        log = server.log.read_text()
        assert log.count("model second, version 1: ready") == 1  # it has not been loaded again meanwhile
        assert log.count(" files copied from ") == 4
        store.stop()
        served.wait_until(lambda: "cannot be listed, so what is served stays" in server.log.read_text())
        assert served.added("first") == 3
    assert server.process.returncode == 0


@pytest.mark.parametrize("protocol", ["", "http://"])
def test_a_url_may_name_the_store(
    bucket: Bucket, store: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    host, port = store.get_host_and_port()
    url = f"s3://{protocol}{host}:{port}/{bucket.url.removeprefix('s3://')}"
    sync([RemoteSource(url, tmp_path)])
    assert (tmp_path / "first/1/model.onnx").read_bytes() == adder(1)


def test_models_are_loaded_from_a_bucket_when_they_are_asked_for(
    bucket: Bucket, store: ThreadedMotoServer, cache_dir: Path
) -> None:
    flags = (f"--cache-dir={cache_dir}", *EXPLICIT)
    with live_server(bucket.url, flags) as server, triton.InferenceServerClient(server.url) as client:
        served = controlled(server, client)
        bucket.write("first/1/model.onnx", adder(3))
        bucket.write("second/1/model.onnx", adder(3))
        bucket.write("late/1/model.onnx", adder(2))
        client.load_model("first")
        client.load_model("late")
        assert [served.added(name) for name in ("first", "second", "late")] == [3, 2, 2]
        refused = dict.fromkeys(("absent", "first?"), "failed to poll from model repository")
        refused |= dict.fromkeys(("..", ".versions"), "a name begins with no dot")
        for name, reason in refused.items():
            with pytest.raises(InferenceServerException, match=reason):
                client.load_model(name)
        assert served.added("first") == 3
        store.stop()
        with pytest.raises(InferenceServerException, match="it cannot be read"):
            client.load_model("first")
        assert served.added("first") == 3


def test_a_damaged_copy_is_replaced_at_the_start(bucket: Bucket, tmp_path: Path, cache_dir: Path) -> None:
    flags = (f"--cache-dir={cache_dir}", *EXPLICIT)
    before = set(copies(cache_dir))
    for _ in range(2):
        with live_server(bucket.url, flags) as server, triton.InferenceServerClient(server.url) as client:
            assert controlled(server, client).added("first") == 1
            text = server.log.read_text()
        (copy,) = set(copies(cache_dir)) - before
        model = copy / "first" / "1" / "model.onnx"
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        times = model.stat()
        model.write_bytes(content)  # a bit of a disk
        os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "model first: 1 of 1 files copied" in text
    assert "model second" not in text.replace("model second, version", "")
    assert len(list((copy / ".versions").iterdir())) <= 3  # what is not used any more goes


def test_names_of_objects_lead_nowhere_else(bucket: Bucket, cache_dir: Path) -> None:
    before = set(copies(cache_dir))
    for key in ("../../up/1/model.onnx", "evil/../../../up/1/model.onnx", "/root/1/model.onnx", ".hidden/1/model.onnx"):
        bucket.write(key, adder(1))
    bucket.write("model.onnx", adder(1))  # beside the models
    bucket.write("folder/", b"")  # as consoles make folders
    flags = (f"--cache-dir={cache_dir}", *EXPLICIT)
    with live_server(bucket.url, flags) as server, triton.InferenceServerClient(server.url) as client:
        served = controlled(server, client)
        assert {name for name, _ in served.index()} == {"first", "second"}
    (copy,) = set(copies(cache_dir)) - before
    assert {path.name for path in copy.iterdir()} == {"first", "second", ".versions", ".lock"}
    assert not list(cache_dir.rglob("up"))


class Web(SimpleHTTPRequestHandler):
    """A web server with indexes of folders. It breaks off where a file called `cut` lies beside what is asked for.

    The connection is reset where a folder has a file called `reset`.
    """

    def do_GET(self) -> None:
        if (Path(self.translate_path(self.path)) / "reset").exists():
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with open(os.devnull, "r+b") as nothing:
                os.dup2(nothing.fileno(), self.connection.fileno())  # closes the socket now
            self.close_connection = True
        else:
            super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if Path(self.translate_path(self.path)).with_name("cut").exists():
            outputfile.write(source.read()[:-5])
            self.close_connection = True
        else:
            shutil.copyfileobj(source, outputfile)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "web"
    write(folder / "models", "one", 1)
    write(folder / "models", "two words", 2)
    (folder / "net.onnx").write_bytes(adder(3))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Web, directory=str(folder))) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def test_a_web_server_has_models(web: tuple[str, Path], cache_dir: Path) -> None:
    url, folder = web
    flags = (f"{url}/net.onnx", f"other={url}/net.onnx", f"--cache-dir={cache_dir}", *POLL)
    with live_server(f"{url}/models", flags) as server, triton.InferenceServerClient(server.url) as client:
        served = controlled(server, client)
        assert [served.added(name) for name in ("one", "two words", "net", "other")] == [1, 2, 3, 3]
        (folder / "models" / "one" / "1" / "cut").touch()
        (folder / "models" / "one" / "1" / "model.onnx").write_bytes(adder(2) + bytes(1))
        write(folder / "models", "three", 3)
        served.wait_until(lambda: "model one: its copy of" in server.log.read_text())
        served.wait_until(lambda: client.is_model_ready("three"))
        assert (served.added("one"), served.added("three")) == (1, 3)
        (folder / "models" / "one" / "1" / "cut").unlink()
        (folder / "models" / "one" / "1" / "model.onnx").write_bytes(adder(3))
        served.wait_until(lambda: served.added("one") == 3)


def test_a_folder_that_cannot_be_listed_is_not_empty(web: tuple[str, Path], cache_dir: Path) -> None:
    url, folder = web
    flags = (f"--cache-dir={cache_dir}", *POLL)
    with live_server(f"{url}/models", flags) as server, triton.InferenceServerClient(server.url) as client:
        served = controlled(server, client)
        (folder / "models" / "one" / "reset").touch()
        write(folder / "models", "three", 3)
        served.wait_until(lambda: "so what is served stays: http" in server.log.read_text())
        assert (served.added("one"), served.added("two words")) == (1, 2)
        (folder / "models" / "one" / "reset").unlink()
        served.wait_until(lambda: client.is_model_ready("three"))
        assert served.added("one") == 1


def test_a_load_while_the_web_server_is_gone_changes_nothing(web: tuple[str, Path], cache_dir: Path) -> None:
    url, folder = web
    flags = (f"--cache-dir={cache_dir}", *EXPLICIT)
    with live_server(f"{url}/models", flags) as server, triton.InferenceServerClient(server.url) as client:
        served = controlled(server, client)
        (folder / "models" / "one" / "reset").touch()
        with pytest.raises(InferenceServerException, match="it cannot be read") as refused:
            client.load_model("one")
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        assert served.added("one") == 1
        (folder / "models" / "one" / "reset").unlink()
        shutil.rmtree(folder / "models" / "one")
        with pytest.raises(InferenceServerException, match="one"):
            client.load_model("one")


def test_a_name_that_is_file_and_folder_hinders_no_other_model(bucket: Bucket, cache_dir: Path) -> None:
    flags = (f"--cache-dir={cache_dir}", *POLL)
    with live_server(bucket.url, flags) as server, triton.InferenceServerClient(server.url) as client:
        served = controlled(server, client)
        bucket.write("second/1", b"no folder")
        bucket.write("third/1/model.onnx", adder(3))
        served.wait_until(lambda: client.is_model_ready("third"))
        assert "model second: its copy of" in server.log.read_text()
        assert (served.added("second"), served.added("third")) == (2, 3)


def said(*arguments: str, prefix: tuple[str, ...] = tuple(GANGWAY), **variables: str) -> tuple[int, str]:
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--grpc-address=127.0.0.1")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    ran = subprocess.run(
        [*prefix, "serve", *arguments, *ports],
        env={**environment, "AWS_EC2_METADATA_DISABLED": "true", **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in ran.stderr and "requests unfinished" not in ran.stderr
    return ran.returncode, ran.stderr.splitlines()[-1]


def test_what_is_wrong_is_said_in_a_line(bucket: Bucket, web: tuple[str, Path], tmp_path: Path) -> None:
    variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
    cache = f"--cache-dir={tmp_path}"
    status, text = said("s3://nobody/models", cache, **variables)
    assert status == 1 and "s3://nobody/models: there is no such bucket, folder or file" in text
    status, text = said(bucket.url, cache, AWS_ENDPOINT_URL=variables["AWS_ENDPOINT_URL"])
    assert status == 1 and "there are no credentials" in text and "AWS_ACCESS_KEY_ID" in text
    status, text = said("sr3://bucket/models", cache)
    assert status == 1 and text.endswith("the protocol is none of s3, gs, hf, https, http, file; did you mean 's3'?")
    status, text = said(f"{web[0]}/nothing.onnx", cache)
    assert status == 1 and "there is no such bucket, folder or file" in text
    status, text = said("http://127.0.0.1:1/models", cache)
    assert status == 1 and "it cannot be read" in text and "127.0.0.1" in text
    status, text = said(f"name={web[0]}/models", cache)
    assert status == 2


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['fsspec'] = None; from gangway.server.cli import main; sys.exit(main())"
    status, text = said("s3://bucket/models", f"--cache-dir={tmp_path}", prefix=(sys.executable, "-c", code))
    assert status == 1
    assert text.endswith("pip install 'gangway-serve[remote]'")
    assert text.startswith("gangway serve: s3://bucket/models: a package is missing")
