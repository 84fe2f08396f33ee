"""Where the client's tensors come from: random numbers, .npy files, pictures."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from gangway.clients.errors import InputError
from gangway.clients.inputs import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    Normalisation,
    OpenDimensions,
    TensorMetadata,
    dtype_of,
    file_tensors,
    image_tensor,
    infer_request,
    random_tensors,
    shape_argument,
    shaped,
    with_chosen_sizes,
    zero_tensor,
)

PICTURE = TensorMetadata(name="x", datatype="FP32", shape=[-1, 3, 32, 48])


def tensor(datatype: str, *shape: int, name: str = "x") -> TensorMetadata:
    return TensorMetadata(name=name, datatype=datatype, shape=shape)


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("FP32", "float32"), ("FP16", "float16"), ("INT32", "int32"), ("BOOL", "bool")]
)
def test_random_values_have_the_tensors_shape_and_type(datatype: str, dtype: str) -> None:
    values = random_tensors([tensor(datatype, -1, 16)], batch=3, seed=0)["x"]
    assert values.shape == (3, 16)
    assert values.dtype == dtype
    assert np.unique(values).size > 1


def test_equal_seeds_give_equal_values() -> None:
    first, again, other = (random_tensors([tensor("FP32", 1, 16)], 1, seed)["x"] for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_batch_needs_an_open_first_dimension() -> None:
    with pytest.raises(InputError, match="fixed shape"):
        random_tensors([tensor("FP32", 1, 16)], batch=2, seed=0)
    with pytest.raises(InputError, match="open dimensions"):
        random_tensors([tensor("FP32", -1, -1)], batch=1, seed=0)


def test_shapes_say_what_open_dimensions_are() -> None:
    open_ones = [tensor("FP32", -1, 3, -1, -1)]
    (x,) = random_tensors(shaped(open_ones, {"x": (3, 48, 320)}), batch=2, seed=0).values()
    assert x.shape == (2, 3, 48, 320)
    for wrong in ((4, 48, 320), (48, 320), (1, 3, 48, 320)):
        with pytest.raises(InputError, match=r"input 'x' is \[-1, 3, -1, -1\]; .*, such as x:3,1,1"):
            shaped(open_ones, {"x": wrong})
    with pytest.raises(InputError, match="there is no size to say"):
        shaped([tensor("FP32", -1)], {"x": (3,)})
    with pytest.raises(InputError, match="no input 'y'; its inputs are x FP32"):
        shaped(open_ones, {"y": (1,)})


@pytest.mark.parametrize(
    ("inputs", "declared", "said"),
    [
        ([tensor("FP32", -1, 16)], None, ""),
        ([tensor("INT64", -1, -1)], None, "--shape x:16"),
        ([tensor("INT64", -1, -1)], 32, "--shape x:32"),
        ([tensor("FP32", -1, 3, -1, -1)], None, "--shape x:3,224,224"),
        ([tensor("UINT8", 1, -1, 224, 3)], None, "--shape x:224,224,3"),
        ([tensor("FP32", -1, 12, -1, 64)], None, "--shape x:12,16,64"),
    ],
)
def test_open_dimensions_get_sizes(inputs: list[TensorMetadata], declared: int | None, said: str) -> None:
    chosen, text = with_chosen_sizes(inputs, lambda: OpenDimensions(declared))
    assert text == said
    (x,) = random_tensors(chosen, batch=1, seed=0).values()
    assert x.ndim == len(inputs[0].shape)


NAMED = OpenDimensions(
    names={"ids": ("N", "seq"), "mask": ("N", "seq"), "past": ("N", "", "past", ""), "other": ("", "x")}
)
TEXT = [
    tensor("INT64", -1, -1, name="ids"),
    tensor("INT64", -1, -1, name="mask"),
    tensor("FP32", -1, 4, -1, 8, name="past"),
    tensor("FP32", -1, -1, -1, name="other"),  # of another rank than its names
]


def test_a_dimension_has_one_size_in_all_inputs() -> None:
    found = shaped(TEXT, {"seq": (7,), "past": (4, 3, 8)}, lambda: NAMED)
    assert [list(each.shape) for each in found] == [[-1, 7], [-1, 7], [-1, 4, 3, 8], [-1, -1, -1]]
    for shapes, words in (
        ({"N": (2,)}, "no input 'N'; its inputs are ids .*, its dimensions past, seq"),
        ({"seq": (7, 8)}, "'seq' is one dimension"),
        ({"x": (7,)}, "no input 'x'"),
    ):
        with pytest.raises(InputError, match=words):
            shaped(TEXT, shapes, lambda: NAMED)
    clash = [tensor("INT64", -1, -1, name="seq"), TEXT[0]]
    assert [list(each.shape) for each in shaped(clash, {"seq": (7,)}, lambda: NAMED)] == [[-1, 7], [-1, -1]]


def test_one_hint_names_all_open_inputs() -> None:
    found, said = with_chosen_sizes(TEXT, lambda: NAMED)
    assert said == "--shape seq:16 --shape past:16 --shape other:16,16"
    assert all(size >= 0 for each in found for size in each.shape[1:])


def test_masks_hide_nothing() -> None:
    mask = TensorMetadata(name="attention_mask", datatype="INT64", shape=[-1, 16])
    assert random_tensors([mask], batch=2, seed=0)["attention_mask"].all()


@pytest.mark.parametrize("text", ["x", "x:", ":3", "x:3,0", "x:3,-1", "x:a"])
def test_a_shape_has_a_name_and_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME:SIZE"):
        shape_argument(text)
    assert shape_argument("a:b:3,4") == ("a:b", (3, 4))


def test_datatypes_without_a_numpy_type_are_refused() -> None:
    with pytest.raises(InputError, match="FP8"):
        random_tensors([tensor("FP8", 1, 16)], batch=1, seed=0)


def test_random_bytes_are_digits_and_zeros_are_empty() -> None:
    texts = random_tensors([tensor("BYTES", -1, 16)], batch=2, seed=0)["x"]
    assert texts.shape == (2, 16) and set(texts.flat) == {b"0", b"1"}
    assert zero_tensor(tensor("BYTES", 1, 2), 1).tolist() == [[b"", b""]]
    assert zero_tensor(tensor("INT32", 1, 2), 1).tolist() == [[0, 0]]


@pytest.mark.parametrize("array", [np.array([[b"\xff\0a", b""]]), np.array([["h\u00e9", ""]])])
def test_arrays_of_bytes_and_texts(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    np.save(tmp_path / "a.npy", array)
    (x,) = file_tensors([tensor("BYTES", -1, 2)], {"x": tmp_path / "a.npy"}).values()
    expected = [each.encode() if isinstance(each, str) else each for each in array.flat]
    assert (x.shape, x.dtype, x.ravel().tolist()) == ((1, 2), object, expected)


def test_a_file_is_the_one_element(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\0")
    (x,) = file_tensors([tensor("BYTES", -1, 1)], {"x": tmp_path / "a.jpg"}).values()
    assert x.tolist() == [[b"\xff\xd8\0"]]
    with pytest.raises(InputError, match=r"a\.jpg is one element, but input 'x' is BYTES \[1, 16\]"):
        file_tensors([tensor("BYTES", 1, 16)], {"x": tmp_path / "a.jpg"})
    np.save(tmp_path / "numbers.npy", np.zeros((1, 1)))
    with pytest.raises(InputError, match="holds float64, but input 'x' is BYTES"):
        file_tensors([tensor("BYTES", 1, 1)], {"x": tmp_path / "numbers.npy"})


def test_npy_files_are_read_as_they_are(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.int32).reshape(1, 6)
    np.save(tmp_path / "a.npy", values)
    read = file_tensors([tensor("INT32", 1, 6)], {"x": tmp_path / "a.npy"})
    assert np.array_equal(read["x"], values)


def test_wrong_npy_files_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros(6, dtype=np.float32))
    (tmp_path / "text.npy").write_text("not an array")
    wanted = [tensor("INT32", 1, 6)]
    with pytest.raises(InputError, match=r"float\.npy holds float32, but input 'x' is INT32"):
        file_tensors(wanted, {"x": tmp_path / "float.npy"})
    with pytest.raises(InputError, match=r"cannot read .*text\.npy"):
        file_tensors(wanted, {"x": tmp_path / "text.npy"})
    with pytest.raises(InputError, match="No such file"):
        file_tensors(wanted, {"x": tmp_path / "absent.npy"})
    with pytest.raises(InputError, match="inputs are 'x'; --input was given for 'y'"):
        file_tensors(wanted, {"y": tmp_path / "float.npy"})


@pytest.mark.parametrize("size", [(48, 32), (640, 427), (100, 999), (10, 10)])
def test_a_picture_of_any_size_becomes_normalised_planes(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size, (255, 0, 128)).save(tmp_path / "a.png")
    values = image_tensor([PICTURE], tmp_path / "a.png", batch=2)["x"]
    expected = (np.array([255, 0, 128], dtype=np.float32) / 255 - IMAGENET_MEAN) / IMAGENET_DEVIATION
    assert values.shape == (2, 3, 32, 48)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, np.broadcast_to(expected[:, None, None], values.shape), rtol=1e-6)


def test_the_crop_is_the_middle(tmp_path: Path) -> None:
    pixels = np.zeros((64, 192, 3), dtype=np.uint8)
    pixels[:, 64:128] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    values = image_tensor([tensor("FP32", 1, 3, 56, 56)], tmp_path / "a.png", batch=1)["x"]
    bright = (1 - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_DEVIATION, np.float32)
    np.testing.assert_allclose(values[0, :, :, 28], np.repeat(bright[:, None], 56, axis=1), rtol=1e-6)


def test_pictures_need_a_model_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="cannot read"):
        image_tensor([PICTURE], tmp_path / "a.png", batch=1)
    with pytest.raises(InputError, match="needs an input of floats or UINT8"):
        image_tensor([tensor("FP32", 1, 16)], tmp_path / "a.png", batch=1)
    with pytest.raises(InputError, match="with one input"):
        image_tensor([PICTURE, PICTURE], tmp_path / "a.png", batch=1)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match="fixed shape"):
        image_tensor([tensor("FP32", 1, 3, 8, 8)], tmp_path / "a.png", batch=2)


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        (tensor("FP32", -1, 3, 20, 30), (1, 3, 20, 30)),
        (tensor("FP16", -1, 20, 30, 3), (1, 20, 30, 3)),
        (tensor("UINT8", -1, 20, 30, 1), (1, 20, 30, 1)),
        (tensor("FP32", -1, -1, -1, 3), (1, 20, 30, 3)),
        (tensor("UINT8", -1, -1, 3), (20, 30, 3)),
        (tensor("FP64", 1, -1, -1), (1, 20, 30)),
    ],
    ids=str,
)
def test_every_layout_of_pixels_is_known(tmp_path: Path, wanted: TensorMetadata, shape: tuple[int, ...]) -> None:
    Image.new("RGB", (30, 20), (50, 100, 150)).save(tmp_path / "a.png")
    values = image_tensor([wanted], tmp_path / "a.png", 1, Normalisation((0.0,), (1 / 255,)))["x"]
    assert values.shape == shape and values.dtype == dtype_of(wanted.datatype)
    grey = Image.new("RGB", (1, 1), (50, 100, 150)).convert("L").getpixel((0, 0))
    colours = [50, 100, 150] if 3 in shape else [grey]
    np.testing.assert_allclose(np.unique(values), colours, rtol=1e-3)


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        (tensor("UINT8", -1), (10,)),
        (tensor("UINT8", -1, -1), (1, 10)),
        (tensor("BYTES", 1), (1,)),
        (tensor("BYTES", -1, 1), (1, 1)),
    ],
    ids=str,
)
def test_a_model_that_decodes_gets_the_file(tmp_path: Path, wanted: TensorMetadata, shape: tuple[int, ...]) -> None:
    (tmp_path / "a.png").write_bytes(b"0123456789")
    values = image_tensor([wanted], tmp_path / "a.png", batch=1)["x"]
    assert values.shape == shape
    request = infer_request("m", "", {"x": (wanted.datatype, values)})
    assert request.raw_input_contents[0].endswith(b"0123456789")
    assert len(request.raw_input_contents[0]) == (14 if wanted.datatype == "BYTES" else 10)


@pytest.mark.parametrize("numbers", [(1.0, 2.0), (1.0, 2.0, 3.0, 4.0)])
def test_means_are_one_or_three(tmp_path: Path, numbers: tuple[float, ...]) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match="one number, or three"):
        image_tensor([tensor("FP32", -1, 3, 8, 8)], tmp_path / "a.png", 1, Normalisation(numbers))
