"""What an installation takes: disk and CPU time of each extra; disk and memory of a server of one model.

What each extra needs is installed into an environment of its own, with the versions of constraints.txt. Sizes are
without pip, and without Gangway, whose wheel is made in `build/packages`. A server starts in a cgroup, with ever less
memory; the least with which it has answered counts.
"""

import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc

from benchmarks.packages.canary import requirements
from benchmarks.packages.kept_rows import KeptRows
from testing.cgroup import Cgroup
from testing.fetching import FetchError, run
from testing.live_server import live_server
from testing.load import raw_channel, raw_infer
from testing.reference import example_of
from testing.report import ROOT, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

FOLDER = ROOT / "build" / "packages"
MIB = 1 << 20
LEFT_OUT = ("bench", "docs", "test")  # extras of those who work on Gangway
LIMITS_MIB = (1024, 768, 640, 512, 448, 384, 320, 256, 224, 192, 160, 128)
MODELS = ("mlp", "mobilenetv2", "resnet50", "bert_base")
CALL_TIMEOUT_S = 60


def make_wheel() -> Iterator[Row]:
    """Make Gangway's wheel; yield how long it took, and its size."""
    folder = FOLDER / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    begin, begin_cpu_s = time.monotonic(), cpu_s()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(ROOT)], check=True
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        unpacked = sum(each.file_size for each in opened.infolist())
    yield {
        "wheel": wheel.name,
        "MiB": wheel.stat().st_size / MIB,
        "unpacked": unpacked / MIB,
        "seconds": time.monotonic() - begin,
        "of CPU": cpu_s() - begin_cpu_s,
    }


def extras() -> list[str]:
    """Return the extras for users; first none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return ["", *(name for name in project["optional-dependencies"] if name not in LEFT_OUT)]


def extra_rows(extra: str) -> Iterator[Row]:
    """Yield one row: what an extra takes. Raises FetchError."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        begin_cpu_s = cpu_s()
        packages, size_bytes = install(extra, Path(name))
        yield {
            "extra": extra or "none",
            "packages": packages,
            "on disk, MiB": size_bytes / MIB,
            "CPU seconds": cpu_s() - begin_cpu_s,
        }


def cpu_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def install(extra: str, environment: Path) -> tuple[int, int]:
    """Install what an extra needs; return the number of packages and their bytes. Raises FetchError."""
    venv.create(environment, symlinks=True)
    command = [sys.executable, "-m", "pip", f"--python={environment / 'bin' / 'python'}", "--no-cache-dir", "install"]
    command += ["--quiet", "--disable-pip-version-check", f"--constraint={ROOT / 'constraints.txt'}"]
    needed = requirements((ROOT / "pyproject.toml").read_text(), [extra] if extra else [])
    run([*command, *map(str, needed)], f"the extra {extra}")
    (packages,) = environment.glob("lib/python*/site-packages")
    return len(list(packages.glob("*.dist-info"))), size_of(packages)


def size_of(folder: Path) -> int:
    """Return the bytes that the files of a folder take on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def server_rows(repository: Path, model: str) -> Iterator[Row]:
    """Yield one row: disk and memory of a server of one model, with an empty cache and with a filled one."""
    ensure_zoo(repository, [model])
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        served = Path(name) / "models"
        shutil.copytree(repository / model, served / model)
        cache = Path(name) / "cache"

        def starts(compiles: bool, limit_mib: int) -> bool:
            if compiles:
                shutil.rmtree(cache, ignore_errors=True)
            return answers_within(served, model, cache, limit_mib)

        first = least(partial(starts, True))
        answers_within(served, model, cache, LIMITS_MIB[0])
        later = least(partial(starts, False))
        yield {
            "model": model,
            "file, MiB": onnx_file(served, model).stat().st_size / MIB,
            "cache, MiB": size_of(cache) / MIB,
            "memory of the first start, MiB": first,
            "of later ones": later,
        }


def least(starts: Callable[[int], bool]) -> str:
    """Return the least of the limits with which a server starts, and all above; none is told by the largest."""
    found = f"above {LIMITS_MIB[0]}"
    for limit_mib in LIMITS_MIB:
        if not starts(limit_mib):
            break
        found = str(limit_mib)
    return found


def answers_within(repository: Path, model: str, cache: Path, limit_mib: int) -> bool:
    """Say whether a server with so much memory starts, and answers, without that the kernel kills a process."""
    example = example_of(model, onnx_file(repository, model))
    group = Cgroup("memory")
    try:
        group.limit_memory(limit_mib * MIB)
        with live_server(repository, [f"--cache-dir={cache}"], prefix=group.prefix) as server:
            with raw_channel(server.url) as channel:
                raw_infer(channel)(example.request, timeout=CALL_TIMEOUT_S)
            return group.out_of_memory_kills() == 0
    except (RuntimeError, grpc.RpcError) as error:
        print(f"{model}, {limit_mib} MiB: {str(error).strip().splitlines()[-1][:200]}", flush=True)
        return False
    finally:
        group.remove()


def main() -> int:
    """Measure what is asked for; return 1 if something could not be installed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--extras", nargs="*", default=extras(), help='which; "" is none')
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="of the zoo, for servers")
    parser.add_argument("--no-wheel", action="store_true", help="leave out the wheel, which takes minutes")
    parser.add_argument("--reuse", action="store_true", help="rows that an earlier run has made")
    options = parser.parse_args()
    report = start_report("What an installation takes")
    if not options.reuse:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = KeptRows(FOLDER / "rows.json")
    try:
        rows = [kept.of(f"extra {extra}", partial(extra_rows, extra), anew=False)[0] for extra in options.extras]
    except FetchError as error:
        sys.exit(f"install: {error}")
    if rows:
        report.table("extras", rows)
    of_models = {model: partial(server_rows, options.repository, model) for model in options.models}
    servers = [kept.of(f"server of {model}", rows_of, anew=False)[0] for model, rows_of in of_models.items()]
    if servers:
        report.table("servers", servers)
    if not options.no_wheel:
        report.table("wheel", kept.of("wheel", make_wheel, anew=False))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
