"""`gangway top`: what a running server does, in the terminal: cores, models, background jobs."""

import argparse
import json
import os
import sys
import termios
import textwrap
import threading
import time
import tty
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from gangway.base.command_line import CommandParser
from gangway.base.console import Console, Table
from gangway.clients.addresses import USUAL_HTTP_PORT, http_address, http_port
from gangway.clients.errors import InputError, UnreachableError
from gangway.clients.tls import GIVE_SSL, Tls, add_tls_options, speaks_tls

DESCRIPTION = (
    "Show what a running server does: who holds its cores, how its models do, which jobs run. Reads over HTTP. "
    "The key of a model's letter shows its last decisions, and why they were made."
)
EPILOG = """exit status: 0 shown, also after Ctrl-C; 2 wrong argument; 3 no server there, or none that can be watched

examples:
  gangway top
  gangway top 10.0.0.7:8000 --once
  gangway top --header key=secret"""
EVENTS_PATH: Final = "/v2/gangway/events"
DATA: Final = b"data: "
TIMEOUT_S: Final = 15.0  # without a state: those of a server with very many models come every 10 s
COLUMNS: Final = 80
LANE_COLUMNS: Final = 40
MIN_NAME_COLUMNS: Final = 8
LONGEST_LINE: Final = 64 << 20
COLOURS: Final = ("cyan", "magenta", "green", "yellow", "blue", "red")  # of models, in turns
MARKS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the same without colours
IDLE_MARK: Final = "·"
MOST_DECISIONS: Final = 4
WIDTHS: Final = {  # of columns of numbers
    "rate/s": 7, "p50 ms": 6, "p99 ms": 6, "target": 6, "in time": 7, "queue": 5, "refused": 7, "cores": 5,
}  # fmt: skip
State = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. Wrong arguments exit with 2 (argparse)."""
    parser = CommandParser("gangway top", DESCRIPTION, EPILOG)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        return run(arguments.server or arguments.url, dict(arguments.header), arguments.once, Tls.of(arguments))
    except (InputError, UnreachableError) as error:
        print(f"gangway top: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "server",
        nargs="?",
        type=http_address,
        metavar="HOST[:PORT]",
        help="the server's HTTP, another way to say --url",
    )
    parser.add_argument("-u", "--url", type=http_address, metavar="HOST[:PORT]", default=("localhost", http_port()),
        help=f"the server's HTTP (default: localhost:{USUAL_HTTP_PORT})")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one state of about a second, and end")
    parser.add_argument(
        "--header",
        action="append",
        type=_header,
        default=[],
        metavar="KEY=VALUE",
        help="a header that the server wants (--http-restricted-api=statistics:KEY=VALUE)",
    )
    add_tls_options(parser)


def run(address: tuple[str, int], headers: Mapping[str, str], once: bool, tls: Tls | None = None) -> int:
    """Show states until there are no more. Raises UnreachableError or InputError."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False) if is_terminal else Console(highlight=False, width=COLUMNS)
    where = f"{address[0]}:{address[1]}"
    with closing(_states(address, headers, tls)) as states:
        if once or not is_terminal:
            for state in states:
                console.print(view(state, where, console.width, console.height if is_terminal else None))
                if once:
                    return 0
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live, _keys(_Screen(live, where)) as screen:
                for state in states:
                    screen.show(state)
    raise UnreachableError(f"{where} has ended the connection: the server stops, or has been stopped")


class _Screen:
    """What a terminal shows: the last state, and decisions about the model whose key was pressed. For two threads."""

    def __init__(self, live: Live, where: str) -> None:
        self._live = live
        self._where = where
        self._state: State | None = None
        self._mark = ""

    def show(self, state: State) -> None:
        """Show a state."""
        self._state = state
        console = self._live.console
        self._live.update(view(state, self._where, console.width, console.height, self._mark), refresh=True)

    def press(self, key: str) -> None:
        """Show the decisions about the model of this letter; no longer, if it is the same again or no letter."""
        self._mark = key if key in MARKS and key != self._mark else ""
        if self._state is not None:
            self.show(self._state)


@contextmanager
def _keys(screen: _Screen) -> Iterator[_Screen]:
    """Let a screen hear of keys, if there is a keyboard. Ctrl-C stays what it is."""
    if not sys.stdin.isatty():
        yield screen
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def read() -> None:
        with suppress(OSError):  # the terminal has gone
            while key := os.read(keyboard, 1):
                screen.press(key.decode("latin-1"))

    try:
        tty.setcbreak(keyboard)
        threading.Thread(target=read, name="keys", daemon=True).start()
        yield screen
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _states(address: tuple[str, int], headers: Mapping[str, str], tls: Tls | None) -> Generator[State, None, None]:
    where = f"{address[0]}:{address[1]}"
    with _answer(address, headers, tls) as response:
        _check(response, where)
        while True:
            try:
                line = response.readline(LONGEST_LINE)
            except TimeoutError:
                raise UnreachableError(f"{where} has said nothing for {TIMEOUT_S:.0f} s") from None
            except (OSError, HTTPException):
                return
            if not line:
                return
            if line.startswith(DATA):
                yield _parse(line[len(DATA) :], where)


