"""Load a model by name, check it and warm it up: what both nodes do at start."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from tokenizers import Tokenizer

from engine import cpu_library
from engine.checkpoint.checkpoint import find_checkpoint, name_and_size
from engine.checkpoint.files import refuse_odd_file
from engine.checkpoint.model import LoadedModel, load_model
from engine.checkpoint.tokenizer_files import TOKENIZER, read_tokenizer, refuse_too_many
from engine.choice.coupling import rare_choices, usual_chains, usual_choices
from engine.choice.vocabulary import read_vocabulary
from engine.device import pin
from engine.errors import ModelError
from engine.exact import bits_of
from engine.executor import Executor
from engine.fastest import (
    FASTEST,
    fastest_dtype,
    fastest_num_threads,
    is_dtype,
    is_num_threads,
    usual_num_threads,
)
from engine.forward.cpu_attention import NAMES
from engine.forward.forward import Layers, Say, silent
from engine.forward.llama_parts import why_not_fused
from engine.forward.more_layers import has_states, more_in_slots
from engine.heads.loaded import Loaded
from engine.heads.recognised import head_kind_of
from engine.kept import AS_BEFORE, Kept
from engine.layout.slots import NUM_TREE_SLOTS
from engine.memory import limits
from engine.model_executor import ModelExecutor
from engine.places import Places
from engine.quantised.asked import KEEPING, refuse_elsewhere
from engine.quantised.linear import is_quantised
from engine.quantised.reading import choose_reading
from engine.room import USUAL, Utilization
from engine.selfcheck import check_reproducible, check_slot_attention, plain_logits
from engine.tensor_parallel.backend import lead
from engine.tensor_parallel.devices import rank_devices
from engine.tensor_parallel.group import Followers
from proto.head_kinds import refuse_head

# -- tokenizer -------------------------------------------------------------------------------------

# The fingerprint of a tokenizer: drafter and target work together only if a token id means the same
# to both.


@dataclass(frozen=True, slots=True)
class TokenizerPrint:
    """Fingerprint of a tokenizer, to compare whether two models use the same token ids.

    path        path of tokenizer.json, for messages
    num_trained  number of tokens without added ones; added ones may have ids beyond the logits
    vocab_size  number of all tokens; 0 without a tokenizer
    digests     SHA-256 (hex) of the id -> token map, and of that in tokenizer.json alone; the first
                is empty without a tokenizer, the second also if the files beside it add no token
    """

    path: Path
    num_trained: int
    vocab_size: int
    digests: tuple[str, str]

    def check_fits(self, logits_size: int) -> None:
        """Raise ModelError if the tokenizer has more tokens than the model has logits."""
        refuse_too_many(self.path, self.num_trained, logits_size)


def fingerprint(name: str, revision: str | None = None) -> TokenizerPrint:
    """Return the fingerprint of a model's tokenizer; an empty one if there is no tokenizer.json.

    Raises:
        ModelError: tokenizer.json is there, and it or a file beside it cannot be read; or the
            model's folder is not found.
    """
    folder = find_checkpoint(name, revision)
    path = folder / TOKENIZER
    refuse_odd_file(path)
    if not path.exists():
        return TokenizerPrint(path, 0, 0, ("", ""))
    found = read_tokenizer(folder)
    num_trained = found.tokenizer.get_vocab_size(with_added_tokens=False)
    vocab_size = found.tokenizer.get_vocab_size()
    digests = found.digest(), found.file_digest()
    return TokenizerPrint(path, num_trained, vocab_size, digests)


def tokenizer_of(name: str, revision: str | None = None) -> Tokenizer:
    """Return a model's tokenizer. Raises ModelError if it cannot be read."""
    return read_tokenizer(find_checkpoint(name, revision)).tokenizer


