"""`gangway check`: which models of a repository can be served here, and what must change for the others.

What will serve the parts of ONNX files is found by a process of the compiler, which this room does not import.
"""

import argparse
import dataclasses
import json
import mmap
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from google.protobuf import text_format

from gangway.artifact.cache import add_cache_dir, add_dimension
from gangway.artifact.format import Engine
from gangway.base.command_line import CommandParser
from gangway.base.commands import ending_signals
from gangway.base.files import words_of
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.check.engine import check_files, latest_version, served_by
from gangway.server.check.repairs import Change, RepairedModel, remedy_for, repair
from gangway.server.check.trial import START_SECONDS, Outcome, TrialServer, trial_server
from gangway.server.control.repository.ensembles import NOT_AVAILABLE, load_order
from gangway.server.control.repository.repository import CONFIG_FILENAME, file_of, find_models
from gangway.server.errors import ConfigError
from gangway.server.models.config import (
    DEFAULT_MODEL_FILENAME,
    ENGINE_PARAMETER,
    ONNX_SUFFIX,
    PYTHON_BACKEND,
    composing_models,
    is_ensemble,
    without_effect,
)
from gangway.server.models.config_table import parameter_of
from gangway.server.models.config_text import read_config
from gangway.server.models.python_settings import CODE_SUFFIX
from gangway.server.options.backend_settings import backend_setting
from gangway.server.options.server import files_of

DESCRIPTION = """Try every model of a Triton repository on a server of its own, and say which can be served as they are,
which can with changes of config.pbtxt, and which cannot. Compiled models stay in the cache, so `gangway serve` finds
them there.

Of an .onnx file, say without compiling or serving it which parts kernels compute, which are islands of onnxruntime, for
which rows and sizes, and why not more."""
EPILOG = "exit status: 0 every model can be served as it lies there (after --fix), 1 some cannot, 2 wrong usage"
KEPT_SUFFIX: Final = ".orig"  # behind the name of a config.pbtxt that --fix replaces
MAX_COLUMNS: Final = 100


class Verdict(StrEnum):
    """What is said of a model."""

    MOVES = "moves"
    CHANGES = "moves with changes"
    CANNOT = "cannot move"

    def of(self, count: int) -> str:
        """Return the words for so many models."""
        return f"{count} {self if count == 1 else self.replace('moves', 'move')}"


@dataclass(frozen=True)
class RepositoryModel:
    """A model as it lies in a repository. `loose`: its ONNX file, if it has no version folder.

    `is_alone`: a server takes that file as it is, since no folder lies beside it.
    """

    name: str
    folder: Path
    loose: Path | None = None
    is_alone: bool = False


