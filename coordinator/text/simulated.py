"""What of the hardware was simulated while something was measured, and how well (pure)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOST_LATE = 0.01  # of the time; where forwards took longer by more, the figures mean nothing


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
    late_ms       by so much, together: no text can have taken longer than by that
    elapsed_ms    in this time; 0: these are sums since the start, and no share of any time
    """

    target_ms: float
    target_ms_per_row: float
    draft_ms: float
    draft_ms_per_row: float
    links: tuple[str, ...]
    link_seed: int
    num_forwards: int = 0
    num_overruns: int = 0
    late_ms: float = 0.0
    elapsed_ms: float = 0.0

    @property
    def is_void(self) -> bool:
        """Whether forwards took so much longer than they should have that the text shows it."""
        return self._late_share > MOST_LATE

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
        """Whether the figures can be believed, in a line for people.

        Empty if nothing was told, or if it is not known in which time that was.
        """
        if not self.num_forwards or not self.elapsed_ms:
            return ""
        line = f"{self.num_overruns} of {self.num_forwards} forwards took longer than simulated"
        if self.num_overruns:
            line += f", by {self._late_share:.1%} of the time"
        return line + (": the figures are void" if self.is_void else "")

    @property
    def _late_share(self) -> float:
        return late_share([(self.late_ms, self.elapsed_ms)])

    def since(self, before: "Simulated", elapsed_ms: float) -> "Simulated":
        """What has been counted since then, in so much time."""
        return replace(
            self,
            num_forwards=max(0, self.num_forwards - before.num_forwards),
            num_overruns=max(0, self.num_overruns - before.num_overruns),
            late_ms=max(0.0, self.late_ms - before.late_ms),
            elapsed_ms=elapsed_ms,
        )


def late_share(times: Iterable[tuple[float, float]]) -> float:
    """By what share of the time forwards took longer than they should have, at most.

    times  pairs: how late they were, and in what time. No more than all of a time is late: two
           devices can be late at once, and one can be late by what it began before
    """
    pairs = tuple(times)
    elapsed = sum(elapsed for _, elapsed in pairs)
    return sum(min(pair) for pair in pairs) / elapsed if elapsed else 0.0


def _device(name: str, forward_ms: float, row_ms: float) -> str:
    per_row = f"{row_ms:g} ms a row"
    if not forward_ms:
        return f"{name} {per_row}"
    return f"{name} {forward_ms:g} ms" + (f" + {per_row}" if row_ms else "")
