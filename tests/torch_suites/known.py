"""What is not run, and what is known to fail."""

from collections.abc import Mapping
from types import MappingProxyType

_UNWRITTEN = "returns memory that nobody has written to"

# By the suite's entry, whatever the variant: no two runs are to be the same.
SKIPPED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), _UNWRITTEN
    )
    | dict.fromkeys(("resize_", "resize_as_"), _UNWRITTEN)
)

# By the case's name: the item. An entry that passes fails the run: take it out.
EXPECTED: Mapping[str, str] = MappingProxyType({})

_UNTRACED = "torch runs the call, and the layers around it, uncompiled: AOTAutograd cannot trace "
_SPARSE = "torch runs all of it, or all but a few kilobytes, uncompiled: Dynamo does not compile sparse tensors"

# By the case's name: why nothing can move in it. A case in which something does fails the run: take it out.
UNMOVED: Mapping[str, str] = MappingProxyType(
    {
        "op_db:index_fill:dynamic": _UNTRACED + "aten._unique",
        "op_db:linalg.svd:complex": _UNTRACED + "aten.allclose",
        "op_db:svd:complex": _UNTRACED + "aten.allclose",
        "op_db:index_reduce.amin:inductor": "generated code holds more than the peak that graphs show",
    }
    | dict.fromkeys([f"op_db:sparse.mm.reduce:{variant}" for variant in ("plain", "bf16", "dynamic")], _SPARSE)
    | dict.fromkeys([f"op_db:sparse.sampled_addmm:{variant}" for variant in ("plain", "complex", "dynamic")], _SPARSE)
)
