"""The zoo's models have the published sizes; none is written for it."""

import pytest

from gangway.zoo import DEFAULT_NAMES, MODELS, build, count

# Trained parameters and multiply-adds in 10^9; docs/reference/zoo.md names the sources.
PUBLISHED = {
    "resnet18": (11_689_512, 1.814),
    "resnet34": (21_797_672, 3.664),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "googlenet": (6_999_000, 1.583),
    "inception_v3": (23_834_568, 5.713),
    "mobilenetv2": (3_504_872, 0.301),
    "efficientnet_b0": (5_288_548, 0.386),
    "alexnet": (61_100_840, 0.714),
    "vgg16": (138_357_544, 15.470),
    "ssd_resnet34": (20_000_000, 15.85),
    "tiny_yolov2": (15_858_700, 3.49745),
    "bert_base": (109_482_240, 11.17),
    "bert_large": (335_141_888, 39.46),
    "xlnet_base": (116_718_336, 11.48),
    "gpt2": (124_439_808, 5.55),
    "mlp": (5_898, 5.76e-6),
    "simple": (0, 0.0),
    "simple_string": (0, 0.0),
    "simple_int8": (0, 0.0),
    "simple_identity": (0, 0.0),
    "simple_pixels": (0, 0.0),
    "simple_image": (0, 0.0),
    "simple_sequence": (0, 0.0),
    "simple_dyna_sequence": (0, 0.0),
    "simple_string_dyna_sequence": (0, 0.0),
    "accumulator": (0, 0.0),
    "digits_pixels": (0, 0.0),
    "digits_network": (9_610, 9.472e-6),
}


def test_every_model_is_compared() -> None:
    assert PUBLISHED.keys() == MODELS.keys()
    assert set(DEFAULT_NAMES) <= MODELS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_size_is_the_published_one(name: str) -> None:
    parameters, multiply_adds = PUBLISHED[name]
    counts = count(build(name).without_weights())
    assert counts.parameters == pytest.approx(parameters, rel=0.01)
    assert counts.multiply_adds == pytest.approx(1e9 * multiply_adds, rel=0.01)
    assert counts.gflop == pytest.approx(2 * multiply_adds, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_batch_is_symbolic_and_all_else_fixed(name: str) -> None:
    graph = build(name)
    for info in (*graph.inputs, *graph.outputs):
        batch, *rest = info.type.tensor_type.shape.dim
        assert batch.dim_param == "N"
        assert all(dimension.dim_value > 0 for dimension in rest) or name == "simple_identity"


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.sequence])
def test_a_longer_sequence_costs_more_but_has_the_same_parameters(name: str) -> None:
    short, long = count(build(name).without_weights()), count(build(name, 384).without_weights())
    assert short.parameters == long.parameters
    factor = 384 / (MODELS[name].sequence or 0)
    if name == "gpt2":
        factor *= 0.99  # its head sees one token, however long the sequence
    assert factor <= long.multiply_adds / short.multiply_adds < 1.25 * factor
    assert {info.type.tensor_type.shape.dim[1].dim_value for info in build(name, 384).inputs} == {384}


@pytest.mark.parametrize(
    ("name", "sequence", "message"),
    [
        ("resnet51", None, "no model 'resnet51'; it has resnet18"),
        ("resnet50", 384, "takes no tokens"),
        ("bert_base", 513, "1 to 512 tokens, not 513"),
        ("gpt2", 1025, "1 to 1024 tokens, not 1025"),
        ("xlnet_base", 0, "tokens, not 0"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, sequence: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, sequence)
