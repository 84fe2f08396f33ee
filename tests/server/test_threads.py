"""Pools of threads, where the system starts no further thread."""

import threading

import pytest

from gangway.server.threads import NoThreadError, started_pool
from tests.server.conftest import no_more_threads


def test_a_pool_has_its_threads_from_the_beginning() -> None:
    pool = started_pool(2, "test")
    with no_more_threads():
        assert pool.submit(threading.get_ident).result(10) != threading.get_ident()
        with pytest.raises(NoThreadError, match="no further thread can be started"):
            started_pool(1, "test")
    pool.shutdown()
