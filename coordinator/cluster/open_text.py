"""A text that is being written, and the nodes that work on it (pure)."""

from dataclasses import dataclass, field

from coordinator.text.running import Running
from coordinator.text.session import NodeId
from proto.messages import Role, Rule

NOBODY: tuple[NodeId, ...] = ()


@dataclass(slots=True)
class OpenText:
    """A text that the nodes work on.

    targets, drafters  who has been told of it and is there; at most one target
    sources            numbers of all drafters that were ever told of it
    """

    running: Running
    targets: tuple[NodeId, ...] = NOBODY
    drafters: tuple[NodeId, ...] = NOBODY
    sources: set[int] = field(default_factory=set)

    def workers(self, role: Role) -> tuple[NodeId, ...]:
        """The nodes of this role."""
        return self.targets if role is Role.TARGET else self.drafters

    def set_workers(self, role: Role, nodes: tuple[NodeId, ...]) -> None:
        """From now on these."""
        if role is Role.TARGET:
            self.targets = nodes
        else:
            self.drafters = nodes

    def wants(self, node: NodeId, role: Role) -> bool:
        """Whether this node could work on it and does not."""
        return node not in self.workers(role) and self.has_room_for(role)

    def has_room_for(self, role: Role) -> bool:
        """Whether one more node of this role may work on it."""
        machine = self.running.machine
        if role is Role.TARGET:
            return not self.targets
        is_coupled = machine.rule is Rule.COUPLED
        return machine.policy.has_drafter and (is_coupled or not self.drafters)
