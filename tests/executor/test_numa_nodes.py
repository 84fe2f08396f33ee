"""Which cores are of one NUMA node, as a prepared tree of sysfs says, or a list."""

from pathlib import Path

import pytest

from gangway.executor.launch import NODES, nodes_of, numa_nodes


def tree(folder: Path, *lists: str) -> Path:
    """The folder of nodes; beside them lie other files, as in the real one."""
    for number, text in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{text}\n")
    (folder / "online").write_text("0-1\n")
    (folder / "power").mkdir()
    return folder


@pytest.mark.parametrize(
    ("lists", "cores", "found"),
    [
        (["0-3"], range(4), [range(4)]),
        (["0-1,4-5", "2-3,6-7"], range(8), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (["0-3", "4-7"], (1, 2, 5), [(1, 2), (5,)]),  # a cpuset leaves out a part of each
        (["0-3", "4-7"], (4, 5), [(4, 5)]),  # or a whole node
        (["0-3", "", "4-7"], range(8), [range(4), range(4, 8)]),  # a node of memory only
        (["0-1", "4-5"], (0, 1, 4, 5), [(0, 1), (4, 5)]),  # 2 and 3 are offline
        (["0-1", "2"], range(4), [range(4)]),  # it does not name all: nothing is known
        ([], range(2), [range(2)]),
        ([str(number) for number in range(11)], (2, 10), [(2,), (10,)]),  # by number, not by name
    ],
)
def test_nodes_of_a_system(tmp_path, lists, cores, found):
    assert numa_nodes(tuple(cores), tree(tmp_path, *lists)) == tuple(map(tuple, found))


def test_a_system_that_says_nothing_has_one_node(tmp_path):
    assert numa_nodes((0, 3), tmp_path / "missing") == ((0, 3),)
    (tmp_path / "node0").mkdir()
    assert numa_nodes((0, 3), tmp_path) == ((0, 3),)


def test_the_nodes_of_this_machine_have_its_cores():
    listed = [folder for folder in NODES.glob("node[0-9]*") if (folder / "cpulist").read_text().strip()]
    assert 1 <= len(numa_nodes((0,))) <= max(1, len(listed))


def test_a_list_of_nodes():
    assert nodes_of("0-1,4;2-3", (0, 1, 2, 3, 4)) == ((0, 1, 4), (2, 3))
    assert nodes_of("all", (0,)) == ((0,),)
    for wrong in ("0;1", "0,1;1-2", "0-3", "0;;1-2", "x"):
        with pytest.raises(ValueError, match=r"is in one node|must be"):
            nodes_of(wrong, (0, 1, 2))
