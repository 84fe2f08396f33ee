"""Why a command of a client ends: what its last line says, and its exit status."""


class ClientError(Exception):
    """The command cannot continue. The text is for people, `exit_status` for scripts."""

    exit_status = 1


class RefusedError(ClientError):
    """The server answered with an error status (unknown model, wrong shape, ...)."""

    exit_status = 1


class InputError(ClientError):
    """The command line or a file it names does not fit the model."""

    exit_status = 2


class UnreachableError(ClientError):
    """No server answered at the address, or not in time."""

    exit_status = 3


def reason(error: OSError) -> str:
    """Return what the system says of an error, without its number."""
    return error.strerror or str(error)
