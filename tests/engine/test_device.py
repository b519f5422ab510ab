"""What a process sets for a GPU before it loads anything; the GPU is made up."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import engine.device
import engine.host
from engine.checkpoint.model import load_model
from engine.device import claim, gigabytes
from engine.errors import ModelError, OutOfMemory


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The GPUs that were made the process's own."""
    claimed: list[str] = []
    monkeypatch.setattr(engine.device, "_check_cuda", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: claimed.append(str(device)))
    matmul = torch.backends.cuda.matmul
    before = (
        torch.backends.cuda.cudnn_sdp_enabled(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    torch.backends.cuda.enable_cudnn_sdp(True)
    matmul.allow_bf16_reduced_precision_reduction = True
    yield claimed
    torch.backends.cuda.enable_cudnn_sdp(before[0])
    matmul.allow_bf16_reduced_precision_reduction = before[1]
    matmul.allow_fp16_reduced_precision_reduction = before[2]


def test_a_gpu_is_claimed_with_what_must_be_off(made_up: list[str]) -> None:
    assert claim("cuda:1") == torch.device("cuda:1")
    assert made_up == ["cuda:1"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", ModelError),
        ("CUDA error: out of memory", OutOfMemory),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", OutOfMemory),
    ],
)
def test_a_gpu_that_takes_no_other_process_is_a_line(
    said: str, kind: type[ModelError], made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: object) -> None:
        raise RuntimeError(f"{said}\nSearch for it in the documentation of CUDA")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(ModelError) as caught:
        claim("cuda:1")
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"device cuda:1: it cannot be used ({said}); end what")


def test_memory_that_torch_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [300]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 - sum(kept), 2000))
    assert engine.device.free_bytes(torch.device("cuda:0")) == 1000


def test_the_memory_of_a_gpu_is_the_same_whoever_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (1000, 10):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2000))
        assert engine.device.total_bytes(torch.device("cuda:0")) == 2000


@pytest.mark.parametrize(
    ("groups", "files", "total"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "5000", "memory.max": "max"}, 5000),
        ("0::/", {}, None),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "4000"}, 4000),
        ("4:cpu,memory:/a\n0::/", {"memory/memory.limit_in_bytes": "3000"}, 3000),
        ("4:cpu:/a", {"memory/a/memory.limit_in_bytes": "4000"}, None),
    ],
)
def test_the_memory_of_a_cpu_is_what_its_control_groups_allow(
    groups: str,
    files: dict[str, str],
    total: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(engine.host, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(engine.host, "GROUP_FILES", tmp_path)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert engine.device.total_bytes(torch.device("cpu")) == (total or pages)


def test_whoever_loads_a_model_claims_its_device(
    made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Experiments and tests load models without a node around them.
    def stop(*_: object) -> None:
        raise ModelError("far enough")

    monkeypatch.setattr("engine.checkpoint.checked.find_checkpoint", stop)
    with pytest.raises(ModelError, match="far enough"):
        load_model("anything", device="cuda:1")
    assert made_up == ["cuda:1"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_cpu_needs_nothing() -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    assert claim("cpu") == torch.device("cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    assert gigabytes(16_060_000_000) == "16.1 GB"


@pytest.mark.parametrize(
    ("file", "cuda", "said"),
    [
        (None, None, "(no NVIDIA driver, a torch for CPUs alone)"),
        (
            "NVRM version: NVIDIA 535.104.05 Sat\nGCC 12",
            "13.0",
            "(driver 535.104.05, a torch",
        ),
    ],
)
def test_where_no_gpu_can_be_used_the_driver_is_named(
    file: str | None,
    cuda: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if file is not None:
        (tmp_path / "version").write_text(file)
    with pytest.raises(ModelError) as raised:
        engine.device.torch_device("cuda:0")
    assert said in str(raised.value)
