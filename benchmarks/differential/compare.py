"""In what two answers differ, one line for each place, and which of the known differences says why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.differential.departing import AFTER_MS
from benchmarks.differential.known.all import KNOWN
from benchmarks.differential.known.entry import Known

ABSENT = "nothing"


@dataclass(frozen=True)
class Difference:
    """What two servers answer to one case at one place."""

    case: str
    place: str
    triton: str
    gangway: str

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.place}: {self.triton} -> {self.gangway}"

    @property
    def known(self) -> Sequence[Known]:
        """The entries that say why."""
        return [entry for entry in KNOWN if entry.covers(self.case, self.text)]


def differences(case: str, triton: Any, gangway: Any) -> list[Difference]:
    """Return where the answers to a case differ."""
    return [Difference(case, *parts) for parts in _compared("", triton, gangway)]


def _compared(place: str, triton: Any, gangway: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(triton, dict) and isinstance(gangway, dict):
        errors = _error(triton), _error(gangway)
        if (errors[0] is None) != (errors[1] is None):
            yield f"{place} outcome".lstrip(), errors[0] or repr(triton), errors[1] or repr(gangway)
            return
        for key in [*triton, *(key for key in gangway if key not in triton)]:
            if key == AFTER_MS:
                continue
            inner = f"{place}.{key}".lstrip(".")
            yield from _compared(inner, triton.get(key, ABSENT), gangway.get(key, ABSENT))
    elif (names := _names(triton)) and (own_names := _names(gangway)):
        if names != own_names and sorted(names) == sorted(own_names):
            yield f"{place} order".lstrip(), repr(names), repr(own_names)
        own = dict(zip(own_names, gangway, strict=True))
        for name, each in zip(names, triton, strict=True):
            yield from _compared(f"{place}.{name}", each, own.pop(name, ABSENT))
        for name, each in own.items():
            yield from _compared(f"{place}.{name}", ABSENT, each)
    elif isinstance(triton, list) and isinstance(gangway, list) and _is_deep(triton, gangway):
        for index in range(max(len(triton), len(gangway))):
            pair = (each[index] if index < len(each) else ABSENT for each in (triton, gangway))
            yield from _compared(f"{place}.{index}".lstrip("."), *pair)
    elif triton != gangway or type(triton) is not type(gangway):
        yield place, repr(triton), repr(gangway)


def _error(answer: dict[str, Any]) -> str | None:
    """Return an answer's error in short, None if it is none."""
    if "code" in answer:
        return f"{answer['code']} {answer.get('message')!r}"
    if "error_message" in answer:
        return f"error {answer['error_message']!r}"
    if "failed" in answer:
        return str(answer["failed"])
    if answer.get("status", 0) >= 400:
        body = answer.get("body", answer.get("events", ""))
        return f"{answer['status']} {body.get('error', body) if isinstance(body, dict) else body!r}"
    return None


def _names(answer: Any) -> list[str]:
    """Return the names of a list's members, if all have one that no other has."""
    if not isinstance(answer, list) or not all(isinstance(each, dict) and "name" in each for each in answer):
        return []
    names = [" ".join(filter(None, (each["name"], each.get("version")))) for each in answer]
    return names if len(set(names)) == len(names) else []


def _is_deep(*lists: list[Any]) -> bool:
    return any(isinstance(each, dict | list) for one in lists for each in one)


def unknown(found: Sequence[Difference]) -> list[Difference]:
    """Return the differences that no entry covers."""
    return [each for each in found if not each.known]


def unused(found: Sequence[Difference]) -> list[Known]:
    """Return the entries that cover no difference."""
    used = {id(entry) for each in found for entry in each.known}
    return [entry for entry in KNOWN if id(entry) not in used]


def by_entry(found: Sequence[Difference]) -> Mapping[str, int]:
    """Return how many cases each entry covers."""
    return {entry.what: len({each.case for each in found if entry in each.known}) for entry in KNOWN}
