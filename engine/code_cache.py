"""Compiled programs are found again in torch's cache: what it writes must not differ by chance.

Inductor keeps what g++ has made under a hash of the source. But the source names each constant by
the address that it happens to have, and so no process finds what another one has compiled. A
program is handed its constants whenever it is called, so that any model of the same shape can use
it: its shape is name enough. Besides, the template of a kernel is parsed anew for every matrix
product; once will do.

Both reach into torch, whose version is pinned; where it has changed, they leave it alone.
"""

import functools
from typing import Any

import torch


def make_source_repeatable() -> None:
    """Let programs of the same shape have the same source in every process. May be repeated."""
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.graph import GraphLowering

    parse = getattr(KernelTemplate, "_template_from_string", None)
    if parse is not None and not hasattr(parse, "cache_info"):
        KernelTemplate._template_from_string = staticmethod(functools.cache(parse))  # type: ignore[method-assign]
    allocate: Any = getattr(GraphLowering, "allocate_non_dup_const_name", None)
    if allocate is None or hasattr(allocate, "__wrapped__"):
        return

    @functools.wraps(allocate)
    def allocate_by_shape(graph: Any, name: str | None, data: torch.Tensor) -> str:
        made: str = allocate(graph, name, data)
        graph.constant_reprs[made] = f"{data.dtype} {tuple(data.shape)} {data.layout}"
        return made

    patched: Any = GraphLowering
    patched.allocate_non_dup_const_name = allocate_by_shape
