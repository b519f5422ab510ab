"""Where the models run if nobody says."""

import os
from pathlib import Path

import pytest

from coordinator import devices
from coordinator.devices import default_devices


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """machine(cores, threads_per_core, gpus, torch): a computer that is not this one."""

    def be(cores: set[int], siblings: int = 1, gpus: str = "", torch: str = "2.13.0") -> None:
        def first_line(path: Path) -> str:
            core = int(path.parts[-3].removeprefix("cpu"))
            if siblings == 0:
                raise OSError("no such file")
            first = core - core % siblings
            return f"{first}-{first + siblings - 1}\n" if siblings > 1 else f"{core}\n"

        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
        monkeypatch.setattr(Path, "read_text", first_line)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        monkeypatch.setattr(devices, "version", lambda _: torch)

    return be


def test_gpus_come_first_and_one_is_shared(machine) -> None:  # type: ignore[no-untyped-def]
    machine({0, 1}, gpus="0,1,2")
    assert default_devices() == ("cuda:0", "cuda:1")
    machine({0, 1}, gpus="3")
    assert default_devices() == ("cuda:0", "cuda:0")


def test_gpus_that_this_torch_cannot_use_do_not_count(machine) -> None:  # type: ignore[no-untyped-def]
    machine({0, 1}, gpus="0,1", torch="2.13.0+cpu")
    assert default_devices() == ("cpu:0", "cpu:1")
    machine({0, 1}, gpus="-1")
    assert default_devices() == ("cpu:0", "cpu:1")


@pytest.mark.parametrize(
    ("cores", "siblings", "expected"),
    [
        ({0}, 1, ("cpu:0", "cpu:0")),
        ({0, 1}, 1, ("cpu:0", "cpu:1")),
        ({0, 1}, 2, ("cpu:0", "cpu:1")),  # two threads of one core are better than nothing
        ({4, 5, 6, 7}, 1, ("cpu:4-6", "cpu:7")),
        ({0, 1, 2, 3}, 2, ("cpu:0", "cpu:2")),
        ({0, 1, 2, 3, 4, 5, 6, 7}, 2, ("cpu:0,2,4", "cpu:6")),
        ({1, 3, 4, 5, 9}, 1, ("cpu:1,3-5", "cpu:9")),
        ({1, 3}, 2, ("cpu:1", "cpu:3")),  # their siblings belong to somebody else
        ({0, 1, 2}, 0, ("cpu:0-1", "cpu:2")),  # the kernel does not say
    ],
)
def test_the_drafter_gets_a_core_and_the_target_the_others(
    cores: set[int],
    siblings: int,
    expected: tuple[str, str],
    machine,  # type: ignore[no-untyped-def]
) -> None:
    machine(cores, siblings)
    assert default_devices() == expected
