"""The parser of every command: a short and a long help, settings from a file and from variables, near names.

A setting is the text of a flag's argument. What the command line says replaces what a variable says, and that what a
file says (`settings.py`). So a flag's type checks them all alike.
"""

import argparse
import importlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

from gangway.artifact.commands import COMMANDS
from gangway.artifact.settings import (
    CONFIG_FLAG,
    OFF,
    ON,
    Setting,
    SettingError,
    file_settings,
    setting_name,
    takes_several,
    variable_settings,
)
from gangway.artifact.suggestion import did_you_mean

TITLE: Final = "settings and help"
OWN_FLAGS: Final = ("--help", "--help-all", "--config", "--show-config")

_catching: ContextVar[bool] = ContextVar("catching", default=False)


class _Caught(Exception):  # noqa: N818 - not an error
    """Carries a command's parser out of its `main`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


@dataclass(frozen=True)
class Given:
    """A flag with what is said of it, and where: the command line, a variable, or a place in a file."""

    action: argparse.Action
    arguments: tuple[str, ...]
    source: str


class CommandParser(argparse.ArgumentParser):
    """`common`: the flags that --help shows; --help-all shows the others, too. Empty: --help shows all.

    `usage_hint`: what stands below an error, in place of the list of all flags.
    """

    def __init__(
        self,
        prog: str,
        description: str = "",
        epilog: str = "",
        usage: str | None = None,
        allow_abbrev: bool = True,
        common: Collection[str] = (),
        usage_hint: str = "",
    ) -> None:
        super().__init__(
            prog,
            usage,
            description,
            epilog,
            formatter_class=_HelpText,
            add_help=False,
            allow_abbrev=allow_abbrev,
        )
        self._common = common
        self._usage_hint = usage_hint
        self._unknown = ""
        self._origins: dict[str, str] = {}  # of flags that are set elsewhere
        self._own_group = self.add_argument_group(TITLE)
        add = self._own_group.add_argument
        add(CONFIG_FLAG, metavar="FILE", help="take settings from this TOML file, where flags' names are keys")
        add("--show-config", action="store_true", help="print all settings and where they are from")
        add("-h", "--help", action=_Help, nargs=0, help=f"show {'common flags' if common else 'this text'}")
        if common:
            add("--help-all", action=_Help, nargs=0, help="show all flags")

    @property
    def command(self) -> str:
        """The command's name, such as "serve"."""
        return self.prog.rpartition(" ")[2]

    def parse_args(  # type: ignore[override]  # of argparse's overloads a command needs the simplest
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the values of flags. Leaves with status 2 (SystemExit) if they make no sense."""
        if _catching.get():
            raise _Caught(self)
        given = list(sys.argv[1:] if args is None else args)
        try:
            settings = self._settings(given)
        except SettingError as error:
            self.error(str(error))
        self._origins = {_flag(setting.action): setting.source for setting in settings}
        elsewhere = [text for setting in settings for text in _as_arguments(setting)]
        several = any(not action.option_strings and action.nargs in ("*", "+") for action in self._actions)
        parse = self.parse_known_intermixed_args if several else self.parse_known_args
        parsed, unknown = parse([*elsewhere, *given], namespace or argparse.Namespace())
        if unknown:
            self._unknown = unknown[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if parsed.show_config:
            self._show_config([*settings, *self._on_command_line(given)])
            raise SystemExit(0)
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, error.message + near) from None

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, where that stands, and what may be meant; leave with status 2."""
        for flag, source in self._origins.items():
            if message.startswith(f"argument {flag}: ") or message.startswith(f"argument {flag}/"):
                message += f" (of {source})"
        name = self._unknown.partition("=")[0]
        if name.startswith("-"):
            message += did_you_mean(name, self._option_string_actions)
        if not self._usage_hint:
            super().error(message)
        print(f"{self.prog}: error: {message}\n{self._usage_hint}", file=sys.stderr)
        raise SystemExit(2)

    def format_help(self, show_all: bool = False) -> str:
        """Return the help, of common flags or of all."""
        self._action_groups.remove(self._own_group)
        self._action_groups.append(self._own_group)  # at the end, whatever else there is
        if show_all or not self._common:
            return super().format_help()
        hidden = [action for action in self._actions if action.option_strings and not self._is_common(action)]
        texts = [action.help for action in hidden]
        try:
            for action in hidden:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, text in zip(hidden, texts, strict=True):
                action.help = text

    def _is_common(self, action: argparse.Action) -> bool:
        return any(name in self._common or name in OWN_FLAGS for name in action.option_strings)

    # -- settings

    def _settings(self, given: Sequence[str]) -> list[Given]:
        """Return what a file and variables say, less what the command line says. Raises SettingError."""
        on_command_line = self._on_command_line(given)
        said = {one.action.dest: one for one in on_command_line}
        flags = {setting_name(name): action for name, action in self._option_string_actions.items() if _is_flag(action)}
        variables = variable_settings(flags, os.environ, _flags_of_others)
        config = said.get(CONFIG_FLAG.lstrip("-"))
        path = config.arguments[-1] if config and config.arguments else ""
        for setting in variables:
            if setting.name == CONFIG_FLAG.lstrip("-") and not path:
                path = setting.values[-1]
        settings = file_settings(path, self.command, flags, COMMANDS) if path else []
        found = [_given(flags[setting.name], setting) for setting in settings]
        from_variables = [_given(flags[setting.name], setting) for setting in variables]
        return [
            *self._without(found, [*from_variables, *on_command_line]),
            *self._without(from_variables, on_command_line),
        ]

    def _without(self, settings: list[Given], stronger: Sequence[Given]) -> list[Given]:
        """Return the settings without those of which, or of what excludes them, something stronger speaks."""
        dests = {one.action.dest for one in stronger}
        for exclusive in self._mutually_exclusive_groups:
            together = {action.dest for action in exclusive._group_actions}
            if together & dests:
                dests |= together
        return [one for one in settings if one.action.dest not in dests]

    def _on_command_line(self, given: Sequence[str]) -> list[Given]:
        """Return the flags that the command line has, with their arguments."""
        found: list[Given] = []
        for index, text in enumerate(given):
            if text == "--":
                break
            name, equals, value = text.partition("=")
            action = self._option_string_actions.get(name) or self._abbreviated(name)
            if action is not None:
                values = [value] if equals else _values_after(given[index + 1 :], action)
                found.append(Given(action, tuple(values), "command line"))
        return found

    def _abbreviated(self, name: str) -> argparse.Action | None:
        if not (self.allow_abbrev and name.startswith("--")):
            return None
        matches = {action for full, action in self._option_string_actions.items() if full.startswith(name)}
        return matches.pop() if len(matches) == 1 else None

    def _show_config(self, given: Sequence[Given]) -> None:
        """Print the settings as a file that `--config` takes; what is not set stands in comments."""
        print(f"[{self.command}]")
        by_dest: dict[str, list[Given]] = {}
        for one in given:
            by_dest.setdefault(one.action.dest, []).append(one)
        for action in self._actions:
            if not _is_flag(action) or _flag(action) in OWN_FLAGS:
                continue
            said = [one for one in by_dest.get(action.dest, ()) if one.action is action]
            name = _flag(action).lstrip("-")
            if said:
                print(f"{name} = {_toml(action, said)}  # {said[-1].source}")
            elif action.nargs != 0:
                print(f"# {name} = {_default(action)}  # default")


class _HelpText(argparse.HelpFormatter):
    """Keeps the lines of descriptions and examples, and wraps those that are too long below their last column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            column = re.match(r" *(?:\S+ {2,}|\* \S+ +)?", line)
            below = " " * (column.end() if column and line.startswith(" ") else 0)
            lines += textwrap.wrap(line, width, subsequent_indent=below, break_on_hyphens=False) or [""]
        return "\n".join(indent + line for line in lines)


class _Help(argparse.Action):
    """Prints the help; as long as it is asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if isinstance(parser, CommandParser):
            print(parser.format_help(show_all=option_string == "--help-all"), end="")
        parser.exit()


def parser_of(command: str) -> CommandParser:
    """Return the parser of a command. Raises ModuleNotFoundError if it needs a package that is not installed."""
    with _caught():
        try:
            importlib.import_module(COMMANDS[command].module).main([])
        except _Caught as caught:
            return cast("CommandParser", caught.parser)
    raise AssertionError(f"gangway {command} reads no arguments")


@contextmanager
def _caught() -> Iterator[None]:
    token = _catching.set(True)
    try:
        yield
    finally:
        _catching.reset(token)


def _flags_of_others() -> set[str]:
    """Return the names of the flags of all commands that can be imported."""
    names: set[str] = set()
    for command in COMMANDS:
        try:
            names |= {setting_name(flag) for flag in parser_of(command)._option_string_actions}
        except ModuleNotFoundError:
            continue
    return names


def _is_flag(action: argparse.Action) -> bool:
    return any(name.startswith("--") for name in action.option_strings)


def _flag(action: argparse.Action) -> str:
    """Return the long name."""
    return next(name for name in action.option_strings if name.startswith("--"))


def _given(action: argparse.Action, setting: Setting) -> Given:
    return Given(action, setting.values, setting.source)


def _as_arguments(setting: Given) -> list[str]:
    flag = _flag(setting.action)
    if setting.action.nargs == 0:
        return [flag] * (setting.arguments == ON)
    if setting.action.nargs is not None:
        return [flag, *setting.arguments]
    return [f"{flag}={value}" for value in setting.arguments]


def _values_after(following: Sequence[str], action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return []
    if action.nargs is None:
        return list(following[:1])
    end = next((index for index, text in enumerate(following) if text.startswith("-")), len(following))
    return list(following[:end])


def _toml(action: argparse.Action, said: Sequence[Given]) -> str:
    if action.nargs == 0:
        return "false" if said[-1].arguments == OFF else "true"
    values = [value for one in said for value in one.arguments]
    return json.dumps(values if takes_several(action) else values[-1], ensure_ascii=False)


def _default(action: argparse.Action) -> str:
    if action.default is None:
        return '""'
    if isinstance(action.default, bool | int | float):
        return json.dumps(action.default)
    if isinstance(action.default, list | tuple):
        return json.dumps([str(one) for one in action.default])
    return json.dumps(str(action.default), ensure_ascii=False)
