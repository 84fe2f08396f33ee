#!/usr/bin/env bash
# tokenizers lets other threads run in encode_batch([text]), and holds the GIL all through encode(text) and decode(ids).
#
# A good guess: it is Rust that computes, so the GIL is released for any long call; a server can encode in a thread, and
# one text or a batch of one are the same.
# Seen instead: while encode(text), decode(ids) or from_file run, no other thread of Python runs, however long it takes:
# one that ticks each millisecond stands still. During encode_batch([text]) of the same text, which gives the same ids, it
# ticks on.
# Seen with: tokenizers 0.23.3, CPython 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cat > "$folder/look.py" <<'PYTHON'
import sys
import threading
import time

from tokenizers import Tokenizer, models, pre_tokenizers

path = sys.argv[1]
words = {f"w{number}": number for number in range(100_000)}
tokenizer = Tokenizer(models.WordPiece({"[UNK]": len(words), **words}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save(path)
text = "w1 w22 w333 " * 30_000
ids = tokenizer.encode(text).ids
assert tokenizer.encode_batch([text])[0].ids == ids


def ticks_during(work):
    """Turns that another thread, which sleeps a millisecond each time, has had while the work ran; and its ms."""
    ticks, ended = [], threading.Event()

    def tick():
        while not ended.is_set():
            time.sleep(0.001)
            ticks.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    while not ticks:
        time.sleep(0.001)
    begin = time.perf_counter()
    work()
    end = time.perf_counter()
    ended.set()
    other.join()
    return sum(begin + 0.005 < at < end - 0.005 for at in ticks), (end - begin) * 1e3


CALLS = {
    "encode(text)": lambda: tokenizer.encode(text),
    "decode(ids)": lambda: tokenizer.decode(ids * 4),
    "from_file": lambda: Tokenizer.from_file(path),
    "encode_batch([text])": lambda: tokenizer.encode_batch([text]),
}
seen = {name: ticks_during(call) for name, call in CALLS.items()}
for name, (ticks, took_ms) in seen.items():
    print(f"{name}: {ticks} turns of another thread in {took_ms:.0f} ms")
assert all(took_ms > 50 for _, took_ms in seen.values())
assert max(ticks for name, (ticks, _) in seen.items() if name != "encode_batch([text])") <= 2
assert seen["encode_batch([text])"][0] > 20
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder/tokenizer.json"
