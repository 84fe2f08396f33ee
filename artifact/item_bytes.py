"""Sizes of Triton's datatypes, without numpy, which `datatypes.py` imports: so a front end starts sooner."""

from collections.abc import Mapping

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "UINT8", "INT8"), 1),
    **dict.fromkeys(("UINT16", "INT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("UINT32", "INT32", "FP32"), 4),
    **dict.fromkeys(("UINT64", "INT64", "FP64"), 8),
    "BYTES": 0,  # any
}
