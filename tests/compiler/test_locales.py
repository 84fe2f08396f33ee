"""StringNormalizer on machines whose locales are few."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.model_file import open_model


def normalizer(path: Path, inside: bool, **attributes: Any) -> Path:
    """A model of one StringNormalizer; `inside`: of an If, whose condition is an input."""
    words = helper.make_tensor_value_info("x", TensorProto.STRING, [3])
    result = helper.make_tensor_value_info("y", TensorProto.STRING, [None])
    node = helper.make_node("StringNormalizer", ["x"], ["y"], is_case_sensitive=0, stopwords=["the"], **attributes)
    inputs = [words]
    if inside:
        branches = {name: helper.make_graph([node], name, [], [result]) for name in ("then_branch", "else_branch")}
        node = helper.make_node("If", ["c"], ["y"], **branches)
        inputs.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    graph = helper.make_graph([node], "words", inputs, [result])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("locale", [None, "en_US.UTF-8", "en_US", "C.UTF-8"])
def test_english_letters_need_no_locale_of_the_machine(tmp_path: Path, locale: str | None, inside: bool) -> None:
    given = {"locale": locale} if locale else {}
    path = normalizer(tmp_path / "model.onnx", inside, case_change_action="LOWER", **given)
    feeds: dict[str, Any] = {"x": np.array(["The", "ÉTÉ Ǆ", "Straße"], object)}
    feeds |= {"c": np.array(True)} if inside else {}
    assert open_model(path).run(None, feeds)[0].tolist() == ["été ǆ", "straße"]


def test_a_locale_that_is_lacking_is_named_first(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    path = normalizer(tmp_path / "model.onnx", False, case_change_action="UPPER", locale="xx_YY.UTF-8")
    with pytest.raises(UnsupportedModelError, match=r"^node 'y' .* wants the locale 'xx_YY.UTF-8'.* install it"):
        open_model(path)
    with pytest.raises(UnsupportedModelError, match=r"wants the locale 'xx_YY.UTF-8'"):
        compile_file(path)
