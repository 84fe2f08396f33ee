"""Write the tables that the code knows: commands, flags, fields, metrics, routes, differences; and those of results.

`python -m docs.generate` (part of `make docs`) writes them between the marks `<!-- generated: NAME -->` and
`<!-- end -->` of `pages()`; `SUITE: TITLE` names a table of `benchmarks/SUITE/results.json`.
`tests/docs/test_reference.py` fails while a page is out of date.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from benchmarks.differences.rows import DIFFERENCES, PACKAGES
from benchmarks.differential.known.all import KNOWN
from gangway.base.command_line import parser_of
from gangway.base.commands import COMMANDS
from gangway.executor.control import SchedulerStatus
from gangway.python_backend import triton_python_backend_utils as pb_utils
from gangway.server.models.config_table import FIELDS, PARAMETERS, Support
from gangway.server.options.command_line import (
    ACCEPTED,
    ACCEPTED_TITLE,
    REFUSED,
    REFUSED_TITLE,
    TritonFlag,
    make_parser,
)
from gangway.server.options.endpoints import MetricsOptions
from gangway.server.serving.http.routes import PATHS, WATCHING, method_of, route_of, verbs_of
from gangway.server.serving.metrics import gangway_families, triton_families
from gangway.server.serving.metrics_reading import Reading
from gangway.server.statistics import CacheFigures
from testing import results

DOCS = Path(__file__).parent
INSTALL = DOCS / "how-to" / "install.md"
REFERENCE = DOCS / "reference"
MEASUREMENTS = DOCS / "measurements"
BENCHMARKS = DOCS.parent / "benchmarks"
BEGIN = "<!-- generated: {name} -->\n"
END = "<!-- end -->"
SERVE = "serve"  # has a page of its own
PLAIN_NOTE_WORDS = 12  # of a field that needs no explanation


def commands() -> Iterator[str]:
    """Yield what each command does, and its positional arguments. `--help` has the flags."""
    for name in COMMANDS:
        if name != SERVE:
            parser = parser_of(name)
            actions = (action for action in parser._actions if not action.option_strings)
            arguments = " ".join(_argument(parser, action) for action in actions)
            sentence = re.split(r"[:.] ", _cell(parser.description or ""), maxsplit=1)[0].rstrip(".")
            yield from ("", f"## gangway {name}", "", f"{arguments and f'{arguments}: '}{sentence}.")


def flags() -> Iterator[str]:
    """Yield the flags of `gangway serve` by group. Those of gRPC and HTTP with one meaning stand together."""
    parser = make_parser()
    own_titles = {ACCEPTED_TITLE, REFUSED_TITLE, "positional arguments", "options"}
    groups = {group.title: group._group_actions for group in parser._action_groups if group.title not in own_titles}
    names: dict[str, list[str]] = {}
    for action in (action for actions in groups.values() for action in actions):
        names.setdefault(_meaning(parser, action), []).append(_argument(parser, action))
    for title, actions in groups.items():
        yield from ("", f"### {title}", "")
        for action in actions:
            if alike := names.pop(meaning := _meaning(parser, action), None):
                yield _item(", ".join(alike), meaning)


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return argparse.HelpFormatter(parser.prog)._expand_help(action) if action.help else ""


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the names of an argument, and its value."""
    formatter = argparse.HelpFormatter(parser.prog)
    if action.option_strings:
        usual = formatter._get_default_metavar_for_optional(action)
        names = [f"`{name}`" for name in action.option_strings]
    else:
        usual, names = formatter._get_default_metavar_for_positional(action), []
    value = "" if action.nargs == 0 else f"`{formatter._format_args(action, usual)}`"
    return f"{', '.join(names)} {value}".strip()


def _item(name: str, meaning: str) -> str:
    """Return an item of a list: names are often too long for a column beside their meanings."""
    return f"- {_cell(name)}: {_cell(meaning)}"


def _cell(text: str) -> str:
    """Return text that may stand in a cell. GitHub and the site read an escaped bar in different ways."""
    return " ".join(text.replace("|", " or ").split())


