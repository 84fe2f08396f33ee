"""The metrics of a server, read as Prometheus reads them."""

import http.client
from contextlib import closing
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from testing.live_server import LiveServer

TIMEOUT_S = 30


@dataclass(frozen=True)
class Scrape:
    """The samples of one scrape, by name and labels; counters of Triton have no `_total` here, as on the wire."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def __call__(self, name: str, **labels: str) -> float:
        """The one sample of this name that has these labels, among others."""
        (value,) = [
            value for (sample, own), value in self.samples.items() if sample == name and labels.items() <= set(own)
        ]
        return value


@dataclass(frozen=True)
class Scraped:
    """A server whose metrics are read."""

    server: LiveServer

    def get(
        self, path: str = "/metrics", method: str = "GET", **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        with closing(self.connect()) as connection:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response, response.read()

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.address()
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

    def address(self) -> tuple[str, int]:
        host, _, port = self.server.metrics_url.removeprefix("http://").removesuffix("/metrics").partition(":")
        return host, int(port)

    def families(self) -> list[Metric]:
        return list(text_string_to_metric_families(self.get()[1].decode()))

    def scrape(self) -> Scrape:
        found = {}
        for family in self.families():
            for sample in family.samples:
                name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
                key = (name, frozenset(sample.labels.items()))
                assert key not in found, "twice"
                found[key] = sample.value
        return Scrape(found)
