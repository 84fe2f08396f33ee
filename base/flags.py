"""Options as dataclasses: a field says all of its flag, and everything else about the flag follows from it.

argparse gets the flag's name, type, choices and help from the field (`add_flags`), and the field its value from what
argparse finds (`read_flags`). The key in a file, the variable and the row in the documents are those of the parser.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, TypeVar

OptionsT = TypeVar("OptionsT")
_SOURCE: Final = "source"


class OptionError(ValueError):
    """Flags that do not fit together; `flag` is the one to change."""

    def __init__(self, flag: str, message: str) -> None:
        super().__init__(message)
        self.flag = flag


@dataclass(frozen=True)
class _Source:
    """`flag`: which one an error of `read` is about. `common`: the names that --help shows, too."""

    flag: str
    read: Callable[[argparse.Namespace], Any]
    add: Callable[[argparse._ArgumentGroup], object] | None = None
    common: tuple[str, ...] = ()


def flag(
    name: str, default: Any, *, read: Callable[[Any], Any] | None = None, is_common: bool = False, **how: Any
) -> Any:
    """Return a field of options that has what a flag says. `how`: as `add_argument` has it.

    `unless_given`: what argparse finds where the flag is not given; otherwise that is the default. `read` makes the
    field's value of what argparse finds; it raises ValueError for what makes no sense.
    """
    how = {"default": how.pop("unless_given", default), **how}
    dest = name.lstrip("-").replace("-", "_")

    def value(arguments: argparse.Namespace) -> Any:
        found = vars(arguments)[dest]
        return read(found) if read else found

    common = (name,) if is_common else ()
    return from_flags(name, value, lambda parser: parser.add_argument(name, **how), common, default=default)


def from_flags(
    name: str,
    read: Callable[[argparse.Namespace], Any],
    add: Callable[[argparse._ArgumentGroup], object] | None = None,
    common: tuple[str, ...] = (),
    **default: Any,
) -> Any:
    """Return a field that several flags say together, or one of several fields that one flag says.

    `add` defines the flags, once for all fields. `read` raises ValueError, which is about the flag `name`, or
    OptionError. `default`: as `dataclasses.field` has it.
    """
    return field(metadata={_SOURCE: _Source(name, read, add, common)}, **default)


def nested(options: type) -> Any:
    """Return a field that is a dataclass of options itself, whose flags stand among those of the outer one."""
    source = _Source("", partial(read_flags, options), partial(add_flags, options), common_flags(options))
    return field(metadata={_SOURCE: source}, default_factory=options)


def add_flags(options: type, parser: argparse._ArgumentGroup) -> None:
    """Define the flags of the fields of options, a dataclass, in their order."""
    for _, source in _sources(options):
        if source.add is not None:
            source.add(parser)


def read_flags(options: type[OptionsT], arguments: argparse.Namespace) -> OptionsT:
    """Return options with what argparse has found of their fields' flags. Raises OptionError."""
    values: dict[str, Any] = {}
    for name, source in _sources(options):
        try:
            values[name] = source.read(arguments)
        except OptionError:
            raise
        except ValueError as error:
            raise OptionError(source.flag, str(error)) from None
    return options(**values)


def common_flags(options: type) -> tuple[str, ...]:
    """Return the flags that --help shows, too."""
    return tuple(name for _, source in _sources(options) for name in source.common)


def _sources(options: type) -> Iterator[tuple[str, _Source]]:
    for each in fields(options):
        if _SOURCE in each.metadata:
            yield each.name, each.metadata[_SOURCE]
