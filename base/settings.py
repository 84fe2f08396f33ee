"""Settings of a command from a TOML file and from environment variables, as the texts of its flags' arguments."""

import argparse
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from gangway.base.suggestion import did_you_mean, nearest

CONFIG_FLAG: Final = "--config"
PREFIX: Final = "GANGWAY_"
_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off", "")
ON: Final = ("true",)
OFF: Final = ("false",)
_NO_SETTINGS: Final = ("help", "help-all", "show-config")
# Kubernetes sets such variables for each service of the namespace, which may well be called gangway.
_OF_KUBERNETES: Final = re.compile(r"GANGWAY_(.*_)?(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP).*)")
_ADDRESS_OF_KUBERNETES: Final = re.compile(r"(tcp|udp)://")


class SettingError(ValueError):
    """A file or a variable that cannot be used; the message says where and why."""


class FlagSetting(msgspec.Struct, frozen=True):
    """What is said of a flag, and where: in a file, in a variable or on the command line.

    `values` of a flag that has no argument are ON or OFF.
    """

    action: argparse.Action
    values: tuple[str, ...]
    source: str


def setting_name(flag: str) -> str:
    """Return the key of a flag in a file: "--http-port" is "http-port"."""
    return flag.lstrip("-")


def file_settings(
    path: str, command: str, flags: Mapping[str, argparse.Action], commands: Collection[str]
) -> list[FlagSetting]:
    """Return what a file says for a command: the keys at its top, then those of the command's section.

    `flags` are the command's, by name; `commands` may have sections. Raises SettingError.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{CONFIG_FLAG} {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{CONFIG_FLAG} {path}: {error}") from None
    for name, value in content.items():
        if isinstance(value, dict) and name not in commands:
            raise SettingError(f"{path}: no command is called {name!r}{did_you_mean(name, commands)}")
    top = {name: value for name, value in content.items() if not isinstance(value, dict)}
    section = {} if command in top else content.get(command, {})
    found = {name: _file_setting(name, value, flags, path) for name, value in top.items()}
    found |= {name: _file_setting(name, value, flags, f"{path}, [{command}]") for name, value in section.items()}
    return list(found.values())


def _file_setting(name: str, value: Any, flags: Mapping[str, argparse.Action], place: str) -> FlagSetting:
    known = flags.keys() - {setting_name(CONFIG_FLAG), *_NO_SETTINGS}
    if name not in known:
        raise SettingError(f"{place}: unknown setting {name!r}{did_you_mean(name, known)}")
    source = f"{place} {name}"
    action = flags[name]
    if isinstance(value, list) and not takes_several(action):
        raise SettingError(f"{source}: one value is expected, not a list")
    texts = tuple(_text(item, source) for item in (value if isinstance(value, list) else [value]))
    return FlagSetting(action, _switch(texts[0], source) if action.nargs == 0 else texts, source)


def variable_settings(
    flags: Mapping[str, argparse.Action], environment: Mapping[str, str], others: Callable[[], Collection[str]]
) -> list[FlagSetting]:
    """Return what variables say: GANGWAY_HTTP_PORT is --http-port. Raises SettingError.

    A variable that is near to a flag and is none is an error, unless it is one of `others`, the flags of all commands.
    """
    names = {variable_of(name): name for name in flags if name not in _NO_SETTINGS}
    by_end = [variable.removeprefix(PREFIX) for variable in names]
    found: list[FlagSetting] = []
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or _OF_KUBERNETES.fullmatch(variable) or _ADDRESS_OF_KUBERNETES.match(text):
            continue
        if (name := names.get(variable)) is not None:
            values = _switch(text, variable) if flags[name].nargs == 0 else (text,)
            found.append(FlagSetting(flags[name], values, variable))
            continue
        near = nearest(variable.removeprefix(PREFIX), by_end)
        if near and variable not in map(variable_of, others()):
            raise SettingError(f"the variable {variable} is no setting; did you mean {PREFIX}{near}?")
    return found


def variable_of(name: str) -> str:
    """Return the variable of a flag: "http-port" is GANGWAY_HTTP_PORT."""
    return PREFIX + name.upper().replace("-", "_")


def takes_several(action: argparse.Action) -> bool:
    """Return whether a flag has a list of values."""
    return isinstance(action, argparse._AppendAction) or action.nargs not in (None, 0, "?")


def _switch(text: str, source: str) -> tuple[str, ...]:
    """Return OFF or ON for a flag without an argument."""
    if text.lower() in _TRUE:
        return ON
    if text.lower() in _FALSE:
        return OFF
    raise SettingError(f"{source}: {text!r} is neither true nor false")


def _text(value: Any, source: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise SettingError(f"{source}: a text, a number, a truth value or a list of them is expected")
