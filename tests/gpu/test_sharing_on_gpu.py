"""Two processes on one GPU: the client that tries it, the service, and an end in mid-work."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coordinator.launching import mps
from coordinator.launching.devices import visible_gpus
from coordinator.launching.mps import CONTROL, Mps
from proto.messages import Role
from tests.programs import python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_the_client_uses_the_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", mps._CLIENT, "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_gpus_are_known_by_uuid() -> None:
    names = visible_gpus()
    assert len(names) == torch.cuda.device_count()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert uuid.removeprefix("GPU-") in names[0]


@pytest.mark.skipif(shutil.which(CONTROL) is None, reason="no MPS")
def test_both_nodes_find_the_gpu_through_the_service(tmp_path: Path) -> None:
    service = Mps.start(tmp_path, visible_gpus(), 0)
    if service is None:
        pytest.skip("MPS serves no client here")
    try:
        for role in Role:
            done = python(
                "import torch; print(torch.ones(8, device='cuda:0').sum().item())",
                env={"PATH": "/usr/bin:/bin", **service.environment(role)},
            )
            assert done.stdout == "8.0\n", done.stderr
    finally:
        service.stop()


def test_work_that_was_launched_is_ended_before_the_process() -> None:
    done = python(
        "import torch\n"
        "from engine import running\n"
        "from engine.device import claim\n"
        "device = claim('cuda:0')\n"
        "wide = torch.ones(8192, 8192, device=device)\n"
        "for _ in range(20): wide = wide @ wide\n"
        "event = torch.cuda.Event(); event.record()\n"
        "print(running.finish(60.0), event.query())\n"
    )
    assert done.stdout == "True True\n", done.stderr
