"""`gangway scale-check`: each part has plausible numbers, on this machine's cores and on more workers than it has."""

import json
from pathlib import Path
from typing import Any

import pytest

from gangway.measure.scale_check.gangs import serial_share
from gangway.measure.scale_check.memory import check_memory, widths
from gangway.measure.scale_check.rates import GOAL, carried_share
from gangway.measure.scale_check.splits import Split, equal_splits
from tests.conftest import CompiledZoo
from tests.helpers.small_cache import small_cache
from tests.helpers.started_command import status_of

SECTIONS = ("memory", "gangs", "splits", "requests", "rates")
MIX = "mlp=1,mobilenetv2=3"


def checked(zoo: CompiledZoo, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run the command for as short as it goes; return its figures and its page."""
    files = [f"--json={folder / 'check.json'}", f"--html={folder / 'check.html'}"]
    (folder / "cache").mkdir()
    cache = zoo.linked_cache(folder / "cache")
    arguments = [f"--mix={MIX}", f"--model-repository={zoo.repository}", f"--cache-dir={cache}", *files, *options]
    with small_cache():
        assert status_of("scale-check", *arguments) == 0
    return json.loads((folder / "check.json").read_text()), (folder / "check.html").read_text()


@pytest.mark.long
@pytest.mark.alone
def test_each_part_has_plausible_figures(
    compiled_zoo: CompiledZoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, page = checked(compiled_zoo, tmp_path, "--seconds=10")
    cores = len(found["cores"])
    assert found["believable"] and tuple(found["sections"]) == SECTIONS
    figures = {name: section["figures"] for name, section in found["sections"].items()}
    assert 0.5 < figures["memory"]["one_core_gb_per_s"] < 1000
    assert figures["memory"]["all_cores_gb_per_s"] < 2 * cores * figures["memory"]["one_core_gb_per_s"]
    widest = [row for row in found["sections"]["gangs"]["rows"] if row["cores"] == cores]
    assert [row["model"] for row in widest] == ["mlp", "mobilenetv2"]
    assert all(0 <= row["serial share"] <= 1 and row["measured ms"] > 0 for row in widest)
    assert 0.3 < widest[1]["predicted / measured"] < 3
    assert all(0.2 < row["predicted / measured"] < 5 for row in found["sections"]["splits"]["rows"])
    assert all(10 < figures["requests"][f"{role}_cpu_us"] < 1e5 for role in ("scheduler", "front_ends", "client"))
    shares = [row["worst model in time"] for row in found["sections"]["rates"]["rows"]]
    assert len(shares) == 5 and all(0 <= share <= 1 for share in shares)
    assert figures["rates"]["predicted_per_s"] > 1
    shown = capsys.readouterr()
    assert "WARNING: less than 300 s" in shown.out and "load at 50%" in shown.err
    for section in found["sections"].values():
        assert f"<h2 id={section['name']}>" in page and section["title"] in shown.out
        assert section["meaning"] and section["action"]
    assert page.count("data:image/png;base64,") == 4 and "://" not in page  # it needs no other file


@pytest.mark.long
@pytest.mark.timeout(400)
def test_sixteen_workers_on_fewer_cores_work_and_are_not_to_be_believed(
    compiled_zoo: CompiledZoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, page = checked(compiled_zoo, tmp_path, "--seconds=10", "--cores=0x16")
    assert not found["believable"] and len(found["cores"]) == 16
    assert "NO TIME HERE IS TO BE BELIEVED" in page
    assert "NO TIME HERE IS TO BE BELIEVED" in capsys.readouterr().out
    gangs = {row["cores"] for row in found["sections"]["gangs"]["rows"]}
    assert gangs == {1, 2, 4, 8, 16}
    assert max(row["gangs"] for row in found["sections"]["splits"]["rows"]) >= 8
    answered = [row["requests"] for row in found["sections"]["rates"]["rows"]]
    assert min(answered) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds=5"], "at least 10"),
        (["--seconds=-1"], "--seconds"),
        (["--mix=mlp"], "MODEL=WEIGHT"),
        (["--mix=absent=1"], "the zoo has no model 'absent'"),
        (["--mix=mlp=1", "--model-repository=/absent"], "/absent/mlp/1/model.onnx does not exist"),
        (["--cores=4095"], "not available to this process"),
        (["--cores=0x0"], "workers of each core"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("scale-check", *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.alone
def test_pairs_of_nodes_are_measured() -> None:
    """The two nodes are the same core here, so their memory is as near."""
    with small_cache():
        section = check_memory([0], [[0], [0]], seconds=0.1)
    remote = [row["cores"] for row in section.rows if isinstance(row["cores"], str)]
    assert remote and all("memory of node" in str(name) for name in remote)
    assert 0.3 < section.figures["worst_remote_share"] <= 1.0


def test_widths_are_few_and_have_both_ends() -> None:
    assert widths(1) == [1] and widths(2) == [1, 2] and widths(6) == [1, 2, 3, 4, 5, 6]
    assert widths(20) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20]
    assert widths(192)[-3:] == [96, 128, 192]


def test_the_serial_share_explains_amdahls_times() -> None:
    for serial in (0.0, 0.1, 1.0):
        assert serial_share(16, 100.0, 100 * serial + 100 * (1 - serial) / 16) == pytest.approx(serial)


def test_splits_are_equal_and_fill_the_cores() -> None:
    assert equal_splits(16, 4) == [Split(1, 16, 4), Split(2, 8, 2), Split(4, 4, 1)]
    assert equal_splits(12, 8) == [Split(1, 12, 8), Split(2, 6, 4), Split(4, 3, 2)]


def test_the_carried_load_lies_between_the_points_around_the_goal() -> None:
    assert carried_share([(0.5, 1.0), (1.0, 0.9)]) == pytest.approx(0.5 + 0.5 * (1 - GOAL) / 0.1)
    assert carried_share([(0.5, 1.0), (1.0, 0.96)]) == 1.0
    assert carried_share([(0.5, 0.9), (1.0, 0.99)]) == 0.0
