"""Load a Hugging Face causal language model, or say in one line why it cannot be used.

Owns in which precision and on which device weights are loaded.
Must not know how a forward pass is laid out (`forward.py`) or what a session is.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.integrations.accelerate
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as hf_logging

from engine.checkpoint import families, long_texts
from engine.checkpoint.checkpoint import find_checkpoint
from engine.checkpoint.files import (
    Names,
    Object,
    Shapes,
    blamed,
    check_layers,
    one_line,
    read_config,
    read_shapes,
    refuse_odd_weights,
    stated_eos_ids,
    weight_files,
)
from engine.checkpoint.parts import Lazy, cuts_in_files, kind_of_part, one_at_a_time, plain_parts
from engine.checkpoint.settled import settle
from engine.checkpoint.tensors import (
    check_shapes,
    refuse_mismatched,
    refuse_missing,
    refuse_not_finite,
    refuse_unexpected,
)
from engine.checkpoint.wrapped import as_in_model, language_model, stored_text
from engine.device import claim, cpu_is_fast_in, free_bytes, gigabytes
from engine.errors import ModelError, OutOfMemory, kind_of
from engine.layout.attention_windows import FULL, LayerKinds
from engine.quantised.formats import read_format, stated_fields
from engine.quantised.kernels import loading_options, try_out, why_no_kernels
from engine.quantised.packed_checkpoint import PackedCheckpoint
from engine.tensor_parallel.group import Rank
from engine.tensor_parallel.split import cuts_of, share_head, split

# -- weights ---------------------------------------------------------------------------------------

# Read a folder's weights into a model: plain weights as they are; packed (quantised) weights either
# as they are, for another library's kernels, or dequantised.
#
# Owns the one call of transformers that reads weights, and the errors raised around it. Knows no
# architecture.

logger = logging.getLogger(__name__)

_NO_GENERATION: Any = GenerationConfig()  # type: ignore[no-untyped-call]


def refuse_too_large(
    name: str, empty: Any, dtype: torch.dtype, device: torch.device, *, num_parts: int = 1
) -> None:
    """Raise OutOfMemory if a model's weights in `dtype` need more than the device's free memory.

    empty      the model to be read, on `meta` (without memory): the whole, or a rank's part of it
    num_parts  number of such parts that will be on this device
    """
    needed = sum(weight.numel() for weight in empty.parameters()) * dtype.itemsize * num_parts
    free = free_bytes(device)
    if needed > free:
        raise OutOfMemory(
            f"{name}: its weights take {gigabytes(needed)} in {str(dtype).removeprefix('torch.')}, "
            f"and {device} has {gigabytes(free)} free; use a smaller dtype or model, or end what "
            "else runs there"
        )


def straight_onto(device: torch.device) -> dict[str, Any]:
    """Return transformers' options to read weights directly onto a GPU; {} for a CPU."""
    return {} if device.type == "cpu" else {"device_map": {"": device}}


@contextmanager
def without_accelerate() -> Iterator[None]:
    """While inside, transformers can load onto one device without the package accelerate.

    Transformers asks for that package whenever it is given a device, but needs it only for several
    devices. Its question (`is_accelerate_available`) is answered with yes meanwhile. If a changed
    transformers has no such function, nothing is replaced.
    """
    asks: Any = transformers.integrations.accelerate
    answer = getattr(asks, "is_accelerate_available", None)
    if answer is None:
        yield
        return
    asks.is_accelerate_available = lambda *_, **__: True
    try:
        yield
    finally:
        asks.is_accelerate_available = answer


