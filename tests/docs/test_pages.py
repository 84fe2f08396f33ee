"""Pages are short and plain, and what they point to exists."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES = sorted(DOCS.rglob("*.md"))
ALL = [*OUTSIDE, *PAGES]
MAX_PARAGRAPH_WORDS = 120
MAX_README_LINES = 100
# Folders at the top: a path in backquotes that begins with one of them must exist.
TOP = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"models", "tools"}
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
MODULE = re.compile(r"python -m ((?:benchmarks|docs|gangway|testing)[\w.]*)")


def prose(page: Path) -> str:
    """The text without fenced and indented blocks, comments and tables' lines."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text()), flags=re.DOTALL)
    return "\n".join("" if line.startswith(("    ", "|")) else line for line in text.splitlines())


def paragraphs(page: Path) -> Iterator[str]:
    """Paragraphs and items of lists."""
    lines = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n", prose(page), flags=re.MULTILINE).splitlines()
    for is_blank, group in groupby(lines, key=lambda line: not line.strip()):
        if not is_blank:
            yield " ".join(group)


def headings(page: Path) -> set[str]:
    """Anchors, as the site makes them of headings."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in found)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/install.md", "docs/tutorials/embeddings.md"])
def test_make_installs_the_extras_that_pages_do(page: str) -> None:
    recipe = re.search(
        r"^\$\(VENV\)/\.installed:.*?'(\..*?)'", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    assert recipe is not None
    assert f"pip install '{recipe[1]}'" in (ROOT / page).read_text()


@pytest.mark.parametrize("page", ALL, ids=page_name)
def test_paragraphs_are_short(page: Path) -> None:
    assert [text for text in paragraphs(page) if len(text.split()) > MAX_PARAGRAPH_WORDS] == []


@pytest.mark.parametrize("page", ALL, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in headings(file)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("page", ALL, ids=page_name)
def test_paths_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in CODE.findall(text) if _is_path(path) and not _exists(path)]
    for module in MODULE.findall(text):
        is_placeholder = module.rpartition(".")[2].isupper()
        if not is_placeholder and not any((ROOT / name).exists() for name in _files_of(module)):
            missing.append(module)
    assert missing == []


def _is_path(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+(?:/[\w.*-]+)+/?|[\w-]+/", text) is not None and text.partition("/")[0] in TOP


def _exists(path: str) -> bool:
    return any(ROOT.glob(path.rstrip("/")))


def _files_of(module: str) -> tuple[str, str, str]:
    path = module.removeprefix("gangway.").replace(".", "/")
    return (f"{path}.py", f"{path}/__init__.py", f"{path}/__main__.py")


def test_code_names_pages_that_exist() -> None:
    """Comments and docstrings name pages by their paths from the top."""
    missing = set()
    for room in sorted(TOP - {"docs", "build"}):
        for file in (ROOT / room).rglob("*"):
            if file.suffix in (".py", ".c", ".h") and "gangway" not in file.relative_to(ROOT).parts[:1]:
                names = re.findall(r"\bdocs/[\w/.-]+\.md\b", file.read_text())
                missing |= {f"{file.relative_to(ROOT)}: {name}" for name in names if not (ROOT / name).exists()}
    assert missing == set()
