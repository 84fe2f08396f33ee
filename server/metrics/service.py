"""The metrics of a front-end process, from its options to an open port."""

from collections.abc import Callable

from gangway.executor.control import ControlSegment
from gangway.server.data_plane import DataPlane
from gangway.server.front_ends.shared import Peers
from gangway.server.listen_address import socket_address
from gangway.server.metrics.endpoint import MetricsEndpoint
from gangway.server.metrics.exposition import Exposition
from gangway.server.metrics.machine import Machine
from gangway.server.metrics.reading import Source
from gangway.server.models import Models
from gangway.server.options.metrics import MetricsOptions


def serve_metrics(
    options: MetricsOptions,
    models: Callable[[], Models],
    plane: DataPlane,
    control: ControlSegment,
    peers: Peers = Peers(),  # noqa: B008 - frozen
) -> str:
    """Answer on the metrics' port from now on; return its address ("host:port"), "" if there shall be no metrics.

    Raises OSError, which says why the port cannot be had.
    """
    if not options.target:
        return ""
    machine = Machine(options.interval_ms / 1000) if options.cpu else None
    exposition = Exposition(Source(models, plane, control, machine, peers), options)
    try:
        host, port, _ = socket_address(options.target)
        endpoint = MetricsEndpoint(host, port, exposition.render, options.reuse_port)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {options.target}: {error.strerror or error}") from error
    endpoint.start()
    return endpoint.address
