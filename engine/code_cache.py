"""Compiled programs are found again in torch's cache: what it writes must not differ by chance.

Inductor keeps what g++ has made under a hash of the source. But the source names each constant by
the address that it happens to have, so that two models with the same source keep apart; and so no
process finds what another one has compiled. Named by what it holds a constant keeps them apart as
well. Besides, a template of a kernel is parsed anew for every matrix product: once is enough.

Both reach into torch, whose version is pinned; where it has changed, they leave it alone.
"""

import functools
import hashlib
from typing import Any

import torch


def make_source_repeatable() -> None:
    """Let programs of the same weights have the same source in every process. May be repeated."""
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.graph import GraphLowering

    parse = getattr(KernelTemplate, "_template_from_string", None)
    if parse is not None and not hasattr(parse, "cache_info"):
        KernelTemplate._template_from_string = staticmethod(functools.cache(parse))  # type: ignore[method-assign]
    allocate: Any = getattr(GraphLowering, "allocate_non_dup_const_name", None)
    if allocate is None or hasattr(allocate, "__wrapped__"):
        return

    @functools.wraps(allocate)
    def allocate_by_content(graph: Any, name: str | None, data: torch.Tensor) -> str:
        made: str = allocate(graph, name, data)
        graph.constant_reprs[made] = _named(data)
        return made

    patched: Any = GraphLowering
    patched.allocate_non_dup_const_name = allocate_by_content


def _named(data: torch.Tensor) -> str:
    """Names a constant by what it holds.

    What oneDNN has packed is opaque, and its gaps hold anything; it is made of weights, and like
    all constants it is handed to the program when that is called. So its shape will do.
    """
    kind = f"{data.dtype} {tuple(data.shape)} {data.layout}"
    if data.is_mkldnn:
        return kind
    content: Any = data.detach().reshape(-1).view(torch.uint8).numpy()
    return f"{kind} {hashlib.blake2b(content, digest_size=16).hexdigest()}"