def read_packed(
    name: str, of: "Checked", packed: PackedCheckpoint, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a quantised model: weights packed if a library has kernels for them, else dequantised.

    packed  the folder's packed weights

    Raises:
        ModelError, OutOfMemory: as `read_weights`.
    """
    folder, empty = of.folder, of.empty
    why = why_no_kernels(packed.form, device)
    if why is None and of.names is not None:
        why = "it is read out of a model of several modalities"
    if why is None:
        try:
            options = loading_options(name, packed.form, device)
            model = read_weights(name, folder, of.config, dtype, options=options)
            try_out(name, model, device)
        except OutOfMemory:
            raise  # dequantised weights would take even more
        except ModelError as error:
            why = str(error)
        else:
            num_bytes = model.get_memory_footprint()
            kept = "its weights stay as they are, and take %s"
            logger.warning(f"%s: {kept}", name, gigabytes(num_bytes))
            return model
    refuse_too_large(name, empty, dtype, device)
    num_bytes = sum(weight.numel() for weight in empty.parameters()) * dtype.itemsize
    # On a GPU the user expects the packed weights to save memory.
    level = logging.INFO if device.type == "cpu" else logging.WARNING
    form = "its weights are dequantised: %s; they take %s in %s"
    logger.log(level, f"%s: {form}", name, why, gigabytes(num_bytes), dtype)
    onto = straight_onto(device)
    tensors = packed.tensors(empty, device=device if onto else torch.device("cpu"))
    kind = type(empty)
    return read_weights(name, folder, empty.config, dtype, kind=kind, tensors=tensors, options=onto)


def read_part(
    name: str, of: "Checked", dtype: torch.dtype, device: torch.device, rank: Rank
) -> Any:
    """Return one rank's part of a model, reading only that rank's slices of each tensor.

    Packed weights are dequantised, slice by slice too. If a checkpoint stores its tensors in a form
    of which slices cannot be read, the whole model is read onto the host first and then divided.

    Raises:
        ModelError, OutOfMemory: as `read_weights`; also if the model cannot be divided so.
    """
    empty, packed = of.empty, of.packed
    cuts = cuts_of(name, empty, rank)
    in_files = cuts_in_files(empty, of.shapes, cuts)
    read = partial(read_weights, name, of.folder, empty.config, dtype)
    if in_files is None:
        refuse_too_large(name, empty, dtype, torch.device("cpu"))
        model = read(kind=type(empty), tensors=of.tensors())
        split(model, cuts, rank)
    else:
        kind = kind_of_part(empty, cuts, rank)
        with torch.device("meta"):
            part = kind(empty.config)
        # Rank 0 checks for all ranks: the others start later, for they load their libraries first.
        num_parts = rank.count if device.type == "cpu" and rank.index == 0 else 1
        refuse_too_large(name, part, dtype, device, num_parts=num_parts)
        if packed is None:
            tensors = plain_parts(of.folder, in_files, of.names)
        else:
            where = device if straight_onto(device) else torch.device("cpu")
            tensors = packed.tensors(empty, in_files, where)
        with one_at_a_time():
            model = read(kind=kind, tensors=tensors, options=straight_onto(device))
    share_head(model, of.vocab_size, rank)
    return model


def read_weights(
    name: str,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    kind: Any = None,
    tensors: Mapping[str, Lazy] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return a transformers model with the weights of the folder.

    kind     the model's class; None: transformers chooses it by `config`
    tensors  name -> tensor, read in place of the folder's own (packed weights, or a rank's part)
    options  further keyword arguments for `from_pretrained`

    Raises:
        ModelError: the tensors are not those that config.json describes, or not finite.
        OutOfMemory: the weights do not fit into memory.
    """
    loader: Any = AutoModelForCausalLM if kind is None else kind
    try:
        with without_accelerate():
            model, info = loader.from_pretrained(
                folder if tensors is None else None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                generation_config=_NO_GENERATION,  # what is wanted of the file is read here
                **(options or {}),
            )
    except ModelError:
        raise  # of `tensors`
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{name}: not enough memory for its weights: {one_line(error)}"
        ) from error
    except Exception as error:  # transformers computes with what it reads: any error is possible
        kind = kind_of(error)
        raise kind(f"{name}: cannot load the weights: {one_line(error)}") from error
    refuse_mismatched(folder / "config.json", info["mismatched_keys"])
    refuse_missing(folder / "config.json", info["missing_keys"])
    refuse_unexpected(folder / "config.json", model, info["unexpected_keys"])
    refuse_not_finite(folder, model)
    return model


def put(name: str, model: Any, device: torch.device) -> Any:
    """Return the model moved to `device`. Raises OutOfMemory if it does not fit there."""
    if model.device == device:
        return model
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{name}: its weights do not fit on {device}; use a smaller dtype or model"
        ) from error


