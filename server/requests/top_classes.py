"""The largest elements of a tensor, as text. Apart from codecs.py because of numpy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gangway.artifact.datatypes import DTYPES


def texts_of(
    content: bytes, datatype: str, shape: tuple[int, int], count: int, labels: Sequence[str]
) -> list[list[str]]:
    """Return the texts of the `count` largest elements of each row of a tensor [rows, elements], the largest first."""
    rows, elements = shape
    values = np.frombuffer(content, DTYPES[datatype], rows * elements)
    return class_texts(values.reshape(shape), count, labels)


def class_texts(values: npt.NDArray[np.generic], count: int, labels: Sequence[str]) -> list[list[str]]:
    """Return "value:index:label" of the largest elements of each row of `values` [rows, elements], the largest first.

    Of equal ones the first comes first; what is not a number comes last.
    """
    texts = []
    for row in values:
        # Backwards there and back again: the sort is stable, and of equal ones the first shall come first.
        order = np.argsort(row[::-1], kind="stable")[::-1]
        places = len(row) - 1 - order
        if row.dtype.kind == "f":
            unknown = np.isnan(row[places])
            places = np.concatenate([places[~unknown], places[unknown]])
        texts.append([_text(row[place], int(place), labels) for place in places[:count]])
    return texts


def _text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(value)
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"