def _compatibility(rows: tuple[TritonFlag, ...]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for flag in rows:
        reasons.setdefault(flag.reason, []).append(f"`{flag.name}`")
    yield from (_item(", ".join(names), reason) for reason, names in reasons.items())


def fields(support: Support) -> Iterator[str]:
    """Yield the fields of a configuration that have one support, those of one note together.

    Honoured ones with a short note mean what they mean in Triton, as the page says of all that it does not list.
    The log has the reasons of those without effect.
    """
    names: dict[str, list[str]] = {}
    for name, entry in FIELDS.items():
        if entry.support is support:
            is_short = len(entry.note.split()) <= PLAIN_NOTE_WORDS and ".md" not in entry.note
            says_where = re.match(r"see [\w-]+\.md", entry.note)  # of a field that means what it means in Triton
            if support is not Support.HONOURED or not (is_short or says_where):
                note = "the log says why" if support is Support.ACCEPTED else entry.note
                names.setdefault(note, []).append(f"`{name}`")
    yield from (_item(", ".join(group), _linked(note)) for note, group in names.items())


def parameters() -> Iterator[str]:
    """Yield the parameters of a configuration, then those without effect, those of one reason together."""
    in_vain: dict[str, list[str]] = {}
    for name, entry in PARAMETERS.items():
        if entry.support is Support.ACCEPTED:
            in_vain.setdefault(entry.note, []).append(f"`{name}`")
        else:
            yield _item(f"`{name}`", _linked(entry.note))
    yield from (_item(", ".join(names), f"no effect: {note}") for note, names in in_vain.items())


def _linked(note: str) -> str:
    """Return a note with links in place of the names of pages. Raises ValueError if there is no such page."""
    return re.sub(r"\b([\w-]+)\.md\b", lambda match: f"[{match[1]}]({_page(match[1])})", note)


def _page(name: str) -> str:
    """Return the path of a page, from the reference."""
    for folder in ("reference", "how-to", "explanation"):
        if (DOCS / folder / f"{name}.md").exists():
            return f"{name}.md" if folder == REFERENCE.name else f"../{folder}/{name}.md"
    raise ValueError(f"no page is called {name}.md")


def metrics(kinds: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield names, types and meanings, as a scrape says them."""
    for name, kind, meaning in map(_metric, kinds()):
        yield _item(f"`{name}` ({kind})", meaning)


def metric_names(kinds: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield names by type, of metrics whose meanings Triton's documents say, and a scrape."""
    names: dict[str, list[str]] = {}
    for name, kind, _ in map(_metric, kinds()):
        names.setdefault(kind, []).append(f"`{name}`")
    yield from (_item(kind, ", ".join(some)) for kind, some in names.items())


def _metric(text: str) -> tuple[str, str, str]:
    """Return name, type and meaning of a family."""
    help_line, type_line = text.splitlines()[:2]
    _, _, name, meaning = help_line.split(" ", maxsplit=3)
    return name, type_line.rpartition(" ")[2], meaning


def _of_triton() -> Iterator[str]:
    reading = _reading()
    seen = set()
    # A histogram needs true counts, so it is asked for without a model; the response cache needs a model.
    for models, options in (((MagicMock(),), MetricsOptions()), ((), MetricsOptions(histograms=True))):
        for text in triton_families(replace(reading, models=models), options):
            if (name := text.split()[2]) not in seen:
                seen.add(name)
                yield text


def _of_gangway() -> Iterator[str]:
    return gangway_families(_reading())


def _reading() -> Reading:
    """Return what a scrape reads of a server without models."""
    server: Any = SimpleNamespace(started_s=0, front_end_restarts=0, scheduler_restarts=0, worker_restarts=(), cores=())
    return Reading(
        models=(),
        scheduler=SchedulerStatus(),
        server=server,
        workers=(),
        leases=0,
        slots=0,
        slots_in_use=0,
        heap_bytes=0,
        heap_capacity_bytes=0,
        refused_unread=0,
        loop_lag_s=0.0,
        cache=CacheFigures(1, 0, 0, 0, 0, 0, 0, 0),
        machine=MagicMock(),
    )


def routes() -> Iterator[str]:
    """Yield every path of HTTP with its methods, and the gRPC method that it stands for."""
    paths: dict[str, list[str]] = {}
    for path in PATHS:
        route = route_of(path.encode())
        if route is None:
            raise ValueError(f"{path} is no path")
        verbs = verbs_of(route)
        method = "no gRPC method" if route.operation in WATCHING else method_of(route, verbs[0])
        paths.setdefault(f"{', '.join(verbs)}; {method}", []).append(f"`{path}`")
    yield from (_item(", ".join(group), method) for method, group in paths.items())


# What a model.py may call, in the order of the page; after Triton's module and its binding to C++.
PB_UTILS = (
    "Tensor",
    "get_input_tensor_by_name",
    "get_output_tensor_by_name",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "ResponseIterator",
    "TritonError",
    "TritonModelException",
    "get_model_dir",
    "get_input_config_by_name",
    "get_output_config_by_name",
    "using_decoupled_model_transaction_policy",
    "ModelConfig",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "deserialize_bytes_tensor",
    "load_model",
    "unload_model",
    "is_model_ready",
    "Logger",
    "MetricFamily",
    "Metric",
    "MetricKind",
    "PreferredMemory",
    "MemoryType",
    "InferenceTrace",
)
PLAIN_WORDS = 32  # a method is explained whose docstring has more: the name says the rest
PLAIN_FUNCTION_WORDS = 16
OWN_METHODS = ("of", "converted", "received")  # which Triton's classes do not have


def pb_utils_names() -> Iterator[str]:
    """Yield the functions and classes that a model.py may call, and what they do; by name only what the name says."""
    plain_names = []
    for name in PB_UTILS:
        found = getattr(pb_utils, name)
        said = inspect.getdoc(found) or ""
        methods = dict(_methods(found)) if inspect.isclass(found) else {}
        plain = ", ".join(f"`{method}`" for method, told in methods.items() if len(told.split()) <= PLAIN_WORDS)
        if not methods and len(said.split()) <= PLAIN_FUNCTION_WORDS:
            plain_names.append(f"`{name}`")
        else:
            yield _item(f"`{name}`", f"{said} {plain and f'Methods: {plain}.'}")
        yield from (
            _item(f"`{name}.{method}`", told) for method, told in methods.items() if len(told.split()) > PLAIN_WORDS
        )
    yield _item("as in Triton", ", ".join(plain_names))


def _methods(found: type) -> Iterator[tuple[str, str]]:
    """Yield the names of a class's methods, and what their docstrings say."""
    for method in vars(found):
        function = inspect.getattr_static(found, method)
        function = getattr(function, "__func__", function)  # of a static one
        if inspect.isfunction(function) and not method.startswith("_") and method not in OWN_METHODS:
            yield method, inspect.getdoc(function) or ""


def differences_from_triton() -> Iterator[str]:
    """Yield what `python -m benchmarks.differential` expects to differ. Reasons stand beside it in the code."""
    others = [known for known in KNOWN if not known.surprises]
    for area in dict.fromkeys(known.area for known in others):
        yield from ("", f"### {area}", "")
        yield from (f"- {_cell(known.what)}" for known in others if known.area == area)


def surprises_of_triton() -> Iterator[str]:
    """Yield the differences from Triton that nobody would guess, and what shows each."""
    yield from (f"- {_cell(known.what)} `{known.surprises}`" for known in KNOWN if known.surprises)


def engines() -> Iterator[str]:
    """Yield the engines that were asked, with the versions that `constraints.txt` has."""
    pins = dict(line.split("==") for line in (DOCS.parent / "constraints.txt").read_text().split() if "==" in line)
    yield ", ".join(f"{engine} {pins[package]}" for engine, package in PACKAGES.items()) + "."


def differences_of_engines() -> Iterator[str]:
    """Yield where engines answer differently, by area, and what Gangway answers."""
    for area in dict.fromkeys(row.area for row in DIFFERENCES):
        yield from ("", f"### {area}", "")
        for row in DIFFERENCES:
            if row.area == area:
                shown_by = f" `{row.shown_by}`" if row.shown_by else ""
                yield f"- **{_cell(row.what)}.** {_cell(row.others)} *{_cell(row.gangway)}*{shown_by}"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "flags": flags,
    "flags without effect": lambda: _compatibility(ACCEPTED),
    "flags that are refused": lambda: _compatibility(REFUSED),
    **{f"fields {support}": partial(fields, support) for support in Support},
    "parameters": parameters,
    "Triton's metrics": lambda: metric_names(_of_triton),
    "Gangway's metrics": lambda: metrics(_of_gangway),
    "routes": routes,
    "differences from Triton": differences_from_triton,
    "surprises of Triton": surprises_of_triton,
    "engines": engines,
    "differences of engines": differences_of_engines,
    "pb_utils": pb_utils_names,
}


def with_tables(text: str) -> str:
    """Return a page with its tables as they should be. Raises KeyError for a mark that names no table."""
    pattern = re.compile(re.escape(BEGIN).replace(r"\{name\}", "(.+?)") + ".*?" + re.escape(END), re.DOTALL)
    return pattern.sub(lambda match: f"{BEGIN.format(name=match[1])}{_table(match[1])}{END}", text)


def _table(name: str) -> str:
    suite, colon, title = name.partition(": ")
    lines = results.read(BENCHMARKS / suite / results.NAME)[title].markdown() if colon else TABLES[name]()
    return "\n".join(lines).strip("\n") + "\n"


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [
        INSTALL,
        *sorted(REFERENCE.glob("*.md")),
        *(page for page in MEASUREMENTS.glob("*.md") if page.stem != "exported"),
    ]


def main() -> int:
    """Write all tables."""
    for page in pages():
        text = page.read_text()
        if (made := with_tables(text)) != text:
            page.write_text(made)
            print(f"wrote {page.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
