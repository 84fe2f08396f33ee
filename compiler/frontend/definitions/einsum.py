"""Einsum of two tensors as a product of stacks of matrices, between changes of axes."""

import math

from gangway.compiler.frontend.decompositions import Body, defines


@defines("Einsum")
def einsum(body: Body) -> None:
    """Letters of both and the result count matrices, those of both alone are summed up, others are rows or columns."""
    equation = body.attribute("equation", b"").decode().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    names = terms.split(",")
    if not arrow or "." in equation or len(names) != 2 or any(len(set(name)) != len(name) for name in (*names, result)):
        raise body.node.unsupported(f"the equation {equation}")
    sides = sorted(zip(names, range(2), strict=True), key=lambda side: _first_own(side[0], names, result))
    (left, first_input), (right, second_input) = sides
    both = [letter for letter in left if letter in right]
    stacks = [letter for letter in result if letter in both]
    summed = [letter for letter in both if letter not in result]
    rows, columns = ([letter for letter in name if letter not in both] for name in (left, right))
    if set(rows + columns + stacks) != set(result) or not summed:
        raise body.node.unsupported(f"the equation {equation}")
    pairs = [*zip(left + right, (*body.type(first_input).shape, *body.type(second_input).shape), strict=True)]
    lengths = dict(pairs)
    if any(lengths[letter] != length for letter, length in pairs):  # 1 is repeated
        raise body.node.unsupported("axes of one letter differ")
    first = _matrices(body, body.node.inputs[first_input], left, (stacks, rows, summed), lengths)
    second = _matrices(body, body.node.inputs[second_input], right, (stacks, summed, columns), lengths)
    product = body.op("MatMul", first, second)
    order = stacks + rows + columns
    if len(rows) != 1 or len(columns) != 1:
        begins = [-1, *(lengths[letter] for letter in rows[1:])] if rows else []
        shape = [*(0 for _ in stacks), *begins, *(lengths[letter] for letter in columns)]
        product = body.reshape(product, shape)
    permutation = [order.index(letter) for letter in result]
    if permutation == sorted(permutation):
        body.op("Identity", product, output=body.node.outputs[0])
    else:
        body.op("Transpose", product, perm=permutation, output=body.node.outputs[0])


def _first_own(name: str, names: list[str], result: str) -> int:
    """Where in the result the first letter stands that one tensor alone has: what comes first are rows."""
    others = "".join(names).replace(name, "", 1)
    return min((result.index(letter) for letter in name if letter in result and letter not in others), default=-1)


def _matrices(
    body: Body, x: str, letters: str, groups: tuple[list[str], list[str], list[str]], lengths: dict[str, int]
) -> str:
    """[stacks .., rows, columns] of a tensor; each of the last two groups becomes one axis."""
    stacks, rows, columns = groups
    order = [letters.index(letter) for letter in stacks + rows + columns]
    turned = x if order == sorted(order) else body.op("Transpose", x, perm=order)
    if len(rows) == len(columns) == 1:
        return turned
    width = math.prod(lengths[letter] for letter in columns)
    return body.reshape(turned, [*(0 for _ in stacks), -1, width])