# -- loading ---------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "fused", "graphs", "reference")


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model ready to run, with what its node reports to the coordinator.

    executor     runs its forward passes
    loaded       the model, or the head, that the executor runs
    max_len      maximum length of a text in tokens
    vocab_size   the tokenizer's number of tokens; without a tokenizer, the number of logits
    digests      as in `TokenizerPrint`
    load_s       seconds that loading, checking and warming up took
    pass_s       number of rows -> seconds of a pass of so many rows, over few cache slots
    device       name of its device; the names of all ranks' devices, joined by commas
    bits         digest of what decides the bits of logits, if a row's do not depend on other rows
                 (`exact.py`); else ""
    home_drafter  the engine of a drafter in the target's process; None: there is none
    places       the CPU cores between which passes may move; None: there is no choice
    num_threads  of a model that is not alone in its process: torch threads of its passes; 0: all
    """

    executor: Executor
    loaded: Loaded
    max_len: int
    vocab_size: int
    digests: tuple[str, str]
    load_s: float
    pass_s: Mapping[int, float]
    device: str
    bits: str = ""
    home_drafter: "Engine | None" = None
    places: Places | None = None
    num_threads: int = 0


def load_engine(
    model: str,
    *,
    revision: str | None,
    dtype: str,
    device: str,
    max_len: int,
    part: float = 1.0,
    num_lanes: int = 1,
    fixed_rows: int | None,
    warm_rows: Sequence[int],
    say: Callable[[str], None],
    checks_bits: bool = False,
    reads_vocabulary: bool = False,
    backend: str = "auto",
    row_counts: Sequence[int] = (),
    num_children: Sequence[int] = (),
    head_children: Sequence[int] = (),
    chains: Sequence[int] = (),
    tensor_parallel_size: int = 1,
    layers: Layers = (),
    quantization: str = "",
    utilization: Utilization = USUAL,
    kept: Kept = AS_BEFORE,
) -> Engine:
    """Load a model, check it against its own plain forward and warm it up; return the engine.

    dtype, quantization  as for `load_model`; dtype also FASTEST: the one that is fastest here
    max_len, num_lanes, part, utilization  as for `limits`
    fixed_rows, warm_rows  rows of every pass in reproducible mode (else None); usual row numbers
    checks_bits  True: find out whether a row's logits depend on other rows (`Engine.bits`)
    reads_vocabulary  True: have `read_vocabulary` keep it, so that no text waits for it
    row_counts, layers  as for `ModelExecutor`
    num_children, head_children, chains  a drafter's, heads' children per node; draft steps at once
    backend, tensor_parallel_size  one of `BACKENDS`; ranks, 1: as many as `device` names
    kept     what earlier starts have found

    Raises ModelError, and RankError: another rank has ended.
    """
    started, devices = time.monotonic(), rank_devices(device, tensor_parallel_size)
    tokenizer = _looked_at(model, revision, quantization, backend, len(devices))
    with ExitStack() as on_failure:
        with _vocabulary_beside(model, revision, dtype, is_wanted=reads_vocabulary):
            wanted = dtype, devices, max_len, backend, quantization
            loaded = _load(model, revision, *wanted, on_failure, kept, say)
        tokenizer.check_fits(loaded.vocab_size)
        _make_products(loaded, fixed_rows, kept, say)
        max_len, num_lanes = limits(loaded, max_len, num_lanes, part=part, utilization=utilization)
        executor = make_executor(
            *(loaded, max_len + NUM_TREE_SLOTS),
            num_lanes=num_lanes,
            fixed_rows=None if may_be_exact(loaded, backend) else fixed_rows,
            backend=backend,
            row_counts=row_counts if backend in ("auto", "graphs") else (),
            layers=layers,
            say=say,
        )
        _choose_threads(executor, (name_and_size(model, revision), quantization), kept, say)
        bits = _bits(executor, fixed_rows, kept, say) if checks_bits or fixed_rows else ""
        pass_s = _warm_up(executor, warm_rows, num_children, head_children, chains, say)
        on_failure.pop_all()
    return Engine(
        *(executor, loaded, max_len),
        vocab_size=tokenizer.vocab_size or loaded.vocab_size,
        digests=tokenizer.digests,
        load_s=time.monotonic() - started,
        pass_s=pass_s,
        device=",".join(devices),
        bits=bits,
    )


def _looked_at(
    model: str, revision: str | None, quantization: str, backend: str, num_ranks: int
) -> TokenizerPrint:
    """Return what the model's tokenizer is like. Raises ModelError for what is quickly refused."""
    refuse_elsewhere(model, quantization, backend=backend, num_ranks=num_ranks)
    refuse_head(model, head_kind_of(model, revision))
    return fingerprint(model, revision)


@contextmanager
def _vocabulary_beside(
    model: str, revision: str | None, dtype: str, *, is_wanted: bool
) -> Iterator[None]:
    """Read the vocabulary for grammars while the weights are loaded, in a thread, if wanted.

    128,000 tokens take a second, and loading weights leaves a core free. Where loading begins with
    timing number types, the tokens are read before it.
    """
    if not is_wanted:
        yield
        return
    reading = Thread(target=read_vocabulary, args=(find_checkpoint(model, revision),), daemon=True)
    reading.start()
    try:
        if dtype == FASTEST:
            reading.join()
        yield
    finally:
        reading.join()


