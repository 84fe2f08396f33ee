"""The configuration of HAProxy that distributes calls over servers by the model that they name. Pure.

Each model is a backend, once for gRPC and once for HTTP. Whether a server is in it says its health check, `GET
/v2/models/NAME/ready`: so calls follow whoever loads and unloads models, and nobody tells the router.

A gRPC message of a call that names a model begins with field 1, the name: 0A LENGTH NAME behind gRPC's five bytes. The
map's keys are these bytes in hexadecimal, length included, so that no name is the beginning of another. Names of HTTP
come from the path, in hexadecimal for the same reason that they may have any character.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gangway.cluster.server_address import ServerAddress

SERVICE = "/inference.GRPCInferenceService/"
# Calls that mean one server: through a router they would reach any.
REFUSED_CALLS = (
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemory",
    "CudaSharedMemory",
    "LogSettings",
    "TraceSetting",
)
REFUSED_ROUTES = ("/v2/repository/models/", "/v2/systemsharedmemory/", "/v2/cudasharedmemory/", "/v2/logging",
                  "/v2/trace/")  # fmt: skip
INFERENCES = ("ModelInfer", "ModelStreamInfer")
NAMED_CALLS = (*INFERENCES, "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
LONGEST_NAME_BYTES = 255  # of a folder
KEY_BYTES = LONGEST_NAME_BYTES + 3  # with field number and length
BUFFER_BYTES = 131072  # a request that is shorter can be sent again
WINDOW_BYTES = 4 << 20  # of HTTP/2: a large tensor does not wait for acknowledgements
ANY = "::any"  # a backend of every live server; no model's backend is called so, see `backend_of`
STATE_HEAD = """1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight \
srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state \
srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port \
srv_check_addr srv_agent_addr srv_agent_port
"""
NOT_READY = "no server has the model ready: %[var(txn.model),regsub(^[a-z]*:,)]"
RUNNING, STOPPED = 2, 0  # srv_op_state


@dataclass(frozen=True)
class RouteOptions:
    """How the router listens and what it trusts.

    `folder`: of all files that HAProxy reads, and of its socket. `certificate`: PEM, chain and key: clients speak TLS.
    `server_roots`: PEM: the servers speak `secured` over TLS, and one of these signed their certificates.
    `server_certificate`: PEM, chain and key: what servers are shown.
    """

    folder: Path
    address: str = "0.0.0.0"
    grpc_port: int = 8001
    http_port: int = 8000
    check_ms: int = 500
    certificate: Path | None = None
    server_roots: Path | None = None
    secured: tuple[str, ...] = ("grpc",)
    server_certificate: Path | None = None

    @property
    def config(self) -> Path:
        """Return where the configuration lies."""
        return self.folder / "haproxy.cfg"

    @property
    def socket(self) -> Path:
        """Return where HAProxy takes commands."""
        return socket_of(self.folder)

    @property
    def state(self) -> Path:
        """Return where the file lies from which HAProxy takes the servers' states."""
        return self.folder / "servers.state"

    def map(self, protocol: str) -> Path:
        """Return where a protocol's map from models to backends lies."""
        return self.folder / f"{protocol}.map"


def socket_of(folder: Path) -> Path:
    """Return HAProxy's socket for commands, of a router with this folder."""
    return folder / "haproxy.sock"


def backend_of(protocol: str, model: str) -> str:
    """Return the name of a model's backend: the model's, with what HAProxy does not take in hexadecimal."""
    return (
        f"{protocol}:{re.sub(r'[^A-Za-z0-9_.-]', lambda m: ''.join(f':{byte:02x}' for byte in m[0].encode()), model)}"
    )


def maps(models: Sequence[str]) -> Mapping[str, str]:
    """Return the text of the maps from models to backends, by protocol. Names that no folder has are left out."""
    names = [(model, model.encode()) for model in models if 0 < len(model.encode()) <= LONGEST_NAME_BYTES]
    return {
        "grpc": "".join(f"{_field(name)} {backend_of('grpc', model)}\n" for model, name in names),
        "http": "".join(f"{name.hex().upper()} {backend_of('http', model)}\n" for model, name in names),
    }


