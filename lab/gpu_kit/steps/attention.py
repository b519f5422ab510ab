"""Times masked attention over a slot cache for each kernel: first call, later calls, error.

The operands are those of a pass of the engine: the query heads of a group side by side over their
key head, and a mask that shows a prefix and a chain behind it. A cell is named after the shape of
the model, tokens x slots, and the kernel; a kernel's rows are tokens times the heads of a group.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.device import claim
from engine.errors import ModelError
from engine.forward.flex_attention import FlexAttention
from engine.forward.masks import from_words
from engine.forward.split_attention import SplitAttention
from engine.forward.split_kernel import SplitKernel
from lab.gpu_kit.steps.context import Context, run_step, say
from lab.measure.timing import in_a_graph, seconds, typical

CALLS, COUNT = 20, 20  # calls in one CUDA graph; replays of the graph


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a model.

    num_kv  key (and value) heads
    group   query heads for each key head
    dim     numbers per head
    """

    num_kv: int
    group: int
    dim: int


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of one attention call.

    query         [1, kv, n * group, dim]
    keys, values  [1, kv, slots, dim]
    mask          [1, 1, n * group, slots], added to the scores
    words         int64 [2, n]: what each token sees, as in `forward/masks.py`
    group         query heads for each key head
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    words: torch.Tensor
    group: int


Kernel = Callable[[Operands], torch.Tensor]

HEADS = {"8b": Heads(8, 4, 128), "1b": Heads(8, 4, 64)}
NUM_TOKENS = (1, 5, 17)  # 4 to 68 rows with the heads of a group
NUM_SLOTS = (256, 512, 4096, 32768)
OF_FLEX = {("8b", 5, 512), ("8b", 5, 32768), ("1b", 1, 512)}  # few, as each takes long to compile
SMALL = ({"8b": Heads(2, 4, 32)}, (1, 5), (256, 512))


def default(operands: Operands) -> torch.Tensor:
    """Attend with the kernel that torch chooses; returns [1, kv, n * group, dim]."""
    return F.scaled_dot_product_attention(
        operands.query, operands.keys, operands.values, attn_mask=operands.mask
    )


def only(backend: SDPBackend) -> Kernel:
    """Return a function that attends with this kernel of torch, or raises if the kernel cannot."""

    def run(operands: Operands) -> torch.Tensor:
        with sdpa_kernel(backend):
            return default(operands)

    return run


def products(operands: Operands) -> torch.Tensor:
    """Attend with two matrix products and a softmax in float32; returns [1, kv, n * group, dim]."""
    scale = operands.query.shape[-1] ** -0.5
    scores = torch.baddbmm(
        operands.mask[0], operands.query[0], operands.keys[0].transpose(1, 2), alpha=scale
    )
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(operands.query.dtype)
    return torch.bmm(weights, operands.values[0])[None]


KERNELS: Mapping[str, Kernel] = {
    "default": default,
    "cudnn": only(SDPBackend.CUDNN_ATTENTION),
    "flash": only(SDPBackend.FLASH_ATTENTION),
    "efficient": only(SDPBackend.EFFICIENT_ATTENTION),
    "math": only(SDPBackend.MATH),
    "products": products,
}


def split(kind: type[SplitAttention], given: Operands) -> Kernel:
    """Return attention split over the keys, as the engine uses it, for the shape of these operands.

    Its first call compiles the program and checks it (`SplitAttention.make`).
    """
    num_rows, dim = given.query.shape[2:]
    attention = kind(given.keys.shape[2], given.group)
    shape, scale = (1, num_rows // given.group), dim**-0.5
    first_slots = torch.zeros(1, dtype=torch.int64, device=given.query.device)

    def run(given: Operands) -> torch.Tensor:
        if shape not in attention.made:
            attention.make(shape, given.keys, given.values, scale)
        visible = attention.see(given.words, first_slots)
        return attention.attend(given.query, given.keys, given.values, visible, scale)

    return run


def operands(
    heads: Heads, num_tokens: int, num_slots: int, device: torch.device, dtype: torch.dtype
) -> Operands:
    """Return random operands, the same for the same shape; the rows of one token are adjacent."""
    generator = torch.Generator().manual_seed(num_tokens * num_slots)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, heads.num_kv, *shape, generator=generator).to(device, dtype)

    prefix = num_slots - num_tokens
    chain = [(2 << token) - 1 for token in range(num_tokens)]
    words = torch.tensor([[prefix] * num_tokens, chain], device=device)
    mask = from_words(words, num_slots, dtype).repeat_interleave(heads.group, dim=2)
    num_rows = num_tokens * heads.group
    keys, values = drawn(num_slots, heads.dim), drawn(num_slots, heads.dim)
    return Operands(drawn(num_rows, heads.dim), keys, values, mask, words, heads.group)


