"""Fused attention: a task is a head and a block of queries, whose scores exist only in local memory.

Vectors run across queries. So keys and values are read in place, one number at a time, as the weights of a convolution
read pixels; the softmax over the keys needs no sum across lanes; and only queries and results, which are few, are
transposed. Long sequences are cut into blocks of keys with a running maximum and sum (Milakov and Gimelshein 2018;
Dao et al., "FlashAttention", 2022).
"""

from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import AttentionSpec, KernelPlan
from gangway.compiler.templates.attention_block import QueryBlock, bias_elements
from gangway.compiler.templates.base import FLOAT_BYTES, UnsupportedSpecError, knob, make_plan
from gangway.compiler.templates.builder import Argument, Buffer, Expr, either, kernel, quotient, remainder
from gangway.compiler.templates.product import most_numbers

QUERY_VECTORS = 2  # of a block of queries
KEYS = 256  # most keys of a block: their scores for a block of queries fill the L1 cache
MOST_BIASES = 2
MOST_HEAD_SIZE = 512  # queries and results of a block take 128 KiB then


def candidates(spec: AttentionSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The default plan, then shorter and longer blocks of keys. Raises `UnsupportedSpecError`."""
    if spec.head_size > MOST_HEAD_SIZE or len(spec.biases) > MOST_BIASES:
        raise UnsupportedSpecError(f"attention with heads of {spec.head_size} and {len(spec.biases)} biases")
    width = QUERY_VECTORS * target.lanes
    tasks = spec.heads * -(-spec.queries // width)
    for keys in dict.fromkeys(min(limit, spec.keys) for limit in (KEYS, KEYS // 2, 2 * KEYS)):
        local = (2 * spec.head_size + keys) * width
        moved = (local + 2 * spec.keys * spec.head_size) * FLOAT_BYTES
        text = f"attention {min(width, spec.queries)} queries x {keys} keys"
        sums = most_numbers(target, QUERY_VECTORS) * QUERY_VECTORS
        yield make_plan(spec, {"keys": keys}, tasks, text, moved, sums)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: q, k, v, [biases,] y."""
    spec = plan.spec
    assert isinstance(spec, AttentionSpec)
    width = QUERY_VECTORS * target.lanes
    full, rest = divmod(spec.queries, width)
    blocks = full + (rest > 0)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        head, block = quotient(number, blocks), remainder(number, blocks)

        def write(count: int) -> None:
            QueryBlock(spec, target, knob(plan, "keys"), buffers, head, block * width, count).write()

        if not full:
            write(rest)
        else:
            either(block < full if rest else True, lambda: write(width), lambda: write(rest))

    channels = spec.heads * spec.head_size
    positions = {"q": spec.queries, "k": spec.keys, "v": spec.keys}
    arguments = [Argument(name, channels * count) for name, count in positions.items()]
    arguments += [Argument(f"bias{i}", bias_elements(spec, bias)) for i, bias in enumerate(spec.biases)]
    return kernel(symbol, [*arguments, Argument("y", channels * spec.queries)], task)
