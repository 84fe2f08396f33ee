"""Flags of the server itself: the repository, how models are executed, cores and scheduling, traces, the log."""

import argparse
import errno
import os
import re
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter, not_
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from gangway.artifact.precision import FP32, PRECISIONS
from gangway.base.flags import flag, from_flags
from gangway.base.numbers import INT32_MAX, integer
from gangway.executor.launch import available_cores, nodes_of
from gangway.server.messages import FORMATS, LogSettings
from gangway.server.models.settings import RateLimits
from gangway.server.options.backend_settings import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_START_SECONDS,
    backend_setting,
    read_default_max_batch_size,
    read_python_environment,
    read_python_start_seconds,
    settings_without_effect,
)
from gangway.server.options.values import boolean, folder, readable_file, seconds, writable_file
from gangway.server.tracing.settings import TraceConfig, trace_config_of

ALL_MODELS = "*"
ONNX_SUFFIX = ".onnx"

URL = re.compile(r"(?:([^=/]+)=)?([A-Za-z][A-Za-z0-9+.-]*://.+)")
COPIES = "repositories"  # in the cache folder

Mode = Literal["none", "poll", "explicit"]
ModelFile: TypeAlias = tuple[str, Path]  # a model's name, and the ONNX file that it is, without a repository


@dataclass(frozen=True)
class RemoteSource:
    """`url`: of a repository, or of an ONNX file that is the model `name`. `folder`: of its copy on this machine."""

    url: str
    folder: Path
    name: str = ""

    @property
    def protocol(self) -> str:
        """What stands before "://"."""
        return self.url.partition("://")[0]


def _add_sources(parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add("models", nargs="*", type=_source, metavar="MODELS",
        help="folders of models, and ONNX files, each a model with the name of its file; NAME=FILE gives another"
        " name; also s3://, gs://, hf:// and https:// URLs")  # fmt: skip
    add("--model-repository", "--model-store", action="append", default=[], type=_source,
        metavar="DIR", help="the same as MODELS; may be given several times")  # fmt: skip


def _sources(arguments: argparse.Namespace) -> list[Path | ModelFile | str]:
    return [*arguments.models, *arguments.model_repository]


def _folders(arguments: argparse.Namespace) -> tuple[Path, ...]:
    if not (sources := _sources(arguments)):
        raise ValueError("name a folder of models or an ONNX file")
    given = (source for source in sources if isinstance(source, Path))
    return (*given, *(remote.folder for remote in _remotes(arguments)))


def _files(arguments: argparse.Namespace) -> tuple[ModelFile, ...]:
    sources = _sources(arguments)
    files = [source for source in sources if isinstance(source, tuple)]
    files += [file for source in sources if isinstance(source, Path) for file in files_of(source)]
    for name, count in Counter(name for name, _ in files).items():
        if count > 1:
            raise ValueError(f"{count} files are models called {name!r}: give another name, as NAME=FILE")
    return tuple(files)


def _remotes(arguments: argparse.Namespace) -> tuple[RemoteSource, ...]:
    return tuple(_remote(source, arguments.cache_dir) for source in _sources(arguments) if isinstance(source, str))


def _add_load_model(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--load-model", action="append", default=[], metavar="NAME",
        help="explicit: load this model at the start; may be given several times; `*` alone: every one")  # fmt: skip


def _load_models(arguments: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(arguments.load_model))
    if names and arguments.model_control_mode != "explicit":
        raise ValueError("only with --model-control-mode=explicit")
    if ALL_MODELS in names and len(names) > 1:
        raise ValueError(f"{ALL_MODELS} is possible only alone")
    return names


def files_of(folder: Path) -> tuple[ModelFile, ...]:
    """Return the ONNX files of a folder that holds no folders, as models: nobody means it as an empty repository."""
    if any(member.is_dir() and not member.name.startswith(".") for member in folder.iterdir()):
        return ()
    return tuple((file.stem, readable_file(str(file))) for file in sorted(folder.glob(f"*{ONNX_SUFFIX}")))


def _source(text: str) -> Path | ModelFile | str:
    """Read a folder of models, an ONNX file, NAME=FILE, or a URL, which stays as it is."""
    if URL.fullmatch(text):
        return text
    path = Path(text)
    name, equals, file = text.partition("=")
    if equals and not path.exists():
        return _model_file(Path(file), name)
    if path.suffix == ONNX_SUFFIX and not path.is_dir():
        return _model_file(path, path.stem)
    if path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a folder, nor a file that ends with {ONNX_SUFFIX}")
    return folder(text)


def _remote(text: str, cache_dir: Path) -> RemoteSource:
    """Read the URL of a repository or of an ONNX file, or NAME=URL."""
    matched = URL.fullmatch(text)
    assert matched is not None, text
    name, url = matched.groups(default="")
    if url.partition("?")[0].endswith(ONNX_SUFFIX):
        name = name or url.partition("?")[0].rpartition("/")[2].removesuffix(ONNX_SUFFIX)
    elif name:
        raise ValueError(f"{text}: only an ONNX file can be given a name")
    return RemoteSource(url, cache_dir / COPIES / sha256(text.encode()).hexdigest()[:16], name)


def _model_file(path: Path, name: str) -> ModelFile:
    path = readable_file(str(path))
    if name.startswith(".") or "/" in name or not name.isprintable():
        raise argparse.ArgumentTypeError(f"{name!r} is no name for a model: give one, as NAME={path}")
    return name, path


def _config_name(text: str) -> str:
    if not text.isprintable() or " " in text or "/" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a file without .pbtxt, which has neither spaces nor /"
        )
    return text