@dataclass(frozen=True)
class Report:
    """What is said of a model, and what --fix would write: `config`, if it must change.

    `impossible`: what the server says of a latency target that no request can meet.
    """

    candidate: RepositoryModel
    verdict: Verdict
    served_by: str = ""
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    config: ModelConfig | None = None
    impossible: str = ""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.static or options.dimension or any(path.suffix == ONNX_SUFFIX for path in options.path):
        if options.fix:
            parser.error("--fix changes repositories, not .onnx files")
        return _check_files(options)
    for ending in ending_signals():
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    try:
        candidates = [each for directory in options.path for each in _candidates(directory)]
        if not candidates:
            print(f"gangway check: no models in {options.path[0]}: one lies there as NAME/1/model.onnx",
                  file=sys.stderr)  # fmt: skip
            return 1
        with trial_server(options.cache_dir, options.backend_config) as server:
            reports: list[Report] = []
            for number, candidate in enumerate(_in_order(candidates), 1):
                if sys.stderr.isatty():
                    print(f"{number}/{len(candidates)} {candidate.name} ...", end="\r", file=sys.stderr, flush=True)
                lost = {report.candidate.name for report in reports if report.verdict is Verdict.CANNOT}
                reports.append(_check(server, candidate, lost))
                if not options.json:
                    print("\n".join(_lines(reports[-1])), flush=True)
        changed = [report for report in reports if report.verdict is Verdict.CHANGES]
        for report in changed if options.fix else ():
            _write(report)
    except (RuntimeError, OSError, argparse.ArgumentTypeError) as error:  # the last of a file that is not readable
        print(f"gangway check: {words_of(error)}", file=sys.stderr)
        return 1
    print(json.dumps([_plain(each) for each in reports], indent=1) if options.json else _summary(reports, options.fix))
    undone = [each for each in reports if each.verdict is not Verdict.MOVES and not (options.fix and each in changed)]
    return 1 if undone else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("gangway check", DESCRIPTION, EPILOG)
    parser.add_argument(
        "path", type=_checked_path, nargs="+", metavar="PATH", help="a folder of models, or an .onnx file"
    )
    parser.add_argument("--static", action="store_true", help="look at all .onnx files below folders as at files")
    add_dimension(parser)
    parser.add_argument(
        "--fix",
        action="store_true",
        help=f"write the changes; a config.pbtxt that is replaced is kept as {CONFIG_FILENAME}{KEPT_SUFFIX}",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects, one for each model or file")
    parser.add_argument(
        "--backend-config",
        type=_backend_setting,
        action="append",
        default=[],
        metavar="[BACKEND,]SETTING=VALUE",
        help="as for `gangway serve`; python,stub-timeout-seconds=N: how long `initialize` of a Python model may take"
        f" here ({START_SECONDS})",
    )
    add_cache_dir(parser)
    return parser


def _check_files(options: argparse.Namespace) -> int:
    """Have the compiler look at files; return its exit status."""
    command = check_files(options.path, dict(options.dimension), options.json)
    return subprocess.run(command, check=False).returncode


def _checked_path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    if not path.is_dir() and path.suffix != ONNX_SUFFIX:
        raise argparse.ArgumentTypeError(f"{path} is neither a folder nor an {ONNX_SUFFIX} file")
    return path


def _backend_setting(text: str) -> str:
    """Return what is passed on, if a server takes it."""
    backend_setting(text)
    return text


def _candidates(directory: Path) -> Iterator[RepositoryModel]:
    """Yield the models of a repository, also those whose ONNX file lies beside where it should."""
    for name, path in files_of(directory):
        yield RepositoryModel(name, directory / name, path, is_alone=True)
    for name, folders in find_models([directory]).items():
        loose = sorted(folders[0].glob(f"*{ONNX_SUFFIX}"))
        has_versions = any(item.is_dir() and item.name.isdigit() for item in folders[0].iterdir())
        yield RepositoryModel(name, folders[0], loose[0] if len(loose) == 1 and not has_versions else None)
    for path in () if files_of(directory) else sorted(directory.glob(f"*{ONNX_SUFFIX}")):
        if path.is_file() and not (directory / path.stem).exists():
            yield RepositoryModel(path.stem, directory / path.stem, path)


def _in_order(candidates: Sequence[RepositoryModel]) -> list[RepositoryModel]:
    """Return ensembles behind the models that they are made of."""
    known = {candidate.name: candidate for candidate in candidates}
    needs = {name: composing_models(_written(candidate) or ModelConfig()) for name, candidate in known.items()}
    return [known[name] for name in load_order(needs)]


def _written(candidate: RepositoryModel) -> ModelConfig | None:
    """Return the configuration as written, an empty one if there is none; None if it cannot be read."""
    path = candidate.folder / CONFIG_FILENAME
    try:
        return read_config(path) if path.exists() else ModelConfig()
    except ConfigError:
        return None


def _check(server: TrialServer, candidate: RepositoryModel, lost: set[str]) -> Report:
    """Try a model; an ensemble of models that are `lost` is lost, and does not try them again."""
    name, target, written = candidate.name, server.repository / candidate.name, _written(candidate)
    _link(candidate, target)
    missing = ", ".join(sorted(lost & set(composing_models(written or ModelConfig()))))

    def load() -> Outcome:
        if missing:
            return Outcome(reason=f"ensemble {name} {NOT_AVAILABLE}: {missing}")
        outcome = server.load(name)
        reason = outcome.reason.replace(f"{target}/", f"{candidate.folder}/")  # which lie there by links
        return dataclasses.replace(outcome, reason=reason)

    first = load()
    if written is None:
        reason = first.reason.removeprefix(CONFIG_FILENAME).lstrip(":, ")  # a place follows a comma, a text a colon
        return Report(candidate, Verdict.CANNOT, changes=(Change(CONFIG_FILENAME, reason, "correct the text"),))
    is_python = _is_python(written, target)
    if first.config or is_python or is_ensemble(written):
        model = RepairedModel(name, is_python=is_python)
    else:
        model = _known_of(server, name, target, written)
    found, moved = repair(written, model), (_moved(candidate),) if candidate.loose and not candidate.is_alone else ()
    outcome = first
    if found.changes:
        (target / CONFIG_FILENAME).unlink(missing_ok=True)
        (target / CONFIG_FILENAME).write_text(text_format.MessageToString(found.config))
        outcome = load()
    if outcome.config is None:
        why = Change("model", outcome.reason, remedy_for(written, is_python))
        return Report(candidate, Verdict.CANNOT, changes=(*found.changes, why))
    changes = (*moved, *found.changes)
    return Report(
        candidate,
        Verdict.CHANGES if changes else Verdict.MOVES,
        served_by(outcome.config, target),
        changes,
        without_effect(found.config, parameter_of(outcome.config, ENGINE_PARAMETER) == Engine.PYTHON.value),
        found.config if found.changes else None,
        outcome.impossible,
    )


def _link(candidate: RepositoryModel, target: Path) -> None:
    """Make a folder that shows the model as it lies, or as --fix would move it."""
    target.mkdir()
    inside = sorted(candidate.folder.iterdir()) if candidate.folder.is_dir() else []
    for item in inside:
        (target / item.name).symlink_to(item.resolve())
    if candidate.loose:
        (target / "1").mkdir()
        for path, name in _moves(candidate.loose).items():
            (target / "1" / name).symlink_to(path.resolve())


def _moves(loose: Path) -> dict[Path, str]:
    """Return the files that belong in the version folder, each with its name there.

    They are the ONNX file and the files with its weights: those beside it whose names it contains.
    """
    found = {loose: DEFAULT_MODEL_FILENAME}
    if not loose.stat().st_size:  # nothing can be mapped of it
        return found
    with loose.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for path in loose.parent.iterdir():
            if path.is_file() and path.suffix != ONNX_SUFFIX and content.find(path.name.encode()) >= 0:
                found[path] = path.name
    return found


def _moved(candidate: RepositoryModel) -> Change:
    assert candidate.loose is not None, "asked for models without a version folder only"
    place = f"{candidate.name}/1/{DEFAULT_MODEL_FILENAME}"
    return Change("layout", f"{candidate.loose.name} lies in no version folder", f"moved to {place}")


def _is_python(written: ModelConfig, folder: Path) -> bool:
    """Return whether model.py computes a model, which its configuration need not say."""
    is_code = file_of(written, latest_version(folder)).suffix == CODE_SUFFIX
    return not is_ensemble(written) and (is_code or written.backend == PYTHON_BACKEND)


def _known_of(server: TrialServer, name: str, folder: Path, written: ModelConfig) -> RepairedModel:
    """Return what is known of an ONNX model that is not served as it is.

    `folder`: that of the server for trials.
    """
    latest = latest_version(folder)
    files = sorted(path.name for path in latest.glob(f"*{ONNX_SUFFIX}"))
    wanted = written.default_model_filename or DEFAULT_MODEL_FILENAME
    filename = files[0] if len(files) == 1 and wanted not in files else wanted
    if filename.endswith(CODE_SUFFIX) or not (latest / filename).exists():
        return RepairedModel(name, files)
    return RepairedModel(name, files, server.load(name, ModelConfig(default_model_filename=filename)).config)


def _lines(report: Report) -> Iterator[str]:
    """Yield what is printed of a model."""
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    yield from _wrapped(f"{report.candidate.name}: {report.verdict}", report.served_by, columns)
    for change in report.changes:
        yield from _wrapped(f"  {change.field}:", change.reason, columns)
        yield from _wrapped("    ->", change.remedy, columns) if change.remedy else ()
    yield from _wrapped("  impossible:", report.impossible, columns) if report.impossible else ()
    for note in report.notes:
        yield from _wrapped("  without effect:", note, columns)


def _wrapped(head: str, text: str, columns: int) -> list[str]:
    line = f"{head}, {text}" if text and not head.startswith(" ") else f"{head} {text}".rstrip()
    return textwrap.wrap(line, columns, subsequent_indent="       ")


def _summary(reports: Sequence[Report], fixed: bool) -> str:
    counts = {verdict: sum(report.verdict is verdict for report in reports) for verdict in Verdict}
    text = ", ".join(verdict.of(count) for verdict, count in counts.items() if count)
    hint = "changes are written" if fixed else "gangway check --fix writes the changes"
    models = "1 model" if len(reports) == 1 else f"{len(reports)} models"
    return f"\n{models}: {text}" + (f" ({hint})" if counts[Verdict.CHANGES] else "")


def _plain(report: Report) -> dict[str, object]:
    return {
        "name": report.candidate.name,
        "verdict": report.verdict.value,
        "served_by": report.served_by,
        "changes": [dataclasses.asdict(change) for change in report.changes],
        "without_effect": list(report.notes),
        "impossible": report.impossible,
    }


def _write(report: Report) -> None:
    """Do what the report says must change."""
    candidate = report.candidate
    if candidate.loose:
        version = candidate.folder / "1"
        version.mkdir(parents=True)
        for path, name in _moves(candidate.loose).items():
            path.rename(version / name)
    if report.config is not None:
        path = candidate.folder / CONFIG_FILENAME
        kept = path.with_name(CONFIG_FILENAME + KEPT_SUFFIX)
        if path.exists() and not kept.exists():
            path.rename(kept)
        path.write_text(text_format.MessageToString(report.config))
