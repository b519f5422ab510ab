"""Where the models run if nobody says."""

import os
from pathlib import Path

import pytest

from coordinator.launching import devices
from coordinator.launching.devices import (
    default_device,
    default_devices,
    default_shares,
    gpus_of,
    is_device_here,
    num_ranks,
    shared_device,
    shares,
    visible_gpus,
)
from proto.errors import ConfigurationError
from proto.messages import Role


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """machine(cores, threads_per_core, gpus, ...): a computer that is not this one."""

    def be(
        cores: set[int],
        siblings: int = 1,
        gpus: str = "",
        torch: str = "2.13.0",
        num_gpus: int = 4,
        quota: str = "max 100000",
    ) -> None:
        def first_line(path: Path) -> str:
            if path.name == "cpu.max":
                return f"{quota}\n"
            if path.name == "cpulist":
                raise OSError("no such file")
            core = int(path.parts[-3].removeprefix("cpu"))
            if siblings == 0:
                raise OSError("no such file")
            first = core - core % siblings
            return f"{first}-{first + siblings - 1}\n" if siblings > 1 else f"{core}\n"

        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
        monkeypatch.setattr(Path, "read_text", first_line)
        there = ["null", "nvidiactl", *(f"nvidia{number}" for number in range(num_gpus))]
        monkeypatch.setattr(os, "listdir", lambda _: there)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        if gpus == "all":
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setattr(devices, "version", lambda _: torch)

    return be


def test_gpus_come_first_and_one_is_shared(machine) -> None:  # type: ignore[no-untyped-def]
    machine({0, 1}, gpus="0,1,2")
    assert default_devices() == ("cuda:0", "cuda:1")
    machine({0, 1}, gpus="3")
    assert default_devices() == ("cuda:0", "cuda:0")
    machine({0, 1}, gpus="GPU-8f3c")
    assert default_devices() == ("cuda:0", "cuda:0")
    machine({0, 1}, gpus="all")
    assert default_devices() == ("cuda:0", "cuda:1")


def test_models_of_several_ranks_have_devices_side_by_side(machine) -> None:  # type: ignore[no-untyped-def]
    machine(set(range(8)), gpus="0,1,2,3")
    assert default_devices(2, 1) == ("cuda:0", "cuda:2")
    assert default_devices(2, 2) == ("cuda:0", "cuda:2")
    assert default_devices(4, 2) == ("cuda:0", "cuda:2")  # they share two
    machine(set(range(8)))
    assert default_devices(2, 2) == ("cpu:0-5", "cpu:6-7")
    machine({0, 1})
    assert default_devices(2, 1) == ("cpu:0-1", "cpu:1")


@pytest.mark.parametrize(
    ("device", "size", "expected"),
    [
        ("", 1, 1),
        ("", 4, 4),
        ("cuda:0", 1, 1),
        ("cuda:0-3", 1, 4),
        ("cuda:0,cuda:2", 1, 2),
        ("cuda:0-1,3", 1, 3),
        ("cpu:0-3", 1, 1),
        ("cpu:0,1", 1, 1),
        ("cpu:0-1,cpu:2", 1, 2),
        ("cuda:x", 1, 1),
        ("cuda:3-0", 1, 1),
    ],
)
def test_ranks_are_counted_without_the_engine(device: str, size: int, expected: int) -> None:
    assert num_ranks(device, size) == expected


def test_gpus_that_this_torch_cannot_use_do_not_count(machine) -> None:  # type: ignore[no-untyped-def]
    machine({0, 1}, gpus="0,1", torch="2.13.0+cpu")
    assert default_devices() == ("cpu:0", "cpu:1")
    for hidden in ("-1", "", "NoDevFiles"):
        machine({0, 1}, gpus=hidden)
        assert default_devices() == ("cpu:0", "cpu:1")
    machine({0, 1}, gpus="all", num_gpus=0)
    assert default_devices() == ("cpu:0", "cpu:1")


