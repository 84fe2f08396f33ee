"""`gangway route`: a HAProxy in front of several servers, configured by what models they have."""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gangway.base.command_line import CommandParser
from gangway.base.commands import ending_signals
from gangway.base.files import write_whole
from gangway.base.numbers import count
from gangway.clients.errors import ClientError, InputError, UnreachableError
from gangway.clients.tls import Tls
from gangway.cluster.haproxy import Haproxy, RouterError, check_folder, command, find_haproxy
from gangway.cluster.haproxy_config import STATE_HEAD, RouteOptions, configuration, maps, states
from gangway.cluster.repository import Repositories, read_repositories
from gangway.cluster.server_address import SPEAKING, ServerAddress, add_servers, servers_of, tls_of

FOLDER = Path("route")


@dataclass(frozen=True)
class Router:
    """What the files of a router are made of."""

    servers: Sequence[ServerAddress]
    options: RouteOptions
    tls: Tls | None
    timeout_s: float


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or the status of the error: 1 HAProxy, 2 usage, 3 no server answers."""
    options = _parser().parse_args(argv)
    try:
        router = _router(options)
        found = _read(router)
        _write(router, found, states(found.models, router.servers, found.ready, router.options))
        if options.write_only:
            print(f"wrote {router.options.config}: {len(found.models)} models, {len(router.servers)} servers")
            return 0
        return _run(router, found, options.refresh)
    except ClientError as error:
        print(f"gangway route: {error}", file=sys.stderr)
        return error.exit_status


def _run(router: Router, found: Repositories, refresh_s: float) -> int:
    """Run HAProxy until a signal comes or it ends, and follow the servers' repositories."""
    ending = threading.Event()
    for number in ending_signals():
        signal.signal(number, lambda *_: ending.set())
    haproxy = Haproxy(router.options.config)
    options = router.options
    where = f"gRPC on {options.address}:{options.grpc_port}, HTTP on {options.address}:{options.http_port}"
    print(f"{len(found.models)} models on {len(router.servers)} servers: {where}", flush=True)
    try:
        while not ending.wait(refresh_s):
            haproxy.look()
            newer = read_repositories(router.servers, router.tls, router.timeout_s)
            # What a server had that does not answer now it may have again.
            models = tuple(sorted({*newer.models, *(found.models if newer.errors else ())}))
            if models == found.models:
                continue
            newer = replace(newer, models=models)
            try:
                _change(router, haproxy, found, newer)
            except RouterError as error:  # the former configuration is good
                print(f"gangway route: warning: {error}; trying again in {refresh_s} s", file=sys.stderr)
            else:
                found = newer
                print(f"the servers have {len(models)} models now", flush=True)
    finally:
        haproxy.stop()
    return 0


def _change(router: Router, haproxy: Haproxy, found: Repositories, newer: Repositories) -> None:
    """Give HAProxy the configuration for other models; servers keep their states. Raises RouterError."""
    added = [model for model in newer.models if model not in found.models]
    known = command(router.options.socket, "show servers state")
    begin = states(added, router.servers, newer.ready, router.options).removeprefix(STATE_HEAD)
    _write(router, newer, f"{known}\n{begin}")
    haproxy.reload()


def _router(options: argparse.Namespace) -> Router:
    files = (options.certificate, options.server_root_certificates, options.server_certificate)
    for file in files:
        if file is not None and not file.is_file():
            raise InputError(f"{file}: there is no such file")
    certificate, roots, own = (file and file.absolute() for file in files)
    folder = options.output.absolute()
    route = RouteOptions(
        folder, options.address, options.grpc_port, options.http_port, options.check_ms,
        certificate, roots, SPEAKING[options.server_tls], own,
    )  # fmt: skip
    check_folder(folder)
    if not options.write_only:
        find_haproxy()  # before the servers are asked
    return Router(servers_of(options), route, tls_of(options), options.timeout)


def _read(router: Router) -> Repositories:
    """Return the servers' repositories. Raises UnreachableError if no server answers."""
    found = read_repositories(router.servers, router.tls, router.timeout_s)
    if not found.ready:
        raise UnreachableError("\n".join(("no server answers:", *(f"  {n}: {e}" for n, e in found.errors.items()))))
    for name, error in found.errors.items():
        print(f"gangway route: warning: {name}: {error}; it gets calls when it answers", file=sys.stderr)
    if not found.models:
        print("gangway route: warning: no server has a model", file=sys.stderr)
    return found


def _write(router: Router, found: Repositories, state: str) -> None:
    """Write all that HAProxy reads."""
    options = router.options
    options.folder.mkdir(parents=True, exist_ok=True)
    for protocol, text in maps(found.models).items():
        write_whole(options.map(protocol), text.encode())
    write_whole(options.state, state.encode())
    write_whole(options.config, configuration(found.models, router.servers, options).encode())


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway route",
        description="Run HAProxy in front of several servers. Every call goes to a server that has its model ready, to "
        "the one with the fewest calls. Servers may load and unload models, end and come back meanwhile.",
    )
    add = parser.add_argument
    add_servers(parser)
    add("--address", default="0.0.0.0", metavar="HOST", help="address to listen on (0.0.0.0)")
    add("--grpc-port", type=_port, default=8001, metavar="PORT", help="port of gRPC (8001)")
    add("--http-port", type=_port, default=8000, metavar="PORT", help="port of HTTP (8000)")
    add(
        "--certificate", type=Path, metavar="FILE", help="clients speak TLS; PEM: certificate chain and key in one file"
    )
    add(
        "--check-ms",
        type=count,
        default=500,
        metavar="MS",
        help="how often each model on each server is checked (500)",
    )
    add("--refresh", type=count, default=5, metavar="SECONDS", help="how often to look for new models (5)")
    add("-o", "--output", type=Path, default=FOLDER, metavar="DIR",
        help=f"where haproxy.cfg, its maps and its socket are ({FOLDER})")  # fmt: skip
    add("--write-only", action="store_true", help="write the files and end; you run `haproxy -W -f DIR/haproxy.cfg`")
    return parser


def _port(text: str) -> int:
    value = count(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, not {text!r}")
    return value
