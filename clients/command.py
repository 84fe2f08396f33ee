"""`gangway client MODEL`: one inference, its answer, and where the time went."""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from gangway.artifact.datatypes import RAW_ONLY
from gangway.artifact.snippets import NONE, SEQUENCE, curl_snippet, python_snippet, stream_snippets
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, Table
from gangway.base.numbers import count
from gangway.clients.addresses import USUAL_HTTP_PORT, grpc_address, grpc_url, http_port
from gangway.clients.connection import ServerConnection
from gangway.clients.errors import ClientError, RefusedError
from gangway.clients.inputs import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    Array,
    Normalisation,
    TensorMetadata,
    concrete,
    file_tensors,
    image_tensor,
    infer_request,
    outputs_of,
    random_tensors,
    shape_argument,
    shaped,
    with_chosen_sizes,
)
from gangway.clients.tls import Tls, add_tls_options
from gangway.protos import grpc_service_pb2 as pb

DESCRIPTION = "Send an inference to a Triton-compatible server over gRPC; print the answer and where the time went."
EPILOG = """exit status: 0 answered, 1 the server refused, 2 wrong argument or file, 3 no server or no answer in time

examples:
  gangway client resnet50 --image cat.jpg --top 5
  gangway client simple --input INPUT0=a.npy --input INPUT1=b.npy
  gangway client mlp --count 100 --url 10.0.0.7:8001"""
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")  # of ModelStatistics
PYTHON, CURL = "python", "curl"
FIRST_VALUES = 6  # of an output, printed
SHOWN_BYTES = 64  # of an element of BYTES
TOP_OF_IMAGE = 3  # classes that are printed of a picture, unless --top says how many


@dataclass(frozen=True)
class ServerTimes:
    """Successful requests, and nanoseconds per phase, cumulated over them, as ModelStatistics has them."""

    requests: int
    phase_ns: dict[str, int]

    def since(self, before: "ServerTimes") -> "ServerTimes":
        """Return what happened after `before`."""
        return ServerTimes(
            self.requests - before.requests, {phase: ns - before.phase_ns[phase] for phase, ns in self.phase_ns.items()}
        )

    def mean_ms(self, phase: str) -> float:
        """Return milliseconds per request spent in a phase; 0 when there was no request."""
        return self.phase_ns[phase] / self.requests / 1e6 if self.requests else 0.0

    @property
    def total_ms(self) -> float:
        """Milliseconds per request, all phases."""
        return sum(self.mean_ms(phase) for phase in PHASES)


@dataclass(frozen=True)
class InferenceResult:
    """Output tensors of the last inference, milliseconds of every round trip, the server's times.

    `classified`: names of outputs that are classes as text, "VALUE:INDEX" or "VALUE:INDEX:LABEL", the best first.
    `sizes`: those that were chosen for open dimensions, as flags.
    """

    outputs: dict[str, Array]
    round_trip_ms: tuple[float, ...]
    server: ServerTimes
    classified: tuple[str, ...] = ()
    sizes: str = ""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. Wrong arguments exit with 2 (argparse)."""
    parser = CommandParser(prog="gangway client")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    parser.add_argument("--model-version", default="", metavar="V", help="version (default: the server's choice)")
    parser.add_argument("--url", type=grpc_address, default=grpc_url(), metavar="HOST:PORT",
        help="server (default: %(default)s)")  # fmt: skip
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input",
        action="append",
        type=_named_file,
        default=[],
        metavar="NAME=FILE",
        help="values of an input, as .npy, or any file as the one element of BYTES; repeat it for each input",
    )
    source.add_argument(
        "--image", type=Path, metavar="FILE", help="picture: resized, cropped and normalised, or as a file"
    )
    source.add_argument("--random", action="store_true", help="random values (the default)")
    parser.add_argument("--shape", action="append", type=shape_argument, default=[], metavar="NAME:SIZE,...",
        help="sizes of random values for open dimensions: of an input all but the first, that of --batch, or of a "
        "dimension by its name, such as seq:16 (default: a declared one, 224 for pictures, else 16)")  # fmt: skip
    mean, deviation = (",".join(map(str, each)) for each in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    parser.add_argument("--mean", type=_numbers, default=IMAGENET_MEAN, metavar="R[,G,B]",
        help=f"of --image: taken from colours of 0 to 1 ({mean})")  # fmt: skip
    parser.add_argument("--std", type=_numbers, default=IMAGENET_DEVIATION, metavar="R[,G,B]",
        help=f"of --image: what the rest is divided by; numbers, or fractions such as 1/255 ({deviation})")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the random values (default: %(default)s)")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="rows of a request (default: %(default)s)")
    parser.add_argument(
        "--count", type=count, default=1, metavar="N", help="requests, one by one (default: %(default)s)"
    )
    parser.add_argument(
        "--top",
        type=count,
        metavar="K",
        help="ask for the K best classes of outputs that are scores, with their labels (--image: 3)",
    )
    parser.add_argument(
        "--snippet",
        nargs="?",
        choices=(PYTHON, CURL),
        const=PYTHON,
        help="print a program, or a command of curl, that sends such a request, and send none",
    )
    parser.add_argument(
        "--timeout-ms", type=count, default=10_000, metavar="MS", help="of every call (default: %(default)s)"
    )
    add_tls_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed command line; return the exit status."""
    try:
        with ServerConnection(arguments.url, arguments.timeout_ms / 1000, Tls.of(arguments)) as connection:
            if arguments.snippet:
                print_snippets(connection, arguments)
                return 0
            answer = ask(connection, arguments)
    except ClientError as error:
        print(f"gangway client: {error}", file=sys.stderr)
        return error.exit_status
    console = Console()
    if answer.sizes:
        console.print(f"Sizes that nobody said: {answer.sizes}", highlight=False)
    show_outputs(console, answer.outputs, answer.classified)
    show_timing(console, answer.round_trip_ms, answer.server)
    return 0


