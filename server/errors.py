"""Why a configuration, a model or a request is refused, in words for the client."""

from typing import NoReturn

from gangway.protos import StatusCode

MAX_WORD_CHARACTERS = 200  # of one name or value out of a configuration
MAX_REASON_CHARACTERS = 2000  # a reason travels to the front end in a message of limited size


def shortened(text: str, limit: int = MAX_WORD_CHARACTERS) -> str:
    """Return the text, or its beginning if it is long."""
    return text if len(text) <= limit else f"{text[:limit]}..."


class ConfigError(ValueError):
    """A model's configuration is wrong or asks for what this server does not do. The message is for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, MAX_REASON_CHARACTERS))


class CompileError(Exception):
    """The model cannot be compiled; the message says why. `is_final`: another attempt would not succeed either."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class ModelLoadError(Exception):
    """The model cannot be served; the message says why."""


# Why a model cannot be loaded. ConfigError is a ValueError; a thread that cannot be started is a RuntimeError.
LOAD_ERRORS = (CompileError, ModelLoadError, ValueError, OSError, RuntimeError)

# The details travel in an HTTP/2 header of limited size, and may quote the client's own words.
MAX_DETAIL_CHARACTERS = 1000


class RequestError(Exception):
    """A request was refused or failed; `code` and `message` are the answer."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message if len(message) <= MAX_DETAIL_CHARACTERS else f"{message[:MAX_DETAIL_CHARACTERS]}..."

    def without_traceback(self) -> "RequestError":
        """Return an equal error that holds no frames, to be kept by what a frame of its traceback refers to.

        Such a cycle would keep a request's tensors until the next collection of garbage.
        """
        return RequestError(self.code, self.message)


def invalid(message: str) -> NoReturn:
    """Refuse a request that is wrong in itself."""
    raise RequestError(StatusCode.INVALID_ARGUMENT, message)


def unsupported(message: str) -> NoReturn:
    """Refuse a request for something this server does not do."""
    raise RequestError(StatusCode.UNIMPLEMENTED, message)


def unavailable(message: str) -> NoReturn:
    """Refuse a request that may succeed later or elsewhere."""
    raise RequestError(StatusCode.UNAVAILABLE, message)


def internal(message: str) -> NoReturn:
    """Refuse what Triton refuses with INTERNAL, also where the mistake is the client's."""
    raise RequestError(StatusCode.INTERNAL, message)


def fault() -> RequestError:
    """Return the error for what fails by a fault of the server, which its log tells of."""
    return RequestError(StatusCode.INTERNAL, "internal error, see the server's log")
