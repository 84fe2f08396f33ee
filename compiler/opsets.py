"""Operator sets: what an operator means in them, and which of them onnxruntime reads.

onnx writes newer stamps than onnxruntime opens. Most operators are the same in both sets: `restamp` lets a model import
an older one, if every node means the same there.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import onnx
from onnx import defs, helper

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.subgraphs import all_nodes

OWN_DOMAINS = ("", "ai.onnx")  # of ONNX's own operators
NEWEST_IR_VERSION = 13  # that onnxruntime opens in the oldest version that pyproject.toml admits
NEWEST_OPSETS: Mapping[str, int] = {"": 26, "ai.onnx.ml": 5}
REVIEWED_OPSETS: Mapping[str, int] = {"": 28, "ai.onnx.ml": 5}  # up to which _REDEFINED is complete
LAST_KERNELS: Mapping[str, int] = {  # the last opset in which onnxruntime computes what it lacks in newer ones
    **dict.fromkeys(("GlobalLpPool", "MaxRoiPool", "RoiAlign", "Bernoulli", "Multinomial"), 21),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), 21),
    "Swish": 24,
}
_REDEFINED = {  # opsets that gave an operator another meaning, but neither other inputs nor other attributes
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), (13,)),
    "AveragePool": (19,),
    "BatchNormalization": (9, 14),
    "DFT": (20,),
    "Dropout": (10, 12),
    "GroupNormalization": (21,),
    "LpPool": (18,),
    "Resize": (11, 13),
    "RoiAlign": (16,),
    "Scan": (9,),
}


def opset_of(model: Any) -> int:
    """Return the version of ONNX's own operators that a model, or a function, imports; 0 if it imports none."""
    return next((opset.version for opset in model.opset_import if opset.domain in OWN_DOMAINS), 0)


def call_own_domain_empty(model: Any) -> None:
    """Write the domain of ONNX's own operators as an empty string, in place: onnx infers no types by the other name."""
    for _, node in _nodes(model):
        node.domain = domain_of(node)
    for importer in (model, *model.functions):
        for item in importer.opset_import:
            item.domain = domain_of(item)


def means_the_same(operator: str, opset: int, other: int) -> bool:
    """Whether a node that is valid in two operator sets computes the same in both."""
    low, high = sorted((opset, other))
    return not any(low < version <= high for version in _REDEFINED.get(operator, ()))


def imports(nodes: Iterable[Any], opset: int, versions: Mapping[str, int] = MappingProxyType({})) -> list[Any]:
    """Return the imports of a model that has these nodes, with those of graphs in them; `versions`, if not 1."""
    others = dict.fromkeys(sorted({node.domain for node in all_nodes(nodes)} - {*OWN_DOMAINS}), 1)
    return [helper.make_opsetid(name, version) for name, version in {"": opset, **others, **versions}.items()]


def add_import(model: Any, domain: str, version: int) -> None:
    """Let a model import a domain, in place, if it imports no version of it."""
    if all(domain_of(item) != domain for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))


def why_unknown(model: Any) -> str:
    """Return what the installed onnx does not know about the stamps of a model; empty if it knows them."""
    known = {"": defs.onnx_opset_version(), "ai.onnx.ml": defs.onnx_ml_opset_version()}
    for item in (*model.opset_import, *(item for each in model.functions for item in each.opset_import)):
        domain = domain_of(item)
        if item.version > known.get(domain, item.version):
            return (
                f"it imports opset {item.version} of {domain or 'ai.onnx'}, newer than onnx {onnx.__version__} knows:"
                f" export it with opset {known[domain]} or older"
            )
    if model.ir_version > onnx.IR_VERSION:
        return (
            f"its IR version is {model.ir_version}, newer than onnx {onnx.__version__} knows: save it with IR version"
            f" {onnx.IR_VERSION} or older"
        )
    return ""


def restamp(model: Any) -> bool:
    """Let a model import operator sets that onnxruntime reads and has kernels for, in place; return whether it changes.

    Raises UnsupportedModelError for a node that is another one there, and for opsets that onnx does not know either.
    """
    if why := why_unknown(model):
        raise UnsupportedModelError(why)
    limits, cause = _limits(model)
    for importer, node in _nodes(model):
        domain = domain_of(node)
        limit, opset = limits.get(domain, 0), _version(importer, domain)
        if 0 < limit < opset and (why := _obstacle(node, domain, opset, limit)):
            raise UnsupportedModelError(f"node '{node.name or node.output[0]}' ({node.op_type}): {why}; {cause}")
    changed = bool(model.ir_version > NEWEST_IR_VERSION)
    model.ir_version = min(model.ir_version, NEWEST_IR_VERSION)
    for importer in (model, *model.functions):
        for item in importer.opset_import:
            limit = limits.get(domain_of(item), item.version)
            changed = changed or item.version > limit
            item.version = min(item.version, limit)
    return changed


def _limits(model: Any) -> tuple[dict[str, int], str]:
    """Return the newest opset of each domain in which onnxruntime computes all of a model, and why no newer one."""
    last = {
        LAST_KERNELS[node.op_type]: node.op_type
        for _, node in _nodes(model)
        if not domain_of(node) and node.op_type in LAST_KERNELS
    }
    if not last:
        return dict(NEWEST_OPSETS), "onnxruntime reads no newer one"
    opset = min(last)
    return {**NEWEST_OPSETS, "": opset}, f"onnxruntime computes {last[opset]} in no newer one"


def _obstacle(node: Any, domain: str, opset: int, limit: int) -> str:
    """Return why a node of `opset` is another one, or none, in opset `limit`; drop attributes that have their defaults.

    Types are onnxruntime's to judge, and what only that knows is left to it.
    """
    if not defs.has(node.op_type, opset, domain):
        return ""
    if not defs.has(node.op_type, limit, domain):
        return f"opset {limit} has no such operator"
    new, old = (defs.get_schema(node.op_type, version, domain) for version in (opset, limit))
    if new.since_version > REVIEWED_OPSETS[domain] or not means_the_same(node.op_type, opset, limit):
        return f"it is another operator in opset {limit} than in opset {opset}"
    for name, kind, most in (("inputs", node.input, old.max_input), ("outputs", node.output, old.max_output)):
        if len(kind) > most:
            return f"opset {limit} knows {most} of its {len(kind)} {name}"
    unknown = [item for item in node.attribute if item.name in new.attributes and item.name not in old.attributes]
    for item in unknown:
        default = new.attributes[item.name].default_value
        if item.ref_attr_name or item.type != default.type or not _is_equal(item, default):
            return f"opset {limit} does not know its attribute '{item.name}'"
        node.attribute.remove(item)
    return ""


def _is_equal(attribute: Any, default: Any) -> bool:
    return bool(helper.get_attribute_value(attribute) == helper.get_attribute_value(default))


def _nodes(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the model or function, and a node, of all."""
    for importer, nodes in ((model, model.graph.node), *((each, each.node) for each in model.functions)):
        yield from ((importer, node) for node in all_nodes(nodes))


def domain_of(named: Any) -> str:
    """Return the domain of a node, or of an import; empty for ONNX's own."""
    return "" if named.domain in OWN_DOMAINS else str(named.domain)


def _version(importer: Any, domain: str) -> int:
    return next((item.version for item in importer.opset_import if domain_of(item) == domain), 0)
