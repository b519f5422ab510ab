"""Reads which machine this is: Python, torch, CUDA, the GPU and its state.

    python -m lab.gpu_kit.steps.versions --ask

prints one line of JSON that says which steps can run here. Nothing of the accelerator is changed:
neither clocks nor MIG nor the compute mode.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from lab.experiments.surroundings import commit, machine
from lab.gpu_kit.steps.context import Context, run_step

MPS_DAEMON = "nvidia-cuda-mps-control"
PACKAGES = ("transformers", "tokenizers", "safetensors", "numpy", "pyzmq", "pydantic", "triton")
QUERY_LIMIT_S = 20.0
ASKED = (
    *("name", "driver_version", "memory.total", "memory.used", "compute_mode", "mig.mode.current"),
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu"),
    *("utilization.gpu", "persistence_mode"),
)


def why_no_gpu() -> str:
    """Return in a few words why torch cannot use a GPU; "" if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "no GPU that this torch can use"


def why_no_mps() -> str:
    """Return in a few words why MPS cannot run; "" if its daemon can be tried."""
    if reason := why_no_gpu():
        return reason
    return "" if shutil.which(MPS_DAEMON) else f"{MPS_DAEMON} is not installed"


def name_of(device: str) -> str:
    """Return the device and the versions that decide its speed, in one line."""
    if not device.startswith("cuda"):
        return f"{machine()}, torch {torch.__version__}"
    properties = torch.cuda.get_device_properties(torch.device(device))
    return f"{properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def ask(device: str) -> int:
    """Print what the driver must know of this machine as JSON; return the exit status 0."""
    no_gpu = why_no_gpu()
    name = "" if device.startswith("cuda") and no_gpu else name_of(device)
    said = {"why_no_gpu": no_gpu, "why_no_mps": why_no_mps(), "name": name}
    print(json.dumps(said))
    return 0


def measure(context: Context) -> None:
    """Write a row for each version and each state of the machine."""
    for name, value in {**_software(), **_gpus(), **_state()}.items():
        context.record.measured(name, value=value)


def _software() -> Mapping[str, str]:
    """Return machine, versions, commit and number of cores, by name."""
    found = {
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda),
        "commit": commit() or "not known (no git here)",
        "cores": str(len(os.sched_getaffinity(0))),
    }
    if torch.version.cuda is not None:
        found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _gpus() -> Mapping[str, str]:
    """Return a description of each GPU, by name."""
    if why_no_gpu():
        return {"GPU": f"none: {why_no_gpu()}"}
    found = {"GPUs": str(torch.cuda.device_count())}
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{one.name}, {one.total_memory / 2**30:.0f} GiB, "
            f"{one.multi_processor_count} multiprocessors, sm_{one.major}{one.minor}"
        )
    return found


def _state() -> Mapping[str, str]:
    """Return what the driver says of clocks, MIG, compute mode and MPS; {}: no GPU to use."""
    if why_no_gpu():
        return {}
    found = {}
    for name in ASKED:  # one by one, since a driver refuses a query with any name that it lacks
        said = _said(["nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader"])
        found[name] = said or "not said"
    runs = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    found["MPS"] = f"{MPS_DAEMON} {'is' if shutil.which(MPS_DAEMON) else 'is not'} installed; " + (
        f"{runs} is there" if os.path.exists(runs) else "no daemon of others is seen"
    )
    return found


def _said(command: list[str]) -> str:
    """Return what a command prints, in one line; "" if it fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(ended.stdout.split("\n")).strip("; ") if ended.returncode == 0 else ""


if __name__ == "__main__":
    if "--ask" in sys.argv:
        sys.exit(ask(sys.argv[-1]))
    sys.exit(run_step(measure))
