"""Device names, and copies between host and device.

Owns the spelling of names (`cpu`, `cpu:0`, `cpu:0-6,8`, `cuda:0`), the CPU cores that a process is
bound to, and what this processor can do. Knows no model.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import running
from engine.errors import ModelError, kind_of
from engine.host import CPU_FLAGS, cpu_flags, memory_bytes

_RUN = r"\d{1,4}(?:-\d{1,4})?"
_NAME = re.compile(rf"cpu|cpu:(?P<cores>{_RUN}(?:,{_RUN})*)|cuda:(?P<gpu>\d{{1,4}})")

DRIVER = Path("/proc/driver/nvidia/version")


def torch_device(name: str) -> torch.device:
    """Return the torch device that `name` stands for.

    Raises:
        ModelError: the name is misspelt, or that device is not there.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelError(
            f"unknown device {name!r}: use cpu, cpu:N or cpu:N-M (these cores) or cuda:N (GPU N)"
        )
    if match["gpu"]:
        _check_cuda(name, int(match["gpu"]))
        return torch.device(name)
    cores_of(name)
    return torch.device("cpu")


def claim(name: str) -> torch.device:
    """Return the torch device that `name` stands for; if it is a GPU, make it the process's own.

    Called before any model is loaded. On a GPU this switches off for the whole process:

        cuDNN's attention   it plans anew for every number of rows and slots, 0.4 s each time, and
                            has given wrong text with few key heads (pytorch issue 193893)
        bfloat16 sums       partial sums of half precision in matrix products: they make rows that
                            nearly tie differ from one shape of a pass to the next

    Raises:
        ModelError: as for `torch_device`, or the GPU does not take this process.
    """
    device = torch_device(name)
    if device.type == "cuda":
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise kind_of(error)(
                f"device {name}: it cannot be used ({why}); end what else runs there, or use "
                "another device"
            ) from error
        running.wait_at_end(partial(torch.cuda.synchronize, device))
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return device


def threads_on(device: torch.device) -> int:
    """Return on how many threads torch computes on this device; 0: it is no CPU."""
    return torch.get_num_threads() if device.type == "cpu" else 0


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Let torch compute on so many threads until the end of the block; 0: on as many as before."""
    before = torch.get_num_threads() if count else 0
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pin(name: str) -> None:
    """Bind this process to the cores of `cpu:...`, one torch thread each, or to GPU N for `cuda:N`.

    Raises:
        ModelError: the name is misspelt, or the cores or the GPU do not exist.
    """
    claim(name)
    cores = cores_of(name)
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ModelError(f"device {name}: this process may not use it; use cpu") from error
    torch.set_num_threads(len(cores))


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor copied to `device`, without waiting for the GPU's earlier work."""
    if tensor.device == device or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Point:
    """A point in a GPU's work, behind all that was launched before; for the host, it is passed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Set the point on the device of `tensor`."""
        self._event: Any = None
        if not is_host(tensor):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def is_passed(self) -> bool:
        """Return whether the device has done all of that work; cheap to ask."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has done it."""
        if self._event is not None:
            self._event.synchronize()


