"""Locales, by which StringNormalizer changes letters: onnxruntime opens no model whose locale a machine lacks.

Slim images have C.UTF-8 only. In the GNU C library that maps letters as en_US.UTF-8 does, which exporters write and
which is ONNX's default. Other languages have rules of their own, such as Turkish of i.
"""

import ctypes
from functools import cache
from typing import Any

from onnx import helper

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.subgraphs import all_nodes

_EVERYWHERE = "C.UTF-8"
_SAME_LETTERS = ("", "en_US", "en_US.UTF-8", "en_US.utf8")
_LETTERS_MASK = 1  # LC_CTYPE_MASK


def state_locales(model: Any) -> bool:
    """Give each StringNormalizer a locale that this machine has, in place; return whether that changes the model.

    Raises UnsupportedModelError for a locale of other rules that the machine lacks.
    """
    changed = False
    for node in all_nodes((*model.graph.node, *(item for each in model.functions for item in each.node))):
        if node.op_type != "StringNormalizer" or any(item.ref_attr_name for item in node.attribute):
            continue
        name = next((item.s.decode(errors="replace") for item in node.attribute if item.name == "locale"), "")
        if name in _SAME_LETTERS:
            kept = [item for item in node.attribute if item.name != "locale"]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute("locale", _EVERYWHERE)])
            changed = True
        elif not _exists(name):
            title = node.name or node.output[0]
            raise UnsupportedModelError(
                f"node '{title}' (StringNormalizer) wants the locale '{name}', which this machine lacks: install it"
                " (Debian's package locales-all has all)"
            )
    return changed


@cache
def _exists(name: str) -> bool:
    """Whether the C library knows a locale, without setting it for this process."""
    library = ctypes.CDLL(None)
    library.newlocale.restype = ctypes.c_void_p
    library.newlocale.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    library.freelocale.argtypes = (ctypes.c_void_p,)
    found = library.newlocale(_LETTERS_MASK, name.encode(), None)
    if found:
        library.freelocale(found)
    return bool(found)
