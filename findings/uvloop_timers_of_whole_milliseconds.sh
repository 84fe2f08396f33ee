#!/usr/bin/env bash
# uvloop rounds the time of a timer to whole milliseconds, so a pause below half a millisecond is none.
#
# A good guess: call_later is late by up to a millisecond, as libuv's clock counts in these, but never early.
# Seen instead: asyncio.sleep(0.0004) returns at once, within the same turn of the loop's clock; sleep(0.0014) takes about
# one millisecond, less than asked for. asyncio's own loop is never early. A pause that paces something by parts of a
# millisecond becomes a busy loop.
# Seen with: uvloop 0.23.0, CPython 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uvloop==0.23.0
cat > "$folder/look.py" <<'PYTHON'
import asyncio
import statistics
import time

import uvloop


async def median_pause_ms(asked_s: float) -> float:
    pauses = []
    for _ in range(200):
        begin = time.monotonic()
        await asyncio.sleep(asked_s)
        pauses.append(time.monotonic() - begin)
    return statistics.median(pauses) * 1e3


async def all_pauses() -> list[float]:
    return [await median_pause_ms(asked_ms / 1e3) for asked_ms in (0.4, 1.4)]


uv, own = uvloop.run(all_pauses()), asyncio.run(all_pauses())
print("asked for 0.4 and 1.4 ms, got (medians): uvloop %.2f, %.2f; asyncio %.2f, %.2f" % (*uv, *own))
assert uv[0] < 0.2 and uv[1] < 1.4
assert own[0] >= 0.4 and own[1] >= 1.4
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
