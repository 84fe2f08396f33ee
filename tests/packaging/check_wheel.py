"""`python tests/packaging/check_wheel.py FOLDER PYTHON...`: install wheels in fresh environments, and serve with them.

For each Python, with its wheel: all extras compile two models into a cache; then no extra serves the compiled one from
that cache, and says which extra the other needs; then the extra `onnxruntime` serves both. No pins: the newest versions
within the bounds of pyproject.toml. With --lowest they are the oldest ones, which uv finds.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 300
COMPILED, STRINGS = "simple", "simple_string"  # both add and subtract; onnxruntime serves the second
NUMBERS, ONES = list(range(16)), [1] * 16


def main(argv: Sequence[str]) -> int:
    """Check each Python; return 0. Whatever is wrong ends the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the wheels")
    parser.add_argument("python", nargs="+", help="interpreters to check with")
    parser.add_argument("--lowest", action="store_true", help="install the lowest versions that the bounds admit")
    options = parser.parse_args(argv)
    for python in options.python:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            check(wheel_of(options.folder.resolve(), python), python, Path(scratch), options.lowest)
        print(f"{python}: serves, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(options.python)} passed, 0 failed")
    return 0


def wheel_of(folder: Path, python: str) -> Path:
    """Return the wheel of a Python. Raises AssertionError if there is none, or several."""
    command = [python, "-c", "import sys; print('cp{}{}'.format(*sys.version_info))"]
    tag = subprocess.check_output(command, text=True).strip()
    wheels = list(folder.glob(f"*-{tag}-{tag}-*.whl"))
    assert len(wheels) == 1, f"{folder} has {len(wheels)} wheels for {python}"
    return wheels[0]


def check(wheel: Path, python: str, folder: Path, lowest: bool) -> None:
    """Install and serve in environments of one Python. Raises AssertionError, CalledProcessError."""
    whole, core = folder / "whole", folder / "core"
    install(whole, python, f"{wheel}[all]", lowest)
    version = subprocess.check_output([whole / "bin/python", "-m", "gangway", "--version"], text=True)
    assert version.startswith("gangway "), version
    why_interpreted = "from gangway.scheduler import WHY_INTERPRETED; print(WHY_INTERPRETED)"
    assert subprocess.check_output([whole / "bin/python", "-c", why_interpreted], text=True) == "\n"
    run(whole, "zoo", folder / "models", COMPILED, STRINGS)
    for model in (COMPILED, STRINGS):  # the server would do it, too, beside everything else that this machine does
        run(whole, "compile", f"--cache-dir={folder / 'cache'}", folder / "models" / model)
    with server(whole, folder) as port:
        assert add(port, COMPILED, NUMBERS) == add(port, STRINGS, [*map(str, NUMBERS)]) == [n + 1 for n in NUMBERS]

    install(core, python, str(wheel), lowest)
    with server(core, folder) as port:
        assert add(port, COMPILED, NUMBERS) == [n + 1 for n in NUMBERS]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
            assert b"<title>Gangway</title>" in page.read()
        run(core, "top", f"127.0.0.1:{port}", "--once")
        assert "pip install 'gangway-serve[onnxruntime]'" in refusal(port, STRINGS)
    assert "pip install 'gangway-serve[compile]'" in failure(core, "zoo", folder / "others")
    empty = f"--cache-dir={folder / 'empty'}"
    assert "pip install 'gangway-serve[compile]'" in failure(core, "compile", empty, folder / "models" / COMPILED)

    install(core, python, f"{wheel}[onnxruntime]", lowest)
    with server(core, folder) as port:
        assert add(port, STRINGS, [*map(str, NUMBERS)]) == [n + 1 for n in NUMBERS]


def install(environment: Path, python: str, what: str, lowest: bool) -> None:
    """Install into a new environment, or one that is there."""
    if not environment.exists():
        subprocess.run([python, "-m", "venv", environment], check=True)
    if lowest:
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", environment, "--resolution=lowest-direct"]
        subprocess.run([*command, "--quiet", what], check=True)
    else:
        command = [environment / "bin/pip", "install", "--disable-pip-version-check"]
        subprocess.run([*command, "--quiet", "--quiet", what], check=True)


def run(environment: Path, *arguments: Path | str) -> None:
    """Run a command of Gangway, which must succeed."""
    subprocess.run([environment / "bin/gangway", *arguments], check=True, stdout=subprocess.DEVNULL)


def failure(environment: Path, *arguments: Path | str) -> str:
    """Return the one line that a command says, which must fail."""
    ended = subprocess.run([environment / "bin/gangway", *arguments], check=False, text=True, capture_output=True)
    assert ended.returncode == 1 and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    return ended.stderr


@contextmanager
def server(environment: Path, folder: Path, cwd: Path | None = None, prefix: Sequence[str] = ()) -> Iterator[int]:
    """Serve the models; yield the port of HTTP. Afterwards the server must end well.

    `prefix`: words before the command, of a program that becomes it.
    """
    ports = free_ports(3)
    names = ("http", "grpc", "metrics")
    flags = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    repository = ("--model-repository", folder / "models", "--cache-dir", folder / "cache", "--cores", "1")
    command = [*prefix, environment / "bin/gangway", "serve", *repository, *flags]
    log = folder / "server.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=cwd) as process:
        try:
            end = time.monotonic() + START_SECONDS
            while "ready: gRPC" not in log.read_text():
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield ports[0]
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
        assert status == 0, log.read_text()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def add(port: int, model: str, numbers: Sequence[int | str]) -> list[int]:
    """Return what a model answers: numbers plus one."""
    kind = "BYTES" if isinstance(numbers[0], str) else "INT32"
    ones = [str(one) for one in ONES] if kind == "BYTES" else ONES
    inputs = [
        {"name": f"INPUT{number}", "shape": [1, 16], "datatype": kind, "data": data}
        for number, data in enumerate((numbers, ones))
    ]
    body = json.dumps({"inputs": inputs, "outputs": [{"name": "OUTPUT0"}]}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}/infer", body, timeout=30) as answer:
        return [int(value) for value in json.load(answer)["outputs"][0]["data"]]


def refusal(port: int, model: str) -> str:
    """Return why a model does not answer."""
    try:
        add(port, model, ["1"] * 16)
    except urllib.error.HTTPError as error:
        return error.read().decode()
    raise AssertionError(f"{model} answers")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
