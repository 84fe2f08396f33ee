"""`gangway serve`."""

import logging

from gangway.server.options import log_level, parse_options

LOG_FORMAT = "%(asctime)s %(levelname)s supervisor: %(message)s"
_log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    options = parse_options(argv)
    logging.basicConfig(level=log_level(options.logs), format=LOG_FORMAT)
    for warning in options.warnings:
        _log.warning("%s", warning)
    from gangway.server.supervisor import serve  # noqa: PLC0415 - so that --help and mistakes answer at once

    return serve(options)
