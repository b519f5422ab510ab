"""Load a head by name, check it and warm it up; make an engine of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint.checkpoint import WANTED_OF_HEADS, find_folder
from engine.checkpoint.files import Object, one_line, read_config
from engine.checkpoint.model import DTYPES, refuse_unknown_dtype
from engine.choice.coupling import rare_choices, usual_choices
from engine.choice.coupling_on_gpu import try_choices
from engine.choice.first_uses import use_once
from engine.device import claim, cpu_is_fast_in, pin
from engine.errors import ModelError, OutOfMemory
from engine.fastest import FASTEST, usual_num_threads
from engine.forward.forward import LAST
from engine.heads.dflash import DFlash, read_dflash, read_dflash_config
from engine.heads.dflash_executor import DFlashExecutor
from engine.heads.eagle import EagleExecutor
from engine.heads.eagle_layer import EagleHead, read_eagle_head
from engine.heads.head_tensors import HeadTensors
from engine.heads.layouts import read_eagle_config
from engine.heads.loaded import LoadedHead
from engine.heads.medusa import Medusa, read_medusa
from engine.heads.medusa_executor import MedusaExecutor
from engine.heads.mtp import read_mtp_head
from engine.heads.mtp_executor import MtpExecutor
from engine.heads.stated import NO_HEAD, medusa_counts
from engine.heads.target import Target
from engine.kept import AS_BEFORE
from engine.layout.slots import NUM_TREE_SLOTS, Feed
from engine.loading import Engine, fingerprint
from engine.memory import limits
from engine.quantised.reading import choose_reading
from engine.quantised.rounding import BITS
from engine.room import USUAL, Utilization
from proto.head_kinds import MTP, HeadKind, head_kind, head_kind_of_tensors, is_mtp

HeadExecutor = EagleExecutor | MedusaExecutor | DFlashExecutor

# -- selfcheck -------------------------------------------------------------------------------------

# A check made once, when a head is loaded: does it run, and are its logits finite?

_NUM_ROWS = 8
# Errors that torch raises if settings in config.json do not fit together.
_MISFITS = (ValueError, RuntimeError, TypeError, LookupError, ArithmeticError)


def check_outputs(executor: HeadExecutor) -> None:
    """Check that a head drafts a chain with finite logits; call it before any text is opened.

    The first row gets a random feature, and the rows after it use the features that the head itself
    predicts.

    Raises:
        ModelError: the head does not run with its settings, or its logits are not finite.
        OutOfMemory: there is not enough memory to run it.
    """
    loaded = executor.loaded
    if loaded.max_model_len <= _NUM_ROWS:
        raise ModelError(
            f"{loaded.name}: it takes {loaded.max_model_len} tokens (max_position_embeddings), "
            "too few to draft; use another head"
        )
    random = np.random.default_rng(0)
    numbers = torch.from_numpy(random.standard_normal(loaded.feature_size))
    feature = numbers.to(DTYPES[loaded.feature_dtype]).view(torch.uint8).numpy().tobytes()
    tokens = random.integers(0, loaded.vocab_size, _NUM_ROWS).tolist()
    try:
        rows = [
            executor.run(_feed(token, slot, feature), (0,)) for slot, token in enumerate(tokens, 1)
        ]
        # NaN and infinity show in the maximum; a token that is never drafted has minus infinity.
        is_finite = bool(torch.cat(rows).amax(1).isfinite().all())
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{loaded.name}: out of memory: {one_line(error)}") from error
    except _MISFITS as error:
        raise ModelError(
            f"{loaded.name}: the head does not run with the settings in config.json "
            f"({one_line(error)}); correct them"
        ) from error
    executor.forget()
    if not is_finite:
        raise ModelError(
            f"{loaded.name}: what the head computes is not finite; use bfloat16 or float32, or "
            "get the head again"
        )


def _feed(token: int, slot: int, feature: bytes) -> Feed:
    """Return a pass of one row of a chain, at `slot`; the row at slot 1 gets the feature."""
    is_first = slot == 1
    return Feed(
        (token,),
        (slot,),
        (slot,),
        slot,
        (1,),
        before=(slot - 1,),
        features=(feature if is_first else b"",),
    )


# -- loading ---------------------------------------------------------------------------------------

__all__ = ["LoadedHead", "load_head", "load_head_engine"]

WARMED_DEVICES = ("cuda",)  # devices that load kernels and allocate memory at their first use


def load_head(
    name: str,
    *,
    revision: str | None = None,
    target: str,
    target_revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    feature_dtype: str = "float32",
    max_len: int = 0,
    quantization: str = "",
) -> LoadedHead:
    """Load and return a head from a folder or the hub, in any layout of `layouts.py`.

    name      a folder, or `organisation/head`; safetensors or PyTorch's files, no code from them
    target    name of the model that it was made for; tensors that both share are read from there
    dtype     float32, bfloat16, float16, or auto: the checkpoint's own (float32 on a CPU that
              would only emulate it)
    device    as for `load_model`
    feature_dtype  as `LoadedHead.feature_dtype`
    max_len   maximum length of a text that was asked for, as for `load_model`
    quantization  "int8" or "int4": round an EAGLE head's matrices to so many bits on a CPU whose
              C++ library multiplies them as they are; drafts need not be exact; "": do not

    Raises:
        ModelError: with one line that says what is wrong and what to do.
    """
    refuse_unknown_dtype(dtype)
    assert feature_dtype in DTYPES
    where = claim(device)
    if is_mtp(name):
        return _load_mtp(Target(target, target_revision, max_len), dtype, where, feature_dtype)
    folder = find_folder(name, revision, WANTED_OF_HEADS)
    path, stated = folder / "config.json", read_config(folder)
    tensors = HeadTensors(folder, target)
    kind = head_kind(stated)
    if kind is None and "speculators_model_type" not in stated:
        kind = head_kind_of_tensors(tensors)
    if kind is None:
        raise ModelError(f"{path}: {NO_HEAD}")
    of = Target(target, target_revision, max_len)
    chosen = _choose_dtype(dtype, tensors, where)
    bits = BITS.get(quantization, 0)
    module, layers, longest = _read(kind, (path, stated), tensors, of, chosen, where, bits)
    return LoadedHead(
        kind=kind,
        name=name,
        layers=layers,
        hidden_size=of.hidden_size,
        vocab_size=of.vocab_size,
        max_model_len=longest,
        eos_token_ids=of.eos_token_ids,
        num_parameters=tensors.num_taken,
        dtype=chosen,
        device=where,
        module=module,
        feature_dtype=feature_dtype,
    )


def _read(
    kind: HeadKind,
    config: tuple[Path, Object],
    tensors: HeadTensors,
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
    bits: int,
) -> tuple[Medusa | EagleHead | DFlash, tuple[int, ...], int]:
    """Return (a head, the target's layers that it reads, how many positions it takes).

    config  path and content of config.json

    Raises ModelError.
    """
    if kind is HeadKind.MEDUSA:
        counts = medusa_counts(*config)
        medusa = read_medusa(*counts, tensors, target, dtype, device)
        return medusa, (LAST,), target.max_model_len
    if kind is HeadKind.DFLASH:
        sizes = read_dflash_config(*config, target)
        block = read_dflash(sizes, tensors, target, dtype, device)
        return block, sizes.layers, sizes.max_model_len
    of_eagle = read_eagle_config(*config, kind, target)
    eagle = read_eagle_head(of_eagle, tensors, target, dtype, device, bits)
    return eagle, of_eagle.layers, of_eagle.max_model_len


def _load_mtp(target: Target, dtype: str, device: torch.device, feature_dtype: str) -> LoadedHead:
    """Load and return the layer that the target's own checkpoint has. Raises ModelError."""
    own = getattr(target.checked.text_config, "dtype", None) or torch.float32
    chosen = _usable(own, device) if dtype == "auto" else DTYPES[dtype]
    module = read_mtp_head(target, chosen, device)
    return LoadedHead(
        kind=HeadKind.MTP,
        name=f"{MTP} of {target.name}",
        layers=(LAST,),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        eos_token_ids=target.eos_token_ids,
        num_parameters=module.layers.num_parameters,
        dtype=chosen,
        device=device,
        module=module,
        feature_dtype=feature_dtype,
    )


def load_head_engine(
    name: str,
    *,
    revision: str | None,
    target: str,
    target_revision: str | None,
    dtype: str,
    device: str,
    max_len: int,
    part: float = 1.0,
    num_lanes: int = 1,
    warm_rows: Sequence[int],
    say: Callable[[str], None],
    feature_dtype: str = "float32",
    quantization: str = "",
    num_children: Sequence[int] = (),
    is_alone: bool = True,
    utilization: Utilization = USUAL,
) -> Engine:
    """Load a head, check it and warm it up; return the engine, as `loading.load_engine` does.

    target, target_revision  the model that the head was made for, whose tokenizer it uses
    dtype, quantization  as for `load_head`; the dtype FASTEST means auto
    max_len  maximum length of a text in tokens; 0: what the head can take and fits into memory
    part, utilization  memory for the head, as for `limits`
    num_lanes  texts at once; fewer if there is no memory for them
    warm_rows  numbers of rows that passes often have, ascending
    say      is called with a short text for each stage
    num_children  numbers of children per tree node that a head on a device of its own drafts; those
             of a head in its target's process are given to `loading.load_engine`
    is_alone  False: the head runs in its target's process, which has chosen cores and threads

    `feature_dtype` of `Engine.loaded` may still be changed until the first features come.

    Raises ModelError, with one line that says what is wrong and what to do.
    """
    started = time.monotonic()
    if is_alone:
        pin(device)
    tokenizer = fingerprint(target, target_revision)
    say("loading weights")
    loaded = load_head(
        name,
        revision=revision,
        target=target,
        target_revision=target_revision,
        dtype="auto" if dtype == FASTEST else dtype,
        device=device,
        feature_dtype=feature_dtype,
        max_len=max_len,
        quantization=quantization,
    )
    tokenizer.check_fits(loaded.vocab_size)
    if is_alone and loaded.device.type == "cpu":
        _settle_on_cpu(loaded)
    max_len, num_lanes = limits(loaded, max_len, num_lanes, part=part, utilization=utilization)
    executor = _checked_executor(loaded, max_len + NUM_TREE_SLOTS, num_lanes)
    say("warming up")
    pass_s = executor.warm_up(warm_rows)
    _use_once(executor, max(warm_rows), num_children)
    return Engine(
        executor=executor,
        loaded=loaded,
        max_len=max_len,
        vocab_size=tokenizer.vocab_size or loaded.vocab_size,
        digests=tokenizer.digests,
        load_s=time.monotonic() - started,
        pass_s=pass_s,
        device=device,
    )


_MAKE: Mapping[HeadKind, type[HeadExecutor]] = {
    HeadKind.MEDUSA: MedusaExecutor,
    HeadKind.EAGLE: EagleExecutor,
    HeadKind.EAGLE3: EagleExecutor,
    HeadKind.MTP: MtpExecutor,
    HeadKind.DFLASH: DFlashExecutor,
}


def _settle_on_cpu(loaded: LoadedHead) -> None:
    """Choose the threads of this process, and how its products read."""
    torch.set_num_threads(usual_num_threads(loaded))
    choose_reading(AS_BEFORE)


def _checked_executor(loaded: LoadedHead, capacity: int, num_lanes: int) -> HeadExecutor:
    """Return what runs a head, after a check of its outputs. Raises ModelError."""
    executor = _MAKE[loaded.kind](loaded, capacity, num_lanes=num_lanes)
    check_outputs(executor)
    return executor


def _use_once(executor: HeadExecutor, num_rows: int, num_children: Sequence[int]) -> None:
    """Run on a GPU what texts do first, so that none waits until kernels are loaded.

    num_rows      most rows of a usual pass
    num_children  as for `load_head_engine`; (): choices are left to the target's engine
    """
    if executor.loaded.device.type not in WARMED_DEVICES:
        return
    if isinstance(executor, EagleExecutor):
        executor.warm_up_prompts()
    if num_children:
        device, vocab_size = executor.loaded.device, executor.loaded.vocab_size
        choices = (*usual_choices(num_children), *rare_choices(num_children))
        try_choices(choices, torch.zeros(num_rows, vocab_size, device=device))
        use_once(num_rows, vocab_size, device)


def _choose_dtype(dtype: str, tensors: HeadTensors, device: torch.device) -> torch.dtype:
    """Return the dtype to load; for "auto" the checkpoint's own, or float32 (see `load_head`)."""
    if dtype != "auto":
        return DTYPES[dtype]
    return _usable(tensors.dtype, device)


def _usable(own: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a checkpoint's dtype, or float32 on a CPU that would only emulate it."""
    is_usable = own in DTYPES.values() and (device.type != "cpu" or cpu_is_fast_in(own))
    return own if is_usable else torch.float32
