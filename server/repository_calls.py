"""What clients ask of the model repository, on its way to the supervisor, which alone loads and unloads models.

A call has a number; its thread waits until the supervisor has answered that number. What comes with a load (a
configuration, files) may be as large as a message: it stands in memory that the supervisor reads by itself.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid, unavailable, unsupported
from gangway.server.front_end_messages import CallKind, RepositoryAnswer, RepositoryCall
from gangway.server.questions import Questions

MAX_WAITING = 16  # each has a thread, and maybe a model, for as long as it takes to compile one
LOAD_SECONDS = 1800.0  # every wait ends; the load goes on
INDEX_SECONDS = 5.0
MAX_NAME_BYTES = 1024


class RepositoryCalls:
    """Safe for threads. `ask` says whether the supervisor could be told."""

    def __init__(self, ask: Callable[[RepositoryCall], bool]) -> None:
        self._ask = ask
        self._questions = Questions(
            MAX_WAITING, f"{MAX_WAITING} requests to the model repository wait for their answers, more cannot"
        )

    def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load or reload a model; return when it answers requests. Raises RequestError."""
        _check(request.repository_name, request.model_name)
        with _in_memory(request.SerializeToString() if request.parameters else b"") as path:
            self._call("load", request.model_name, path)
        return pb.RepositoryModelLoadResponse()

    def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; return when it takes no new requests. Raises RequestError.

        `unload_dependents` means what was loaded because this one, an ensemble, needs it.
        """
        dependents = False
        _check(request.repository_name, request.model_name)
        for name, parameter in request.parameters.items():
            if name != "unload_dependents":
                invalid(f"unrecognized unload parameter '{name}'")
            if parameter.WhichOneof("parameter_choice") != "bool_param":
                invalid("Unload parameter 'unload_dependents' must have bool type for its value")
            dependents = parameter.bool_param
        self._call("unload", request.model_name, dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    def refresh(self) -> None:
        """Have the supervisor look what the repositories hold; if that is not possible, what was known stands."""
        with contextlib.suppress(RequestError):
            self._call("index", seconds=INDEX_SECONDS)

    def answered(self, answer: RepositoryAnswer) -> None:
        """The supervisor has answered."""
        self._questions.answered(answer)

    def refuse(self, reason: str) -> None:
        """Answer everything with UNAVAILABLE from now on, also what waits."""
        self._questions.refuse(reason)

    def _call(
        self,
        kind: CallKind,
        name: str = "",
        path: str = "",
        seconds: float = LOAD_SECONDS,
        dependents: bool = False,
    ) -> None:
        self._questions.ask(
            lambda number: self._ask(RepositoryCall(number, kind, name, path, dependents)),
            seconds,
            not_now="the model repository cannot be asked now",
            unanswered=f"no answer from the model repository within {seconds:.0f} seconds",
        )


def _check(repository: str, name: str) -> None:
    if repository:
        unsupported("'repository_name' specification is not supported")
    if not name or len(name.encode()) > MAX_NAME_BYTES or "/" in name or not name.isprintable():
        invalid(f"invalid model name '{name[:80]}': expected 1 to {MAX_NAME_BYTES} printable bytes without '/'")


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Give a path under which the supervisor finds the content, empty for none."""
    if not content:
        yield ""
        return
    try:
        descriptor = os.memfd_create("gangway-load", os.MFD_CLOEXEC)
    except OSError as error:
        unavailable(f"no memory for the request: {error}")
    with open(descriptor, "wb", buffering=0) as file:
        try:
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
        except OSError as error:
            unavailable(f"no memory for the request: {error}")
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
