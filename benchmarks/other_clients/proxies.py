"""Proxies in front of a server's gRPC, as their manuals have it: HAProxy, nginx, Caddy, nghttpx."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testing.fetch.haproxy import with_haproxy
from testing.fetching import TOOLS, FetchError, debian_package
from testing.live_server import reserved_port

STOP_S = 20
LARGEST_BYTES = 256 << 20
HAPROXY_DEFAULTS = """defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
"""


@dataclass(frozen=True)
class Secrets:
    """PEM files: who signs, what a server shows, what a client shows. `both`: certificate and key of the server."""

    root: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path

    def joined(self, folder: Path, certificate: Path, key: Path) -> Path:
        """Return one file of certificate and key, as HAProxy wants it."""
        path = folder / f"{certificate.stem}.pem"
        path.write_bytes(certificate.read_bytes() + key.read_bytes())
        return path


@dataclass(frozen=True)
class Way:
    """Where a proxy listens and what it passes to. `secrets`: both ways speak TLS, and know their clients."""

    listen: str
    server: str
    folder: Path
    secrets: Secrets | None = None


def haproxy(way: Way) -> str:
    """Return HAProxy's configuration."""
    bind, server, secrets = f"{way.listen} proto h2", f"{way.server} proto h2", way.secrets
    if secrets is not None:
        own = secrets.joined(way.folder, secrets.certificate, secrets.key)
        client = secrets.joined(way.folder, secrets.client_certificate, secrets.client_key)
        bind = f"{way.listen} ssl crt {own} ca-file {secrets.root} verify required alpn h2"
        server = f"{way.server} ssl crt {client} ca-file {secrets.root} verify required alpn h2"
    return f"""
global
  stats socket {way.folder}/haproxy.sock mode 600 level admin expose-fd listeners
  tune.h2.initial-window-size 1048576
{HAPROXY_DEFAULTS}frontend in
  bind {bind}
  default_backend out
backend out
  server it {server}
"""


def nginx(way: Way) -> str:
    """Return nginx's configuration."""
    secrets, tls, scheme, listen = way.secrets, "", "grpc", f"{way.listen} http2"
    if secrets is not None:
        scheme, listen = "grpcs", f"{way.listen} ssl http2"
        tls = f"""
    ssl_certificate {secrets.certificate};
    ssl_certificate_key {secrets.key};
    ssl_client_certificate {secrets.root};
    ssl_verify_client on;
    grpc_ssl_certificate {secrets.client_certificate};
    grpc_ssl_certificate_key {secrets.client_key};
    grpc_ssl_trusted_certificate {secrets.root};
    grpc_ssl_verify on;
    grpc_ssl_name localhost;"""
    return f"""
worker_processes 1;
pid {way.folder}/nginx.pid;
error_log {way.folder}/error.log info;
daemon off;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {way.folder}/body;
  proxy_temp_path {way.folder}/proxy;
  fastcgi_temp_path {way.folder}/fastcgi;
  uwsgi_temp_path {way.folder}/uwsgi;
  scgi_temp_path {way.folder}/scgi;
  upstream server {{ server {way.server}; keepalive 8; }}
  server {{
    listen {listen};
    client_max_body_size 0;
    http2_max_concurrent_streams 1000;
    keepalive_timeout 60s;
    location / {{ grpc_pass {scheme}://server; grpc_read_timeout 60s; grpc_send_timeout 60s; }}{tls}
  }}
}}
"""


def haproxy_http(way: Way) -> str:
    """Return HAProxy's configuration for HTTP/1.1."""
    return f"""
{HAPROXY_DEFAULTS}frontend in
  bind {way.listen}
  default_backend out
backend out
  server it {way.server}
"""


def nginx_http(way: Way) -> str:
    """Return nginx's configuration for HTTP/1.1: events are passed on as they come."""
    pass_on = f"""proxy_pass http://{way.server}; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;"""
    return (
        nginx(way)
        .replace(f"{way.listen} http2", way.listen)
        .replace("grpc_pass grpc://server; grpc_read_timeout 60s; grpc_send_timeout 60s;", pass_on)
        .replace("http2_max_concurrent_streams 1000;", "")
    )


