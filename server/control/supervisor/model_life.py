"""The life of a model's version, as clients see it: the states, and what leads from one to the other.

`docs/explanation/model-life.md` draws it. A version without number stands for a model that has no usable version.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from gangway.server.messages import UNLOADED, ModelReady, ModelRemoved, ModelUnavailable


class VersionState(Enum):
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
TRANSITIONS: Final[Mapping[VersionState, Mapping[VersionState, str]]] = {
    VersionState.ABSENT: {
        VersionState.UNKNOWN: "the index is read, and a repository has it",
        VersionState.LOADING: _LOAD,
        VersionState.FAILED: _READ,
    },
    VersionState.UNKNOWN: {
        VersionState.FAILED: _READ,
        VersionState.ABSENT: "the index is read and no repository has it, or a load knows its versions",
    },
    VersionState.LOADING: {
        VersionState.READY: "the load succeeds",
        VersionState.FAILED: "the load fails",
        VersionState.UNLOADED: "the load is given up: another version of the model has failed",
    },
    VersionState.READY: {
        VersionState.READY: "a reload succeeds; one that fails changes nothing",
        VersionState.UNLOADING: "an unload; its files have gone; a model of the ensemble has gone",
        VersionState.FAILED: "no worker can load it, or its requests have ended workers",
    },
    VersionState.UNLOADING: {
        VersionState.UNLOADED: "the last request has ended",
        VersionState.FAILED: f"the last request has ended, and it cannot be served any more; {_READ}",
        VersionState.LOADING: _LOAD,
        VersionState.READY: _MADE,
        VersionState.ABSENT: f"the last request has ended, and {_GONE}",
    },
    VersionState.UNLOADED: {
        VersionState.UNLOADED: "an unload of an ensemble whose models have gone",
        VersionState.LOADING: _LOAD,
        VersionState.READY: _MADE,
        VersionState.FAILED: _READ,
        VersionState.ABSENT: f"{_GONE}, or a load knows its versions",
    },
    VersionState.FAILED: {
        VersionState.FAILED: "it fails for another reason",
        VersionState.LOADING: _LOAD,
        VersionState.READY: f"it is loaded again by itself; {_MADE}",
        VersionState.UNLOADED: "an unload",
        VersionState.ABSENT: f"{_GONE}, or its files have become other versions",
    },
}

_STATES: Final = {"UNKNOWN": VersionState.UNKNOWN, "LOADING": VersionState.LOADING, "UNLOADING": VersionState.UNLOADING}


def state_of(message: ModelReady | ModelUnavailable | ModelRemoved | None) -> VersionState:
    """Return the state in which the last news of a version leaves it; None: there has been none."""
    if isinstance(message, ModelReady):
        return VersionState.READY
    if isinstance(message, ModelUnavailable):
        idle = VersionState.UNLOADED if message.reason.startswith(UNLOADED) else VersionState.FAILED
        return _STATES.get(message.state, idle)
    return VersionState.ABSENT
