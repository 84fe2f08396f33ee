"""Chains of nodes that only cut out and rearrange a tensor, each replaced by one copy of what is needed in the end."""

from gangway.compiler.graph import Graph, Node
from gangway.compiler.patterns.editor import Editor
from gangway.compiler.patterns.strides import VIEWS, view_of
from gangway.compiler.specs import ELEMENT_TYPES

_CUTS = ("Slice", "Split")
_MOVES = ("Gather", "Transpose")


def find_copies(graph: Graph) -> Graph:
    """Return the graph with StridedCopy nodes where tensors are cut by Slice or Split and then, perhaps, rearranged.

    Attributes: `strides` in the input, one for each axis of the output, and `offset`, in numbers.
    """
    editor = Editor(graph)
    for node in graph.nodes:
        needed = [name for name in node.outputs if node.operator in VIEWS and name and _is_needed(editor, name)]
        copies = [_copy(editor, node, name) for name in needed]
        if copies and all(copies):
            editor.replace(node.outputs[0], [copy for copy in copies if copy])
    return editor.result()


def _is_needed(editor: Editor, name: str) -> bool:
    """Whether somebody reads the tensor who does more than look at it in another way."""
    readers = editor.readers[name]
    return editor.uses[name] > len(readers) or not all(_looks(editor, reader) for reader in readers)


def _looks(editor: Editor, node: Node) -> bool:
    """Whether all that a node computes are views of something else."""
    views = [view_of(editor, name) for name in node.outputs if name]
    return node.operator in VIEWS and all(view and view.root not in node.outputs for view in views)


def _copy(editor: Editor, node: Node, name: str) -> Node | None:
    """Return the copy that makes a tensor from the one that it is cut out of."""
    view = view_of(editor, name)
    if (
        view is None
        or view.root == name
        or view.root not in editor.types
        or not _is_worthwhile(editor, name, view.root)
    ):
        return None
    if editor.types[view.root].dtype not in ELEMENT_TYPES:
        return None
    attributes = {"strides": view.strides, "offset": view.offset}
    return Node(node.name, "StridedCopy", (view.root,), (name,), attributes)


def _is_worthwhile(editor: Editor, name: str, root: str) -> bool:
    """Whether a tensor is cut, and moved once more: single steps have kernels, or lie in place."""
    operators = []
    while name != root:
        operators.append(editor.producers[name].operator)
        name = editor.producers[name].inputs[0]
    return any(item in _CUTS for item in operators) and sum(item in (*_CUTS, *_MOVES) for item in operators) > 1
