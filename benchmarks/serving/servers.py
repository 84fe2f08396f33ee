"""The servers that `benchmarks.serving` compares: `gangway serve` under a policy, and Triton, behind one interface."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from google.protobuf import text_format

from benchmarks.peers.triton_server import CONFIGURATIONS, triton_server
from gangway.artifact.precision import FP32
from gangway.protos import model_config_pb2 as mc
from testing.live_server import live_server
from testing.load import TOLERANCE, is_right, raw_channel, raw_infer
from testing.processes import cpu_ns, descendants_of
from testing.reference import Example
from testing.repository import onnx_file

QOS_PARAMETER, MIN_COSINE_PARAMETER = "qos_ms", "precision_min_cosine"
WARM_UP_QUERIES = 3
IN_PRECISION = "@"
LOW_TOLERANCE = 0.1  # of answers in low precision
LOW_MIN_COSINE = 0.0  # the zoo has random weights, with which rounding differs more than in trained networks
TIMEOUT_S = 60
PRECISION_COUNT = re.compile(r'^gangway_precision_requests_total\{.*precision="(\w+)"\} (\d+)$', re.MULTILINE)


@dataclass(frozen=True)
class Served:
    """A server that answers at `url`; `root_pid` is the process that all of its others descend from.

    `metrics_url`: Gangway's; empty for Triton.
    """

    url: str
    root_pid: int
    metrics_url: str = ""

    def cpu_s(self) -> float:
        """Return the processor time that its processes have taken so far."""
        return sum(cpu_ns(pid) for pid in (self.root_pid, *descendants_of(self.root_pid))) / 1e9

    def by_precision(self) -> Counter[str]:
        """Return how many requests were computed in each precision, of models whose precision deadlines choose."""
        counts: Counter[str] = Counter()
        if self.metrics_url:
            with urlopen(self.metrics_url, timeout=TIMEOUT_S) as response:
                text = response.read().decode()
            for precision, count in PRECISION_COUNT.findall(text):
                counts[precision] += int(count)
        return counts


@contextmanager
def serving(name: str, source: Path, targets_ms: Mapping[str, float | str | None]) -> Iterator[Served]:
    """Serve models of a repository by one of CONFIGURATIONS, or by Gangway under the policy of this name.

    `POLICY@bf16`: with models in that precision; `POLICY@deadline`: in both, as deadlines choose.

    `targets_ms`: the latency target of each model, or text such as "3x"; None: best effort. Triton has no such thing.
    Raises RuntimeError when the server does not start, FetchError when there is no Triton.
    """
    if name in CONFIGURATIONS:
        with triton_server(source, list(targets_ms), CONFIGURATIONS[name]) as triton:
            yield Served(triton.url, triton.process.pid)
        return
    with tempfile.TemporaryDirectory() as folder:
        policy, _, precision = name.partition(IN_PRECISION)
        write_repository(Path(folder), source, targets_ms, min_cosine=LOW_MIN_COSINE if precision else None)
        with live_server(Path(folder), [f"--scheduler={policy}", f"--precision={precision or FP32}"]) as gangway:
            yield Served(gangway.url, gangway.process.pid, gangway.metrics_url)


def write_repository(
    folder: Path,
    source: Path,
    targets_ms: Mapping[str, float | str | None],
    max_batch_size: int | None = None,
    min_cosine: float | None = None,
) -> None:
    """Write a repository of Gangway's that links to models of another one and has these targets.

    A target may be text, such as "3x". `max_batch_size`: of each model; None: as it is. `min_cosine`: of answers in low
    precision to those in fp32; None: the server's default.
    """
    for name, target_ms in targets_ms.items():
        config = text_format.Parse((source / name / "config.pbtxt").read_text(), mc.ModelConfig())
        config.parameters.pop(QOS_PARAMETER, None)
        if target_ms is not None:
            text = target_ms if isinstance(target_ms, str) else f"{target_ms:.3f}"
            config.parameters[QOS_PARAMETER].string_value = text
        if min_cosine is not None:
            config.parameters[MIN_COSINE_PARAMETER].string_value = str(min_cosine)
        if max_batch_size is not None:
            config.max_batch_size = max_batch_size
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(text_format.MessageToString(config))
        (folder / name / "1").symlink_to(onnx_file(source, name).parent.resolve())


def warm_up(url: str, examples: Mapping[str, Example], tolerance: float = TOLERANCE) -> None:
    """Ask each model a few times. Raises RuntimeError for an answer that is not onnxruntime's."""
    with raw_channel(url) as channel:
        infer = raw_infer(channel)
        for name, example in examples.items():
            for _ in range(WARM_UP_QUERIES):
                if not is_right(infer(example.request, timeout=TIMEOUT_S), example.outputs, tolerance):
                    raise RuntimeError(f"{url} answers {name} wrongly: nothing is measured")


def known_servers(policies: Sequence[str], triton: Sequence[str]) -> list[str]:
    """Return names for `serving`: Gangway's policies, then configurations of Triton such as "1x2".

    Raises ValueError for a configuration that there is not.
    """
    names = [f"triton {one}" for one in triton]
    if unknown := [name for name in names if name not in CONFIGURATIONS]:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(CONFIGURATIONS)}")
    return [*policies, *names]