@dataclass(frozen=True)
class RepositoryOptions:
    """`folders` hold one folder per model, those of the copies of `remotes`, too; `files` are models. `mode`: who
    decides what is loaded after the start.

    `load_models` (explicit only): names to load at the start; ALL_MODELS alone means every one. `complete_configs`:
    what a configuration leaves out is taken from the model. `config_name`: as of `read_model`. Times are in seconds, 0:
    never.
    """

    folders: tuple[Path, ...] = from_flags("MODELS", _folders, _add_sources, ("--model-repository",), default=())
    mode: Mode = flag("--model-control-mode", "none", is_common=True, type=str.lower, choices=get_args(Mode),
        help="none: load every model at the start; poll: follow changes of the repository; "
        "explicit: load and unload what clients ask for (none)")  # fmt: skip
    poll_seconds: float = flag("--repository-poll-secs", 15.0, is_common=True, type=seconds, metavar="SECONDS",
        help="poll: how often to look for changes, 0: never (15)")  # fmt: skip
    load_models: tuple[str, ...] = from_flags("--load-model", _load_models, _add_load_model, ("--load-model",),
        default=())  # fmt: skip
    strict_readiness: bool = flag("--strict-readiness", True, type=boolean, metavar="BOOL",
        help="the server is ready only while every model is (true)")  # fmt: skip
    exit_on_error: bool = flag("--exit-on-error", False, is_common=True, type=boolean, metavar="BOOL",
        help="end when a model cannot be loaded at the start; otherwise the others are served (false)")  # fmt: skip
    complete_configs: bool = flag("--disable-auto-complete-config", True, action="store_true", unless_given=False,
        read=not_,
        help="refuse a model whose config.pbtxt does not say everything, instead of asking the model")  # fmt: skip
    config_name: str = flag("--model-config-name", "", type=_config_name, metavar="NAME",
        help="configure models by configs/NAME.pbtxt of their folders, where it is there (config.pbtxt)")  # fmt: skip
    files: tuple[ModelFile, ...] = from_flags("MODELS", _files, default=())
    remotes: tuple[RemoteSource, ...] = from_flags("MODELS", _remotes, default=())


CACHE_IMPLEMENTATION = "local"
RATE_LIMIT_MODES = ("off", "execution_count")
BATCHING_MODES = ("auto", "off")


def _add_rate_limits(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--rate-limit", type=str.lower, choices=RATE_LIMIT_MODES, default=RATE_LIMIT_MODES[0],
        help="whether resources and priorities of instance groups count (%(default)s)")  # fmt: skip
    parser.add_argument("--rate-limit-resource", type=_resource, action="append", default=[], metavar="NAME:COUNT",
        help="how much there is of a resource; otherwise what the model needs that needs most of it")  # fmt: skip


def _rate_limits(arguments: argparse.Namespace) -> RateLimits:
    return RateLimits(arguments.rate_limit != RATE_LIMIT_MODES[0], tuple(arguments.rate_limit_resource))