def states(
    models: Sequence[str], servers: Sequence[ServerAddress], ready: Mapping[str, frozenset[str]], options: RouteOptions
) -> str:
    """Return the file of states with which HAProxy begins: without it every server begins in every backend."""
    has_tls = int(bool(_trust(options, "grpc")))
    lines = [
        f"{number} {backend_of('grpc', model)} {place} {server.name} - {state} 0 1 1 0 "
        f"{'15 3 2 6' if state else '8 2 0 6'} 0 0 0 - {server.grpc_port} - {has_tls} {server.http_port} - - 0"
        for number, model in enumerate(models, 10)
        for place, server in enumerate(servers, 1)
        for state in [RUNNING if model in ready.get(server.name, ()) else STOPPED]
    ]
    return STATE_HEAD + "".join(f"{line}\n" for line in lines)


def configuration(models: Sequence[str], servers: Sequence[ServerAddress], options: RouteOptions) -> str:
    """Return the text of haproxy.cfg."""
    return "\n".join(_lines(models, servers, options)) + "\n"


def _lines(models: Sequence[str], servers: Sequence[ServerAddress], options: RouteOptions) -> Iterator[str]:
    named = [model for model in models if 0 < len(model.encode()) <= LONGEST_NAME_BYTES]
    yield "# Written by `gangway route`, which writes it again when the servers have other models."
    yield from _general(options)
    yield from _grpc_frontend(options)
    yield from _http_frontend(options)
    grpc_trust, http_trust = (_trust(options, protocol) for protocol in ("grpc", "http"))
    backends = [(f"grpc{ANY}", f"http{ANY}", "/v2/health/live")]
    backends += [
        (backend_of("grpc", model), backend_of("http", model), f"/v2/models/{quote(model, safe='')}/ready")
        for model in named
    ]
    for grpc, http, uri in backends:
        yield from ("", f"backend {grpc}", f"  option httpchk GET {uri}")
        for server in servers:
            tls = f" ssl alpn h2{_sni(server)}" if grpc_trust else " proto h2"
            check = f"check port {server.http_port} check-proto h1{_check_tls(server) if http_trust else ''}"
            address = f"{server.bracketed}:{server.grpc_port}"
            yield f"  server {server.name} {address}{tls} {check}{_peer(server, grpc_trust or http_trust)}"
        yield from ("", f"backend {http}", "  no log  # the other backend says the same")
        for server in servers:
            tls = f" ssl{_sni(server)}{_peer(server, http_trust)}" if http_trust else ""
            yield f"  server {server.name} {server.bracketed}:{server.http_port}{tls} track {grpc}/{server.name}"


def _general(options: RouteOptions) -> Iterator[str]:
    yield "global"
    yield "  log stdout format raw daemon notice"
    yield f"  stats socket {options.socket} mode 600 level admin expose-fd listeners"
    yield f"  server-state-file {options.state}"
    yield f"  tune.bufsize {BUFFER_BYTES}"
    yield f"  tune.h2.initial-window-size {WINDOW_BYTES}"
    yield "  tune.h2.max-concurrent-streams 1000"
    yield "  hard-stop-after 1h  # streams that are under way when the configuration is replaced"
    yield "defaults"
    yield "  mode http"
    yield "  log global"
    yield "  timeout connect 2s"
    yield "  timeout client 1h"
    yield "  timeout server 1h"
    yield "  timeout http-request 10s"
    yield "  timeout check 5s  # a busy server is not a dead one"
    yield "  balance leastconn"
    yield "  option redispatch 1"
    yield "  retries 3"
    yield "  retry-on conn-failure empty-response  # where nothing of an answer has been seen"
    yield "  load-server-state-from-file global"
    inter = f"inter {options.check_ms} fastinter {max(1, options.check_ms // 4)}"
    yield f"  default-server {inter} fall 2 rise 1 init-addr last,libc,none"


def _grpc_frontend(options: RouteOptions) -> Iterator[str]:
    named = " ".join(SERVICE + call for call in NAMED_CALLS)
    inferences = " ".join(SERVICE + call for call in INFERENCES)
    refused = " ".join(SERVICE + call for call in REFUSED_CALLS)
    key = f"req.body,bytes(5,{KEY_BYTES}),hex"
    yield from ("", "frontend grpc", f"  bind {_bind(options, options.grpc_port)}")
    yield f"  acl named path {named}"
    yield f"  acl inference path {inferences}"
    yield f"  acl stream path {SERVICE}ModelStreamInfer"
    yield f"  acl refused path_beg {refused}"
    # A stream may begin with silence. It has no end yet, so its first message must do: gRPC sends it as one frame.
    yield "  http-request wait-for-body time 1h at-least 7 if stream"
    yield f"  http-request wait-for-body time 10s at-least {5 + KEY_BYTES} if named !stream"
    yield f"  http-request set-var(txn.model) {key},map_beg({options.map('grpc')}) if named"
    yield "  http-request disable-l7-retry if stream"
    # The errors below have no content, so HAProxy gives them no type; gRPC's clients want one.
    yield "  http-after-response set-header content-type application/grpc unless { res.hdr(content-type) -m found }"
    yield f"  http-request {_grpc_error(12, 'the router carries inference only: call the server itself')} if refused"
    compressed = "the router reads the name of the model: send messages without compression"
    yield f"  http-request {_grpc_error(12, compressed)} if named {{ req.body,bytes(0,1),hex -m str 01 }}"
    yield from _without_server("grpc", _grpc_error(14, NOT_READY), _grpc_error(14, "no server is live"))


