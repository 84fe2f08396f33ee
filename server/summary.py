"""What `gangway serve` prints when it is ready."""

import logging
import sys
from collections.abc import Sequence

from rich.table import Table

from gangway.artifact.console import Console
from gangway.artifact.format import Engine
from gangway.server.batching import in_words
from gangway.server.front_end_messages import DUPLICATE
from gangway.server.loaded_model import LoadedModel
from gangway.server.options.serve_options import ServeOptions
from gangway.server.process import drop_unwritable
from gangway.server.queue_policy import Terms
from gangway.server.repository import BrokenModel
from gangway.server.targets import config_of, policies_of

_log = logging.getLogger(__name__)


def print_summary(
    options: ServeOptions,
    address: str,
    metrics_address: str,
    http_address: str,
    target: str,
    loaded: Sequence[LoadedModel],
    broken: Sequence[BrokenModel],
    request_cost_us: float,
) -> None:
    """Print models, latency targets, cores, addresses and a client command to copy. Nobody needs it but people."""
    console = Console(highlight=False)
    cores = ", ".join(map(str, options.general.cores))
    lines = [f"cores      {cores} ({target or 'nothing compiled'}), scheduler {options.general.scheduler}"]
    if request_cost_us:
        lines.insert(
            0, f"alone      as a client here sees it, with {milliseconds(request_cost_us)} that any request costs"
        )
    if http_address:
        lines.append(f"HTTP       {http_address}")
    if address:
        lines.append(f"gRPC       {address}" + ", TLS" * bool(options.grpc.tls))
    if metrics_address:
        lines.append(f"metrics    http://{metrics_address}/metrics")
    if loaded and address and not options.grpc.tls:
        lines.append(f"try        gangway client {loaded[0].ready.name} --url {client_url(address)}")
    if broken:
        lines.append(_not_ready(options.repository.strict_readiness, loaded, broken))
    try:
        if loaded or broken:
            console.print(_model_table(loaded, broken))
        console.print(*lines, sep="\n", soft_wrap=True)
    except OSError as error:
        _log.warning("standard output does not take the summary of the start: %s", error)
        drop_unwritable(sys.stdout)


def _not_ready(is_strict: bool, loaded: Sequence[LoadedModel], broken: Sequence[BrokenModel]) -> str:
    """Say how many models are missing, and what the server therefore says of itself."""
    missing = {entry.name for entry in broken}
    names = missing | {model.entry.name for model in loaded}
    text = f"{len(missing)} of {len(names)} models {'is' if len(missing) == 1 else 'are'} not ready"
    is_missed = any(entry.reason != DUPLICATE for entry in broken)  # see ModelUnavailable.is_missed
    return text + ", so the server says not ready" * (is_strict and is_missed)


def client_url(address: str) -> str:
    """Return what a client on this machine connects to."""
    for everywhere in ("0.0.0.0:", "[::]:"):
        if address.startswith(everywhere):
            return "localhost:" + address.removeprefix(everywhere)
    return address


def _model_table(loaded: Sequence[LoadedModel], broken: Sequence[BrokenModel]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading, side in (("model", "left"), ("version", "right"), ("alone", "right"), ("target", "right")):
        table.add_column(heading, justify="right" if side == "right" else "left")
    table.add_column("batches", overflow="fold")
    table.add_column("status", overflow="fold")
    for model in sorted(loaded, key=lambda model: (model.ready.name, model.ready.version)):
        ready = model.ready
        target = _target(policies_of(ready).terms(0, 0, ready.qos_us))
        alone = "?" if model.isolated is None else milliseconds(model.isolated.latency_us)
        status = "ready, ensemble" if model.entry.is_ensemble else _status(model.engine)
        table.add_row(ready.name, str(ready.version), alone, target, _batches(model), status)
    for entry in broken:
        version = "-" if entry.is_whole else str(entry.version)
        table.add_row(entry.name, version, "", "", "", f"not ready: {entry.reason}")
    return table


def _target(terms: Terms) -> str:
    """Return what requests that state no target get."""
    if not terms.target_us:
        return "best effort"
    return milliseconds(terms.target_us) + " or refused" * terms.rejects_late


def _batches(model: LoadedModel) -> str:
    """Return how many rows are joined; those of an ensemble are joined step by step."""
    return "-" if model.entry.is_ensemble else in_words(config_of(model.ready))


def _status(engine: Engine) -> str:
    return "ready" if engine is Engine.NATIVE else f"ready, served by {engine}"


def milliseconds(microseconds: float) -> str:
    """Return a time for people, three digits."""
    value = microseconds / 1e3
    return f"{value:.3f} ms" if value < 1 else f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"
