"""The tutorials work: their files are written, their servers started and their commands run, as a reader would."""

from contextlib import closing
from pathlib import Path

import pytest

from testing.pages import PageReader, blocks_of
from tests.conftest import CompiledZoo
from tests.helpers.text_models import TextModel

pytestmark = pytest.mark.long

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))


@pytest.fixture(scope="module")
def cache(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled models of all pages: the zoo's are there already, none is compiled twice."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "gangway").mkdir()
    compiled_zoo.linked_cache(folder / "gangway")
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_works(page: Path, tmp_path: Path, cache: Path) -> None:
    blocks = list(blocks_of(page))
    if page.stem == "embeddings":  # whose export needs PyTorch, and weights
        TextModel(tmp_path / "models", "minilm", scores=False)
    assert {"run", "serve"} <= {block.action for block in blocks}
    with closing(PageReader(tmp_path, cache)) as reader:
        for block in blocks:
            reader.follow(block)
