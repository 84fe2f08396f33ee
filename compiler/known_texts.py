"""Texts that a model knows, of inputs that it refuses other texts of: trials ask for them."""

from itertools import islice
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper, numpy_helper

from gangway.artifact.format import ANY_TEXT
from gangway.compiler.model_file import parse

MOST_TEXTS = 4  # of a column: rows of a trial are to differ
MOST_COLUMNS = 1000  # of an input
MOST_CHARACTERS = 10_000  # of all columns: they are told to every front end in one message
_PICKS = {"ArrayFeatureExtractor", "Gather"}
Column = tuple[str, int]  # of an input
Texts = tuple[tuple[str, ...], ...]  # some of each column


def known_texts(path: Path) -> dict[str, Texts]:
    """Return texts of each column of the inputs that a OneHotEncoder reads which refuses texts it does not know.

    So scikit-learn's is exported by default. Raises ModelError, OSError.
    """
    graph = parse(path)[0].graph
    columns = {value.name: _columns_of(value) for value in graph.input if _holds_texts(value)}
    values = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[Column, tuple[str, ...]] = {}
    for node in graph.node:
        sources = [columns.get(name, []) for name in node.input]
        if not any(sources):
            continue
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        if node.op_type == "OneHotEncoder" and attributes.get("cats_strings") and not attributes.get("zeros", 1):
            texts = list(islice(filter(_is_utf_8, attributes["cats_strings"]), MOST_TEXTS))
            found |= dict.fromkeys(sources[0], tuple(text.decode() for text in texts) or (ANY_TEXT,))
        elif node.op_type == "Identity":
            columns[node.output[0]] = sources[0]
        elif node.op_type == "Concat" and attributes.get("axis") in (1, -1):
            columns[node.output[0]] = [column for source in sources for column in source]
        elif node.op_type in _PICKS and node.input[1] in values and attributes.get("axis", 1) in (1, -1):
            picked = numpy_helper.to_array(values[node.input[1]]).reshape(-1).tolist()
            columns[node.output[0]] = [sources[0][number] for number in picked if abs(number) < len(sources[0])]
    if sum(len(text) for texts in found.values() for text in texts) > MOST_CHARACTERS:
        return {}
    names = {name for name, _ in found}
    inputs = {value.name: _columns_of(value) for value in graph.input if value.name in names}
    return {name: tuple(found.get(column, (ANY_TEXT,)) for column in own) for name, own in inputs.items()}


def _is_utf_8(text: bytes) -> bool:
    return text.decode(errors="ignore").encode() == text


def _holds_texts(value: Any) -> bool:
    return bool(value.type.tensor_type.elem_type == TensorProto.STRING)


def _columns_of(value: Any) -> list[Column]:
    """Return the columns of [rows, columns], or the only one of [rows]; none if they are too many."""
    dims = value.type.tensor_type.shape.dim
    count = max(1, dims[-1].dim_value) if len(dims) > 1 else 1
    return [(value.name, number) for number in range(count)] if count <= MOST_COLUMNS else []
