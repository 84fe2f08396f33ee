"""Scripts of findings/ have the form that its README states, and it lists each of them."""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
IN_ORDER = ("# A good guess: ", "# Seen instead", "# Seen with: ", "set -euo pipefail")


def test_each_script_says_what_is_guessed_and_what_is_seen() -> None:
    for path in SCRIPTS:
        text = path.read_text()
        places = [text.find(part) for part in IN_ORDER]
        assert places == sorted(places) and places[0] > 0, f"{path.name}: {places}"
        assert os.access(path, os.X_OK), path.name


def test_each_script_installs_pinned_packages_and_never_gangway() -> None:
    for path in SCRIPTS:
        text = path.read_text()
        assert re.search(r"pip\" install [^|&;]*==[\d.]+", text), path.name
        assert not re.search(r"import gangway|gangway-serve", text), path.name


def test_the_readme_lists_each_script_with_its_first_line() -> None:
    listed = dict(re.findall(r"^- `(\w+)`: (.+)$", (FOLDER / "README.md").read_text(), flags=re.MULTILINE))
    assert listed == {path.stem: path.read_text().splitlines()[1].removeprefix("# ") for path in SCRIPTS}
