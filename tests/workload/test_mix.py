"""Mixes: built in, from files, from the command line; targets and weights."""

from pathlib import Path

import pytest

from gangway.workload.mix import BUILTIN, Mix, MixModel, capacity_per_s, parse_mix, read_mix
from gangway.workload.qos import Qos, WorkloadError, parse_qos
from gangway.zoo.catalog import MODELS


def test_builtin_mixes_name_models_of_the_zoo_with_its_paper_targets():
    assert {name: len(mix.models) for name, mix in BUILTIN.items()} == {"light": 3, "medium": 2, "heavy": 2, "mix": 7}
    for model in BUILTIN["mix"].models:
        assert model.qos == parse_qos(MODELS[model.name].paper_qos_ms)


def test_weights_are_inversely_proportional_to_targets():
    # 1/10 + 1/10 + 1/10 + 1/15 + 1/15 + 1/100 + 1/130 = 0.451025...
    shares = dict(zip(BUILTIN["mix"].names, BUILTIN["mix"].resolve().shares, strict=True))
    assert shares["mobilenetv2"] == pytest.approx(0.1 / 0.4510256, rel=1e-6)
    assert shares["bert_large"] == pytest.approx(1 / 130 / 0.4510256, rel=1e-6)
    assert sum(shares.values()) == pytest.approx(1)


def test_multiples_are_resolved_by_isolated_latencies():
    mix = Mix("two", (MixModel("a"), MixModel("b"))).with_qos(Qos(multiple=3)).resolve({"a": 1000, "b": 4000})
    assert [model.qos for model in mix.models] == [Qos(milliseconds=3), Qos(milliseconds=12)]
    assert mix.shares == pytest.approx((0.8, 0.2))


def test_given_weights_stay_whatever_the_target():
    mix = Mix("two", (MixModel("a", 1, Qos(milliseconds=1)), MixModel("b", 3)))
    assert mix.resolve().shares == (0.25, 0.75)


def test_capacity_is_one_over_the_mean_isolated_latency():
    mix = Mix("two", (MixModel("a", 3), MixModel("b", 1))).resolve()
    assert capacity_per_s(mix, {"a": 2000, "b": 10_000}) == pytest.approx(1 / (0.75 * 0.002 + 0.25 * 0.010))


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (Mix("m", (MixModel("a", qos=Qos(multiple=3)),)), "a: the target 3x needs the isolated latency"),
        (Mix("m", (MixModel("a"),)), "a: it needs a weight or a target"),
        (Mix("m", (MixModel("a", 1), MixModel("b", qos=Qos(milliseconds=1)))), "either every model has a weight"),
    ],
)
def test_what_cannot_be_resolved_is_refused(mix, message):
    with pytest.raises(WorkloadError, match=message):
        mix.resolve()


def test_unresolved_weights_are_no_shares():
    with pytest.raises(WorkloadError, match="resolve them first"):
        _ = BUILTIN["light"].shares


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("own.toml", '[[models]]\nname = "a"\nqos = "3x"\n[[models]]\nname = "b"\nqos = 15\n'),
        ("own.json", '{"models": [{"name": "a", "qos": "3x"}, {"name": "b", "qos": 15}]}'),
    ],
)
def test_mixes_are_read_from_files(tmp_path: Path, file, text):
    (tmp_path / file).write_text(text)
    models = (MixModel("a", qos=Qos(multiple=3)), MixModel("b", qos=Qos(milliseconds=15)))
    assert read_mix(str(tmp_path / file)) == Mix("own", models)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 3", "expected a list 'models'"),
        ("models = []", "has no models"),
        ("models = [{}]", "every model needs a 'name'"),
        ('models = [{name = "a"}, {name = "a"}]', "a model twice: a"),
        ('models = [{name = "a", wieght = 1}]', "model 'a': unknown wieght; known: name, qos, weight"),
        ('models = [{name = "a", weight = "much"}]', "its weight must be a number, not 'much'"),
        ('models = [{name = "a", weight = -1}]', "a: its weight must be a positive number, not -1"),
        ('models = [{name = "a", qos = "soon"}]', 'expected milliseconds .* got "soon"'),
        ("models = [", "own.toml: "),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text, message):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_mix(str(tmp_path / "own.toml"))


def test_unknown_mixes_are_refused():
    with pytest.raises(WorkloadError, match="unknown mix 'ligth'; known: light, medium, heavy, mix"):
        read_mix("ligth")


def test_mixes_are_read_from_the_command_line():
    assert parse_mix("a=3, b=1").models == (MixModel("a", 3), MixModel("b", 1))
    for wrong in ("a", "a=", "=3", "a=3,", "a=3,b=x"):
        with pytest.raises(WorkloadError):
            parse_mix(wrong)


def test_targets_are_read_and_written():
    assert (str(parse_qos("3x")), str(parse_qos("15")), str(parse_qos("1.5ms"))) == ("3x", "15 ms", "1.5 ms")
    for wrong in ("", "x", "-1", "0x", "inf", "nan", "3y"):
        with pytest.raises(WorkloadError, match="expected milliseconds"):
            parse_qos(wrong)
