"""Whether plain weights can be rounded to fewer bits at load (`--quantization`).

Torch is not needed: the coordinator asks before it starts a node, and the node asks again.
"""

from engine.checkpoint.families import FUSED
from engine.errors import ModelError

METHODS = ("int8", "int4")
KEEPING = ("auto", "fused")  # backends that multiply with quantised weights


def refuse_rounding(name: str, method: str, *, device: str, kind: str, is_quantised: bool) -> None:
    """Raise ModelError if a model cannot be rounded by `method`, or not on this device.

    device        name of the device that the model will be on
    kind          model_type in config.json
    is_quantised  True if the checkpoint is quantised already
    """
    if method not in METHODS:
        raise ModelError(f"unknown quantization {method!r}: use {' or '.join(METHODS)}")
    if is_quantised:
        why = "for plain weights, and these are quantised; leave it out"
    elif device.startswith("cuda"):
        why = "for CPUs; leave it out, or use a GPTQ or AWQ checkpoint"
    elif kind not in FUSED:
        why = f"for {', '.join(FUSED)}, and this is {kind}; leave it out"
    else:
        return
    raise ModelError(f"{name}: quantization {method} is {why}")


def refuse_elsewhere(name: str, method: str, *, backend: str, num_ranks: int) -> None:
    """Raise ModelError if this backend, or so many processes, cannot run rounded weights.

    method  "": no weights are rounded
    """
    if not method:
        return
    if backend not in KEEPING:
        raise ModelError(
            f"{name}: quantization {method} is not for the backend {backend}; use fused"
        )
    if num_ranks > 1:
        raise ModelError(
            f"{name}: quantization {method} is for a model in one process; give it one device"
        )