def test_a_container_has_no_more_cores_than_its_quota_is_worth(machine) -> None:  # type: ignore[no-untyped-def]
    machine(set(range(64)), quota="400000 100000")
    assert default_devices() == ("cpu:0-2", "cpu:3")
    machine(set(range(64)), quota="250000 100000")
    assert default_devices() == ("cpu:0-1", "cpu:2")
    machine(set(range(64)), quota="50000 100000")
    assert default_devices() == ("cpu:0", "cpu:1")
    machine(set(range(64)))
    assert default_devices() == ("cpu:0-62", "cpu:63")


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


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["0-7"], ("cpu:0-6", "cpu:7")),
        (["0-3", "4-7"], ("cpu:0-3", "cpu:7")),
        (["0-1,4-7", "2-3"], ("cpu:0-1,4-7", "cpu:3")),
        (["0-1", "2-7"], ("cpu:2-7", "cpu:1")),  # the larger for the target
        (["0-7", "8-15"], ("cpu:0-6", "cpu:7")),  # no core of the other may be used
        (["0-7", ""], ("cpu:0-6", "cpu:7")),  # memory without cores
    ],
)
def test_target_and_drafter_get_memory_of_their_own_where_it_is_divided(
    nodes: list[str],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, cores in enumerate(nodes):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(devices, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(devices, "_first_sibling", lambda core, _: core)
    monkeypatch.setattr(devices, "_quota", lambda: 64)
    monkeypatch.setattr(devices, "_num_gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert default_devices() == expected
    is_divided = expected != ("cpu:0-6", "cpu:7")
    assert shared_device() == ("" if is_divided else "cpu:0-7")


def test_a_target_may_use_all_cores_and_alone_it_does(machine) -> None:  # type: ignore[no-untyped-def]
    machine({0, 1, 2, 3, 4, 5, 6, 7}, siblings=2)
    assert shared_device() == "cpu:0,2,4,6"
    assert default_device(Role.TARGET, is_alone=False, has_peer=False) == "cpu:0,2,4,6"
    machine({0})
    assert shared_device() == ""
    machine({0, 1}, gpus="0")
    assert shared_device() == ""
    assert default_device(Role.TARGET, is_alone=False, has_peer=False) == "cuda:0"


def test_a_device_is_here_if_its_number_is(machine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    machine({0, 1}, gpus="0,1", num_gpus=2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    here = ("", "cpu", "cpu:7", "cpu:0-3,6", "cuda:0", "cuda:1")
    assert [is_device_here(name) for name in here] == [True] * 6
    assert not any(is_device_here(name) for name in ("cuda:2", "cpu:8", "cpu:4-11", "cpu:0,9"))


def test_the_gpus_of_a_device() -> None:
    assert gpus_of("cuda:1") == {1}
    assert gpus_of("cuda:1", 3) == {1, 2, 3}
    assert gpus_of("cuda:0-1,cuda:4") == {0, 1, 4}
    assert gpus_of("cpu:0-3") == frozenset()


SMI = """#!/bin/sh
echo "0, GPU-aaaa-1, {first}"
echo "1, GPU-bbbb-2, NVIDIA H200"
"""


@pytest.mark.parametrize(
    ("visible", "first", "order", "expected"),
    [
        (None, "NVIDIA H200", None, ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("1", "NVIDIA H200", None, ["GPU-bbbb-2"]),
        ("GPU-bb, 0", "NVIDIA H200", None, ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("MIG-xyz", "NVIDIA H200", None, ["MIG-xyz"]),
        ("1", "NVIDIA T4", None, ["1"]),  # which of two kinds is 1 is not known
        ("1", "NVIDIA T4", "PCI_BUS_ID", ["GPU-bbbb-2"]),
    ],
)
def test_visible_gpus_are_known_by_their_uuid(
    visible: str | None,
    first: str,
    order: str | None,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI.format(first=first))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(devices, "_num_gpus", lambda: len(expected))
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert visible_gpus() == expected


# -- several nodes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "number", "expected"),
    [
        ("cuda:0,cuda:1", 2, ["cuda:0", "cuda:1"]),
        ("cuda:0-3", 2, ["cuda:0-1", "cuda:2-3"]),
        ("cuda:1,3,5,6", 2, ["cuda:1,3", "cuda:5-6"]),
        ("cuda:2", 3, ["cuda:2"] * 3),
        ("cpu", 2, ["cpu", "cpu"]),
        ("cpu:0-5", 3, ["cpu:0-1", "cpu:2-3", "cpu:4-5"]),
        ("cpu:0,cpu:1", 2, ["cpu:0", "cpu:1"]),
        ("cpu:0-1,cpu:2-3,cpu:4,cpu:5", 2, ["cpu:0-1,cpu:2-3", "cpu:4,cpu:5"]),
        ("cpu:7", 2, ["cpu:7", "cpu:7"]),
        ("cuda:0-3", 1, ["cuda:0-3"]),
        ("what:1", 2, ["what:1", "what:1"]),  # refused elsewhere, in words of its own
        ("", 2, ["", ""]),
    ],
)
def test_several_nodes_divide_the_named_devices_evenly(
    device: str, number: int, expected: list[str]
) -> None:
    assert shares(Role.TARGET, device, number) == expected


def test_devices_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="3 devices cannot be divided evenly among 2 tar"):
        shares(Role.TARGET, "cuda:0-2", 2)


@pytest.mark.parametrize(
    ("gpus", "wanted", "targets", "drafters"),
    [
        (4, (2, 1, 1, 1), ["cuda:0", "cuda:1"], ["cuda:2"]),
        (4, (2, 2, 1, 1), ["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]),
        (2, (2, 1, 1, 1), ["cuda:0", "cuda:1"], ["cuda:1"]),
        (1, (2, 1, 1, 1), ["cuda:0", "cuda:0"], ["cuda:0"]),
        (5, (2, 1, 2, 1), ["cuda:0", "cuda:2"], ["cuda:4"]),
    ],
)
def test_several_nodes_have_gpus_of_their_own_while_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    wanted: tuple[int, int, int, int],
    targets: list[str],
    drafters: list[str],
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda: gpus)
    assert default_shares(*wanted) == (targets, drafters)


@pytest.mark.parametrize(
    ("cores", "wanted", "targets", "drafters"),
    [
        (8, (2, 1), ["cpu:0-3", "cpu:4-6"], ["cpu:7"]),
        (8, (2, 2), ["cpu:0-2", "cpu:3-5"], ["cpu:6", "cpu:7"]),
        (8, (2, 0), ["cpu:0-3", "cpu:4-7"], []),
        (2, (2, 1), ["cpu:0", "cpu:0"], ["cpu:1"]),
        (2, (2, 2), ["cpu:0", "cpu:0"], ["cpu:1", "cpu:1"]),
        (1, (2, 1), ["cpu:0", "cpu:0"], ["cpu:0"]),
    ],
)
def test_several_nodes_share_out_the_cores_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    wanted: tuple[int, int],
    targets: list[str],
    drafters: list[str],
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda: 0)
    monkeypatch.setattr(devices, "_cores", lambda: list(range(cores)))
    assert default_shares(*wanted) == (targets, drafters)
