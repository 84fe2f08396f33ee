"""Changes of right requests, always the same ones."""

import random
from collections.abc import Callable, Sequence

SEED = 48


def _flip(chance: random.Random, data: bytearray) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _replace(chance: random.Random, data: bytearray) -> None:
    data[chance.randrange(len(data))] = chance.choice(b'\x00\x01\x7f\x80\xff[]{},"09-.e')


def _remove(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.randrange(1, 9)]


def _repeat(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data))
    data[at:at] = data[at : at + chance.randrange(1, 30)]


def _cut(chance: random.Random, data: bytearray) -> None:
    del data[chance.randrange(1, len(data)) :]


_CHANGES: Sequence[Callable[[random.Random, bytearray], None]] = (
    _flip,
    _flip,
    _replace,
    _replace,
    _remove,
    _repeat,
    _cut,
)


def mutated_messages(seeds: Sequence[bytes], count: int) -> list[bytes]:
    """Return so many messages, each with one to three changes of a seed."""
    chance = random.Random(SEED)
    found = []
    for place in range(count):
        data = bytearray(seeds[place % len(seeds)])
        for _ in range(chance.randrange(1, 4)):
            if data:
                chance.choice(_CHANGES)(chance, data)
        found.append(bytes(data))
    return found
