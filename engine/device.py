"""Device names: which torch device a name stands for, and which CPU core a process keeps to.

Owns the spelling (`cpu`, `cpu:N`, `cuda:N`) and what this processor can do. Knows no model.
"""

import os
import re
from pathlib import Path

import torch

from engine.errors import ModelError

_NAME = re.compile(r"cpu|(?P<kind>cpu|cuda):(?P<index>\d{1,4})")

# Without one of these the type is emulated, several times slower than float32.
_CPU_FLAGS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def torch_device(name: str) -> torch.device:
    """Return the torch device that `name` stands for.

    Raises:
        ModelError: the name is misspelt, or that device is not there.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"unknown device {name!r}: use cpu, cpu:N (core N) or cuda:N (GPU N)")
    if match["kind"] == "cuda":
        _check_cuda(name, int(match["index"]))
        return torch.device(name)
    _core_of(name)
    return torch.device("cpu")


def pin(name: str) -> None:
    """Keep this process to core N with one torch thread for `cpu:N`, to GPU N for `cuda:N`.

    Raises:
        ModelError: the name is misspelt, or that core is not there.
    """
    device = torch_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    core = _core_of(name)
    if core is None:
        return
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise ModelError(f"device {name}: this process may not use that core; use cpu") from error
    torch.set_num_threads(1)


def cpu_is_fast_in(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of `dtype` in hardware."""
    return dtype not in _CPU_FLAGS or bool(_CPU_FLAGS[dtype] & cpu_flags())


def cpu_flags() -> set[str]:
    """Feature names of this processor as the kernel lists them; empty where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def _check_cuda(name: str, index: int) -> None:
    if not torch.cuda.is_available():
        raise ModelError(f"device {name}: no usable CUDA GPU here; use cpu or cpu:N")
    count = torch.cuda.device_count()
    if index >= count:
        raise ModelError(f"device {name}: the GPUs here are cuda:0 to cuda:{count - 1}")


def _core_of(name: str) -> int | None:
    """Return N of `cpu:N`, or None."""
    kind, _, index = name.partition(":")
    if kind != "cpu" or not index:
        return None
    count = os.cpu_count() or 1
    if int(index) >= count:
        raise ModelError(
            f"device {name}: no such core; the cores here are cpu:0 to cpu:{count - 1}"
        )
    return int(index)
