"""URLs of repositories on other machines, as fsspec gets them."""

import pytest

from gangway.server.control.repository.remote import store_of


@pytest.mark.parametrize(
    ("url", "given", "endpoint"),
    [
        ("s3://bucket/models", "s3://bucket/models", ""),
        ("s3://bucket.with.dots/a/b", "s3://bucket.with.dots/a/b", ""),
        ("s3://localhost:9000/bucket/models", "s3://bucket/models", "http://localhost:9000"),
        ("s3://http://10.0.0.1:9000/bucket/a/b", "s3://bucket/a/b", "http://10.0.0.1:9000"),
        ("s3://https://minio.example:443/bucket", "s3://bucket", "https://minio.example:443"),
        ("gs://bucket/models", "gs://bucket/models", ""),
        ("https://example.org:8443/models", "https://example.org:8443/models", ""),
    ],
)
def test_the_store_of_a_url(url: str, given: str, endpoint: str) -> None:
    assert store_of(url) == (given, {"endpoint_url": endpoint} if endpoint else {})