def _cache_bytes(text: str) -> int:
    """Read "local,size=1048576"."""
    implementation, _, setting = text.partition(",")
    if implementation != CACHE_IMPLEMENTATION:
        raise argparse.ArgumentTypeError(f"cache '{implementation}' is not supported, only '{CACHE_IMPLEMENTATION}'")
    name, _, size = setting.partition("=")
    if name != "size" or not _is_count(size):
        raise argparse.ArgumentTypeError(f"expected 'local,size=BYTES', got '{text}'")
    return int(size)


def _resource(text: str) -> tuple[str, int]:
    """Read "NAME:COUNT"."""
    name, _, count = text.partition(":")
    if ":" in count:
        raise argparse.ArgumentTypeError(f"'{text}' names a device, there is only one: expected 'NAME:COUNT'")
    if not name or not _is_count(count) or int(count) > INT32_MAX:
        raise argparse.ArgumentTypeError(f"expected 'NAME:COUNT', got '{text}'")
    return name, int(count)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


@dataclass(frozen=True)
class ModelOptions:
    """`cache_bytes`: memory of the response cache; 0: there is none. `batching`: requests may be joined and split.
    `precision`: of models whose configuration names none.

    `default_max_batch_size`: of models without a configuration whose first dimension may be a batch.
    `python_environment`: of Python models whose configuration names none; empty: the server's own.
    `python_start_seconds`: how long an instance of one may take until it is initialised. `strict_python_outputs`: their
    answers must be as their configurations say. `serve_while_compiling`: onnxruntime serves models until they are
    compiled, whose configurations do not say whether. `memory_mib`: that all models may hold; 0: any number.
    `warnings`: a sentence for each setting that has no effect.
    """

    cache_bytes: int = flag("--cache-config", 0, type=_cache_bytes, is_common=True, metavar="local,size=BYTES",
        help="memory for answers of models with `response_cache { enable: true }` (none)")  # fmt: skip
    rates: RateLimits = from_flags("", _rate_limits, _add_rate_limits, default_factory=RateLimits)
    default_max_batch_size: int = flag("--backend-config", DEFAULT_MAX_BATCH_SIZE, type=backend_setting,
        action="append", unless_given=[], read=read_default_max_batch_size, metavar="[BACKEND,]SETTING=VALUE",
        help="default-max-batch-size=N: the batch of models without a configuration"
        f" ({DEFAULT_MAX_BATCH_SIZE}); python,execution-env-path=PATH: the environment of Python models that name none;"
        f" python,stub-timeout-seconds=N: how long `initialize` of one may take ({DEFAULT_START_SECONDS});"
        " other settings of Triton's have no effect, and a line in the log says why")  # fmt: skip
    python_environment: str = from_flags("", read_python_environment, default="")
    python_start_seconds: int = from_flags("", read_python_start_seconds, default=DEFAULT_START_SECONDS)
    strict_python_outputs: bool = flag("--strict-python-outputs", False, action="store_true",
        help="refuse answers of Python models with outputs, types or shapes that their configurations have not, instead"
        " of passing them on as they are, with a warning")  # fmt: skip
    batching: bool = flag("--batching", True, choices=BATCHING_MODES, unless_given=BATCHING_MODES[0], is_common=True,
        read=BATCHING_MODES[0].__eq__,
        help="whether requests are joined to batches, and large ones split over gangs (%(default)s)")  # fmt: skip
    precision: str = flag("--precision", FP32, choices=PRECISIONS, is_common=True,
        help="of products in kernels, in models whose configuration names none (%(default)s)")  # fmt: skip
    serve_while_compiling: bool = flag("--serve-while-compiling", False, action="store_true", is_common=True,
        help="have onnxruntime serve models that are not in the cache until they are compiled, instead of their being"
        " ready only then")  # fmt: skip
    idle_unload_s: float = flag("--idle-unload-s", 0.0, type=seconds, metavar="SECONDS",
        help="have workers give back the memory of a model that has had no request for so long, and load it at the next"
        " one, where its configuration does not say otherwise (0: never)")  # fmt: skip
    memory_mib: int = flag("--models-memory-mib", 0, type=integer(0, 1 << 30), metavar="MIB",
        help="have workers give back the memory of the models that were asked longest ago, while weights of loaded"
        " models need more than this, and load each at its next request (0: no limit)")  # fmt: skip
    warnings: tuple[str, ...] = from_flags("", settings_without_effect, default=())


