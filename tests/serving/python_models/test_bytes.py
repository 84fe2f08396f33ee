"""Elements of BYTES that are no text: they reach Python models on every path, and come back. onnxruntime wants text."""

import json
import math
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm

from gangway.executor.frames import join_strings
from gangway.python_backend.elements import split_elements
from testing.repository import GANGWAY
from tests.helpers import ensemble_configs, onnx_text, ways
from tests.helpers.python_models import config_of, executes, write
from tests.helpers.raw_stream import RawStream
from tests.helpers.served import TIMEOUT_S, Served, serving

Elements = list[bytes]
Way = Callable[[Served, Elements], Elements]  # of elements to a model and back

SAME = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
                for r in requests]
"""
ASKS = """
    def execute(self, requests):
        import json
        found = []
        for r in requests:
            asked = pb_utils.InferenceRequest(
                model_name=json.loads(r.parameters()).get("model", "same"), requested_output_names=["y"],
                inputs=[pb_utils.Tensor("x", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            answer = asked.exec()
            found.append(pb_utils.InferenceResponse(answer.output_tensors(), error=answer.error()))
        return found
"""
STREAMS = """
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for element in pb_utils.get_input_tensor_by_name(r, "x").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([element], dtype=object))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WARMED = (
    SAME
    + """
    def initialize(self, args):
        self.seen = None

    def execute(self, requests):
        self.seen = self.seen or pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", self.seen)]) for r in requests]
"""
)
STRINGS = ("x:STRING:-1", "y:STRING:-1")
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF"
SETS: dict[str, Elements] = {
    "a picture": [JPEG],
    "NULs": [b"\0", b"a\0b\0", b"\0\0"],
    "empty": [b"", JPEG, b""],
    "half a pair": [b"\xed\xa0\x80", "\u20ac".encode("utf-16")],
    "megabytes": [np.random.default_rng(0).bytes(3 << 20), JPEG],
    "many": [bytes([number & 255, 255]) for number in range(5000)],
}


def fill(repository: Path) -> None:
    write(repository, "same", SAME, config_of(*STRINGS))
    write(repository, "one", SAME, config_of("x:STRING:1", "y:STRING:1"))
    write(repository, "asks", ASKS, config_of(*STRINGS))
    write(repository, "cached", SAME, config_of(*STRINGS, more="response_cache { enable: true }"))
    write(repository, "streams", STREAMS, config_of(*STRINGS, more="model_transaction_policy { decoupled: true }"))
    write(repository, "sequence", SAME, config_of("x:STRING:1", "y:STRING:1", 4, "sequence_batching { }"))
    batching = "dynamic_batching { max_queue_delay_microseconds: 50000 }"
    write(repository, "batched", SAME, config_of("x:STRING:1", "y:STRING:1", 8, batching))
    code = executes("'np': np", "\n        pass")
    write(
        repository,
        "makes",
        code.replace('np.array([str(names["found"]).encode()], dtype=object)', "names['y']"),
        config_of("x:STRING:1", "y:STRING:-1"),
    )
    warm = 'inputs { key: "x" value { data_type: TYPE_STRING dims: [1] input_data_file: "picture" } }'
    warmed = write(
        repository, "warmed", WARMED, config_of("x:STRING:1", "y:STRING:1", more=f'model_warmup {{ name: "p" {warm} }}')
    )
    (warmed / "warmup").mkdir()
    (warmed / "warmup" / "picture").write_bytes(join_strings([JPEG]))
    onnx_text.save(repository, "text", "(string[n] x) => (string[n] y) { y = Identity(x) }", "max_batch_size: 0")
    texts = "(string[n, 1] x) => (string[n, 1] y) { y = Identity(x) }"
    onnx_text.save(repository, "texts", texts, f"max_batch_size: 8 {batching}")
    for name, steps in {
        "chain": [("same", "x=x", "y=a"), ("same", "x=a", "y=y")],
        "to_onnx": [("same", "x=x", "y=a"), ("text", "x=a", "y=y")],
        "from_onnx": [("text", "x=x", "y=a"), ("same", "x=a", "y=y")],
        "asking": [("asks", "x=x", "y=a"), ("same", "x=a", "y=y")],
    }.items():
        ensemble_configs.write(repository, name, ensemble_configs.config_of(*STRINGS, steps, batch=0))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    fill(repository)
    flags = [f"--cache-dir={model_cache}", "--cache-config=local,size=67108864"]
    with serving(repository, *flags, cwd=repository.parent) as served:
        yield served


def through(name: str, way: ways.Way = ways.by_grpc, /, **parameters: Any) -> Way:
    def ask(served: Served, elements: Elements) -> Elements:
        return answered(served, name, elements, way, **parameters)

    return ask


def answered(
    served: Served,
    name: str,
    elements: Elements,
    way: ways.Way = ways.by_grpc,
    /,
    shape: Sequence[int] = (-1,),
    **parameters: Any,
) -> Elements:
    array = np.empty(len(elements), object)
    array[:] = elements
    response = way(served.server, ways.request_of(name, {"x": array.reshape(shape)}, **parameters))
    return split_elements(response.raw_output_contents[0], math.prod(response.outputs[0].shape))


def in_stream(served: Served, elements: Elements) -> Elements:
    """A response for each element."""
    request = ways.request_of("streams", {"x": np.array(elements, object)}, triton_enable_empty_final_response=True)
    found: Elements = []
    with RawStream(served.server.url, timeout_s=TIMEOUT_S) as stream:
        stream.send(request)
        while (response := stream.receive().infer_response).outputs:
            found += split_elements(response.raw_output_contents[0], 1)
    return found


def in_memory(protocol: Any) -> Way:
    def ask(served: Served, elements: Elements) -> Elements:
        content = join_strings(elements)
        key, size_bytes = f"/bytes-test-{uuid.uuid4().hex[:12]}", 2 * len(content)
        url = served.server.url if protocol is triton else served.server.http_url
        handle = shm.create_shared_memory_region("bytes", key, size_bytes)
        try:
            with protocol.InferenceServerClient(url) as client:
                client.register_system_shared_memory("bytes", key, size_bytes)
                shm.set_shared_memory_region(handle, [np.array(content, dtype=object)])
                x, y = protocol.InferInput("x", [len(elements)], "BYTES"), protocol.InferRequestedOutput("y")
                x.set_shared_memory("bytes", len(content))
                y.set_shared_memory("bytes", len(content), offset=len(content))
                client.infer("same", [x], outputs=[y])
                client.unregister_system_shared_memory("bytes")
            return [
                bytes(each) for each in shm.get_contents_as_numpy(handle, np.object_, [len(elements)], len(content))
            ]
        finally:
            shm.destroy_shared_memory_region(handle)

    return ask


def in_rows(served: Served, elements: Elements) -> Elements:
    """Requests of some rows, which are joined to batches."""

    def ask(rows: Elements) -> Elements:
        return answered(served, "batched", rows, shape=(-1, 1))

    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(ask, [elements[at : at + 2] for at in range(0, min(len(elements), 40), 2)]))
    return [element for part in parts for element in part] + elements[40:]


def in_turn(served: Served, elements: Elements) -> Elements:
    """A sequence, an element a request."""
    found: Elements = []
    for place, element in enumerate(elements[:20]):
        flags = {"sequence_start": not place, "sequence_end": place == len(elements[:20]) - 1}
        found += answered(served, "sequence", [element], shape=(1, 1), sequence_id=5, **flags)
    return found + elements[20:]


def twice(served: Served, elements: Elements) -> Elements:
    """From the model, then from the response cache."""
    first = answered(served, "cached", elements)
    assert answered(served, "cached", elements) == first
    return first


PATHS: dict[str, Way] = {
    **{name: through("same", way) for name, way in ways.WAYS.items() if name != "JSON"},
    "gRPC, memory": in_memory(triton),
    "gRPC, decoupled": in_stream,
    "HTTP, memory": in_memory(triton_http),
    "ensemble": through("chain"),
    "ensemble, HTTP": through("chain", ways.by_http),
    "BLS": through("asks"),
    "BLS of an ensemble": through("asks", model="chain"),
    "BLS in an ensemble": through("asking", ways.by_http),
    "cache": twice,
    "batches": in_rows,
    "sequence": in_turn,
}


@pytest.mark.parametrize("elements", SETS)
@pytest.mark.parametrize("path", PATHS)
def test_any_bytes_come_back(served: Served, path: str, elements: str) -> None:
    assert PATHS[path](served, SETS[elements]) == SETS[elements]


def post(served: Served, model: str, body: bytes, **headers: str) -> tuple[int, bytes, Any]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{served.server.http_url}/v2/models/{model}", body, names)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


BODIES = {
    "picture": JPEG,
    "none": b"",
    "text": b"text",
    "a length before it": b"\x04\0\0\0text",
    "megabytes": SETS["megabytes"][0],
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_the_one_element(served: Served, name: str) -> None:
    body = BODIES[name]
    for model, shape in (("one", [1]), ("batched", [1, 1])):
        status, content, headers = post(served, f"{model}/infer", body, Inference_Header_Content_Length="0")
        assert status == 200, content[:300]
        json_bytes = int(headers["Inference-Header-Content-Length"])
        assert json.loads(content[:json_bytes])["outputs"][0]["shape"] == shape
        assert split_elements(content[json_bytes:], 1) == [body]
    status, content, _ = post(served, "same/infer", body, Inference_Header_Content_Length="0")
    assert (status, "the model must have input shape [1]" in json.loads(content)["error"]) == (400, True)


def test_json_has_text_only(served: Served) -> None:
    """Text goes both ways; an answer that JSON cannot hold is an error, which says what to ask for."""
    texts = ["", "h\u00e9llo", "\u20ac\U0001f600", "\0", '"\n\\']
    x = {"name": "x", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    status, content, _ = post(served, "chain/infer", json.dumps({"inputs": [x]}).encode())
    assert (status, json.loads(content)["outputs"][0]["data"]) == (200, texts)
    raw = join_strings([b"text", JPEG])
    binary = {"name": "x", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [binary]}).encode()
    for model in ("same", "chain", "asks"):
        status, content, _ = post(served, f"{model}/infer", head + raw, Inference_Header_Content_Length=str(len(head)))
        error = json.loads(content)["error"]
        assert status == 400
        assert "output 'y': element 1 is not UTF-8" in error
        assert "Please use the binary data format" in error


ONNX_PATHS: dict[str, Way] = {
    **{name: through("text", way) for name, way in ways.WAYS.items() if name != "JSON"},
    "after Python": through("to_onnx"),
    "before Python": through("from_onnx", ways.by_http),
    "BLS": through("asks", model="text"),
    "BLS of an ensemble": through("asks", model="to_onnx"),
}


@pytest.mark.parametrize("path", ONNX_PATHS)
def test_onnxruntime_wants_text(served: Served, path: str) -> None:
    texts = [b"", "h\u00e9llo".encode(), b"a\0b"]
    assert ONNX_PATHS[path](served, texts) == texts
    with pytest.raises(ways.RefusedError) as refused:
        ONNX_PATHS[path](served, [b"text", JPEG])
    assert "model 'text': input 'x': element 1 is not UTF-8: invalid start byte" in refused.value.message
    assert refused.value.is_of("INVALID_ARGUMENT")


def test_what_is_no_text_costs_its_own_request(served: Served) -> None:
    """Of those that onnxruntime executes in one batch."""

    def ask(element: bytes) -> Elements | str | int | None:
        try:
            return answered(served, "texts", [element], shape=(1, 1))
        except ways.RefusedError as error:
            return error.status

    elements = [JPEG if number % 4 == 0 else b"%d" % number for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, elements))
    assert found == ["INVALID_ARGUMENT" if each is JPEG else [each] for each in elements]


MADE = {
    "bytes and texts": ("np.array([b'\\xff\\0', 'h\\u00e9', b''], dtype=object)", [b"\xff\0", "h\u00e9".encode(), b""]),
    "S": ("np.array([b'\\xff\\0a', b'b\\0'])", [b"\xff\0a", b"b"]),  # numpy itself has lost the last NUL
    "U": ("np.array(['h\\u00e9', ''])", ["h\u00e9".encode(), b""]),
    "numbers": ("np.array([1, 2.5, None], dtype=object)", [b"1", b"2.5", b"None"]),
    "np.bytes_": ("np.array([np.bytes_(b'\\xff')], dtype=object)", [b"\xff"]),
    "every second": ("np.array([b'\\xff', b'a', b'\\xfe'], dtype=object)[::2]", [b"\xff", b"\xfe"]),
    "StringDType": ("np.array(['h\\u00e9'], dtype=np.dtypes.StringDType())", ["h\u00e9".encode()]),
    "none": ("np.array([], dtype=object)", []),
    "none of S": ("np.array([], dtype='S3')", []),
}


@pytest.mark.parametrize("kind", MADE)
def test_arrays_that_models_make(served: Served, kind: str) -> None:
    code, expected = MADE[kind]
    assert answered(served, "makes", [f"y = {code}".encode()]) == expected


def test_a_text_that_has_no_bytes(served: Served) -> None:
    """As a file's name that is no UTF-8 is in Python. It is an error of its request, and of no other."""
    with pytest.raises(ways.RefusedError, match="surrogates not allowed") as refused:
        answered(served, "makes", [b"y = np.array(['\\udcff'])"])
    assert refused.value.status == "INTERNAL"


def test_a_warm_up_with_a_picture(served: Served) -> None:
    assert answered(served, "warmed", [b"x"]) == [JPEG]


def test_commands_that_send_a_picture(served: Served, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    picture = tmp_path / "one" / "x"
    picture.write_bytes(JPEG * 1000)
    url = served.server.url
    for source in (f"--input=x={picture}", f"--image={picture}"):
        done = run("client", "one", f"--url={url}", source)
        assert (done.returncode, "(10000 bytes)" in done.stdout) == (0, True), done.stderr
    done = run("client", "text", f"--url={url}", f"--input=x={picture}")
    assert (done.returncode, "input 'x': element 0 is not UTF-8" in done.stderr) == (1, True)
    load = ("--mix=one=1", "--rate=20", "--qos=500", "--isolated=one=1", "--seconds=1", "--warmup=0")
    done = run("perf", url, *load, f"--input-data={tmp_path}", f"--json={tmp_path / 'result.json'}")
    assert done.returncode == 0, done.stderr
    assert not json.loads((tmp_path / "result.json").read_text())["runs"][0]["total"]["errors"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GANGWAY, *words], check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
