"""A gRPC server by grpcio that does nothing but answer.

`python -m benchmarks.front_end.grpc_floor PORT ANSWERS CORE`: ANSWERS/MODEL has what ModelInfer answers for a model.
Its ModelStatistics answers when messages have come since the last time: CLOCK_MONOTONIC, ns, 8 bytes each.
"""

import os
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from gangway.base.process import raise_priority
from gangway.clients.connection import SERVICE
from gangway.clients.inputs import infer_request
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.options.endpoints import MAX_MESSAGE_BYTES
from gangway.server.system import keep_freed_memory
from testing.live_server import free_port, stop
from testing.reference import Example

THREADS = 64
OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
START_TIMEOUT_S = 20
DATATYPE = "FP32"


@contextmanager
def floor_server(examples: Mapping[str, Example], core: int) -> Iterator[tuple[str, int]]:
    """Answer the examples' requests; yield address and process id. Raises grpc.FutureTimeoutError."""
    with TemporaryDirectory() as folder:
        for name, example in examples.items():
            (Path(folder) / name).write_bytes(_answer(name, example))
        port = free_port()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.front_end.grpc_floor", str(port), folder, str(core)]
        )
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            stop(process)


def _answer(name: str, example: Example) -> bytes:
    """Return the right response; a request's tensors are written as those of a response are."""
    request = infer_request(name, "", {key: (DATATYPE, values) for key, values in example.outputs.items()})
    response = pb.ModelInferResponse(model_name=name, model_version="1", raw_output_contents=request.raw_input_contents)
    for tensor in request.inputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return response.SerializeToString()


def serve(port: int, answers: Mapping[bytes, bytes]) -> None:
    """Serve until the process is ended."""
    came_ns = array("q")

    def infer(message: bytes, _context: grpc.ServicerContext) -> bytes:
        came_ns.append(time.monotonic_ns())
        return answers[message[2 : 2 + message[1]]]  # the model's name is the first field

    def ok(_message: bytes, _context: grpc.ServicerContext) -> bytes:
        return b""

    def statistics(_message: bytes, _context: grpc.ServicerContext) -> bytes:
        taken = came_ns.tobytes()
        del came_ns[:]
        return taken

    server = grpc.server(ThreadPoolExecutor(THREADS), options=OPTIONS)
    methods = {
        "ModelInfer": infer,
        "ModelStatistics": statistics,
        "SystemSharedMemoryRegister": ok,
        "SystemSharedMemoryUnregister": ok,
    }
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.strip("/"), handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    while True:
        time.sleep(60)


def main() -> None:
    """Run the process: pinned and privileged as a front end is."""
    port, folder, core = sys.argv[1:]
    raise_priority()
    keep_freed_memory()
    os.sched_setaffinity(0, {int(core)})
    serve(int(port), {path.name.encode(): path.read_bytes() for path in Path(folder).iterdir()})


if __name__ == "__main__":
    main()
