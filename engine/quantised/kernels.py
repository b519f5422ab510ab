"""Which library can multiply with packed (quantised) weights directly, and whether it can here.

All these libraries are optional, and none is imported before transformers needs it. Only installed
code is run: formats whose kernels would be downloaded when a model is loaded (fp8 in blocks, mxfp4)
are dequantised on a GPU too.
"""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import CompressedTensorsConfig

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.quantised.formats import Awq, Format, Fp8, Gptq, Nf4

_FP8_UNITS = (8, 9)  # CUDA compute capability from which a GPU multiplies 8-bit floats


def why_no_kernels(form: Format, device: torch.device) -> str | None:
    """Return why weights of this format must be dequantised; None if a library has kernels."""
    if device.type != "cuda":
        return f"kernels are for CUDA, and not for {device.type}"
    libraries = _libraries(form)
    if not libraries:
        return "its kernels are no part of an installed library"
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported"
    if isinstance(form, Fp8) and torch.cuda.get_device_capability(device) < _FP8_UNITS:
        return "this GPU does not multiply 8-bit floats"
    return None


def loading_options(name: str, form: Format, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments for `from_pretrained` with which the kernels are used.

    Raises:
        ModelError: the kernels' library cannot be used.
    """
    options: dict[str, Any] = {"device_map": {"": device}}
    if isinstance(form, Fp8):
        try:
            options["quantization_config"] = CompressedTensorsConfig(use_optimized_inference=True)
        except Exception as error:  # it imports the library, which may raise anything
            raise ModelError(f"{name}: its kernels cannot be used: {one_line(error)}") from error
    return options


def try_out(name: str, model: Any, device: torch.device) -> None:
    """Run the model on one token: only that shows whether the kernels work here.

    Raises:
        ModelError: the kernels do not run, or the logits are not finite.
    """
    try:
        with torch.inference_mode():
            logits = model(torch.zeros(1, 1, dtype=torch.int64, device=device)).logits
    except Exception as error:  # a library may raise anything
        raise ModelError(f"{name}: its kernels do not run here: {one_line(error)}") from error
    if not torch.isfinite(logits).all():
        raise ModelError(f"{name}: its kernels compute NaN or infinity here")


def _libraries(form: Format) -> tuple[str, ...]:
    """Return the import names of the modules that transformers needs for the format's kernels."""
    match form:
        case Fp8():
            return ("compressed_tensors", "accelerate") if form.library else ()
        case Gptq():
            return "gptqmodel", "optimum", "accelerate"
        case Awq():
            return "gptqmodel", "accelerate"
        case Nf4():
            return "bitsandbytes", "accelerate"
        case _:
            return ()