def ask(connection: ServerConnection, arguments: argparse.Namespace) -> InferenceResult:
    """Send `count` equal requests one after the other, between two requests for the model's statistics."""
    model, version = arguments.model, arguments.model_version
    metadata = connection.model_metadata(model, version)
    dimensions = cache(lambda: connection.open_dimensions(model, version))
    inputs = shaped(metadata.inputs, dict(arguments.shape), dimensions)
    sizes = ""
    if not arguments.input and not arguments.image:
        inputs, sizes = with_chosen_sizes(inputs, dimensions)
    values = _values(inputs, arguments)
    tensors = {tensor.name: (tensor.datatype, values[tensor.name]) for tensor in metadata.inputs}
    top = arguments.top or (TOP_OF_IMAGE if arguments.image else 0)
    classes = {tensor.name: top for tensor in metadata.outputs if top and is_scores(tensor)}
    request = infer_request(model, version, tensors, classes)
    before = server_times(connection.model_statistics(model, version))
    round_trip_ms, response = [], pb.ModelInferResponse()
    for _ in range(arguments.count):
        begin_ns = time.monotonic_ns()
        try:
            response = connection.infer(request)
        except RefusedError as error:
            raise RefusedError(f"{error}{_chosen_texts(inputs, arguments)}") from None
        round_trip_ms.append((time.monotonic_ns() - begin_ns) / 1e6)
    after = server_times(connection.model_statistics(model, version))
    return InferenceResult(outputs_of(response), tuple(round_trip_ms), after.since(before), tuple(classes), sizes)


def print_snippets(connection: ServerConnection, arguments: argparse.Namespace) -> None:
    """Print a program or a command that sends such a request, the model's values being ones. Raises ClientError."""
    model, version = arguments.model, arguments.model_version
    metadata = connection.model_metadata(model, version)
    declared, outputs = metadata.inputs, metadata.outputs
    dimensions = cache(lambda: connection.open_dimensions(model, version))
    inputs, _ = with_chosen_sizes(shaped(declared, dict(arguments.shape), dimensions), dimensions)
    examples = [concrete(each, arguments.batch) for each in inputs]
    secure = arguments.ssl
    url = f"http{'s' * secure}://{arguments.url.rpartition(':')[0]}:{http_port()}"
    config = connection.model_config(model, version).config
    raw_only = next((each.datatype for each in (*declared, *outputs) if each.datatype in RAW_ONLY), "")
    if raw_only and (arguments.snippet == CURL or config.model_transaction_policy.decoupled):
        raise ClientError(f"{arguments.snippet}: JSON has no {raw_only}")
    if config.model_transaction_policy.decoupled:
        program, command = stream_snippets(url, model, version, examples)
    else:
        parameters = SEQUENCE if config.HasField("sequence_batching") else NONE
        program = python_snippet(arguments.url, model, version, examples, parameters, secure)
        command = curl_snippet(url, model, version, examples, parameters)
    chosen = program if arguments.snippet == PYTHON else command
    if not chosen:
        raise ClientError(f"{arguments.snippet}: the values of this model are too many for a snippet")
    print(chosen)
    if arguments.snippet == CURL and http_port() == USUAL_HTTP_PORT:
        print(f"gangway client: HTTP is taken to be on port {USUAL_HTTP_PORT}; GANGWAY_HTTP_PORT names another",
              file=sys.stderr)  # fmt: skip


