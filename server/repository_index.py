"""The index shows what the repositories hold at this moment, also what nobody has asked for."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from gangway.server.front_end_control import FrontEndControl
from gangway.server.front_end_messages import DUPLICATE, WHOLE_MODEL, ModelRemoved, ModelUnavailable
from gangway.server.repository import find_models

_log = logging.getLogger(__name__)


async def refresh_index(repositories: Sequence[Path], front_end: FrontEndControl) -> None:
    """Tell clients of models that are new in the repositories, and nothing more of those that have gone."""
    try:
        found = await asyncio.to_thread(find_models, repositories)
    except OSError as error:
        _log.warning("a repository cannot be listed: %s", error)
        return
    known = {name for name, _ in front_end.entries}
    for name, folders in found.items():
        if name not in known:
            several = ModelUnavailable(name, WHOLE_MODEL, DUPLICATE)
            front_end.announce(several if len(folders) > 1 else ModelUnavailable(name, WHOLE_MODEL, "", "UNKNOWN"))
    for (name, version), entry in list(front_end.entries.items()):
        is_idle = isinstance(entry, ModelUnavailable) and not entry.is_missed and entry.state != "UNLOADING"
        if is_idle and name not in found:
            front_end.announce(ModelRemoved(name, version))
