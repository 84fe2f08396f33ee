"""What the arguments of flags may look like.

These are types for argparse, which puts the flag's name before whatever is said here: "argument --grpc-port: 70000 is
not a port". Paths are absolute from here on: not every process of the server works in the folder where it was started.
"""

import math
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from gangway.server.access import Restriction, Restrictions, parse_restriction

FROM_FILE = "@"  # no category begins so
_TRUE = ("true", "1")
_FALSE = ("false", "0")


def boolean(text: str) -> bool:
    """Return a truth value, spelled as tritonserver takes it."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ArgumentTypeError(f"{text!r} is neither true nor false (1 nor 0)")


def seconds(text: str) -> float:
    """Return a time of 0 s or more."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentTypeError(f"{text} is no time")
    return number


def port(text: str) -> int:
    """Return a TCP port; 0 is any free one."""
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise ArgumentTypeError(f"{text} is not a port")
    return int(text)


def pattern(text: str) -> str:
    """Return a regular expression, as Python writes it."""
    try:
        re.compile(text)
    except re.error as error:
        raise ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def folder(text: str) -> Path:
    """Return the absolute path of a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(f"{path} {'is not a folder' if path.exists() else 'does not exist'}")
    return path.absolute()


def readable_file(text: str) -> Path:
    """Return the absolute path of a file that can be read."""
    path = Path(text)
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    return path.absolute()


def writable_file(text: str) -> Path:
    """Return the absolute path of a file that can be written, or be made."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{path} cannot be written")
    return path.absolute()


def restriction(text: str) -> Restrictions:
    """Return a restriction of protocols, or those that are the lines of a file (`@FILE`)."""
    if not text.startswith(FROM_FILE):
        return Restrictions((_restriction(text),), is_visible=True)
    try:
        lines = readable_file(text.removeprefix(FROM_FILE)).read_text().splitlines()
    except UnicodeDecodeError:
        raise ArgumentTypeError(f"{text.removeprefix(FROM_FILE)} is no text") from None
    return Restrictions(tuple(_restriction(line.strip()) for line in lines if line.strip()))


def _restriction(text: str) -> Restriction:
    try:
        return parse_restriction(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def restrictions(given: Sequence[Restrictions]) -> Restrictions:
    """Return what all occurrences of a flag say together. Raises ValueError."""
    groups = tuple(group for each in given for group in each.groups)
    together = Restrictions(groups, any(each.is_visible for each in given))
    if (category := together.duplicate()) is not None:
        raise ValueError(f"'{category}' is given more than once")
    return together
