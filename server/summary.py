"""What `gangway serve` prints when it is ready."""

import sys
from collections.abc import Sequence
from typing import Final

from gangway.artifact.format import Engine
from gangway.server.batching import in_words
from gangway.server.loaded_model import LoadedModel
from gangway.server.options.serve_options import ServeOptions
from gangway.server.queue_policy import Terms
from gangway.server.repository import BrokenModel
from gangway.server.targets import config_of, policies_of
from rich.console import Console
from rich.table import Table

LOG_WIDTH: Final = 160  # of a line that is written to no terminal


def print_summary(
    options: ServeOptions,
    address: str,
    metrics_address: str,
    http_address: str,
    target: str,
    loaded: Sequence[LoadedModel],
    broken: Sequence[BrokenModel],
) -> None:
    """Print models, latency targets, cores, addresses and a client command to copy."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
    if loaded or broken:
        console.print(_model_table(loaded, broken))
    cores = ", ".join(map(str, options.general.cores))
    console.print(f"cores      {cores} ({target or 'nothing compiled'}), scheduler {options.general.scheduler}")
    if http_address:
        console.print(f"HTTP       {http_address}")
    if address:
        console.print(f"gRPC       {address}" + ", TLS" * bool(options.grpc.tls))
    if metrics_address:
        console.print(f"metrics    http://{metrics_address}/metrics")
    if loaded and address and not options.grpc.tls:
        console.print(f"try        gangway client {loaded[0].ready.name} --url {client_url(address)}", soft_wrap=True)


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
        table.add_row(entry.name, str(entry.version or "-"), "", "", "", f"not ready: {entry.reason}")
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
