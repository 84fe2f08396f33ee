"""`gangway client MODEL`: one inference, its answer, and where the time went."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.console import Console
from gangway.clients.connection import Connection
from gangway.clients.errors import ClientError
from gangway.clients.inputs import TensorMetadata, image_tensor, npy_tensors, random_tensors
from gangway.clients.show import show_outputs, show_timing
from gangway.clients.tensors import Array, infer_request, outputs_of
from gangway.clients.timing import ServerTimes, server_times
from gangway.clients.tls import Tls, add_tls_options
from gangway.protos import grpc_service_pb2 as pb

DESCRIPTION = "Send an inference to a Triton-compatible server over gRPC; print the answer and where the time went."
EPILOG = """exit status: 0 answered, 1 the server refused, 2 wrong argument or file, 3 no server or no answer in time

examples:
  gangway client resnet50 --image cat.jpg --top 5
  gangway client simple --input INPUT0=a.npy --input INPUT1=b.npy
  gangway client mlp --count 100 --url 10.0.0.7:8001"""


@dataclass(frozen=True)
class Answer:
    """What came back: output tensors of the last inference, milliseconds of every round trip, the server's split."""

    outputs: dict[str, Array]
    round_trip_ms: tuple[float, ...]
    server: ServerTimes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    parser.add_argument("--model-version", default="", metavar="V", help="version (default: the server's choice)")
    parser.add_argument("--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="server (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input",
        action="append",
        type=_named_file,
        default=[],
        metavar="NAME=FILE.npy",
        help="values of an input; repeat it for each input",
    )
    source.add_argument(
        "--image", type=Path, metavar="FILE", help="picture: resized, cropped, normalised like ImageNet"
    )
    source.add_argument("--random", action="store_true", help="random values (the default)")
    parser.add_argument("--seed", type=int, default=0, help="of the random values (default: %(default)s)")
    parser.add_argument(
        "--batch", type=_positive, default=1, metavar="N", help="rows of a request (default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=_positive, default=1, metavar="N", help="requests, one by one (default: %(default)s)"
    )
    parser.add_argument("--top", type=_positive, metavar="K", help="print the K largest values of each float row")
    parser.add_argument(
        "--timeout-ms", type=_positive, default=10_000, metavar="MS", help="of every call (default: %(default)s)"
    )
    add_tls_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed command line; return the exit status."""
    try:
        with Connection(arguments.url, arguments.timeout_ms / 1000, Tls.of(arguments)) as connection:
            answer = ask(connection, arguments)
    except ClientError as error:
        print(f"gangway client: {error}", file=sys.stderr)
        return error.exit_status
    console = Console()
    show_outputs(console, answer.outputs, arguments.top)
    show_timing(console, answer.round_trip_ms, answer.server)
    return 0


def ask(connection: Connection, arguments: argparse.Namespace) -> Answer:
    """Send `count` equal requests one after the other, between two looks at the model's statistics."""
    model, version = arguments.model, arguments.model_version
    metadata = connection.model_metadata(model, version)
    values = _values(metadata.inputs, arguments)
    request = infer_request(model, version, {t.name: (t.datatype, values[t.name]) for t in metadata.inputs})
    before = server_times(connection.model_statistics(model, version))
    round_trip_ms, response = [], pb.ModelInferResponse()
    for _ in range(arguments.count):
        begin_ns = time.monotonic_ns()
        response = connection.infer(request)
        round_trip_ms.append((time.monotonic_ns() - begin_ns) / 1e6)
    after = server_times(connection.model_statistics(model, version))
    return Answer(outputs_of(response), tuple(round_trip_ms), after.since(before))


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. Wrong arguments exit with 2 (argparse)."""
    parser = argparse.ArgumentParser(prog="gangway client")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _values(inputs: Sequence[TensorMetadata], arguments: argparse.Namespace) -> dict[str, Array]:
    if arguments.input:
        return npy_tensors(inputs, dict(arguments.input))
    if arguments.image:
        return image_tensor(inputs, arguments.image, arguments.batch)
    return random_tensors(inputs, arguments.batch, arguments.seed)


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE.npy, got '{text}'")
    return name, Path(path)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)