@contextmanager
def _answer(address: tuple[str, int], headers: Mapping[str, str], tls: Tls | None) -> Iterator[HTTPResponse]:
    where = f"{address[0]}:{address[1]}"
    connection = HTTPConnection(*address, timeout=TIMEOUT_S)
    if tls is not None:
        context = tls.context()
        context.set_alpn_protocols(["http/1.1"])
        connection = HTTPSConnection(*address, timeout=TIMEOUT_S, context=context)
    try:
        try:
            connection.request("GET", EVENTS_PATH, headers=dict(headers))
            response = connection.getresponse()
        except (HTTPException, OSError) as error:
            if tls is None and isinstance(error, HTTPException | ConnectionError) and speaks_tls(*address, TIMEOUT_S):
                raise UnreachableError(f"{where} {GIVE_SSL}") from None
            if isinstance(error, HTTPException):
                raise UnreachableError(
                    f"{where} does not speak HTTP: is it the port of gRPC?"
                    f" HTTP's is --http-port, usually {USUAL_HTTP_PORT}"
                ) from None
            reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or error
            raise UnreachableError(f"cannot reach a server at {where}: {reason}") from None
        yield response
        response.close()
    finally:
        connection.close()


def _check(response: HTTPResponse, where: str) -> None:
    if response.status == 200 and response.getheader("content-type", "").startswith("text/event-stream"):
        return
    try:
        said = response.read(4096)
    except (OSError, HTTPException):
        said = b""
    try:
        content = json.loads(said)
        error = content["error"] if isinstance(content, dict) else ""
    except (ValueError, KeyError):
        error = ""
    if response.status in (400, 403, 503) and error:  # 400: of the port of gRPC
        hint = "; give it by --header KEY=VALUE" if response.status == 403 else ""
        raise UnreachableError(f"{where} refuses: {error}{hint}")
    if b"/metrics" in said:
        raise UnreachableError(
            f"{where} is a port of metrics; the one of HTTP is --http-port, usually {USUAL_HTTP_PORT}"
        )
    if error == "Not Found":
        raise UnreachableError(f"{where} cannot be watched: it is no Gangway, or runs with --allow-page=false")
    raise UnreachableError(f"{where} is no Gangway: it answers {response.status} to GET {EVENTS_PATH}")


def _parse(line: bytes, where: str) -> State:
    try:
        state = json.loads(line)
    except ValueError:
        state = None
    if not isinstance(state, dict) or "gangway" not in state:
        raise UnreachableError(f"{where} is no Gangway: it sends something else than states")
    return state


