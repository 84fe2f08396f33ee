"""What commands show to people: tables, lines and bars, in which what users have named is never markup.

Names, reasons and paths are text whatever is in them: brackets and colons stay, control characters are escaped. Nobody
else has rich's own Console, Table, Progress or TextColumn (`banned-api` in pyproject.toml).
"""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any, Final, cast

import rich.console
import rich.progress
import rich.table
from rich.segment import Segment
from rich.text import Text

PIPE_COLUMNS: Final = 160  # of a line that is written to no terminal
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # tabs and ends of lines are layout


class Console(rich.console.Console):
    """Standard output, or standard error, where what cannot be written is lost: only bars are shown there.

    A line that standard output does not take raises OSError.
    """

    def __init__(self, *, stderr: bool = False, highlight: bool = True, **options: Any) -> None:
        file = options.pop("file", _Lossy(sys.stderr) if stderr else None)
        options.setdefault("width", None if sys.stdout.isatty() or stderr else PIPE_COLUMNS)
        super().__init__(file=cast("IO[str] | None", file), highlight=highlight, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text as it is, whatever the caller asks for."""
        options["markup"] = options["emoji"] = False
        return super().render_str(_plain(text), **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the caller whether that is the end."""
        raise BrokenPipeError("nobody reads standard output")


class Table(rich.table.Table):
    """Columns with two spaces between them and no lines, which fits narrow terminals, and programs that read a pipe.

    What does not fit is wrapped, and never left out. No line ends with blanks, however long another one is.
    """

    def __init__(self, *headers: str, title: str = "", **options: Any) -> None:
        # A line of its own, which may be longer than the table is wide.
        line = Text(_plain(title), style="italic", no_wrap=True, overflow="ignore") if title else None
        super().__init__(title=line, title_justify="left", box=None, pad_edge=False, **options)
        for header in headers:
            self.add_column(header)

    def add_column(self, header: Any = "", *arguments: Any, **options: Any) -> None:
        """Add a column whose cells are never cut."""
        options.setdefault("overflow", "fold")
        super().add_column(header, *arguments, **options)

    def __rich_console__(self, console: rich.console.Console, options: rich.console.ConsoleOptions) -> Iterator[Any]:
        """Yield the segments of the lines."""
        made = (each for each in super().__rich_console__(console, options) if isinstance(each, Segment))  # all are
        for line in Segment.split_lines(made):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style, line[-1].control)
            yield from (*line, Segment.line())


class ProgressBars(rich.progress.Progress):
    """Bars that vanish when they are done, and are shown on terminals only.

    Descriptions take `columns` at least; `more` stands behind the bar.
    """

    def __init__(self, console: Console, *more: rich.progress.ProgressColumn, columns: int = 1) -> None:
        description = rich.progress.TextColumn(f"{{task.description:<{columns}}}", markup=False)
        shown = (description, rich.progress.BarColumn(), *more, rich.progress.TimeElapsedColumn())
        # Elsewhere a bar would leave an empty line.
        super().__init__(*shown, console=console, transient=True, disable=not console.is_interactive)


def _plain(text: str) -> str:
    """Return text with control characters escaped."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _Lossy:
    """A stream that ignores failed writes: a terminal may go away, a disk may be full."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # also an encoding without the character
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
