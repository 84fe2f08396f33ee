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
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from typing import Any, Final, NoReturn, cast

from gangway.base.commands import COMMANDS
from gangway.base.settings import (
    CONFIG_FLAG,
    ON,
    FlagSetting,
    SettingError,
    file_settings,
    setting_name,
    takes_several,
    variable_settings,
)
from gangway.base.suggestion import did_you_mean

TITLE: Final = "settings and help"
OWN_FLAGS: Final = ("--help", "--help-all", CONFIG_FLAG, "--show-config")
COMMAND_LINE: Final = "command line"
_WITHOUT_VALUE: Final = re.compile(r"(argument .+: )ignored explicit argument (.*)", re.DOTALL)  # argparse's words
MAX_ENDING: Final = 2  # flags that are named in place of one that is none

_catching: ContextVar[bool] = ContextVar("catching", default=False)


class _Caught(Exception):  # noqa: N818 - not an error
    """Carries a command's parser out of its `main`."""


class CommandParser(argparse.ArgumentParser):
    """`common`: the flags that --help shows; --help-all shows the others, too. Empty: --help shows all.

    `usage_hint`: what stands below an error; empty: where the help is.
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
            prog, usage, description, epilog, formatter_class=_HelpText, add_help=False, allow_abbrev=allow_abbrev
        )
        self._common = common
        self._usage_hint = usage_hint or f"{prog} --help lists all arguments"
        self._settings: list[FlagSetting] = []
        self._own_group = self.add_argument_group(TITLE)
        add = self._own_group.add_argument
        add(CONFIG_FLAG, metavar="FILE", help="take settings from this TOML file, where flags' names are keys")
        add("--show-config", action="store_true", help="print all settings and where they are from")
        add("-h", "--help", action=_Help, nargs=0, help=f"show {'common flags' if common else 'this text'}")
        if common:
            add("--help-all", action=_Help, nargs=0, help="show all flags")

    def parse_args(  # type: ignore[override]  # of argparse's overloads a command needs the simplest
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the values of flags. Leaves with status 2 (SystemExit) if they make no sense."""
        if _catching.get():
            raise _Caught(self)
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        on_command_line, unknown = self._read_flags(given[:end])
        if unknown:  # before the value behind one is read as a positional argument
            self._refuse_unknown(unknown)
        try:
            self._settings = self._read_settings(on_command_line)
        except SettingError as error:
            self.error(str(error))
        elsewhere = [text for one in self._settings if one.source != COMMAND_LINE for text in _as_arguments(one)]
        # In front, a flag with a list would take what is no flag, too.
        several = any(not action.option_strings and action.nargs in ("*", "+") for action in self._actions)
        parse = self.parse_known_intermixed_args if several else self.parse_known_args
        parsed, unknown = parse([*given[:end], *elsewhere, *given[end:]], namespace or argparse.Namespace())
        if unknown:
            self._refuse_unknown(unknown)
        if parsed.show_config:
            self._show_config()
            raise SystemExit(0)
        return parsed

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        name = unknown[0].partition("=")[0]
        flags = list(self._option_string_actions)
        beginning = [flag for flag in flags if flag.startswith(name)]
        near = did_you_mean(name, beginning if len(beginning) == 1 else flags) if name.startswith("-") else ""
        if not near and name.startswith("--"):
            ending = [flag for flag in flags if flag.endswith(name[1:])]
            shown = sorted(ending, key=lambda flag: flag not in self._common)[:MAX_ENDING]
            near = f"; there is {' and '.join(shown)}" if shown else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, error.message + near) from None

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where that stands; leave with status 2."""
        message = _WITHOUT_VALUE.sub(r"\1takes no value, but has \2: give the flag alone, or leave it out", message)
        for setting in self._settings:
            names = ("/".join(setting.action.option_strings), *setting.action.option_strings)
            if setting.source != COMMAND_LINE and message.startswith(tuple(f"argument {name}: " for name in names)):
                message += f" (of {setting.source})"
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

    def _read_settings(self, on_command_line: Sequence[FlagSetting]) -> list[FlagSetting]:
        """Return what a file, variables and the command line say, less what something stronger says.

        Raises SettingError.
        """
        flags = {setting_name(name): action for name, action in self._option_string_actions.items() if _is_flag(action)}
        in_variables = variable_settings(flags, os.environ, _flags_of_others)
        settings = [*self._weaker(in_variables, on_command_line), *on_command_line]
        paths = [one.values[-1] for one in settings if _flag(one.action) == CONFIG_FLAG]
        if not paths or not paths[-1]:
            return settings
        in_file = file_settings(paths[-1], self.prog.rpartition(" ")[2], flags, COMMANDS)
        return [*self._weaker(in_file, settings), *settings]

    def _weaker(self, settings: list[FlagSetting], stronger: Sequence[FlagSetting]) -> list[FlagSetting]:
        """Return the settings without those of which, or of what excludes them, something stronger speaks."""
        dests = {one.action.dest for one in stronger}
        for exclusive in self._mutually_exclusive_groups:
            together = {action.dest for action in exclusive._group_actions}
            if together & dests:
                dests |= together
        return [one for one in settings if one.action.dest not in dests]

    def _read_flags(self, given: Sequence[str]) -> tuple[list[FlagSetting], list[str]]:
        """Return what the command line says of flags, and what looks like a flag and is none, nor one's argument.

        Nothing if it makes no sense, which a second look tells.
        """
        reader = argparse.ArgumentParser(
            add_help=False, allow_abbrev=self.allow_abbrev, argument_default=argparse.SUPPRESS, exit_on_error=False
        )
        flags = {_flag(action): action for action in self._actions if _is_flag(action)}
        for name, action in flags.items():
            if action.nargs == 0:
                reader.add_argument(*action.option_strings, dest=name, action="store_const", const=ON)
            elif action.nargs == argparse.OPTIONAL:
                reader.add_argument(*action.option_strings, dest=name, action="append", nargs="?", const=action.const)
            else:
                reader.add_argument(*action.option_strings, dest=name, action="extend", nargs=action.nargs or 1)
        try:
            found, rest = reader.parse_known_args(given)
        except argparse.ArgumentError:
            return [], []
        settings = [FlagSetting(flags[name], tuple(values), COMMAND_LINE) for name, values in vars(found).items()]
        known = tuple(self._option_string_actions)
        unknown = [text for text in rest if text.startswith("--") and not _begins(text.partition("=")[0], known)]
        return settings, unknown

    def _show_config(self) -> None:
        """Print the settings as a file that `--config` takes; what is not set stands in comments."""
        print(f"[{self.prog.rpartition(' ')[2]}]")
        for action in self._actions:
            if not _is_flag(action) or _flag(action) in OWN_FLAGS:
                continue
            name = setting_name(_flag(action))
            said = [one for one in self._settings if one.action is action]
            values = [value for one in said for value in one.values]
            if said:
                print(f"{name} = {_toml(action, values)}  # {said[-1].source}")
            elif action.nargs != 0:
                print(f"# {name} = {_default(action)}  # default")


class _HelpText(argparse.HelpFormatter):
    """Fills paragraphs; keeps indented lines, and wraps those that are too long below their last column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text).splitlines():
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
    module = importlib.import_module(COMMANDS[command].module)
    token = _catching.set(True)
    try:
        module.main([])
    except _Caught as caught:
        return cast("CommandParser", caught.args[0])
    finally:
        _catching.reset(token)
    raise AssertionError(f"gangway {command} reads no arguments")


