"""`gangway serve`."""

import gc
import logging

from gangway.server.options.command_line import parse_options

_log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Serve until a signal comes; return the exit status."""
    options = parse_options(argv)
    gc.disable()  # imports leave no garbage, and to look for it is a sixth of their time
    from gangway.server.control.supervisor.log import ServerLog  # noqa: PLC0415 - so that --help and mistakes answer at once
    from gangway.server.control.supervisor.supervisor import serve  # noqa: PLC0415

    gc.enable()
    gc.freeze()  # what lives now lives on
    log = ServerLog(options.logs)
    for warning in options.warnings:
        _log.warning("%s", warning)

    return serve(options, log)