# -- model -----------------------------------------------------------------------------------------

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, ready for inference, and its properties.

    model          the transformers model
    name           its name as the user gave it
    vocab_size     V, the number of logits of a row (a padded tail included)
    max_model_len  number of positions that the model can take
    eos_token_ids  end-of-text ids of generation_config.json and config.json, ascending; may be ()
    dtype          number type of its activations; weights may be packed in fewer bits
    num_parameters  number of weights of the whole model, also if this process has a part
    kinds          what its layers see of a text
    rank           which part of the weights is here (tensor parallelism); None: all of them
    """

    model: Any
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    rank: Rank | None = None
    kinds: LayerKinds = FULL

    @property
    def architecture(self) -> str:
        """Return the model type as transformers names it, for messages."""
        return str(self.model.config.model_type)


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    rank: Rank | None = None,
    max_len: int = 0,
) -> LoadedModel:
    """Load and return a causal language model from a folder or from the Hugging Face hub.

    name      a folder, or `organisation/model`; safetensors weights only, plain or packed as in
              `quantised/formats.py`; no code from the model
    revision  branch, tag or commit on the hub
    dtype     float32, bfloat16, float16, or auto: the checkpoint's own (float32 on a CPU that
              would only emulate it)
    device    cpu, cpu:N, cpu:N-M (see `device.pin`) or cuda:N
    rank      load only this rank's part of the model (tensor parallelism); None: the whole
    max_len   maximum length of a text that was asked for; 0: none. A model may have other rotary
              factors for long texts (`long_texts.py`)

    Sets transformers' own logging to errors only, and its progress bars off.

    Raises:
        ModelError: with one line that says what is wrong and what to do.
    """
    refuse_unknown_dtype(dtype)
    where = claim(device)
    of = check_checkpoint(name, revision)
    config, packed, empty = of.config, of.packed, of.empty
    chosen = _choose_dtype(name, dtype, config, of.folder, where)
    if rank is not None:
        model = read_part(name, of, chosen, where, rank)
    elif packed is None:
        refuse_too_large(name, empty, chosen, where)
        kind = None if of.names is None else type(empty)
        onto = straight_onto(where)
        read = partial(read_weights, name, of.folder, of.plain, chosen, kind=kind, options=onto)
        model = read(tensors=of.tensors())
    else:
        model = read_packed(name, of, packed, chosen, where)
        chosen = model.get_input_embeddings().weight.dtype  # some kernels know only one
    text_config = config.get_text_config(decoder=True)
    vocab_size = of.vocab_size if rank is not None else _vocab_size(model, text_config)
    model = put(name, model, where).eval().requires_grad_(False)
    num_layers, text = int(text_config.num_hidden_layers), text_config.to_dict()
    longest = max_model_len(name, text_config, max_len)
    settle(model, text_config, longest)
    return LoadedModel(
        model=model,
        name=name,
        vocab_size=vocab_size,
        max_model_len=longest,
        eos_token_ids=_eos_token_ids(of.stated_eos, text_config, vocab_size),
        num_layers=num_layers,
        hidden_size=int(text_config.hidden_size),
        dtype=chosen,
        device=where,
        num_parameters=sum(parameter.numel() for parameter in empty.parameters()),
        rank=rank,
        kinds=families.layer_kinds(str(config.model_type), text, num_layers),
    )


@dataclass(frozen=True, slots=True)
class Checked:
    """A model's folder whose tensors' sizes fit its config.json; no weight has been read yet.

    config  transformers' configuration of the model; of a wrapper, that of its language model
    plain   the same without its fields about quantisation
    packed  reads the weights if they are packed (quantised); None: they are plain
    empty   the model on `meta`, without memory
    shapes  shape of each tensor, by its name, as in a plain checkpoint
    names   where the files have the tensors of a wrapper's language model; None: it is no wrapper
    stated_eos  the end-of-text ids that the folder's files name; None: they name none
    """

    folder: Path
    config: Any
    plain: Any
    packed: PackedCheckpoint | None
    empty: Any
    shapes: Shapes
    names: Names | None
    stated_eos: tuple[int, ...] | None

    def tensors(self) -> dict[str, Lazy] | None:
        """Return the model's plain tensors, read when used; None: the folder's are just these."""
        if self.packed is not None:
            return self.packed.tensors(self.empty)
        return None if self.names is None else plain_parts(self.folder, {}, self.names)

    @property
    def text_config(self) -> Any:
        """Return the part of the configuration that describes the language model."""
        return self.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        """Return V, the number of logits of a row."""
        return _vocab_size(self.empty, self.text_config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the token ids that end a text (`LoadedModel.eos_token_ids`)."""
        return _eos_token_ids(self.stated_eos, self.text_config, self.vocab_size)


