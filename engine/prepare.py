"""From a model's name to a loaded, checked and warm executor: what both nodes do at start."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.device import pin
from engine.executor import Executor
from engine.model import LoadedModel, load_model
from engine.selfcheck import check_reproducible, check_slot_attention
from engine.slots import NUM_TREE_SLOTS
from engine.tokenizer import fingerprint


@dataclass(frozen=True, slots=True)
class Prepared:
    """A node's engine.

    max_len      most tokens of a text
    vocab_size   of the tokenizer; of the logits if there is no tokenizer
    digest       hash of the tokenizer's id -> token map; empty if there is none
    """

    executor: Executor
    loaded: LoadedModel
    max_len: int
    vocab_size: int
    digest: str
    load_s: float


def prepare(
    model: str,
    *,
    revision: str | None,
    dtype: str,
    device: str,
    max_len: int,
    fixed_rows: int | None,
    warm_rows: Sequence[int],
    say: Callable[[str], None],
) -> Prepared:
    """Load, check and warm up; `say` is told what is being done.

    max_len  most tokens of a text; 0: as many as the model can take

    Raises:
        ModelError: one line that says what is wrong and what to do.
    """
    started = time.monotonic()
    pin(device)
    say("loading weights")
    loaded = load_model(model, revision=revision, dtype=dtype, device=device)
    max_len = min(loaded.max_model_len, max_len or loaded.max_model_len)
    executor = Executor(loaded, max_len + NUM_TREE_SLOTS, fixed_rows=fixed_rows)
    say("checking")
    check_slot_attention(executor)
    if fixed_rows is not None:
        check_reproducible(executor)
    say("warming up")
    executor.warm_up(warm_rows)
    vocab_size, digest = fingerprint(model, revision)
    return Prepared(
        executor=executor,
        loaded=loaded,
        max_len=max_len,
        vocab_size=vocab_size or loaded.vocab_size,
        digest=digest,
        load_s=time.monotonic() - started,
    )
