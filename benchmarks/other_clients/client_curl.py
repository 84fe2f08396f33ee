"""curl with Python models: `python -m benchmarks.other_clients.client_curl FOLDER HTTP_HOST:PORT`."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.other_clients.client_checks import expect, run_checks
from benchmarks.other_clients.messages import PICTURE

_, ADDRESS = sys.argv[1:]
WAIT_S = 20


def curl(path: str, content: bytes, *arguments: str) -> tuple[int, bytes]:
    """Return status and body of what curl gets."""
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", str(WAIT_S), "--data-binary", "@-"]
    command += ["--write-out", "\n%{http_code}", *arguments, f"http://{ADDRESS}/v2/models/{path}"]
    done = subprocess.run(command, input=content, check=True, capture_output=True)
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), body


def asked(path: str, content: Any, *arguments: str) -> Any:
    """Return the JSON that curl gets for JSON."""
    status, body = curl(path, json.dumps(content).encode(), *arguments)
    expect(status == 200, (status, body))
    return json.loads(body)


def tensor(name: str, datatype: str, *data: Any) -> dict[str, Any]:
    """Return an input."""
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}


def numbers() -> None:
    """JSON, of a model and of an ensemble."""
    answer = asked("adds/infer", {"inputs": [tensor("x", "FP32", 1, 2)]})
    expect(answer["outputs"][0]["data"] == [2, 3], answer)
    rows = {**tensor("x", "FP32", 1, 2), "shape": [1, 2]}
    expect(asked("chain_rows/infer", {"inputs": [rows]})["outputs"][0]["data"] == [3, 4], "chain_rows")


def picture() -> None:
    """A file as the element of the only input: its size comes back, behind JSON, as such a request wants it."""
    for model in ("picture", "chain_picture"):
        status, body = curl(f"{model}/infer", PICTURE * 1000, "-H", "Inference-Header-Content-Length: 0")
        expect((status, int.from_bytes(body[-8:], "little")) == (200, len(PICTURE) * 1000), (model, status, body))


def told() -> None:
    """Parameters, id and a header reach the model."""
    content = {"id": "seven", "parameters": {"p": 7}, "inputs": [tensor("a", "FP32", 1)]}
    seen = json.loads(asked("sees/infer", content, "-H", "x-user: me")["outputs"][0]["data"][0])
    expect((seen["id"], seen["parameters"]) == ("seven", {"p": 7, "x-user": "me"}), seen)


def errors() -> None:
    """The status and the words of an exception, of a model and of a step."""
    for model, name in (("raises", "do"), ("chain_raises", "x")):
        content = json.dumps({"inputs": [tensor(name, "BYTES", "value error")]}).encode()
        status, body = curl(f"{model}/infer", content)
        expect(status == 500 and "ValueError: no value" in json.loads(body)["error"], (status, body))


def generate() -> None:
    """One response of a decoupled model, of an ensemble's, and none for several."""
    for model in ("tokens", "token_chain"):
        expect(asked(f"{model}/generate", {"text_input": "one"})["text_output"] == "one", model)
        status, body = curl(f"{model}/generate", b'{"text_input": "one two"}')
        expect(status == 400 and b"exactly 1 response" in body, (status, body))


def events() -> None:
    """Each response is an event, an error in the middle, too."""
    for model in ("tokens", "token_chain"):
        status, body = curl(f"{model}/generate_stream", b'{"text_input": "one two three"}')
        told = [json.loads(line.removeprefix(b"data: "))["text_output"] for line in body.split(b"\n\n") if line]
        expect((status, told) == (200, ["one", "two", "three"]), (status, body))
    status, body = curl("tokens/generate_stream", b'{"text_input": "one error three"}')
    expect(status == 200 and body.count(b"data: ") == 3 and b'"error"' in body, (status, body))
    status, body = curl("tokens/generate_stream", b'{"text_input": "fails"}')
    expect(status == 400 and json.loads(body) == {"error": "no tokens"}, (status, body))


CHECKS: Sequence[tuple[str, Callable[[], Any]]] = [
    (check.__name__, check) for check in (numbers, picture, told, errors, generate, events)
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
