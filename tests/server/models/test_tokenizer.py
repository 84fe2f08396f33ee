"""Texts as tokens: what is cut, and what a server without the package, or with a damaged file, says."""

import sys
from pathlib import Path

import pytest

from gangway.protos import StatusCode
from gangway.server.errors import RequestError
from gangway.server.models.tokenizer import TextTokenizer
from tests.helpers.text_models import tokenizer


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = tokenizer()
    made.enable_padding(length=64)
    made.enable_truncation(5)
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["cat " * 50, ("the dog", "cat sits " * 50)])
def test_what_is_cut_ends_as_the_package_ends_it(path: str, text: str | tuple[str, str]) -> None:
    expected = tokenizer()
    expected.enable_truncation(20)
    cut = expected.encode(*([text] if isinstance(text, str) else text))
    (found,) = TextTokenizer(path).encode([text], 20)
    assert found.ids == cut.ids and (not found.types or found.types == cut.type_ids)
    assert bool(found.types) is isinstance(text, tuple)
    (whole,) = TextTokenizer(path).encode([text])
    assert len(whole.ids) > 50  # nor does what the file says of lengths count


def test_without_the_package(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    known = TextTokenizer(path)
    known.prepare()
    with pytest.raises(RequestError, match="pip install") as refused:
        known.encode(["cat"])
    assert refused.value.code is StatusCode.UNIMPLEMENTED


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="cannot be read") as refused:
        TextTokenizer(str(tmp_path / "tokenizer.json")).encode(["cat"])
    assert refused.value.code is StatusCode.INTERNAL
