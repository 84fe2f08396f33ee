"""The servers that the corpus is played against: their models and flags."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gangway.zoo import write_model
from testing.live_server import LiveServer, live_server
from tests.helpers.python_models import config_of, write
from tests.wire.corpus import SEGMENT, Answer, Case, Renaming
from tests.wire.grpc_client import GrpcPlayer
from tests.wire.http_client import HttpPlayer

SEGMENT_BYTES = 4096
ZOO = ("simple", "simple_string", "simple_int8", "simple_identity", "simple_sequence", "simple_image")
COUNTED = ("counted_grpc", "counted_http")  # nobody else changes their statistics
SLEEPS = """
    def execute(self, requests):
        import time
        found = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            time.sleep(int(x[0]) / 1000)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return found
"""
COUNTS = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILS = """
    def execute(self, requests):
        error = pb_utils.TritonError("it does not like é and 100 %\\nat all", pb_utils.TritonError.UNAVAILABLE)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
SHOUTS = """
    def execute(self, requests):
        found = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            loud = np.array([each.decode().upper().encode() for each in text.ravel()], dtype=object)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", loud)]))
        return found
"""
INTEGERS = ("x:INT32:1", "y:INT32:1")
KEYS = ("inference:infer-key=s3cret", "model-repository,logging:admin=0ther")
FLAGS: Mapping[str, Sequence[str]] = {
    "plain": ("--model-control-mode=explicit", "--load-model=*"),
    "strict": (
        *(f"--grpc-restricted-protocol={key}" for key in KEYS),
        *(f"--http-restricted-api={key}" for key in KEYS),
        "--grpc-infer-response-compression-level=high",
        "--grpc-max-message-bytes=65536",
        "--http-max-input-size=65536",
        "--allow-page=false",
        "--id=strict",
    ),
}


def write_repository(folder: Path) -> Path:
    """Write the models: those of Triton's examples, COUNTED, some in Python."""
    for name in ZOO:
        write_model(folder, name)
    for name in COUNTED:
        (folder / name / "1").mkdir(parents=True)
        shutil.copy(folder / "simple" / "1" / "model.onnx", folder / name / "1")
        (folder / name / "config.pbtxt").write_text("max_batch_size: 8")
    write(folder, "sleepy", SLEEPS, config_of(*INTEGERS))
    write(folder, "counts", COUNTS, config_of(*INTEGERS, more="model_transaction_policy { decoupled: true }"))
    write(folder, "failing", FAILS, config_of(*INTEGERS))
    write(folder, "shouting", SHOUTS, config_of("text_input:STRING:1", "text_output:STRING:1"))
    return folder


@dataclass(frozen=True)
class Played:
    """A server of the corpus, and the file that clients share with it."""

    server: LiveServer
    segment: Path
    ports: Mapping[str, str]

    def answer(self, protocol: str, case: Case) -> Answer:
        """Send a case and return what is answered."""
        names = {name: address.rpartition(":")[2] for name, address in self.ports.items()}
        target, steps = protocol, list(case.steps)
        if steps[0][0] == "at":
            target = steps.pop(0)[1]
        player = GrpcPlayer if protocol == "grpc" else HttpPlayer
        return player(self.ports[target], Renaming(self.segment.name, names), self.segment).play(steps)


@contextmanager
def playing(repository: Path, server: str, cache_dir: Path | None = None) -> Iterator[Played]:
    """Start one of the servers, until the block ends."""
    segment = Path("/dev/shm") / (SEGMENT[:-8] + uuid.uuid4().hex[:8])
    segment.write_bytes(bytes(SEGMENT_BYTES))
    cache = [f"--cache-dir={cache_dir}"] if cache_dir else []
    try:
        with live_server(repository, [*cache, *FLAGS[server]]) as running:
            metrics = running.metrics_url.split("/")[2]
            yield Played(running, segment, {"grpc": running.url, "http": running.http_url, "metrics": metrics})
    finally:
        segment.unlink()


@contextmanager
def written_repository() -> Iterator[Path]:
    """Write the models to a folder that is removed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_repository(Path(folder))
