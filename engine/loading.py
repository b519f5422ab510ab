"""From a model's name to an engine, loaded, checked and warm: what both nodes do at start."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.coupling import warm_up_choices
from engine.device import pin
from engine.errors import ModelError
from engine.executor import Executor
from engine.fastest import FASTEST, fastest_dtype, fastest_num_threads, usual_num_threads
from engine.memory import longest_text, num_lanes_that_fit
from engine.model import LoadedModel, load_model
from engine.selfcheck import check_reproducible, check_slot_attention, plain_logits
from engine.slots import NUM_TREE_SLOTS
from engine.tokenizer import fingerprint

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "fused", "graphs", "compiled", "reference")


@dataclass(frozen=True, slots=True)
class Engine:
    """An executor that is ready for texts, and what its node must say of it.

    max_len      most tokens of a text
    vocab_size   of the tokenizer; of the logits if there is no tokenizer
    digest       hash of the tokenizer's id -> token map; empty if there is none
    pass_s       seconds of a pass by its rows, over few slots
    """

    executor: Executor
    loaded: LoadedModel
    max_len: int
    vocab_size: int
    digest: str
    load_s: float
    pass_s: Mapping[int, float]


def load_engine(
    model: str,
    *,
    revision: str | None,
    dtype: str,
    device: str,
    max_len: int,
    num_lanes: int = 1,
    fixed_rows: int | None,
    warm_rows: Sequence[int],
    say: Callable[[str], None],
    backend: str = "auto",
    row_counts: Mapping[str, Sequence[int]] | None = None,
) -> Engine:
    """Load, check and warm up; `say` is told what is being done.

    dtype    as for `load_model`, or FASTEST
    max_len  most tokens of a text; 0: as many as the model can take and the memory holds
    num_lanes  texts at once; fewer if there is no memory for them
    warm_rows  numbers of rows that passes often have, ascending
    row_counts  by backend, as for `Executor`
    backend  one of `BACKENDS`: which forward runs

    Raises:
        ModelError: one line that says what is wrong and what to do.
    """
    started = time.monotonic()
    pin(device)
    tokenizer = fingerprint(model, revision)  # first: it is quickly refused
    if dtype == FASTEST:
        say("timing number types")
        make = partial(make_executor, backend=backend, row_counts=(1,))
        dtype = fastest_dtype(model, revision=revision, device=device, make_executor=make)
    say("loading weights")
    loaded = load_model(model, revision=revision, dtype=dtype, device=device)
    tokenizer.check_fits(loaded.vocab_size)
    if loaded.device.type == "cpu" and torch.get_num_threads() > 1:
        say("choosing threads")
        choose = fastest_num_threads if fixed_rows is None else usual_num_threads
        torch.set_num_threads(choose(loaded))
    max_len = longest_text(loaded, max_len)
    say("compiling (takes a minute)" if backend == "compiled" else "checking")
    executor = make_executor(
        loaded,
        max_len + NUM_TREE_SLOTS,
        num_lanes=num_lanes_that_fit(loaded, max_len, num_lanes),
        fixed_rows=fixed_rows,
        backend=backend,
        row_counts=(row_counts or {}).get("graphs" if backend == "auto" else backend, ()),
    )
    if fixed_rows is not None:
        check_reproducible(executor)
        if executor.lanes.count > 1:
            # One shape for every pass, whatever texts there are.
            executor.set_total(executor.capacity)
    say("warming up")
    pass_s = executor.warm_up(warm_rows)
    if executor.backend == "graphs":
        warm_up_choices(executor.row_counts, loaded.vocab_size, loaded.device)
    return Engine(
        executor=executor,
        loaded=loaded,
        max_len=max_len,
        vocab_size=tokenizer.vocab_size or loaded.vocab_size,
        digest=tokenizer.digest,
        load_s=time.monotonic() - started,
        pass_s=pass_s,
    )


def make_executor(
    loaded: LoadedModel,
    capacity: int,
    *,
    num_lanes: int = 1,
    fixed_rows: int | None = None,
    backend: str = "auto",
    row_counts: Sequence[int] = (),
) -> Executor:
    """Make an executor and hold it to the model's own forward.

    num_lanes, row_counts  as for `Executor`
    backend  one of `BACKENDS`; auto: the fused forward, on a GPU as graphs, if it covers the model
             and agrees with it, else the reference

    The fused backend is checked twice: on the model's weights where they are, while the reference
    can still take its place, and again when it has laid them out anew. After that the model itself
    cannot be run.

    Raises:
        ModelError: this engine cannot run the model exactly, or not with this backend.
    """
    assert backend in BACKENDS
    plain = plain_logits(loaded)
    for name in _candidates(backend, loaded):
        executor = None
        try:
            executor = Executor(
                loaded,
                capacity,
                num_lanes=num_lanes,
                fixed_rows=fixed_rows,
                backend=name,
                row_counts=row_counts,
            )
            check_slot_attention(executor, plain)
        except ModelError as error:
            if backend != "auto":
                raise
            logger.info("the backend %s is not used: %s", name, error)
            if executor is not None:
                executor.free()  # the next one needs the memory
        else:
            executor.take_over()
            check_slot_attention(executor, plain)
            return executor
    executor = Executor(loaded, capacity, num_lanes=num_lanes, fixed_rows=fixed_rows)
    check_slot_attention(executor, plain)
    return executor


def _candidates(backend: str, loaded: LoadedModel) -> tuple[str, ...]:
    """The backends to try before the reference."""
    if backend == "auto":
        return ("graphs", "fused") if loaded.device.type == "cuda" else ("fused",)
    return () if backend == "reference" else (backend,)
