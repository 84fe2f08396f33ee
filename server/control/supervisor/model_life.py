"""The life of a model's version, as clients see it: the states, and what leads from one to the other.

`docs/explanation/model-life.md` draws it. A version without number stands for a model that has no usable version.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from gangway.server.messages import UNLOADED, ModelReady, ModelRemoved, ModelUnavailable


class State(Enum):
    """Where a version stands. RepositoryIndex shows UNLOADED and FAILED as UNAVAILABLE, with the reason."""

    ABSENT = "absent"  # the index has no such entry
    UNKNOWN = "unknown"  # in a repository, and nobody has asked for it
    LOADING = "loading"  # there is nothing of it that answers requests
    READY = "ready"
    UNLOADING = "unloading"  # no new request gets it, earlier ones go on
    UNLOADED = "unloaded"  # not wanted
    FAILED = "failed"  # wanted, or meant to be, and not possible


_LOAD: Final = "a load begins"
_READ: Final = "a load fails before it begins: the repository's files say why"
_MADE: Final = "an ensemble's models are there again"
_GONE: Final = "no repository has it"

# What may follow each state, and what leads there. Nothing else happens.
TRANSITIONS: Final[Mapping[State, Mapping[State, str]]] = MappingProxyType(
    {
        State.ABSENT: MappingProxyType(
            {
                State.UNKNOWN: "the index is read, and a repository has it",
                State.LOADING: _LOAD,
                State.FAILED: _READ,
            }
        ),
        State.UNKNOWN: MappingProxyType(
            {
                State.FAILED: _READ,
                State.ABSENT: "the index is read and no repository has it, or a load knows its versions",
            }
        ),
        State.LOADING: MappingProxyType(
            {
                State.READY: "the load succeeds",
                State.FAILED: "the load fails",
                State.UNLOADED: "the load is given up: another version of the model has failed",
            }
        ),
        State.READY: MappingProxyType(
            {
                State.READY: "a reload succeeds; one that fails changes nothing",
                State.UNLOADING: "an unload; its files have gone; a model of the ensemble has gone",
                State.FAILED: "no worker can load it, or its requests have ended workers",
            }
        ),
        State.UNLOADING: MappingProxyType(
            {
                State.UNLOADED: "the last request has ended",
                State.FAILED: f"the last request has ended, and it cannot be served any more; {_READ}",
                State.LOADING: _LOAD,
                State.READY: _MADE,
                State.ABSENT: f"the last request has ended, and {_GONE}",
            }
        ),
        State.UNLOADED: MappingProxyType(
            {
                State.UNLOADED: "an unload of an ensemble whose models have gone",
                State.LOADING: _LOAD,
                State.READY: _MADE,
                State.FAILED: _READ,
                State.ABSENT: f"{_GONE}, or a load knows its versions",
            }
        ),
        State.FAILED: MappingProxyType(
            {
                State.FAILED: "it fails for another reason",
                State.LOADING: _LOAD,
                State.READY: f"it is loaded again by itself; {_MADE}",
                State.UNLOADED: "an unload",
                State.ABSENT: f"{_GONE}, or its files have become other versions",
            }
        ),
    }
)

_STATES: Final = {"UNKNOWN": State.UNKNOWN, "LOADING": State.LOADING, "UNLOADING": State.UNLOADING}


def state_of(message: ModelReady | ModelUnavailable | ModelRemoved | None) -> State:
    """Return the state in which the last news of a version leaves it; None: there has been none."""
    if isinstance(message, ModelReady):
        return State.READY
    if isinstance(message, ModelUnavailable):
        idle = State.UNLOADED if message.reason.startswith(UNLOADED) else State.FAILED
        return _STATES.get(message.state, idle)
    return State.ABSENT
