"""The numbers that a policy is."""

from dataclasses import dataclass

MAX_WINDOW = 64
MAX_WIDTH, MAX_BRANCHES = 16, 8


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy is a setting of these numbers (`proto.policies`); no code asks for its name.

    num_speculative_tokens  most drafted tokens in one target pass (K)
    launch_min, launch_hit  drafts at which a pass starts; and after one that accepted all it had
    window                  most tokens that the drafter may be ahead of the last verdict it applied
    group                   drafts that cannot be used before a verdict are sent so many at a time
    rest_after              passes after which the target tries whether it is faster alone; 0: never
    width                   nodes that one draft step expands at most (W)
    branches                children that are kept of each, the likeliest (R); 1: a chain
    detours                 children on a path that are not the first of theirs, at most
    subtree                 a pass verifies the likeliest nodes, and not the best chain alone
    min_score               least estimated chance (natural logarithm) of a path to be expanded
    """

    name: str
    num_speculative_tokens: int
    launch_min: int
    launch_hit: int
    window: int
    group: int = 1
    min_score: float = -1e9
    rest_after: int = 0
    width: int = 1
    branches: int = 1
    detours: int = MAX_WINDOW
    subtree: bool = False

    @property
    def has_drafter(self) -> bool:
        """Whether drafts come from another process."""
        return self.window > 0

    @property
    def prices_waits(self) -> bool:
        """Whether the target decides each time how many drafts in a row it waits for."""
        return self.rest_after > 0 and self.branches > 1
