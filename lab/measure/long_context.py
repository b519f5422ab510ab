"""Attention of a decode pass over long texts: under a mask, and split over the keys.

    taskset -c 0 python -m lab.measure.long_context [--device cuda:0] [--shape 32,8,128]

One layer of a model with the given heads, key heads and numbers a head, in a cache of as many slots
as the longest line. A line for each length and number of rows: milliseconds of either form
(quartiles, turn by turn; on a GPU as CUDA graphs), the largest error of the split one against the
masked one, relative to the largest output, and how many bytes either is told in what it sees, which
is made once for all layers of a pass and not timed. First, how long the programs take to compile.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from engine.choice.logit_graphs import Compute
from engine.device import pin, torch_device
from engine.forward.flex_attention import FlexAttention
from engine.forward.graphs import recorder
from engine.forward.masks import from_words
from engine.forward.operators import side_by_side
from engine.forward.split_attention import SplitAttention, Visible
from engine.forward.split_kernel import SplitKernel
from lab.measure.timing import in_turns, spread

LENGTHS = (256, 1024, 8192, 32_768)
ROW_COUNTS = (1, 5, 17)
WARM, TIMED = 3, 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Shape = tuple[int, int, int]


def chain(length: int, num_rows: int) -> torch.Tensor:
    """Return int64 [5, num_rows]: a chain at the end of a text, as `Backend.forward` takes it."""
    step = torch.arange(num_rows)
    shown = torch.full_like(step, length - num_rows)
    return torch.stack((step, step, shown + step, shown, (2 << step) - 1))


class Layer:
    """The attention of one layer over random keys and values, in both forms."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        num_heads, num_keys, dim = shape
        self.device = device
        self.group = num_heads // num_keys
        self.scale = dim**-0.5
        size = 2, 1, num_keys, max(LENGTHS), dim
        self.keys, self.values = torch.randn(size, dtype=dtype, device=device)
        kind = SplitKernel if device.type == "cuda" else FlexAttention
        self.attention: SplitAttention = kind(max(LENGTHS), self.group)

    def query(self, num_rows: int) -> torch.Tensor:
        """Return random queries [1, key heads, num_rows * group, dim], the same each time."""
        size = 1, self.keys.shape[1], num_rows * self.group, self.keys.shape[3]
        return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(self.keys)

    def make(self, num_rows: int) -> float:
        """Compile the split form for this number of rows; return the seconds that it took."""
        started = time.perf_counter()
        self.attention.make((1, num_rows), self.keys, self.values, self.scale)
        return time.perf_counter() - started

    def mask(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Return the mask that the masked form adds to its scores."""
        return from_words(rows[3:], length, self.keys.dtype).repeat_interleave(self.group, dim=2)

    def masked(self, query: torch.Tensor, mask: torch.Tensor) -> Compute:
        """Return a function that attends under a mask, over as many slots as the mask has."""
        keys, values = (tensor[:, :, : mask.shape[3]] for tensor in (self.keys, self.values))
        return partial(_ignoring, partial(side_by_side, query, keys, values, mask, self.scale))

    def split(self, query: torch.Tensor, visible: Visible) -> Compute:
        """Return a function that attends over all slots, but reads only the visible ones."""
        seen = self.keys, self.values
        return partial(_ignoring, partial(self.attention.attend, query, *seen, visible, self.scale))


def _ignoring(run: Callable[[], torch.Tensor], _rows: torch.Tensor) -> torch.Tensor:
    """Return what `run` returns; the rows, which a captured function is given, are ignored."""
    return run()


def compare(layer: Layer, num_rows: int, length: int) -> str:
    """Time both forms for one number of rows at one length; return the line to print."""
    query, rows = layer.query(num_rows), chain(length, num_rows)
    there = rows.to(layer.device)
    mask, visible = layer.mask(there, length), layer.attention.see(there[3:], there.new_zeros(1))
    computes = [layer.masked(query, mask), layer.split(query, visible)]
    if layer.device.type == "cuda":
        record = recorder(layer.device)
        computes = [record(compute, rows) for compute in computes]
    forms = [lambda run=run: run(rows).flatten()[0].item() for run in computes]
    want, got = (run(rows).float().clone().reshape(query.shape) for run in computes)
    error = float((got - want).abs().amax() / want.abs().amax())
    masked, split = in_turns(forms, layer.device, warm=WARM, count=TIMED)
    return (
        f"{length:6} slots {num_rows:3} rows  masked {spread(masked)} ms, "
        f"{mask.nbytes:,} bytes of mask  "
        f"split {spread(split)} ms, {there[3:].nbytes:,} bytes of words  error {error:.1e}"
    )


def main() -> None:
    """Measure all lengths and numbers of rows, and print a line for each."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.long_context", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu, the default, or cuda:0"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="number type")
    parser.add_argument(
        "--shape",
        default="32,8,128",
        metavar="N,N,N",
        help="number of heads, number of key heads, width of a head (default 32,8,128)",
    )
    options = parser.parse_args()
    pin(options.device)
    torch.set_num_threads(1)
    heads, keys, dim = map(int, options.shape.split(","))
    layer = Layer((heads, keys, dim), DTYPES[options.dtype], torch_device(options.device))
    print(f"keys and values of the layer: {layer.keys.nbytes + layer.values.nbytes:,} bytes")
    with torch.inference_mode():
        for num_rows in ROW_COUNTS:
            print(f"{num_rows} rows: compiled and checked in {layer.make(num_rows):.1f} s")
            for length in LENGTHS:
                print(compare(layer, num_rows, length), flush=True)


if __name__ == "__main__":
    main()
