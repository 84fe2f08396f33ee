"""What to do with each of Triton's client examples: how it is called, or why it cannot pass here.

The examples are the files of src/python/examples in the repository triton-inference-server/client.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

GRPC, HTTP = "grpc", "http"
CONTROLLED_MODELS = {GRPC: 8, HTTP: 7}  # as many as the examples of model control count
DEFAULT_PORTS = {GRPC: 8001, HTTP: 8000}
IMAGE = "IMAGE"  # stands for the file with the picture
_CLASSIFY = ("-m", "simple_image", "-s", "INCEPTION", "-c", "3")


@dataclass(frozen=True)
class Example:
    """One call of one script. `explicit`: with a server that loads models by request, and has so many of them."""

    script: str
    protocol: str = GRPC
    arguments: Sequence[str] = ()
    explicit: int = 0
    takes_url: bool = True
    not_applicable: str = ""

    @property
    def title(self) -> str:
        """Return script and arguments, for people."""
        return " ".join((self.script, *self.arguments))


# What is said of the scripts whose names contain the first word. The first match counts.
_NOT_APPLICABLE = (
    ("cudashm", "CUDA shared memory needs a GPU"),
    ("custom_repeat", "asks for a model of a backend in C++"),
    ("ensemble", "sends encoded images (JPEG, PNG), which no ONNX model decodes"),
    ("vllm", "asks for a language model of vLLM"),
)

# Scripts that speak both protocols, or are worth more than one call.
_CALLS: dict[str, tuple[Example, ...]] = {
    "image_client.py": (
        Example("", GRPC, ("-i", "grpc", *_CLASSIFY, "-b", "2", IMAGE)),
        Example("", GRPC, ("-i", "grpc", "--async", *_CLASSIFY, IMAGE)),
        Example("", GRPC, ("-i", "grpc", "--streaming", *_CLASSIFY, IMAGE)),
        Example("", HTTP, ("-i", "http", *_CLASSIFY, IMAGE)),
        Example("", HTTP, ("-i", "http", "--async", *_CLASSIFY, "-b", "2", IMAGE)),
    ),
    "grpc_image_client.py": (
        Example("", GRPC, (*_CLASSIFY, IMAGE)),
        Example("", GRPC, ("--async", *_CLASSIFY, IMAGE)),
        Example("", GRPC, ("--streaming", *_CLASSIFY, IMAGE)),
    ),
    **{
        f"simple_{kind}.py": tuple(Example("", protocol, arguments) for arguments in ((), ("--dyna",)))
        for kind, protocol in (
            ("grpc_sequence_stream_infer_client", GRPC),
            ("grpc_sequence_sync_infer_client", GRPC),
            ("grpc_aio_sequence_stream_infer_client", GRPC),
            ("grpc_aio_sequence_sync_infer_client", GRPC),
            ("http_sequence_sync_infer_client", HTTP),
            ("http_aio_sequence_sync_infer_client", HTTP),
        )
    },
    "reuse_infer_objects_client.py": (Example("", GRPC, ("-i", "grpc")), Example("", HTTP, ("-i", "http"))),
    "memory_growth_test.py": (
        Example("", GRPC, ("-i", "grpc"), takes_url=False),
        Example("", HTTP, ("-i", "http"), takes_url=False),
    ),
}


def examples_of(scripts: Sequence[str]) -> list[Example]:
    """Return the calls of these scripts, in their order."""
    return [replace(call, script=script) for script in scripts for call in _calls_of(script)]


def _calls_of(script: str) -> Sequence[Example]:
    for word, reason in _NOT_APPLICABLE:
        if word in script:
            return (Example("", not_applicable=reason),)
    if script in _CALLS:
        return _CALLS[script]
    protocol = HTTP if "http" in PurePath(script).stem.split("_") else GRPC
    return (Example("", protocol, explicit=CONTROLLED_MODELS[protocol] if "model_control" in script else 0),)