def _load(
    model: str,
    revision: str | None,
    dtype: str,
    devices: Sequence[str],
    max_len: int,
    backend: str,
    quantization: str,
    on_failure: ExitStack,
    kept: Kept,
    say: Callable[[str], None],
) -> LoadedModel:
    """Pin this process to its device and return the model loaded on it, or its part for one rank.

    on_failure  ends the processes of other ranks
    kept        the number types that were fastest at earlier starts
    """
    if len(devices) > 1:
        return _load_on_ranks(model, revision, dtype, devices, max_len, on_failure, say)
    (device,) = devices
    pin(device)
    load = partial(
        load_model,
        model,
        revision=revision,
        device=device,
        quantization=quantization,
        keep_codes=backend in (*KEEPING, "graphs"),
    )
    if dtype == FASTEST:
        say("timing number types")
        make = partial(make_executor, backend=backend, row_counts=(1,))
        most = f"at most {torch.get_num_threads()} threads"
        about = name_and_size(model, revision), backend, quantization, most
        find = partial(fastest_dtype, load, device=device, make_executor=make)
        dtype = kept.found("number type", about, find, is_dtype)
    say("loading weights")
    loaded = load(dtype=dtype, max_len=max_len)
    more_in_slots(loaded.model)  # before its cache is measured
    return loaded


def _load_on_ranks(
    model: str,
    revision: str | None,
    dtype: str,
    devices: Sequence[str],
    max_len: int,
    on_failure: ExitStack,
    say: Callable[[str], None],
) -> LoadedModel:
    """Start the other ranks and load the model, divided, on all; return the part of rank 0.

    Rank 0 is this process. The other ranks' processes are ended by `on_failure`. Dtypes are not
    timed: for a model that is worth dividing, memory traffic decides.
    """
    say(f"loading weights on {len(devices)} devices")
    dtype = "auto" if dtype == FASTEST else dtype
    followers = Followers(model, revision=revision, dtype=dtype, devices=devices, max_len=max_len)
    on_failure.callback(followers.close)
    pin(devices[0])
    loaded = load_model(
        model,
        revision=revision,
        dtype=dtype,
        device=devices[0],
        rank=followers.rank,
        max_len=max_len,
    )
    followers.meet(loaded.device)
    lead(loaded.model, followers)
    return loaded


def _make_products(
    loaded: LoadedModel, fixed_rows: int | None, kept: Kept, say: Callable[[str], None]
) -> None:
    """Compile our C++ on a CPU for a quantised model, which needs it, and in reproducible mode.

    Other models start without it if it is not there yet (`cpu_library` says how it comes). In
    reproducible mode the text may not depend on whether somebody has compiled it before. Then
    choose how its products read.
    """
    if loaded.device.type != "cpu":
        return
    is_needed = is_quantised(loaded.model) or fixed_rows is not None
    if is_needed and not cpu_library.is_kept():
        say("compiling products for this processor, once")
        _, why = cpu_library.made()
        if why is not None:
            logger.info("matrix products are torch's own: %s", why)
    choose_reading(kept)


def may_be_exact(loaded: LoadedModel, backend: str) -> bool:
    """True if passes need no padding to be reproducible: all is computed by our own operators."""
    is_fused = backend in ("auto", "fused") and why_not_fused(loaded.model) is None
    is_alone = loaded.device.type == "cpu" and loaded.rank is None
    return is_fused and is_alone and loaded.dtype in NAMES and cpu_library.is_kept()


def _bits(
    executor: ModelExecutor, fixed_rows: int | None, kept: Kept, say: Callable[[str], None]
) -> str:
    """Return the digest of what decides bits (`Engine.bits`).

    Raises ModelError in reproducible mode (`fixed_rows`) if passes are not reproducible.
    """
    if executor.fixed_rows is not None:
        check_reproducible(executor)
        if executor.lanes.count > 1:
            executor.set_total(executor.capacity)
        return ""
    say("checking that every pass has the same bits")
    bits = bits_of(executor, kept)
    if fixed_rows is not None and not bits:
        raise ModelError(
            f"{executor.loaded.name}: its rows are not reproducible here; use --backend reference"
        )
    return bits


