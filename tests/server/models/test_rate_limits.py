"""From instance groups and command line to limits."""

import argparse

import pytest
from google.protobuf import text_format

from gangway.base.flags import add_flags, read_flags
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import ConfigError
from gangway.server.models.settings import ModelLimits, RateLimits
from gangway.server.options.server import ModelOptions

LIMITED = 'rate_limiter { resources { name: "r" count: 4 } resources { name: "s" global: true count: 1 } priority: 3 }'


def limits_of(text: str, rates: RateLimits = RateLimits()) -> ModelLimits:  # noqa: B008 - frozen
    return ModelLimits.of(text_format.Parse(text, ModelConfig()), "m", 2, rates)


@pytest.mark.parametrize(
    ("text", "instances"),
    [
        ("", 0),
        ("instance_group { kind: KIND_CPU }", 0),
        ("instance_group { count: 3 }", 3),
        ("instance_group { count: 3 } instance_group { count: 2 kind: KIND_MODEL }", 5),
        ("instance_group { count: 3 } instance_group { kind: KIND_AUTO }", 0),
    ],
)
def test_instances(text: str, instances: int) -> None:
    expected = (("instances of m, version 2", 1, instances),) if instances else ()
    assert limits_of(text) == ModelLimits(expected, 0)


def test_resources_count_when_they_are_asked_for() -> None:
    text = f"instance_group {{ count: 2 {LIMITED} }}"
    own = ("instances of m, version 2", 1, 2)
    assert limits_of(text) == ModelLimits((own,), 0)
    assert limits_of(text, RateLimits(True)) == ModelLimits((own, ("resource r", 4, 4), ("resource s", 1, 1)), 3)
    more = limits_of(text, RateLimits(True, (("r", 8), ("x", 1))))
    assert more.limits[1:] == (("resource r", 4, 8), ("resource s", 1, 1))
    assert limits_of("instance_group { count: 2 }", RateLimits(True)) == ModelLimits((own,), 0)


def test_what_can_never_be_had() -> None:
    with pytest.raises(ConfigError, match="4 of resource 'r' are needed, there are 3"):
        limits_of(f"instance_group {{ {LIMITED} }}", RateLimits(True, (("r", 3),)))
    with pytest.raises(ConfigError, match="different rate limiters"):
        limits_of(f"instance_group {{ {LIMITED} }} instance_group {{ count: 1 }}", RateLimits(True))


def options(*argv: str) -> ModelOptions:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(ModelOptions, parser.add_argument_group())
    return read_flags(ModelOptions, parser.parse_args(argv))


def test_options() -> None:
    assert options() == ModelOptions(0, RateLimits())
    assert options("--cache-config=local,size=1048576").cache_bytes == 1048576
    given = options("--rate-limit=execution_count", "--rate-limit-resource=r:4", "--rate-limit-resource=s:0")
    assert given.rates == RateLimits(True, (("r", 4), ("s", 0)))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--cache-config=redis,host=x", "cache 'redis' is not supported, only 'local'"),
        ("--cache-config=local", "expected 'local,size=BYTES'"),
        ("--cache-config=local,size=-1", "expected 'local,size=BYTES'"),
        ("--cache-config=local,size=1MB", "expected 'local,size=BYTES'"),
        ("--rate-limit=sometimes", "invalid choice"),
        ("--rate-limit-resource=r", "expected 'NAME:COUNT'"),
        ("--rate-limit-resource=r:2:0", "names a device"),
        ("--rate-limit-resource=:2", "expected 'NAME:COUNT'"),
    ],
)
def test_wrong_options(argument: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        options(argument)