def caddy(way: Way) -> str:
    """Return Caddy's configuration.

    With certificates of clients it wants SNI and `:authority` to be equal (421 otherwise). Node's client takes the
    address for `:authority`, and Java's sends no SNI for a name without a dot.
    """
    secrets, strict = way.secrets, ""
    if secrets is None:
        site, front, back = f"http://{way.listen}", "", f"reverse_proxy h2c://{way.server}"
    else:
        site, strict = f"https://:{way.listen.rpartition(':')[2]}", "\n    strict_sni_host insecure_off"
        front = f"""bind 127.0.0.1
  tls {secrets.certificate} {secrets.key} {{
    client_auth {{
      mode require_and_verify
      trusted_ca_cert_file {secrets.root}
    }}
  }}"""
        back = f"""reverse_proxy https://{way.server} {{
    transport http {{
      tls_client_auth {secrets.client_certificate} {secrets.client_key}
      tls_trusted_ca_certs {secrets.root}
      tls_server_name localhost
      versions 2
    }}
  }}"""
    return f"""
{{
  admin off
  auto_https off
  servers {{
    protocols h1 h2 h2c{strict}
  }}
}}
{site} {{
  {front}
  {back}
}}
"""


def nghttpx(way: Way) -> str:
    """Return nghttpx's configuration."""
    host, _, port = way.listen.rpartition(":")
    back_host, _, back_port = way.server.rpartition(":")
    front, back, secrets, tls = ";no-tls", "", way.secrets, ""
    if secrets is not None:
        front, back = "", ";tls;sni=localhost"
        tls = f"""
private-key-file={secrets.key}
certificate-file={secrets.certificate}
verify-client=yes
verify-client-cacert={secrets.root}
cacert={secrets.root}
client-private-key-file={secrets.client_key}
client-cert-file={secrets.client_certificate}"""
    return f"""
frontend={host},{port}{front}
backend={back_host},{back_port};;proto=h2{back}
workers=1{tls}
errorlog-file={way.folder}/error.log
single-process=yes
"""


@dataclass(frozen=True)
class Proxy:
    """A proxy: Debian's packages that have it, its program there, its configuration and flags, and how it reloads."""

    packages: tuple[str, ...]
    program: str
    configuration: Callable[[Way], str]
    flags: Callable[[Path], Sequence[str]]
    reload: signal.Signals | None = None

    def command(self) -> list[str]:
        """Return how it is called: as the machine has it, else as Debian has it. Raises FetchError."""
        name = Path(self.program).name
        found = shutil.which(name, path=with_haproxy()["PATH"]) or shutil.which(name, path="/usr/sbin")
        if found:
            return [found]
        folder = TOOLS / "proxies" / name
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=TOOLS) as scratch:
                for package in self.packages:
                    content = debian_package(package, Path(scratch), f"install {name} by hand")
                    shutil.copytree(content, folder, symlinks=True, dirs_exist_ok=True)
        libraries = folder / "usr/lib/x86_64-linux-gnu"
        return ["env", f"LD_LIBRARY_PATH={libraries}", str(folder / self.program)]


PROXIES: Mapping[str, Proxy] = {
    "haproxy": Proxy((), "haproxy", haproxy, lambda file: ["-W", "-db", "-f", str(file)], signal.SIGUSR2),
    "nginx": Proxy(
        ("nginx",),
        "usr/sbin/nginx",
        nginx,
        lambda file: ["-c", str(file), "-e", str(file.parent / "error.log"), "-p", str(file.parent)],
        signal.SIGHUP,
    ),
    "caddy": Proxy(("caddy",), "usr/bin/caddy", caddy, lambda file: ["run", "--adapter=caddyfile", f"--config={file}"]),
    "nghttpx": Proxy(("nghttp2-proxy", "libev4"), "usr/sbin/nghttpx", nghttpx, lambda file: [f"--conf={file}"]),
}


HTTP_CONFIGURATIONS: Mapping[str, Callable[[Way], str]] = {"haproxy": haproxy_http, "nginx": nginx_http}


@dataclass(frozen=True)
class LiveProxy:
    """Where it listens, and its process. `reload` makes it read its configuration again, if it can."""

    url: str
    process: "subprocess.Popen[bytes]"
    folder: Path
    reload: signal.Signals | None


@contextmanager
def proxied(
    name: str, server: str, secrets: Secrets | None = None, configuration: Callable[[Way], str] | None = None
) -> Iterator[LiveProxy]:
    """Pass calls on to a server until the block ends; of gRPC, unless a configuration is given. Raises FetchError."""
    proxy = PROXIES[name]
    command = proxy.command()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = stack.enter_context(reserved_port())
        listen = f"127.0.0.1:{port}"
        file = folder / "configuration"
        file.write_text((configuration or proxy.configuration)(Way(listen, server, folder, secrets)))
        log = stack.enter_context((folder / "log").open("wb"))
        environment = {**os.environ, "HOME": str(folder)}
        process = subprocess.Popen(
            [*command, *proxy.flags(file)], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _await_listening(port, process, folder / "log")
            yield LiveProxy(listen, process, folder, proxy.reload)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_listening(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when somebody listens. Raises FetchError if the proxy ends instead."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), STOP_S).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return
    raise FetchError(f"the proxy ended with status {process.returncode}: {log.read_text()[-1000:]}")
