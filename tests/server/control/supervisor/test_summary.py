"""What the server says of itself on standard output when it is ready."""

from pathlib import Path

import pytest

from gangway.server.access import TlsFiles
from gangway.server.control.supervisor.supervisor import print_summary
from gangway.server.options.command_line import ServeOptions
from gangway.server.options.endpoints import HttpOptions

TLS = HttpOptions(tls=TlsFiles(Path("cert"), Path("key")))


@pytest.mark.parametrize(
    ("http", "address", "page"),
    [
        (HttpOptions(), "0.0.0.0:8300", ["page       http://localhost:8300/"]),
        (HttpOptions(), "[::]:8300", ["page       http://localhost:8300/"]),
        (HttpOptions(), "10.0.0.7:8300", ["page       http://10.0.0.7:8300/"]),
        (TLS, "0.0.0.0:8300", ["page       https://localhost:8300/"]),
        (HttpOptions(page=False), "0.0.0.0:8300", []),
        (HttpOptions(), "", []),
    ],
)
def test_the_page_is_named_as_a_browser_takes_it(
    capsys: pytest.CaptureFixture[str], http: HttpOptions, address: str, page: list[str]
) -> None:
    print_summary(ServeOptions(http=http), "0.0.0.0:8001", "", address, "", [], [])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("page")] == page
