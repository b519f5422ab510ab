"""Read the weights of a folder into a model: plain ones, packed ones for a library, or dequantised.

Owns the one call of transformers that reads weights, and what is refused around it. Knows no
architecture.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.import_utils import is_accelerate_available

from engine.device import free_bytes, gigabytes
from engine.errors import ModelError, OutOfMemory, kind_of
from engine.model_files import one_line
from engine.quantised.kernels import loading_options, try_out, why_no_kernels
from engine.quantised.loading import Lazy, PackedCheckpoint
from engine.tensors import (
    refuse_mismatched,
    refuse_missing,
    refuse_not_finite,
    refuse_unexpected,
)

logger = logging.getLogger(__name__)

_NO_GENERATION: Any = GenerationConfig()  # type: ignore[no-untyped-call]


def refuse_too_large(name: str, empty: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raise OutOfMemory if a model's weights of this type do not fit into what is free.

    empty  the model, without memory
    """
    needed = sum(weight.numel() for weight in empty.parameters()) * dtype.itemsize
    free = free_bytes(device)
    if needed > free:
        raise OutOfMemory(
            f"{name}: its weights take {gigabytes(needed)} in {str(dtype).removeprefix('torch.')}, "
            f"and {device} has {gigabytes(free)} free; use a smaller dtype or model, or end what "
            "else runs there"
        )


def straight_onto(device: torch.device) -> dict[str, Any]:
    """What transformers is told to read weights straight onto a GPU, where its library is there."""
    if device.type == "cpu" or not is_accelerate_available():
        return {}
    return {"device_map": {"": device}}


def read_packed(
    name: str,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    packed: PackedCheckpoint,
    empty: Any,
) -> Any:
    """Return the model with its weights packed where kernels take them so, else dequantised.

    empty  the plain model, without memory

    Raises:
        ModelError, OutOfMemory: as `read_weights`.
    """
    why = why_no_kernels(packed.form, device)
    if why is None:
        try:
            options = loading_options(name, packed.form, device)
            model = read_weights(name, folder, config, dtype, options=options)
            try_out(name, model, device)
        except OutOfMemory:
            raise  # dequantised it takes more
        except ModelError as error:
            why = str(error)
        else:
            return model
    logger.info("%s: its weights are dequantised: %s", name, why)
    refuse_too_large(name, empty, dtype, device)
    return read_weights(name, folder, config, dtype, packed=(packed, empty))


def read_weights(
    name: str,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    packed: tuple[PackedCheckpoint, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the model with the weights of the folder.

    packed   how to read them if they have to be dequantised, and the model without memory
    options  for transformers, besides

    Raises:
        ModelError: they are not those that config.json describes, or not numbers.
        OutOfMemory: they do not fit.
    """
    loader: Any = AutoModelForCausalLM
    tensors: Mapping[str, Lazy] | None = None
    if packed is not None:
        checkpoint, empty = packed
        loader, config, tensors = type(empty), empty.config, checkpoint.tensors(empty)
    try:
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
    except Exception as error:  # it computes with what it finds, so anything may come of it
        kind = kind_of(error)
        raise kind(f"{name}: cannot load the weights: {one_line(error)}") from error
    refuse_mismatched(folder / "config.json", info["mismatched_keys"])
    refuse_missing(folder / "config.json", info["missing_keys"])
    refuse_unexpected(folder / "config.json", model, info["unexpected_keys"])
    refuse_not_finite(folder, model)
    return model


def put(name: str, model: Any, device: torch.device) -> Any:
    """Return the model on `device`. Raises OutOfMemory."""
    if model.device == device:
        return model
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{name}: its weights do not fit on {device}; use a smaller dtype or model"
        ) from error
