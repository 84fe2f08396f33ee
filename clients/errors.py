"""What can go wrong for a client, each with the exit status of its command."""


class ClientError(Exception):
    """The command cannot go on; the text says why, for people. `exit_status` tells scripts what kind it is."""

    exit_status = 1


class RefusedError(ClientError):
    """The server answered with an error status (unknown model, wrong shape, ...)."""

    exit_status = 1


class InputError(ClientError):
    """The command line or a file it names does not fit the model."""

    exit_status = 2


class UnreachableError(ClientError):
    """Nobody answered at the address, or not in time."""

    exit_status = 3
