"""How often the steps of an ensemble run: once for each response of the decoupled steps that they follow. Pure."""

from collections.abc import Collection, Hashable, Sequence
from typing import TypeAlias, TypeVar

Scope: TypeAlias = tuple[int, ...]  # decoupled steps, each of which runs for each response of the one before
TensorKey = TypeVar("TensorKey", bound=Hashable)


class DifferentOriginsError(ValueError):
    """Tensors that meet follow from responses of different decoupled steps. `place`: of the step that reads them."""

    def __init__(self, place: int) -> None:
        super().__init__(f"step {place} reads tensors of different decoupled steps")
        self.place = place


def scopes_of(
    reads: Sequence[Collection[TensorKey]], writes: Sequence[Collection[TensorKey]], decoupled: Sequence[bool]
) -> tuple[Scope, ...]:
    """Return for each step which decoupled steps it follows. `reads`, `writes`: the tensors of each step.

    Steps are in no circle. A tensor that was there before a decoupled step is the same for all responses of that.
    Raises DifferentOriginsError.
    """
    writer = {tensor: place for place, tensors in enumerate(writes) for tensor in tensors}
    found: dict[int, Scope] = {}
    waiting = list(range(len(reads)))
    while waiting:
        place = waiting[-1]
        before = {writer[tensor] for tensor in reads[place] if tensor in writer}
        missing = [other for other in before if other not in found]
        if missing:
            waiting += missing
            continue
        given = sorted(((*found[other], other) if decoupled[other] else found[other] for other in before), key=len)
        scope = given[-1] if given else ()
        if any(scope[: len(each)] != each for each in given):
            raise DifferentOriginsError(place)
        found[place] = scope
        waiting.pop()
    return tuple(found[place] for place in range(len(reads)))
