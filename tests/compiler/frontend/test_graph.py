"""Rules that find nothing cost nothing: the graph is the same one, without a look at what no rule is for."""

import numpy as np

from gangway.compiler.frontend.graph import Editor, Graph, Node, Rule, TensorType, apply_rule, rewrite

KIND = TensorType((2,), "float32")
NODES = (Node("a", "Relu", ("x",), ("y",)), Node("b", "Neg", ("x",), ("unused",)), Node("c", "Abs", ("y",), ("z",)))


def graph() -> Graph:
    types = dict.fromkeys(("x", "y", "unused", "z"), KIND)
    return Graph(("x",), ("z",), True, NODES, {"left": np.zeros(1, np.float32)}, types, {}, 17)


def rename(editor: Editor, node: Node) -> None:
    editor.replace("y", [Node("a", "Tanh", ("x",), ("y",))])


def test_a_graph_stays_the_same_one_if_a_rule_changes_nothing() -> None:
    given = graph()
    assert apply_rule(given, Rule(("Conv",), rename)) is given
    assert apply_rule(given, Rule((), lambda editor, node: editor.shape(node.inputs[0]))) is given


def test_what_a_rule_adds_or_replaces_is_a_change() -> None:
    given = graph()
    assert apply_rule(given, Rule(("Relu",), rename)).nodes[0].operator == "Tanh"
    added = apply_rule(given, Rule(("Abs",), lambda editor, _: editor.constant("one", np.ones(1, np.float32))))
    assert "one" in added.constants and "one" not in given.constants
    other = apply_rule(given, Rule(("Abs",), lambda editor, _: editor.constant("left", np.ones(1, np.float32))))
    assert other.constants["left"][0] == 1 and given.constants["left"][0] == 0


def test_unused_nodes_go_whether_or_not_a_rule_finds_something() -> None:
    for rules in ((), (Rule(("Conv",), rename),), (Rule(("Relu",), rename),)):
        found = rewrite(graph(), *rules)
        assert [node.name for node in found.nodes] == ["a", "c"] and not found.constants