def check_checkpoint(name: str, revision: str | None) -> Checked:
    """Check a model's tensors' sizes against config.json; return the facts; reads no weight.

    Sets transformers' own logging to errors only, and its progress bars off.

    Raises:
        ModelError: with one line that says what is wrong and what to do.
    """
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = find_checkpoint(name, revision)
    path = folder / "config.json"
    stated = read_config(folder)
    stated_eos = stated_eos_ids(folder, stated)
    form = read_format(path, stated)
    families.refuse(name, path, stated)
    shapes = read_shapes(folder)
    refuse_odd_weights(folder, is_packed=form is not None)
    check_layers(path, stated, shapes)
    names = stored_text(shapes) if stated["model_type"] in families.WRAPPERS else None
    packed = None if form is None else PackedCheckpoint(folder, form, names)
    config = _read_config(path, stated)
    families.refuse(name, path, config.to_dict(), config.get_text_config(decoder=True).to_dict())
    if packed is not None:
        shapes = packed.shapes
    elif names is not None:
        shapes = {own: shapes[there.name] for own, there in names.items()}
    if names is not None:
        config = _language_model(path, stated, config, names)
    plain = _without_packing(config)
    empty = _check_sizes(path, stated, plain, shapes)
    if packed is None and names is not None:
        names = as_in_model(names, shapes, empty)
    return Checked(folder, config, plain, packed, empty, shapes, names, stated_eos)


def refuse_unknown_dtype(dtype: str) -> None:
    """Raise ModelError unless `dtype` is "auto" or a name in `DTYPES`."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}: use auto, {', '.join(DTYPES)}")


def max_model_len(name: str, config: Any, asked: int = 0) -> int:
    """Return the number of positions (tokens of a text) that the model can take.

    asked  maximum length of a text that the user asked for; 0: none (`long_texts.limited`)

    Raises:
        ModelError: the configuration names no limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        raise ModelError(f"{name}: config.json has no max_position_embeddings; add it")
    stated = config.to_dict()
    return long_texts.limited(str(config.model_type), stated, limit, asked)


def _read_config(path: Path, stated: Object) -> Any:
    """Return transformers' configuration made of config.json. Raises ModelError if it cannot."""
    try:
        return AutoConfig.from_pretrained(
            path.parent, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers computes with what it reads: any error is possible
        raise ModelError(f"{path}: it cannot be used: {blamed(stated, error)}") from error


def _language_model(path: Path, stated: Object, config: Any, names: Names) -> Any:
    """Return the configuration of a wrapper's language model. Raises ModelError if it is odd."""
    try:
        return language_model(config, stated, names)
    except Exception as error:  # as above
        raise ModelError(f"{path}: it cannot be used: {blamed(stated, error)}") from error


def _without_packing(config: Any) -> Any:
    """Return a copy of a transformers configuration without its fields about quantisation."""
    plain = deepcopy(config)
    for part, field in stated_fields(plain):
        delattr(part, field)
    return plain


def _check_sizes(path: Path, stated: Object, config: Any, shapes: Shapes) -> Any:
    """Return the model on `meta` (without memory), after checking its sizes against the checkpoint.

    Raises ModelError if they do not fit.
    """
    loader: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = loader.from_config(config, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(f"{path}: no model can be made of it: {blamed(stated, error)}") from error
    check_shapes(path, stated, model, shapes)
    return model


def _choose_dtype(
    name: str, dtype: str, config: Any, folder: Path, device: torch.device
) -> torch.dtype:
    """Return the torch dtype to load: `dtype`, or for "auto" the checkpoint's own.

    For "auto", float32 instead if a CPU would only emulate the checkpoint's dtype.
    """
    if dtype != "auto":
        return DTYPES[dtype]
    checkpoint = config.dtype or config.get_text_config(decoder=True).dtype
    if isinstance(checkpoint, str):
        checkpoint = DTYPES.get(checkpoint)
    checkpoint = checkpoint or _dtype_of_weights(name, folder)
    if device.type == "cpu" and not cpu_is_fast_in(checkpoint):
        return torch.float32
    return checkpoint if checkpoint in DTYPES.values() else torch.float32


def _dtype_of_weights(name: str, folder: Path) -> torch.dtype:
    """Return the dtype of the checkpoint's first float32, bfloat16 or float16 tensor."""
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                    found = _SAFETENSORS_DTYPES.get(tensors.get_slice(key).get_dtype())
                    if found is not None:
                        return found
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{name}: cannot read {path.name}: {one_line(error)}") from error
    return torch.float32


def _vocab_size(model: Any, config: Any) -> int:
    """Return V, the rows of the output embedding; without one config.json's vocab_size."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(config.vocab_size if weight is None else weight.shape[0])


def _eos_token_ids(stated: tuple[int, ...] | None, config: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-text ids that the files name, or else the architecture's default."""
    default = getattr(config, "eos_token_id", None)
    ids = stated if stated is not None else default if isinstance(default, list) else [default]
    return tuple(sorted({i for i in ids if isinstance(i, int) and 0 <= i < vocab_size}))
