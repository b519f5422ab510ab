"""Matrix products of few rows on a GPU, in several forms of which the fastest is used.

Theory of operation
-------------------
A pass of a few rows computes little and reads all weights, so a product takes at least as long as
its weight takes to come from memory. Torch's products take longer on small weights: on an H200, one
row times [2048, 2048] takes 6.1 us, and a kernel of our own (`few_rows_kernels.py`) 4.1 us. Which
block sizes are best depends on the shape and the GPU. So the forms are timed when a model is
loaded: for each shape of weight, and for each class of numbers of rows. Torch's product is one of
them. A form counts only if its numbers agree with torch's.

A small weight has too few outputs to keep the whole GPU busy. Then several programs may share an
output, and the product has *partial sums*. Whoever calls a product may take these sums as they are
(`parts_of`), and add them up where it adds something anyway (`small_operators.add_and_norm`). Only
products for which the caller announces this (`may_split`) are split.

Forms are timed as they run later: inside a CUDA graph, with weights that lie in no cache.

Owns the choice of a form. Knows no model. Used for recorded passes (CUDA graphs) only: launching
one of these kernels alone takes the host longer than launching torch's.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as once
from functools import partial

import torch
import torch.nn.functional as F

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.forward.operators import TOLERANCES, Product
from engine.timing import choose

logger = logging.getLogger(__name__)

FEW_ROWS_DEVICES = ("cuda",)
# Classes of numbers of rows: the most rows of a class -> the numbers with which its forms are
# checked, the first of which is timed. Torch computes all products of more rows.
_CLASSES: Mapping[int, Sequence[int]] = {1: (1,), 16: (5, 2, 16), 32: (17, 32)}
# Blocks of the kernels: outputs, inputs, blocks read ahead, partial sums. On an H200 most of these
# were the fastest for some weight of a model of one or of eight billion parameters.
_SUMS = ((2, 1024, 1, 1), (4, 1024, 1, 1), (8, 1024, 1, 1))
_DOTS = (
    *((64, 128, 5, 1), (64, 128, 3, 1), (128, 128, 3, 1), (32, 128, 5, 1)),
    *((64, 128, 5, 2), (64, 128, 5, 4), (64, 128, 3, 4)),
)
_FEWEST_CALLS, _REPEATS = 16, 5  # calls in a graph that is timed, and how often it runs
# The copies of a weight that are read in turn are together this many times larger than the cache.
_CACHES, _MOST_COPIES = 3, 31

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Function: (rows [n, K], weight [N, K], bias [N] or None) -> [n, N], or partial sums (`Form`)"""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to compute a product.

    order      name of its order of sums (`timing.py`)
    split      number of partial sums; 1: `run` returns the product [n, N] in the dtype of the rows;
               more: float32 [split, n, N], which add up to the product
    most_rows  the most rows that it takes
    """

    name: str
    order: str
    run: Run
    split: int = 1
    most_rows: int = max(_CLASSES)


TORCH = Form("torch", "torch", F.linear)


class FewRowsProduct:
    """The product with one weight, computed in a form for each class of numbers of rows."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, forms: Mapping[int, Form]
    ) -> None:
        self._weight, self._bias = weight, bias
        self._forms = forms  # the most rows of a class, ascending -> its form

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [n, N] of rows [n, K]."""
        return whole(self.parts(x), x.dtype)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [n, N] of rows [n, K], or float32 partial sums of it [split, n, N]."""
        return self._form(len(x)).run(x, self._weight, self._bias)

    def num_parts(self, num_rows: int) -> int:
        """Return how many partial sums `parts` returns for so many rows; 1: the product itself."""
        return self._form(num_rows).split

    def _form(self, num_rows: int) -> Form:
        fitting = (form for most, form in self._forms.items() if num_rows <= most)
        return next(fitting, TORCH)