SERVER_NAME = "gangway"
MAX_NAME_CHARACTERS = 256
MAX_FRONT_ENDS = 16
PROFILE_SECONDS = 15.0


def _default_cache_dir() -> Path:
    from gangway.artifact.cache import default_cache_dir  # noqa: PLC0415 - not in the front end, which starts sooner

    return default_cache_dir()


def _add_cache_dir(parser: argparse._ArgumentGroup) -> None:
    from gangway.artifact.cache import add_cache_dir  # noqa: PLC0415 - as above

    add_cache_dir(parser)


def _add_scheduler(parser: argparse._ArgumentGroup) -> None:
    from gangway.scheduler.policies.registry import DEFAULT_POLICY, POLICIES  # noqa: PLC0415 - as above

    parser.add_argument("--scheduler", type=_scheduler, default=DEFAULT_POLICY, metavar="NAME",
        help=f"scheduling policy: {', '.join(sorted(POLICIES))} ({DEFAULT_POLICY})")  # fmt: skip


def _add_numa_nodes(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--numa-nodes", default="all", metavar="LIST;LIST",
        help="which of the cores are of one NUMA node, like 0-3;4-7; no gang has cores of two (as the"
        " system says)")  # fmt: skip


def _add_profile_seconds(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--profile-seconds", type=seconds, default=PROFILE_SECONDS, metavar="SECONDS",
        help="how long to measure a model that has no profile, while there are no requests (15)")  # fmt: skip
    parser.add_argument("--no-profile", action="store_const", const=0.0, dest="profile_seconds", help="measure none")