def _choose_threads(
    executor: ModelExecutor, about: Sequence[str], kept: Kept, say: Callable[[str], None]
) -> None:
    """Set the number of torch threads on a CPU; does nothing on a GPU or with one thread.

    The number is timed, except in reproducible mode and with several ranks: there every process
    must choose the same, so it follows from the model's size.

    about  what the time of a pass depends on, besides its number type and this machine
    """
    loaded, most = executor.loaded, torch.get_num_threads()
    if loaded.device.type != "cpu" or most == 1:
        return
    say("choosing threads")
    if executor.fixed_rows is not None or loaded.rank is not None:
        count = usual_num_threads(loaded)
    else:
        about = *about, executor.backend, str(loaded.dtype), f"at most {most} threads"
        find = partial(fastest_num_threads, executor)
        count = kept.found("threads", about, find, partial(is_num_threads, most))
    torch.set_num_threads(count)


def _warm_up(
    executor: ModelExecutor,
    row_counts: Sequence[int],
    num_children: Sequence[int],
    head_children: Sequence[int],
    chains: Sequence[int],
    say: Callable[[str], None],
) -> Mapping[int, float]:
    """Warm the executor up; return number of rows -> seconds of a pass (of padded ones alone).

    Records the usual choices: a drafter's if `num_children` is given, else a target's.
    """
    say("warming up")
    return executor.warm_up(
        row_counts if executor.fixed_rows is None else (executor.fixed_rows,),
        choices=usual_choices(num_children),
        beside=usual_choices(head_children) if head_children else (),
        rare=rare_choices(num_children),
        chains=chains,
        chained=usual_chains(),
        say=say,
    )


def make_executor(
    loaded: LoadedModel,
    capacity: int,
    *,
    num_lanes: int = 1,
    fixed_rows: int | None = None,
    backend: str = "auto",
    row_counts: Sequence[int] = (),
    layers: Layers = (),
    say: Say = silent,
) -> ModelExecutor:
    """Make an executor and check its logits against the model's own forward; return it.

    capacity  slots per lane: the maximum length of a text and its tree
    num_lanes, fixed_rows, row_counts, layers  as for `ModelExecutor`
    say      is called with a short text for each step that takes long
    backend  one of `BACKENDS`; auto: the first backend of `_candidates` that runs the model and
             passes the check, else the reference

    The fused backend is checked twice: before it lays out the model's weights anew, while another
    backend can still take its place, and after (of a quantised model, only after). From then on the
    model's own forward cannot run.

    Raises:
        ModelError: this engine's logits are not the model's own, or this backend cannot run it.
    """
    assert backend in BACKENDS
    if fixed_rows is not None and has_states(loaded.model):
        raise ModelError(
            f"{loaded.name}: reproducible mode is not for layers with a running state; leave it out"
        )
    is_captured = backend in ("auto", "graphs") and loaded.device.type == "cuda"
    say("compiling kernels" if is_captured else "checking")
    plain = plain_logits(loaded)
    for name in _candidates(backend, loaded):
        executor = None
        try:
            executor = ModelExecutor(
                loaded,
                capacity,
                num_lanes=num_lanes,
                fixed_rows=fixed_rows,
                backend=name,
                row_counts=row_counts,
                layers=layers,
            )
            if not is_quantised(loaded.model):  # its passes are slow before `take_over`
                check_slot_attention(executor, plain)
        except ModelError as error:
            if backend != "auto":
                raise
            # Without graphs a pass on a GPU takes several times as long: tell the user why.
            level = logging.WARNING if name == "graphs" else logging.INFO
            logger.log(level, "the backend %s is not used: %s", name, error)
            if executor is not None:
                executor.free()  # the next one needs the memory
        else:
            executor.take_over(say)
            check_slot_attention(executor, plain)
            return executor
    if is_quantised(loaded.model):
        logger.warning("%s: every pass dequantises all weights: use a plain model", loaded.name)
    executor = ModelExecutor(
        loaded, capacity, num_lanes=num_lanes, fixed_rows=fixed_rows, layers=layers
    )
    executor.take_over(say)
    check_slot_attention(executor, plain)
    return executor


def _candidates(backend: str, loaded: LoadedModel) -> tuple[str, ...]:
    """Return the backends to try, in order, before the reference; () for "reference" itself."""
    if backend != "auto":
        return () if backend == "reference" else (backend,)
    if has_states(loaded.model):  # they are not recorded yet
        return ("fused",)
    return ("graphs", "fused") if loaded.device.type == "cuda" else ("fused",)