def _http_frontend(options: RouteOptions) -> Iterator[str]:
    yield from ("", "frontend http", f"  bind {_bind(options, options.http_port)}")
    # A client may be sending while its connection is closed. So a process that ends closes it with its next answer.
    yield "  option idle-close-on-response"
    yield f"  acl refused path_beg {' '.join(REFUSED_ROUTES)}"
    yield "  acl refused path_end /trace/setting"
    yield "  acl inference path_end /infer /generate /generate_stream"
    key = f"path,field(4,/),url_dec,hex,map({options.map('http')})"
    yield f"  http-request set-var(txn.model) {key} if {{ path_beg /v2/models/ }}"
    yield f"  http-request {_http_error(501, 'the router carries inference only: ask the server itself')} if refused"
    yield from _without_server("http", _http_error(503, NOT_READY), _http_error(503, "no server is live"))


def _without_server(protocol: str, not_ready: str, none_live: str) -> Iterator[str]:
    """Yield the choice of the backend, and the errors where it has no server."""
    # A process that ends after its configuration was replaced counts no servers, but has them for its last calls.
    yield "  acl stopping stopping"
    yield "  acl has_model var(txn.model) -m found"
    yield "  acl no_server var(txn.model),nbsrv eq 0"
    yield f"  http-request {none_live} if !stopping {{ nbsrv({protocol}{ANY}) eq 0 }}"
    yield f"  http-request {not_ready} if !stopping inference has_model no_server"
    yield "  use_backend %[var(txn.model)] if has_model stopping"
    # Whoever only asks about the model gets the answer of any server, and of an unknown one its error.
    yield "  use_backend %[var(txn.model)] if has_model !no_server"
    yield f"  default_backend {protocol}{ANY}"


def _grpc_error(status: int, message: str) -> str:
    return f'return status 200 hdr grpc-status {status} hdr grpc-message "{message}"'


def _http_error(status: int, message: str) -> str:
    return f'return status {status} content-type application/json lf-string \'{{"error":"{message}"}}\''


def _bind(options: RouteOptions, port: int) -> str:
    listen = f"{options.address}:{port}"
    if options.certificate is None:
        return f"{listen} proto h2" if port == options.grpc_port else listen
    return (
        f"{listen} ssl crt {_quoted(options.certificate)} alpn {'h2' if port == options.grpc_port else 'h2,http/1.1'}"
    )


def _trust(options: RouteOptions, protocol: str) -> str:
    """Return how servers are trusted that speak a protocol over TLS, "" if they speak it plainly."""
    if options.server_roots is None or protocol not in options.secured:
        return ""
    own = "" if options.server_certificate is None else f" crt {_quoted(options.server_certificate)}"
    return f" verify required ca-file {_quoted(options.server_roots)}{own}"


def _peer(server: ServerAddress, trust: str) -> str:
    """Return whose certificate it has to be. HAProxy compares names only: of an address the authority must do."""
    return f"{trust} verifyhost {server.host}" if trust and _has_name(server) else trust


def _sni(server: ServerAddress) -> str:
    return f" sni str({server.host})" if _has_name(server) else ""


def _check_tls(server: ServerAddress) -> str:
    return f" check-ssl check-sni {server.host}" if _has_name(server) else " check-ssl"


def _has_name(server: ServerAddress) -> bool:
    return ":" not in server.host and re.search(r"[A-Za-z]", server.host) is not None


def _field(name: bytes) -> str:
    """Return the first field of a message, in hexadecimal: the name of a model."""
    size = len(name)
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    return (b"\x0a" + length + name).hex().upper()


def _quoted(path: Path) -> str:
    """Return a path as the configuration takes it."""
    return re.sub(r"([\\\"' #$])", r"\\\1", str(path))