def whole(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a product [n, N] in `dtype`, its partial sums [split, n, N] added up if it has any."""
    return product.sum(0).to(dtype) if product.dim() == 3 else product


def parts_of(product: Product) -> Product:
    """Return a product that may give partial sums (`FewRowsProduct.parts`), for a caller who adds.

    Products of other kinds are returned unchanged.
    """
    return product.parts if isinstance(product, FewRowsProduct) else product


def num_parts(product: Product, num_rows: int) -> int:
    """Return how many partial sums `parts_of(product)` gives for so many rows; 1: none."""
    return product.num_parts(num_rows) if isinstance(product, FewRowsProduct) else 1


class FewRows:
    """Makes products with weights on a GPU, and remembers the best forms for each shape."""

    def __init__(self) -> None:
        self._failed: set[str] = set()  # names of forms that cannot be compiled or run here
        # (shape, dtype, True if there is no bias, `may_split`) -> the best form of each class.
        self._best: dict[tuple[torch.Size, torch.dtype, bool, bool], Mapping[int, Form]] = {}

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, may_split: bool
    ) -> Product | None:
        """Return the fastest product with `weight` [N, K] and `bias` [N]; None: it is torch's.

        may_split  True: the caller adds up partial sums, so that adding them costs nothing
        """
        if not _forms() or not weight.is_contiguous():
            return None
        key = weight.shape, weight.dtype, bias is None, may_split
        if key not in self._best:
            self._best[key] = self._choose(weight, bias, may_split=may_split)
        forms = self._best[key]
        if all(form is TORCH for form in forms.values()):
            return None
        return FewRowsProduct(weight, bias, forms)

    def _choose(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, may_split: bool
    ) -> Mapping[int, Form]:
        """Return the fastest form of each class, and log them."""
        try:
            copies = _copies(weight)
        except torch.OutOfMemoryError as error:
            logger.info("products are not timed: %s", one_line(error))
            return {}
        usable = [form for form in _forms() if may_split or form.split == 1]
        with torch.inference_mode():
            found = {
                most: self._fastest(
                    [form for form in usable if most <= form.most_rows], row_counts, copies, bias
                )
                for most, row_counts in _CLASSES.items()
            }
        chosen = ", ".join(f"up to {most} rows: {form.name}" for most, form in found.items())
        logger.info("products with weights %s: %s", list(weight.shape), chosen)
        return found

    def _fastest(
        self,
        forms: Sequence[Form],
        row_counts: Sequence[int],
        copies: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> Form:
        """Return the fastest of torch's product and those `forms` that are right."""
        seconds = {TORCH: math.inf}
        for form in (TORCH, *forms):
            if form.name in self._failed:
                continue
            try:
                seconds[form] = _tried(form, row_counts, copies, bias)
            except ModelError as failure:
                level = logging.DEBUG if self._failed else logging.INFO  # most fail for one reason
                logger.log(level, "the product %s is not used: %s", form.name, failure)
                self._failed.add(form.name)
        # Any order: torch's own product has another one for other numbers of rows.
        return choose(seconds, any_order=True)


@once
def _forms() -> Sequence[Form]:
    """Return the forms beside torch's; none where Triton cannot be imported."""
    try:
        # Imported here, because many installations have no Triton.
        from engine.forward.few_rows_kernels import MOST_ROWS, by_dots, by_sums
    except (ImportError, RuntimeError, OSError, AttributeError, TypeError) as error:
        logger.info("products of few rows are torch's: %s", one_line(error))
        return ()
    made = []
    for kernel, most_rows, blocks in ((by_sums, 1, _SUMS), (by_dots, MOST_ROWS, _DOTS)):
        for outputs, inputs, stages, split in blocks:
            run = partial(kernel, outputs=outputs, inputs=inputs, stages=stages, split=split)
            shared = f" in {split} parts" if split > 1 else ""
            name = f"{kernel.__name__} {outputs}x{inputs}x{stages}{shared}"
            order = f"{kernel.__name__} by {inputs}{shared}"
            made.append(Form(name, order, run, split, most_rows))
    return tuple(made)


def _tried(
    form: Form,
    row_counts: Sequence[int],
    copies: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> float:
    """Return the seconds that a form takes for the first number of rows; infinity if it is wrong.

    Raises:
        ModelError: the form cannot be compiled or run here.
    """
    try:
        several = [_rows(count, copies[0]) for count in row_counts]
        if not all(_is_right(form, x, copies[0], bias) for x in several):
            return math.inf
        return _seconds(form, several[0], copies, bias)
    except Exception as failure:  # compilers may raise anything; torch's product remains
        raise ModelError(one_line(failure)) from failure


def _is_right(form: Form, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True if a form gives the numbers of torch's product, up to summation order."""
    want = F.linear(x, weight, bias).float()
    error = (whole(form.run(x, weight, bias), x.dtype).float() - want).abs().amax()
    return bool(error <= TOLERANCES[x.dtype] * want.abs().amax())  # False if it is NaN


def _rows(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    """Return random rows [num_rows, K] for a product with `weight`."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, weight.shape[1], generator=generator).to(weight)


def _copies(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return `weight` and copies of it: read in turn, each comes from memory and from no cache.

    Small weights have few copies: those of a small model lie in the cache in passes too.
    """
    cache_bytes = torch.cuda.get_device_properties(weight.device).L2_cache_size
    count = min(_CACHES * cache_bytes // weight.nbytes, _MOST_COPIES)
    return [weight, *(weight.clone() for _ in range(count))]


def _seconds(
    form: Form, x: torch.Tensor, copies: Sequence[torch.Tensor], bias: torch.Tensor | None
) -> float:
    """Return the fewest seconds per call, inside a CUDA graph that reads `copies` in turn.

    By the device's events, not by `fewest_seconds`: launching a graph takes the host as long as a
    product.
    """
    count = max(_FEWEST_CALLS, 2 * len(copies))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(x.device)
    side = _side_stream(x.device)
    try:
        side.wait_stream(stream)
        with torch.cuda.stream(side):  # libraries may allocate and compile in the first run
            form.run(x, copies[0], bias)
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            for index in range(count):
                form.run(x, copies[index % len(copies)], bias)
    finally:
        # A capture that raises leaves the process on its stream.
        torch.cuda.set_stream(stream)
        stream.wait_stream(side)
    return min(_seconds_of(graph) for _ in range(_REPEATS)) / count


def _seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    """Return the seconds that one run of a graph takes on the device."""
    first, last = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


@once
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures: cuBLAS keeps a workspace for each stream it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
