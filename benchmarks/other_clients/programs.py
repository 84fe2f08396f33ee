"""Clients in other languages: how each is built, and what is asked of it, straight and through proxies.

Debian's packages have what they are built of, but for Node's, which come by npm.

A program is called with the folder of `messages.py`, an address and, for TLS, files: root, certificate and key. It
prints a line of JSON for each check. A line that asks for something, `kill` or `drain`, is answered by an empty line.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.other_clients.messages import FORWARDED, MOST_BYTES, write_http, write_messages, write_repository
from benchmarks.other_clients.proxies import HTTP_CONFIGURATIONS, LiveProxy, Secrets, proxied
from testing.fetching import TOOLS, FetchError, run
from testing.live_server import LiveServer, live_server

FOLDER = Path(__file__).with_name("programs")
BUILT = TOOLS / "clients"
TIMEOUT_S = 240
JARS = (
    *(f"grpc-{part}" for part in ("api", "context", "core", "netty", "stub")),
    *(f"netty-{part}" for part in ("buffer", "codec", "codec-http", "codec-http2", "codec-socks", "common", "handler")),
    *(f"netty-{part}" for part in ("handler-proxy", "resolver", "transport", "transport-native-epoll", "tcnative")),
    *("netty-transport-native-unix-common", "guava", "failureaccess", "perfmark-api"),
)
NODE = {"@grpc/grpc-js": "1.14.7", "axios": "1.21.1", "undici": "7"}
JNI = Path("/usr/lib/x86_64-linux-gnu/jni/libnetty-tcnative.so")


def go() -> list[str]:
    """Build the program in Go with Debian's packages. Raises FetchError."""
    _need("go", "golang-go golang-google-grpc-dev")
    built = BUILT / "client_go"
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
    _build(["go", "build", "-o", str(built), str(FOLDER / "client.go")], "golang-google-grpc-dev", environment)
    return [str(built)]


def cpp() -> list[str]:
    """Build the program in C++. Raises FetchError."""
    _need("g++", "g++ libgrpc++-dev")
    built = BUILT / "client_cpp"
    told = subprocess.run(["pkg-config", "--libs", "grpc++"], check=False, capture_output=True, text=True)
    libraries = told.stdout.split()
    _build(["g++", "-std=c++17", "-o", str(built), str(FOLDER / "client.cc"), *libraries], "libgrpc++-dev")
    return [str(built)]


def node(script: str = "client.js") -> list[str]:
    """Fetch the clients for Node. Raises FetchError."""
    _need("npm", "nodejs npm")
    folder = BUILT / "node"
    folder.mkdir(parents=True, exist_ok=True)
    if not all((folder / "node_modules" / name).exists() for name in NODE):
        packages = [f"{name}@{version}" for name, version in NODE.items()]
        run(["npm", "install", "--silent", "--prefix", str(folder), *packages], " and ".join(packages))
    shutil.copy(FOLDER / script, folder / script)
    return ["node", str(folder / script)]


def java() -> list[str]:
    """Build the program in Java with Debian's packages. Raises FetchError."""
    packages = "libgrpc-java libnetty-java libnetty-tcnative-java libperfmark-java libguava-java"
    _need("javac", packages)
    folder = BUILT / "java"
    folder.mkdir(parents=True, exist_ok=True)
    jars = ":".join(str(jar) for name in JARS for jar in (Path("/usr/share/java") / f"{name}.jar",) if jar.exists())
    _build(["javac", "-cp", jars, "-d", str(folder), str(FOLDER / "Client.java")], packages)
    if JNI.exists():  # Netty knows it by another name than Debian's
        shutil.copy(JNI, folder / "libnetty_tcnative_linux_x86_64.so")
    return ["java", f"-Djava.library.path={folder}", "-cp", f"{folder}:{jars}", "Client"]


def java_http() -> list[str]:
    """Return how Java's own HTTP client is run. Raises FetchError."""
    _need("java", "default-jdk-headless")
    return ["java", str(FOLDER / "ClientHttp.java")]


def tritonclient() -> list[str]:
    """Return how the script with Triton's own client is run."""
    return [sys.executable, "-m", "benchmarks.other_clients.client_tritonclient"]


def curl() -> list[str]:
    """Return how the script that calls curl is run. Raises FetchError."""
    _need("curl", "curl")
    return [sys.executable, "-m", "benchmarks.other_clients.client_curl"]


PROGRAMS: Mapping[str, Callable[[], list[str]]] = {
    "go": go,
    "cpp": cpp,
    "node": node,
    "java": java,
    "tritonclient": tritonclient,
}
OVER_HTTP: Mapping[str, Callable[[], list[str]]] = {
    "node-http": lambda: node("client_http.js"),
    "java-http": java_http,
    "curl": curl,
}


