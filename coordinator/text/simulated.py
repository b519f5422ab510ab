"""What of the hardware was simulated while something was measured, and how well (pure)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOST_OVERRUNS = 0.01  # of the forwards; where more took too long, the figures mean nothing


@dataclass(frozen=True, slots=True)
class Simulated:
    """A rehearsal of other hardware: figures that come with it are not of this machine.

    target_ms, draft_ms  what a forward takes; 0: as long as it takes here
    ..._per_row   and so much more for each of its rows
    links         as they were asked for
    link_seed     of what they lose and how late each message is
    num_forwards  of simulated devices since the text was asked for, those of other texts included,
                  as far as heartbeats have told
    num_overruns  of them, those that took longer than they should have
    """

    target_ms: float
    target_ms_per_row: float
    draft_ms: float
    draft_ms_per_row: float
    links: tuple[str, ...]
    link_seed: int
    num_forwards: int = 0
    num_overruns: int = 0

    @property
    def is_void(self) -> bool:
        """Whether too many forwards took longer than they should have."""
        return overruns([self]) > MOST_OVERRUNS

    @property
    def words(self) -> str:
        """What is simulated, in a line for people."""
        devices = {
            "a target pass": (self.target_ms, self.target_ms_per_row),
            "a draft step": (self.draft_ms, self.draft_ms_per_row),
        }
        parts = [_device(name, *costs) for name, costs in devices.items() if any(costs)]
        parts += [f"link {link}" for link in self.links]
        return "; ".join(parts)

    @property
    def verdict(self) -> str:
        """Whether the figures can be believed, in a line for people; empty if nothing was told."""
        if not self.num_forwards:
            return ""
        line = f"{self.num_overruns} of {self.num_forwards} forwards took longer than simulated"
        return line + (": the figures are void" if self.is_void else "")

    def since(self, before: "Simulated") -> "Simulated":
        """What has been counted since then."""
        return replace(
            self,
            num_forwards=max(0, self.num_forwards - before.num_forwards),
            num_overruns=max(0, self.num_overruns - before.num_overruns),
        )


def overruns(figures: Iterable[Simulated]) -> float:
    """The share of forwards that took longer than they should have."""
    counted = tuple(figures)
    num_forwards = sum(one.num_forwards for one in counted)
    return sum(one.num_overruns for one in counted) / max(1, num_forwards)


def _device(name: str, forward_ms: float, row_ms: float) -> str:
    per_row = f"{row_ms:g} ms a row"
    if not forward_ms:
        return f"{name} {per_row}"
    return f"{name} {forward_ms:g} ms" + (f" + {per_row}" if row_ms else "")