def _scheduler(text: str) -> str:
    from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy  # noqa: PLC0415 - as above

    try:
        if text != DEFAULT_POLICY:  # which needs no look
            make_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _cores(text: str) -> tuple[int, ...]:
    try:
        return tuple(available_cores(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _name(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_NAME_CHARACTERS:
        raise argparse.ArgumentTypeError(f"a name has 1 to {MAX_NAME_CHARACTERS} characters that can be printed")
    return text


@dataclass(frozen=True)
class GeneralOptions:
    """`id` is the name that clients are told. `cores` are CPU numbers, in order; each gets one pinned worker.
    `numa_nodes` are those of each node; no gang crosses them.
    `front_ends`: processes that share the ports. Times are in seconds.
    """

    id: str = flag("--id", SERVER_NAME, type=_name, metavar="NAME",
        help="the server's name in its metadata (%(default)s)")  # fmt: skip
    cores: tuple[int, ...] = flag("--cores", (), is_common=True, type=_cores, unless_given="all", metavar="LIST",
        help="cores that compute, like 0,2-3; `all` honours affinity mask and CPU quota; 0-1x8 has eight"
        " workers on each, for tests (all)")  # fmt: skip
    numa_nodes: tuple[tuple[int, ...], ...] = from_flags("--numa-nodes",
        lambda given: nodes_of(given.numa_nodes, given.cores), _add_numa_nodes, default=())  # fmt: skip
    front_ends: int = flag("--front-ends", 1, type=integer(1, MAX_FRONT_ENDS), metavar="N",
        help="processes that talk with clients and share the ports (%(default)s)")  # fmt: skip
    cache_dir: Path = from_flags("--cache-dir", attrgetter("cache_dir"), _add_cache_dir, ("--cache-dir",),
        default_factory=_default_cache_dir)  # fmt: skip
    max_cache_gib: int = flag("--max-cache-gib", 20, type=integer(0, 1 << 20), metavar="GIB",
        help="size of the folder of compiled models, from which the least recently used ones are removed, but none that"
        " a server uses; 0: no limit (%(default)s)")  # fmt: skip
    scheduler: str = from_flags("--scheduler", attrgetter("scheduler"), _add_scheduler, ("--scheduler",),
        default="")  # fmt: skip  # only the parser loads the policies
    load_threads: int = flag("--model-load-thread-count", 0, type=integer(1), metavar="N",
        help="models that are compiled beside each other while the server starts (as many as there are cores, 4 at"
        " most)")  # fmt: skip
    max_shapes: int = flag("--max-shapes", 8, type=integer(0), metavar="N",
        help="sizes of its symbolic dimensions that a model is compiled for at a time, 0: none (8)")  # fmt: skip
    compile_ahead: int = flag("--compile-ahead", 512, type=integer(0), metavar="SIZE",
        help="up to which size of a symbolic dimension models without convolutions are compiled before requests ask for"
        " it, 0: none (%(default)s)")  # fmt: skip
    profile_seconds: float = from_flags("--profile-seconds", attrgetter("profile_seconds"), _add_profile_seconds,
        ("--no-profile",), default=PROFILE_SECONDS)  # fmt: skip
    allow_client_shm: bool = flag("--allow-client-shm", True, type=boolean, metavar="BOOL",
        help="let clients register shared memory for inputs and outputs (true)")  # fmt: skip
    exit_delay_secs: float = flag("--exit-delay-secs", 0.0, type=seconds, metavar="SECONDS",
        help="how long after SIGTERM the server only says that it is not ready, before it refuses requests: time for a"
        " router to send none here (0)")  # fmt: skip
    exit_timeout_secs: float = flag("--exit-timeout-secs", 30.0, type=seconds, metavar="SECONDS",
        help="how long running requests may take to finish after SIGTERM (30)")  # fmt: skip
    trace_decisions: Path | None = flag("--trace-decisions", None, type=writable_file, metavar="FILE",
        help="write why each scheduling decision was made, one JSON object per line")  # fmt: skip
    timeline: Path | None = flag("--timeline", None, type=writable_file, metavar="FILE",
        help="write which core computed what when, for ui.perfetto.dev")  # fmt: skip


@dataclass(frozen=True)
class TraceFlags:
    """Flags of traces."""

    config: TraceConfig = flag("--trace-config", TraceConfig(), action="append", unless_given=[], read=trace_config_of,
        is_common=True, metavar="[MODE,]SETTING=VALUE",
        help="which requests are traced, may be given several times: level=TIMESTAMPS, rate=N, count=N, mode=MODE;"
        " triton,file=FILE; triton,log-frequency=N; opentelemetry,url=URL; opentelemetry,resource=KEY=VALUE;"
        " opentelemetry,bsp_max_queue_size=N and others (none)")  # fmt: skip


def _verbose(text: str) -> int:
    return int(boolean(text)) if text.lower() in ("true", "false") else integer(0)(text)


def _log_file(path: str) -> str:
    """Return an absolute path, empty if none is given. Raises ValueError if the file cannot be written."""
    if not path:
        return ""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))
    except OSError as error:
        what = "it is a pipe that nobody reads" if error.errno == errno.ENXIO else error.strerror
        raise ValueError(f"{path}: {what}") from None
    return str(Path(path).absolute())


STANDARD_OUTPUT = "-"  # in place of a file


@dataclass(frozen=True)
class AccessLogOptions:
    """Where a line for each request goes, and of which requests. `file` empty: nowhere; STANDARD_OUTPUT: there."""

    file: str = flag("--access-log", "", read=lambda path: path if path == STANDARD_OUTPUT else _log_file(path),
        metavar="FILE", help="write a line for each request there, in the form of --log-format; -: standard output"
        " (none)")  # fmt: skip
    sample: int = flag("--access-log-sample", 1, type=integer(1), metavar="N",
        help="of N requests of a front end write one (%(default)s)")  # fmt: skip


@dataclass(frozen=True)
class LogFlags:
    """Flags of the log: the fields of LogSettings, which is a message, too."""

    info: bool = flag("--log-info", True, type=boolean, metavar="BOOLEAN", help="log events (true)")
    warning: bool = flag("--log-warning", True, type=boolean, metavar="BOOLEAN", help="log warnings (true)")
    error: bool = flag("--log-error", True, type=boolean, metavar="BOOLEAN", help="log errors (true)")
    verbose_level: int = flag("--log-verbose", 0, type=_verbose, is_common=True, metavar="LEVEL",
        help="log details: 0 none, 1 and more all (0)")  # fmt: skip
    format: str = flag("--log-format", "default", choices=FORMATS,
        help="form of a line of the log; json: an object per line (default)")  # fmt: skip
    file: str = flag("--log-file", "", read=_log_file, is_common=True, metavar="FILE",
        help="write the log there instead of to standard error; opened again when it has been moved away")  # fmt: skip

    @property
    def settings(self) -> LogSettings:
        """What the log begins with."""
        return LogSettings(**vars(self))