def view(state: State, where: str, columns: int, lines: int | None, mark: str = "") -> RenderableType:
    """Return what is shown of a state: as wide as `columns`, and no higher than `lines` if they are limited.

    `mark`: the letter of the model whose decisions are shown, too.
    """
    cores, models = state["cores"], state["models"]
    busy = sum(core["busy_share"] for core in cores)
    uptime_s = int(max(0.0, state["time_s"] - state["started_s"]))
    heads = (
        f"gangway {state['gangway']} at {where}, up {_span(uptime_s)}",
        f"{busy:.1f} of {_counted(len(cores), 'core')} busy,"
        f" {_counted(state['requests_in_flight'], 'request')}, {state['queue']} queued",
    )
    parts: list[RenderableType] = [Text(head, style="bold", overflow="ellipsis", no_wrap=True) for head in heads]
    if start := state["start"]:
        parts.append(Text(f"starting: {start['text']}", overflow="ellipsis", no_wrap=True))
    decisions = _decisions(state, mark, columns, lines)
    others = bool(start) + len(state["unavailable"]) + len(state["jobs"])
    core_lines, model_lines = len(cores), len(models)
    if lines is not None:
        room = max(2, lines - 7 - min(others, 6) - len(decisions))
        core_lines = min(core_lines, max(1, room // 2, room - model_lines))
        model_lines = min(model_lines, max(1, room - core_lines))
    parts.append(_cores(state, columns, core_lines))
    if len(cores) > core_lines:
        parts.append(Text(f"and {_counted(len(cores) - core_lines, 'core')} more", style="dim"))
    parts.append(_models(state, columns, model_lines, mark))
    parts += [Text(line, no_wrap=True) for line in decisions]
    left_out = len(models) - model_lines + state["models_left_out"]
    if left_out:
        parts.append(Text(f"and {_counted(left_out, 'model')} more", style="dim"))
    parts += [
        Text(f"{job['kind']} {job['model']}, {_span(state['time_s'] - job['since_s'])}: {job['phase'] or 'begun'}",
             overflow="ellipsis", no_wrap=True)
        for job in state["jobs"]
    ]  # fmt: skip
    parts += [
        Text(_unavailable(entry), style="dim", overflow="ellipsis", no_wrap=True) for entry in state["unavailable"]
    ]
    return Group(*parts)


def _decisions(state: State, mark: str, columns: int, screen_lines: int | None) -> list[str]:
    """Return lines with the last decisions about the models of a letter, the newest first: half a screen at most."""
    models = {(model["name"], model["version"]) for place, model in enumerate(state["models"])
              if mark and _mark(place)[0] == mark}  # fmt: skip
    if not models:
        return []
    known = [each for each in state["decisions"] if (each["model"], each["version"]) in models]
    if not known:
        none = f"{mark}: no decision in the last minute. A request that finds enough idle cores begins without one."
        return textwrap.wrap(none, columns)
    lines = [f"{mark}: last decisions, the newest first"]
    for each in known[: -MOST_DECISIONS - 1 : -1]:
        at = time.strftime("%H:%M:%S", time.localtime(each["time_s"]))
        told = textwrap.wrap(f"{at} {each['text']}", columns, subsequent_indent="  ")
        if screen_lines is not None and len(lines) > 1 and len(lines) + len(told) > screen_lines // 2:
            break
        lines += told
    return lines


def _unavailable(entry: Mapping[str, Any]) -> str:
    version = "" if entry["version"] is None else f", version {entry['version']}"
    return f"{entry['name']}{version} {entry['state'].lower()}: {entry['reason']}"


def _cores(state: State, columns: int, lines: int) -> Table:
    table = Table()
    table.add_column("core", justify="right")
    table.add_column("busy", justify="right")
    width = max(10, min(LANE_COLUMNS, columns - 46))
    table.add_column("last second", width=width, no_wrap=True)
    table.add_column("gang", no_wrap=True, overflow="ellipsis", max_width=columns - width - 14)
    timeline = state["timeline"]
    shown = list(zip(state["cores"], timeline["cores"], strict=True))[:lines]
    for core, runs in shown:
        gang = core["gang"]
        text = "" if gang is None else f"{gang['model']}, {_counted(gang['cores'], 'core')}, layer {gang['layer']}"
        table.add_row(str(core["core"]), f"{core['busy_share']:.0%}", _lane(runs, timeline["samples"], width), text)
    return table


def _lane(runs: Sequence[Sequence[int]], samples: int, width: int) -> Text:
    """Return a line of marks, each for the model that held the core at that moment."""
    text = Text()
    at = end = 0
    each = iter(runs)
    place = -1
    for column in range(width if samples else 0):
        wanted = (column + 0.5) * samples / width
        while end <= wanted and (run := next(each, None)) is not None:
            at, place = end, run[1]
            end = at + run[0]
        mark, style = _mark(place)
        text.append(mark, style)
    return text


def _mark(place: int) -> tuple[str, str]:
    return (IDLE_MARK, "dim") if place < 0 else (MARKS[place % len(MARKS)], COLOURS[place % len(COLOURS)])


def _models(state: State, columns: int, lines: int, chosen: str) -> Table:
    """Return a table of the busiest models and of the chosen letter's, with as many columns as there is room for."""
    table = Table(padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    room = columns - 2
    headings: list[str] = []
    for heading, width in WIDTHS.items():
        if room - width - 1 > MIN_NAME_COLUMNS:
            room -= width + 1
            headings.append(heading)
    table.add_column("model", no_wrap=True, overflow="ellipsis", max_width=max(room - 1, MIN_NAME_COLUMNS))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=WIDTHS[heading])
    names = [model["name"] for model in state["models"]]
    order = sorted(enumerate(state["models"]), key=lambda item: (_mark(item[0])[0] != chosen, -item[1]["rate"]))
    for place, model in sorted(order[:lines]):
        mark, style = _mark(place)
        name = model["name"] if names.count(model["name"]) == 1 else f"{model['name']}/{model['version']}"
        in_time = model["in_time_share"]
        values = {
            "rate/s": f"{model['rate']:.1f}" if model["rate"] < 1e4 else f"{model['rate']:.0f}",
            "p50 ms": _number(model["p50_ms"]),
            "p99 ms": _number(model["p99_ms"]),
            "target": _number(model["target_ms"]),
            "in time": "-" if in_time is None else f"{in_time:.1%}" if in_time < 1 else "100%",
            "queue": _count(model["waiting"]),
            "refused": _count(model["refused"]),
            "cores": "-" if model["ensemble"] else "idle" if model["idle"] else f"{model['cores']:.1f}",
        }
        table.add_row(Text(mark, style), name, *(values[heading] for heading in headings))
    return table


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _number(value: float | None) -> str:
    """Return milliseconds in at most six characters."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 1e6 else f"{value:.0e}"


def _count(value: int) -> str:
    return str(value) if value < 1_000_000 else f"{value / 1e6:.1f}M"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _header(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or not all(" " <= character <= "~" and character != ":" for character in key):
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    if not value.isprintable() or not value.isascii():
        raise argparse.ArgumentTypeError(f"the value of {key!r} cannot be a header's")
    return key, value
