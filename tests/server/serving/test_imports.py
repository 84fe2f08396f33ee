"""What a front end must not import before gRPC listens: it is what an outage consists of."""

import subprocess
import sys

from gangway.artifact.datatypes import STORAGE
from gangway.artifact.format import ITEM_BYTES

HEAVY = (
    *("numpy", "httptools", "orjson", "http.server", "onnx", "rich", "tvm", "opentelemetry"),
    *("email", "importlib.metadata", "gangway.scheduler.messages"),
)


def test_heavy_modules_come_after_grpc_listens() -> None:
    code = "import sys, gangway.server.serving.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(set(HEAVY) & set(done.stdout.split())) == []


def test_sizes_of_datatypes_are_numpys() -> None:
    assert {name: size for name, size in ITEM_BYTES.items() if name != "BYTES"} == {
        name: dtype.itemsize for name, dtype in STORAGE.items()
    }
