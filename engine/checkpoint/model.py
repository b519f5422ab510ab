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
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.checkpoint import families, long_texts
from engine.checkpoint.checked import Checked, check_checkpoint
from engine.checkpoint.files import (
    one_line,
    weight_files,
)
from engine.checkpoint.gguf_list import gguf_in
from engine.checkpoint.parts import Lazy, cuts_in_files, kind_of_part, one_at_a_time, plain_parts
from engine.checkpoint.settled import settle
from engine.checkpoint.tensors import (
    refuse_mismatched,
    refuse_missing,
    refuse_not_finite,
    refuse_unexpected,
)
from engine.device import claim, cpu_is_fast_in, free_bytes, gigabytes
from engine.errors import ModelError, OutOfMemory, kind_of
from engine.layout.attention_windows import FULL, LayerKinds
from engine.quantised import gpu_products, rounding
from engine.quantised.asked import refuse_rounding
from engine.quantised.gguf_checkpoint import GgufCheckpoint
from engine.quantised.kernels import loading_options, try_out, why_no_kernels
from engine.quantised.linear import kind_of_quantised
from engine.quantised.matrix import QuantisedMatrix
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
    _refuse_more_than_free(name, needed, str(dtype).removeprefix("torch."), device)


def _refuse_more_than_free(name: str, needed: int, form: str, device: torch.device) -> None:
    """Raise OutOfMemory if weights, in a form that is named, need more than the free memory."""
    free = free_bytes(device)
    if needed > free:
        raise OutOfMemory(
            f"{name}: its weights take {gigabytes(needed)} in {form}, "
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
    name: str,
    of: Checked,
    packed: PackedCheckpoint | GgufCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
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


def quantised_matrices(
    name: str, of: Checked, quantization: str, device: torch.device
) -> dict[str, QuantisedMatrix]:
    """Return the weights of a model's linear layers as quantised matrices, by path in the model.

    quantization  how plain weights are rounded: "int8" or "int4"; "": packed weights are read as
                  they are, without those that can only be dequantised

    Raises:
        ModelError, OutOfMemory: a weight is invalid, or there is no memory for all.
    """
    empty, packed = of.empty, of.packed
    if quantization:
        form, num_bytes = quantization, rounding.num_bytes(empty, quantization)
        tensors = of.tensors() or plain_parts(of.folder, {})
        found = rounding.matrices(name, empty, tensors, quantization)
    elif packed is not None:
        form, num_bytes = "fewer bits", packed.num_bytes
        found = packed.matrices(empty)
        if isinstance(packed, PackedCheckpoint) and device.type in gpu_products.DEVICES:
            found = packed.matrices(empty, with_floats=True)
    else:
        return {}
    _refuse_more_than_free(name, num_bytes, form, device)
    if device.type not in gpu_products.DEVICES:
        return dict(found)
    taken = ((path, one.to(device)) for path, one in found if gpu_products.is_covered(one))
    return dict(taken)


def read_quantised(
    name: str,
    of: Checked,
    matrices: Mapping[str, QuantisedMatrix],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Return a model whose linear layers at the paths `matrices` have these weights.

    Everything else is read as usual, dequantised where it is packed.

    Raises:
        ModelError, OutOfMemory: as `read_weights`.
    """
    empty, config = of.empty, deepcopy(of.empty.config)
    head, embeddings = empty.get_output_embeddings(), empty.get_input_embeddings()
    paths = {module: path for path, module in empty.named_modules()}
    if paths[head] in matrices:
        config.tie_word_embeddings = False
    left = [
        module for module, path in paths.items() if path not in matrices or module is embeddings
    ]
    weights = {weight for module in left for weight in module.parameters(recurse=False)}
    needed = sum(weight.numel() for weight in weights) * dtype.itemsize
    _refuse_more_than_free(name, needed, str(dtype).removeprefix("torch."), device)
    replaced = {f"{path}.weight" for path in matrices}
    replaced |= {one.removeprefix(f"{empty.base_model_prefix}.") for one in replaced}
    tensors = of.tensors() or plain_parts(of.folder, {})
    rest = {key: tensor for key, tensor in tensors.items() if key not in replaced}
    kind = kind_of_quantised(type(empty), matrices)
    logger.info("%s: %d matrices stay in 8 or 4 bits", name, len(matrices))
    onto = straight_onto(device)
    return read_weights(name, of.folder, config, dtype, kind=kind, tensors=rest, options=onto)


def read_part(name: str, of: Checked, dtype: torch.dtype, device: torch.device, rank: Rank) -> Any:
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
    eos_token_ids  end-of-text ids (`stated_eos_ids`) that have a logit, ascending; may be ()
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
    quantization: str = "",
    keep_codes: bool = False,
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
    quantization  "int8" or "int4": round plain weights to so many bits (`rounding.py`); "": do not
    keep_codes  True: packed weights that a kernel of ours takes stay in their few bits, in models
              that the fused backend runs; False: they are dequantised

    Sets transformers' own logging to errors only, and its progress bars off.

    Raises:
        ModelError: with one line that says what is wrong and what to do.
    """
    refuse_unknown_dtype(dtype)
    where = claim(device)
    of = check_checkpoint(name, revision)
    config = of.config
    chosen = _choose_dtype(name, dtype, config, of.folder, where)
    if rank is not None:
        model = read_part(name, of, chosen, where, rank)
    else:
        model = _read_whole(name, of, chosen, where, quantization, keep_codes=keep_codes)
        if of.packed is not None:
            chosen = model.get_input_embeddings().weight.dtype  # some kernels know only one
    text_config = config.get_text_config(decoder=True)
    model = put(name, model, where).eval().requires_grad_(False)
    num_layers, text = int(text_config.num_hidden_layers), text_config.to_dict()
    longest = max_model_len(name, text_config, max_len)
    settle(model, text_config, longest)
    return LoadedModel(
        model=model,
        name=name,
        vocab_size=of.vocab_size,
        max_model_len=longest,
        eos_token_ids=of.eos_token_ids,
        num_layers=num_layers,
        hidden_size=int(text_config.hidden_size),
        dtype=chosen,
        device=where,
        num_parameters=sum(parameter.numel() for parameter in of.empty.parameters()),
        rank=rank,
        kinds=families.layer_kinds(str(config.model_type), text, num_layers),
    )


def _read_whole(
    name: str,
    of: Checked,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str,
    *,
    keep_codes: bool,
) -> Any:
    """Return a model that one process has; `quantization` and `keep_codes` as for `load_model`."""
    kind_of_model = str(of.empty.config.model_type)
    if quantization:
        refuse_rounding(
            name,
            quantization,
            device=device.type,
            kind=kind_of_model,
            is_quantised=of.packed is not None,
        )
    keep_codes = keep_codes and kind_of_model in families.FUSED
    keep_codes = keep_codes and _keeps_codes(name, of, dtype, device)
    if quantization or keep_codes:
        matrices = quantised_matrices(name, of, quantization, device)
        if matrices:
            return read_quantised(name, of, matrices, dtype, device)
    if of.packed is not None:
        return read_packed(name, of, of.packed, dtype, device)
    refuse_too_large(name, of.empty, dtype, device)
    kind = None if of.names is None else type(of.empty)
    onto = straight_onto(device)
    tensors = of.tensors()
    return read_weights(name, of.folder, of.plain, dtype, kind=kind, tensors=tensors, options=onto)


def _keeps_codes(name: str, of: Checked, dtype: torch.dtype, device: torch.device) -> bool:
    """True if packed weights can stay in their few bits on this device."""
    if device.type not in gpu_products.DEVICES:
        return device.type == "cpu"
    if not isinstance(of.packed, PackedCheckpoint):
        return False  # of a GGUF file on a GPU
    why = gpu_products.why_not(device, dtype)
    if why is not None:
        logger.info("%s: weights do not stay in few bits: %s", name, why)
    return why is None


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
    if limit is None and config.model_type in families.UNLIMITED:
        limit = long_texts.LONGEST
    if not isinstance(limit, int) or limit <= 0:
        raise ModelError(f"{name}: config.json has no max_position_embeddings; add it")
    stated = config.to_dict()
    return long_texts.limited(str(config.model_type), stated, limit, asked)


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
    if gguf_in(folder) is not None:
        return torch.bfloat16  # of its weights only norms are multiplied as they are
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