class Coming:
    """A tensor on its way to the host, behind the GPU's work that was launched before.

    It is copied into pinned memory, because a plain copy goes through memory that the driver must
    lock first. What overwrites the tensor may be launched at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begin the copy; a tensor of the host is taken as it is."""
        self._here = tensor
        if not is_host(tensor):
            self._here = pinned(tensor.shape, tensor.dtype)
            self._here.copy_(tensor, non_blocking=True)
        self._point = Point(tensor)

    def here(self) -> torch.Tensor:
        """Return the tensor on the host; waits for it, not for later work."""
        self._point.wait()
        return self._here


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` on the host; waits for the GPU work launched before, not for later work."""
    return Coming(tensor).here()


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in pinned host memory, for asynchronous copies."""
    return torch.empty(*shape, dtype=dtype, pin_memory=True)


def pin_ahead(most_bytes: int, there: torch.Tensor) -> None:
    """Pin host memory now for later copies of up to `most_bytes` between host and device.

    Pinning 48 MiB takes the driver 10 to 20 ms. Torch keeps freed pinned memory in a pool for each
    power of two of bytes, but drops it at every recording of a CUDA graph, so call this after all
    recordings are made. Does nothing for a CPU.

    there  any tensor on the device
    """
    while most_bytes and not is_host(there):
        pinned((most_bytes,), torch.uint8)
        most_bytes //= 2


def is_host(tensor: torch.Tensor) -> bool:
    """True if the tensor is in the host's memory (on a CPU)."""
    return tensor.device.type == "cpu"


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """While inside, torch raises RuntimeError instead of letting the host wait for the GPU.

    This holds for all threads of the process, and for torch's own calls, not for those of other
    libraries.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Inbox:
    """A tensor at a fixed address on a GPU, which the host fills without waiting for the GPU.

    there  the tensor on the GPU; shape and dtype are those of the tensors that are put into it
    """

    def __init__(self, first: torch.Tensor, device: torch.device) -> None:
        """Allocate the tensor and fill it with `first`, a tensor on the host."""
        self.there = torch.empty_like(first, device=device)
        self._here = first.clone().pin_memory()
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.put(first)

    def put(self, tensor: torch.Tensor) -> None:
        """Fill the tensor with `tensor`, after all work that the GPU has been given so far."""
        stream = torch.cuda.current_stream(self.there.device)
        if not self._copied.query():  # what is still to be copied would be overwritten
            self.there.copy_(tensor.pin_memory(), non_blocking=True)
            return
        self._here.copy_(tensor)
        self.there.copy_(self._here, non_blocking=True)
        self._copied.record(stream)


def cpu_is_fast_in(dtype: torch.dtype) -> bool:
    """True if this processor multiplies matrices of `dtype` in hardware."""
    needed = CPU_FLAGS.get(str(dtype).removeprefix("torch."))
    return needed is None or bool(needed & cpu_flags())


def processor() -> str:
    """Return the line of /proc/cpuinfo that names this processor; "" if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^model name.*$", text, re.MULTILINE)
    return found[0] if found else ""


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes, as far as it can be known."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else torch keeps memory that was used only to read weights
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        text = ""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    if found:
        return int(found[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def total_bytes(device: torch.device) -> int:
    """Return the memory of a device in bytes, whoever uses it: it is the same at every start.

    That of a CPU is what this process's control group may take, if that is less.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return memory_bytes()


def gigabytes(num_bytes: int) -> str:
    """Return a number of bytes as text in gigabytes (10^9 bytes), such as "1.5 GB"."""
    return f"{num_bytes / 1e9:.1f} GB"


def _check_cuda(name: str, index: int) -> None:
    """Raise ModelError if there is no GPU with this index."""
    if not torch.cuda.is_available():
        raise ModelError(
            f"device {name}: no usable CUDA GPU here ({_versions()}); use cpu or cpu:N"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise ModelError(f"device {name}: the GPUs here are cuda:0 to cuda:{count - 1}")


def _versions() -> str:
    """Return the versions of the GPU driver and of torch's CUDA: a torch too new finds no GPU."""
    try:
        said = DRIVER.read_text()
    except OSError:
        driver = "no NVIDIA driver"
    else:
        found = re.search(r"\d+\.\d+(\.\d+)?", said)
        driver = f"driver {found[0] if found else 'of an unknown version'}"
    made_for = torch.version.cuda
    return f"{driver}, {f'a torch for CUDA {made_for}' if made_for else 'a torch for CPUs alone'}"


def cores_of(name: str) -> set[int]:
    """Return the CPU cores that `cpu:...` names; empty for `cpu` and GPUs. Raises ModelError."""
    kind, _, runs = name.partition(":")
    if kind != "cpu" or not runs:
        return set()
    count = os.cpu_count() or 1
    cores: set[int] = set()
    for run in runs.split(","):
        first, _, last = run.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
        if int(last or first) < int(first):
            raise ModelError(f"device {name}: {run} is no range of cores; the lower number first")
    if max(cores) >= count:
        raise ModelError(
            f"device {name}: no such core; the cores here are cpu:0 to cpu:{count - 1}"
        )
    return cores