def server_times(response: pb.ModelStatisticsResponse) -> ServerTimes:
    """Add up the statistics of the model's versions. Raises RefusedError if the server keeps none."""
    if not response.model_stats:
        raise RefusedError("the server keeps no statistics of this model")
    stats = [model.inference_stats for model in response.model_stats]
    return ServerTimes(
        sum(stat.success.count for stat in stats),
        {phase: sum(getattr(stat, phase).ns for stat in stats) for phase in PHASES},
    )


def show_outputs(console: Console, outputs: Mapping[str, Array], classified: Sequence[str]) -> None:
    """Print shape, dtype and the first values of each output, or its classes."""
    table = Table("output", "shape", "dtype", "first values")
    for name, values in outputs.items():
        if name in classified:
            console.print(_classes_table(name, values))
        else:
            dtype = "BYTES" if values.dtype.kind == "O" else values.dtype.name
            table.add_row(name, "x".join(map(str, values.shape)), dtype, _first_values(values))
    if table.row_count:
        console.print(table)


def show_timing(console: Console, round_trip_ms: Sequence[float], server: ServerTimes) -> None:
    """Print the client's round trip and the server's part of it, milliseconds, means over the requests."""
    round_trip = statistics.fmean(round_trip_ms)
    table = Table("time", "ms")
    table.columns[1].justify = "right"
    several = f", mean of {len(round_trip_ms)}" if len(round_trip_ms) > 1 else ""
    table.add_row(f"round trip, seen by the client{several}", f"{round_trip:.3f}")
    for phase in PHASES:
        table.add_row("  server: " + phase.replace("_", " "), f"{server.mean_ms(phase):.3f}")
    table.add_row("  transport and the rest", f"{round_trip - server.total_ms:.3f}")
    console.print(table)
    if server.requests != len(round_trip_ms):
        console.print(f"The server's times are means over {server.requests} requests: it served other clients too.")


def is_scores(tensor: TensorMetadata) -> bool:
    """Say whether an output is one score for each class: floats [C] or [N, C], besides dimensions of 1."""
    return tensor.datatype in ("FP32", "FP64") and len([size for size in tensor.shape[1:] if size != 1]) <= 1


def _values(inputs: Sequence[TensorMetadata], arguments: argparse.Namespace) -> dict[str, Array]:
    if arguments.input:
        return file_tensors(inputs, dict(arguments.input))
    if arguments.image:
        normalisation = Normalisation(arguments.mean, arguments.std)
        return image_tensor(inputs, arguments.image, arguments.batch, normalisation)
    return random_tensors(inputs, arguments.batch, arguments.seed)


def _chosen_texts(inputs: Sequence[TensorMetadata], arguments: argparse.Namespace) -> str:
    """Return how a user sends other texts than those that were chosen, which few models know; empty: there are none."""
    texts = [tensor.name for tensor in inputs if tensor.datatype == "BYTES"]
    if arguments.input or arguments.image or not texts:
        return ""
    return f"; the texts of {', '.join(texts)} were random digits: --input NAME=FILE for each input has others"


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, got '{text}'")
    return name, Path(path)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(Fraction(part)) for part in text.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"expected numbers such as 0.5 or 1/255, got '{text}'") from error


def _classes_table(name: str, texts: Array) -> Table:
    table = Table("row", "rank", "class", "label", "value", title=f"best classes of {name}")
    rows = texts.reshape(1, -1) if texts.ndim == 1 else texts
    for number, row in enumerate(rows):
        for rank, text in enumerate(row, 1):
            value, index, *label = text.decode(errors="replace").split(":", 2)
            table.add_row(str(number), str(rank), index, *(label or ("",)), f"{float(value):.6g}")
    return table


def _first_values(values: Array) -> str:
    shown = [f"{value:.6g}" if values.dtype.kind == "f" else _text(value) for value in values.flat[:FIRST_VALUES]]
    return ", ".join(shown) + (", ..." if values.size > FIRST_VALUES else "")


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        return str(value)
    shown = repr(value[:SHOWN_BYTES].decode(errors="backslashreplace"))
    return f"{shown}... ({len(value)} bytes)" if len(value) > SHOWN_BYTES else shown
