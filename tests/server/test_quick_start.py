"""What a front end must not import before gRPC listens: it is what an outage consists of."""

import subprocess
import sys

from gangway.artifact import datatypes
from gangway.artifact import format as item_bytes

HEAVY = ("numpy", "uvicorn", "uvloop", "httptools", "orjson", "http.server", "onnx", "rich", "tvm", "opentelemetry")


def test_heavy_modules_come_after_grpc_listens() -> None:
    code = "import sys, gangway.server.front_end.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(set(HEAVY) & set(done.stdout.split())) == []


def test_sizes_of_datatypes_are_numpys() -> None:
    assert item_bytes.ITEM_BYTES == datatypes.ITEM_BYTES
