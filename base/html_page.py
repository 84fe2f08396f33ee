"""One HTML file of what a command printed: its text and tables, pictures, the command and the machine.

It needs nothing but itself, so it can be mailed or attached to a ticket.
"""

import base64
import html
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gangway.base.console import Console
from gangway.base.files import write_whole
from gangway.base.host_limits import cpu_name

_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em;
  color: #222; background: #fff; }}
pre {{ overflow-x: auto; line-height: 1.25; }}
dt {{ font-weight: bold; }} dd {{ margin: 0 0 .5em; }}
figure {{ margin: 1em 0; }} img {{ max-width: 100%; }}
table {{ border-collapse: collapse; display: block; font-size: .9em; overflow-x: auto; }}
td, th {{ padding: .2em .7em; border-bottom: 1px solid #ddd; }}
th {{ text-align: left; vertical-align: bottom; }} td {{ white-space: nowrap; }} td.number {{ text-align: right; }}
.good {{ color: #176117; }} .bad {{ color: #a11; font-weight: bold; }} .doubt {{ background: #fe9; padding: .6em; }}
</style>
<h1>{title}</h1>
<dl><dt>command</dt><dd><code>{command}</code></dd><dt>machine</dt><dd>{machine}</dd><dt>time</dt><dd>{time}</dd></dl>
{warnings}
{content}
</html>
"""


def write_html(
    path: Path, title: str, console: Console, pictures: Mapping[str, bytes], warnings: Sequence[str] = ()
) -> None:
    """Write what a recording console has printed, PNG pictures by caption, and warnings. Raises OSError."""
    text = console.export_html(inline_styles=True, code_format="{code}", clear=False)
    figures = "\n".join(figure(caption, content) for caption, content in pictures.items())
    write_page(path, title, f"<pre>{text}</pre>\n{figures}", warnings)


def write_page(path: Path, title: str, content: str, warnings: Sequence[str] = ()) -> None:
    """Write HTML between what each page begins with, command, machine, time and warnings, and its end. Raises OSError.

    The classes `number`, `good`, `bad` and `doubt` have styles.
    """
    page = _PAGE.format(
        title=html.escape(title),
        command=html.escape(shlex.join(["gangway", *sys.argv[1:]])),
        machine=html.escape(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        warnings="\n".join(f"<p class=doubt><strong>warning:</strong> {html.escape(each)}</p>" for each in warnings),
        content=content,
    )
    write_whole(path, page.encode())


def figure(caption: str, content: bytes) -> str:
    """Return a PNG picture and its caption as HTML."""
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    words = html.escape(caption)
    return f'<figure><img alt="{words}" src="{source}"><figcaption>{words}</figcaption></figure>'