def _need(program: str, packages: str) -> None:
    if shutil.which(program) is None:
        raise FetchError(f"there is no {program}: apt-get install {packages}")


def _build(command: list[str], packages: str, environment: Mapping[str, str] | None = None) -> None:
    BUILT.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise FetchError(f"{command[0]} does not end within {TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise FetchError(f"{command[0]} fails; apt-get install {packages}?\n{done.stderr[-1000:]}")


@dataclass(frozen=True)
class Asked:
    """What a program is run against: a server, straight or through a proxy."""

    server: LiveServer
    proxy: LiveProxy | None = None

    @property
    def url(self) -> str:
        """Return where it connects to."""
        return self.server.url if self.proxy is None else self.proxy.url

    def do(self, what: str) -> None:
        """Do what the program asks for."""
        if what == "kill":
            os.kill(self.server.pids()["front end"][0], signal.SIGKILL)
        elif what == "drain":
            if self.proxy is not None and self.proxy.reload is not None:
                self.proxy.process.send_signal(self.proxy.reload)
            self.server.process.send_signal(signal.SIGTERM)


def checks(command: Sequence[str], do: Callable[[str], None] = lambda what: None) -> Iterator[tuple[str, str]]:
    """Run a program; yield each check and its problem, "" if there is none. `do` does what the program asks for."""
    given = list(command)
    process = subprocess.Popen(
        given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None, "pipes"
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    for line in process.stdout:
        told = json.loads(line) if line.startswith("{") else {}
        if "ask" in told:
            do(told["ask"])
            process.stdin.write("\n")
            process.stdin.flush()
        elif "check" in told:
            yield told["check"], told["problem"]
    timer.cancel()
    errors = process.stderr.read()
    if process.wait() != 0:
        yield "all", f"it ended with status {process.returncode}: {errors[-300:]}"


def messages_of(folder: Path) -> tuple[Path, Path]:
    """Write repository and messages; return both."""
    repository, messages = write_repository(folder / "models"), folder / "messages"
    messages.mkdir()
    with live_server(repository) as server:
        write_messages(messages, server.url)
    return repository, messages


def secrets_of(folder: Path) -> Secrets:
    """Make certificates by openssl. Raises FetchError."""
    names = {"root": "/CN=authority", "server": "/CN=localhost", "client": "/CN=client"}
    for name, subject in names.items():
        key = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        own = [
            "-subj",
            subject,
            "-days",
            "2",
            "-keyout",
            str(folder / f"{name}.key"),
            "-out",
            str(folder / f"{name}.crt"),
        ]
        if name == "root":
            own += ["-addext", "keyUsage=critical,keyCertSign"]
        else:
            own += ["-CA", str(folder / "root.crt"), "-CAkey", str(folder / "root.key")]
            own += [
                "-addext",
                "subjectAltName=DNS:localhost,IP:127.0.0.1",
                "-addext",
                "basicConstraints=critical,CA:FALSE",
            ]
        run([*key, *own], "certificates")
    return Secrets(*(folder / name for name in ("root.crt", "server.crt", "server.key", "client.crt", "client.key")))


def ask(name: str, through: str, secure: bool) -> Iterator[tuple[str, str]]:
    """Yield the checks of a program: of a server of its own, through a proxy unless that is "". Raises FetchError."""
    command = PROGRAMS[name]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repository, messages = messages_of(folder)
        secrets = secrets_of(folder) if secure else None
        flags = ["--grpc-infer-response-compression-level=low", f"--grpc-max-message-bytes={MOST_BYTES}", *FORWARDED]
        credentials, tls = None, list[Path]()
        if secrets is not None:
            tls = [secrets.root, secrets.client_certificate, secrets.client_key]
            flags += ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={secrets.root}"]
            flags += [f"--grpc-server-cert={secrets.certificate}", f"--grpc-server-key={secrets.key}"]
            root, certificate, key = [path.read_bytes() for path in tls]
            credentials = grpc.ssl_channel_credentials(root, key, certificate)
        server = stack.enter_context(live_server(repository, flags, credentials))
        proxy = stack.enter_context(proxied(through, server.url, secrets)) if through else None
        asked = Asked(server, proxy)
        yield from checks([*command, str(messages), asked.url, *map(str, tls)], asked.do)


def ask_http(command: Sequence[str], through: str = "") -> Iterator[tuple[str, str]]:
    """Yield the checks of a program that speaks HTTP, of a server of its own, through a proxy unless that is ""."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(live_server(write_repository(folder / "models"), FORWARDED))
        url = server.http_url
        write_http(folder, url)
        if through:
            url = stack.enter_context(proxied(through, url, configuration=HTTP_CONFIGURATIONS[through])).url
        yield from checks([*command, str(folder), url])
