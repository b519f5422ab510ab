"""What of a pair's hardware is simulated, and what that has cost so far."""

from dataclasses import replace

from coordinator.api.config import PairConfig
from coordinator.cluster.registry import Registry
from coordinator.text.metrics import Simulated
from proto.messages import Role


def simulated_by(config: PairConfig, registry: Registry) -> Simulated | None:
    """Return the simulated hardware with its counts so far; None if nothing is simulated."""
    config = _as_told(config, registry)
    simulated = config.simulated
    if simulated is None:
        return None
    slowed = {
        Role.TARGET: config.simulate_target_ms + config.simulate_target_ms_per_row > 0,
        Role.DRAFTER: config.simulate_draft_ms + config.simulate_draft_ms_per_row > 0,
    }
    nodes = [node for node in registry.nodes if slowed[node.role]]
    return replace(
        simulated,
        num_forwards=sum(node.progress + node.num_forwards_before for node in nodes),
        num_overruns=sum(node.num_overruns + node.num_overruns_before for node in nodes),
        late_ms=sum(node.late_us + node.late_us_before for node in nodes) / 1e3,
    )


def _as_told(config: PairConfig, registry: Registry) -> PairConfig:
    """Return the config with the simulated times that the nodes themselves report.

    Nodes started by hand have their own settings, and one that joins later may differ.
    """
    devices: dict[str, float] = {}
    names = {Role.TARGET: "simulate_target_ms", Role.DRAFTER: "simulate_draft_ms"}
    for role, name in names.items():
        for hello in registry.hellos(role)[:1]:
            devices[name] = hello.simulated_us / 1e3
            devices[f"{name}_per_row"] = hello.simulated_us_per_row / 1e3
    return config.model_copy(update=devices)
