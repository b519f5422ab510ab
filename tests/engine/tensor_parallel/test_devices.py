"""How the devices of several ranks are spelt."""

import os

import pytest
import torch

from engine.errors import ModelError
from engine.tensor_parallel.devices import rank_devices


@pytest.fixture(autouse=True)
def _large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores and four GPUs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("cpu", 1, ("cpu",)),
        ("cpu:0-3", 1, ("cpu:0-3",)),
        ("cpu:0,1", 1, ("cpu:0,1",)),
        ("cpu:0-6,7", 1, ("cpu:0-6,7",)),
        ("cpu:0,cpu:1", 1, ("cpu:0", "cpu:1")),
        ("cpu:0-1,cpu:2,4", 1, ("cpu:0-1", "cpu:2,4")),
        ("cpu", 2, ("cpu:0-3", "cpu:4-7")),
        ("cpu:1,3,5", 2, ("cpu:1,3", "cpu:5")),
        ("cuda:1", 1, ("cuda:1",)),
        ("cuda:0-2", 1, ("cuda:0", "cuda:1", "cuda:2")),
        ("cuda:0,cuda:3", 1, ("cuda:0", "cuda:3")),
        ("cuda:0-1,3", 3, ("cuda:0", "cuda:1", "cuda:3")),
        ("cuda:1", 3, ("cuda:1", "cuda:2", "cuda:3")),
    ],
)
def test_a_gpu_is_a_rank_and_cores_are_one_unless_they_are_named_apart(
    name: str, size: int, expected: tuple[str, ...]
) -> None:
    assert rank_devices(name, size) == expected


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("cuda:0-1", 3, "is 2 ranks, but 3 are asked for"),
        ("cuda:2", 3, "cuda:0 to cuda:3"),
        ("cuda:0-7", 1, "cuda:0 to cuda:3"),
        ("cuda:3-0", 1, "the lower number first"),
        ("cuda:0,cuda:0", 1, "a GPU of its own"),
        ("cpu:0,cuda:0", 1, "all GPUs or all CPUs"),
        ("cpu:0,cpu:9", 1, "no such core"),
        ("cpu:0,gpu:1", 1, "unknown device 'gpu:1'"),
        ("cpu:0", 2, "1 cores are too few for 2 ranks"),
    ],
)
def test_what_is_not_there_is_refused_with_a_line(name: str, size: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        rank_devices(name, size)
