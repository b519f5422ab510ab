"""Which cores a launcher gives the nodes that it starts."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.launching import launcher as module
from coordinator.launching.launcher import Launcher
from proto.messages import Role
from proto.node_config import NodeConfig

TARGET = NodeConfig(Role.TARGET, "ipc:///x", "t", "", "model", device="", peer_device="")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """A launcher on a machine with four cores."""
    alone = {True: "cpu:0-2", False: "cpu:0-3"}
    monkeypatch.setattr(module, "shared_device", lambda: "cpu:0-3")
    monkeypatch.setattr(
        module, "default_device", lambda _, *, has_peer, **others: alone[has_peer] if others else ""
    )
    launcher = Launcher()
    yield launcher
    launcher.close()


def test_a_target_beside_a_drafter_may_use_its_core_as_well(launcher: Launcher) -> None:
    config = launcher._completed(TARGET)
    assert (config.device, config.shared_device) == ("cpu:0-2", "cpu:0-3")


def test_a_target_without_a_drafter_has_all_cores(launcher: Launcher) -> None:
    alone = replace(TARGET, peer_device=None)
    config = launcher._completed(alone)
    assert (config.device, config.shared_device) == ("cpu:0-2", "cpu:0-3")


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu:1"},
        {"peer_device": "cpu:1"},
        {"fixed_rows": 16},
        {"tensor_parallel_size": 2},
        {"peer_size": 2},
        {"simulated_ms": 5.0},
        {"role": Role.DRAFTER},
    ],
)
def test_otherwise_each_node_keeps_to_its_own(
    settings: dict[str, object], launcher: Launcher
) -> None:
    assert launcher._completed(replace(TARGET, **settings)).shared_device == ""  # type: ignore[arg-type]


def test_fixed_rows_have_the_same_cores_with_a_drafter_and_without(launcher: Launcher) -> None:
    config = launcher._completed(replace(TARGET, peer_device=None, fixed_rows=16))
    assert config.device == "cpu:0-2"


@pytest.mark.parametrize(
    ("device", "peer", "counted"),
    [
        ("cuda:0", "cuda:0", 7),
        ("cuda:0", "cuda:1", 0),
        ("cuda:0-3", "cuda:3", 7),
        ("cpu:0-2", "cpu:3", 7),
        ("cuda:0", "cpu", 0),
        ("cpu", "cuda:0", 0),
    ],
)
def test_the_other_models_size_counts_only_on_a_device_that_both_use(
    device: str, peer: str, counted: int, launcher: Launcher
) -> None:
    config = replace(TARGET, device=device, peer_device=peer, peer_bytes=7)
    assert launcher._completed(config).peer_bytes == counted
    assert launcher._completed(replace(config, peer_device=None)).peer_bytes == 0


@pytest.mark.parametrize(
    ("device", "peer", "role", "shares"),
    [
        ("cuda:0", "cuda:0", Role.TARGET, True),
        ("cuda:0-1", "cuda:1", Role.TARGET, True),
        ("cuda:0", "cuda:1", Role.TARGET, False),
        ("cuda:0", None, Role.TARGET, False),
        ("cpu:0", "cpu:0", Role.TARGET, False),
        ("cuda:0", "cuda:0", Role.DRAFTER, False),
    ],
)
def test_a_target_is_told_that_the_drafter_computes_on_its_gpu(
    device: str, peer: str | None, role: Role, *, shares: bool, launcher: Launcher
) -> None:
    config = replace(TARGET, role=role, device=device, peer_device=peer)
    assert launcher._completed(config).shares_gpu is shares
