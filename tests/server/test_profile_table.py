"""What people are told of a profile."""

from dataclasses import replace

from gangway.artifact.profile import LayerProfile, Machine, Profile
from gangway.artifact.proxy import InterferenceProxy
from gangway.measure.profile_command import proxy_line, summary, wholeness

PROFILE = Profile(
    key="0" * 64,
    model_name="model",
    machine=Machine("0123456789ab", "a CPU", 2, "avx2", 1.0, 1.0),
    cores=(1, 2),
    batches=(1,),
    layers=(LayerProfile("layer", (((10.0,), (10.0,)),), 1.0, 1.0, (), ()),),
    isolated_us=((10.0,), (10.0,)),
    together_us=((10.0,), (10.0,)),
    interference=(),
    interference_cores=0,
    runs=(9,),
    scatter=0.02,
    seconds=1.0,
)


def test_cores_that_were_not_whole_are_warned_of() -> None:
    assert not any("WARNING" in line for line in summary(PROFILE))
    (warning,) = wholeness(replace(PROFILE, cores_whole=0.52))
    assert warning in summary(replace(PROFILE, cores_whole=0.52))
    assert warning.startswith("WARNING: all cores at once: the slowest did 52% of what one does alone. ")
    assert wholeness(replace(PROFILE, cores=(1,))) == []


def test_what_the_level_rests_on() -> None:
    proxy = InterferenceProxy("0123456789ab", "a", "m", 0.1, 0.002, 1.5, 0.99, 0.97, 42, 3)
    assert "97% of the variance over 42 samples of 3 models, and" in proxy_line(proxy)
    assert "of 1 model, and" in proxy_line(replace(proxy, models=1))
    assert "none" in proxy_line(None)