def _flags_of_others() -> set[str]:
    """Return the names of the flags of all commands that can be imported."""
    names: set[str] = set()
    for command in COMMANDS:
        try:
            names |= {setting_name(flag) for flag in parser_of(command)._option_string_actions}
        except ModuleNotFoundError:
            continue
    return names


def _begins(text: str, names: Sequence[str]) -> bool:
    return any(name.startswith(text) for name in names)


def _is_flag(action: argparse.Action) -> bool:
    return any(name.startswith("--") for name in action.option_strings)


def _flag(action: argparse.Action) -> str:
    """Return the long name."""
    return next(name for name in action.option_strings if name.startswith("--"))


def _as_arguments(setting: FlagSetting) -> list[str]:
    flag = _flag(setting.action)
    if setting.action.nargs == 0:
        return [flag] * (setting.values == ON)
    if setting.action.nargs is not None:
        return [flag, *setting.values]
    return [f"{flag}={value}" for value in setting.values]


def _toml(action: argparse.Action, values: Sequence[str]) -> str:
    if action.nargs == 0:
        return values[-1]
    return json.dumps(values if takes_several(action) else values[-1], ensure_ascii=False)


def _default(action: argparse.Action) -> str:
    default = "" if action.default is None else action.default
    if isinstance(default, list | tuple) and not takes_several(action):
        default = ",".join(map(str, default))
    return json.dumps(default, default=str, ensure_ascii=False)