def expected(operands: Operands) -> torch.Tensor:
    """Return the exact result, computed in float64 on the CPU."""
    query, keys, values, mask = (
        one.double().cpu()
        for one in (operands.query, operands.keys, operands.values, operands.mask)
    )
    scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5 + mask
    return torch.matmul(scores.softmax(-1), values)


def measure(context: Context) -> None:
    """Measure all shapes with all kernels; a kernel that refuses a shape gets a failed row.

    Raises ModelError if the device cannot be used.
    """
    # As in the engine: cuDNN's attention is off, and operands are made in inference mode, without
    # which a program would be compiled twice for each shape.
    device = claim(context.device)
    with torch.inference_mode():
        for shape, given in _shapes(context, device):
            want = expected(given)
            for name, kernel in _kernels(context, shape, given):
                cell = f"{shape}|{name}"
                if not context.record.has(cell):
                    _measure(context, cell, kernel, given, want)


def _shapes(context: Context, device: torch.device) -> Iterator[tuple[str, Operands]]:
    """Yield the name and the operands of each shape."""
    dtype = torch.bfloat16 if context.is_on_gpu else torch.float32
    heads_of, tokens, slots = SMALL if context.is_small else (HEADS, NUM_TOKENS, NUM_SLOTS)
    for model, heads in heads_of.items():
        for num_slots in slots:
            for num_tokens in tokens:
                made = operands(heads, num_tokens, num_slots, device, dtype)
                yield f"{model} {num_tokens}x{num_slots}", made


def _kernels(context: Context, shape: str, given: Operands) -> Iterator[tuple[str, Kernel]]:
    """Yield the name and the function of each kernel for this shape."""
    yield from KERNELS.items()
    if context.is_on_gpu:
        yield "ours", split(SplitKernel, given)
    model, _, size = shape.partition(" ")
    num_tokens, _, num_slots = size.partition("x")
    if (model, int(num_tokens), int(num_slots)) not in OF_FLEX:
        return
    if not context.is_on_gpu:
        context.record.skipped(f"{shape}|flex", "it is compiled for GPUs only here")
        return
    yield "flex", split(FlexAttention, given)


def _measure(
    context: Context, cell: str, kernel: Kernel, given: Operands, want: torch.Tensor
) -> None:
    """Measure one kernel on one shape and write its row."""
    device = given.query.device
    try:
        found: list[torch.Tensor] = []
        first_s = seconds(lambda: found.append(kernel(given)), device)
        error = (found[0].double().cpu().reshape(want.shape) - want).abs().max().item()
        if context.is_on_gpu:
            steady_s = in_a_graph(lambda: kernel(given), device, calls=CALLS, count=COUNT)
        else:
            steady_s = typical(lambda: kernel(given), device, count=COUNT)
    except (RuntimeError, AssertionError, ModelError) as failure:
        context.record.failed(cell, _line(failure))
        return
    context.record.measured(
        cell, steady_us=steady_s * 1e6, first_ms=first_s * 1e3, largest_error=error
    )
    say(f"{cell}: {steady_s * 1e6:.1f} us, first {first_s * 1e3:.1f} ms, error {error:.1e}")


def _line(error: BaseException) -> str:
    """Return the message of an error in one line of at most 160 characters."""
    return " ".join(str(error).split())[:160] or type(error).__name__


if __name__ == "__main__":
    sys.exit(run_step(measure))
