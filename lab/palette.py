"""The colours of every picture: one colour for one thing (pure).

Processes and what they make have the colours of the terminal (`coordinator/cli`): what the target
writes is blue, what the drafter drafts is green, and what is rejected is red. No policy has one of
these colours. All are told apart by eyes of all kinds with the help of marks, names and position.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# -- processes -------------------------------------------------------------------------------------

TARGET, DRAFTER, COORDINATOR = "#2f6db0", "#4f9d55", "#7a6a58"
ROLES: Mapping[str, str] = MappingProxyType(
    {"target": TARGET, "drafter": DRAFTER, "coordinator": COORDINATOR}
)
VERDICT = "#b0344c"  # the target's judgement of drafts, and what it rejects

# What a host does besides running a model. The model has the colour of its process.
PREPARE, MOVE, DECIDE, CODEC = "#c4c08d", "#c9b3dc", "#e3b657", "#8f8f8f"

INK, FAINT = "#222222", "#6b6b6b"  # edges and words

# -- policies --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """The colour and the mark of a line or a point."""

    colour: str
    mark: str


PLAIN = "#555555"  # plain decoding, and whatever else a speed-up is measured against
POLICIES: Mapping[str, Look] = MappingProxyType(
    {
        "auto": Look("#7b3fa0", "o"),
        "ar": Look(PLAIN, "P"),
        "sync": Look("#17a2b8", "s"),
        "pearl": Look("#9a6b4f", "v"),
        "amusd": Look("#a3a300", "D"),
        "pipelined": Look("#e69f00", "^"),
        "ssd": Look("#dd7fb8", "X"),
        "tree": Look("#d55e00", "d"),
    }
)
# Other engines, in the order in which they are met.
PEERS = (
    *(Look("#5b4636", "<"), Look("#637939", ">"), Look("#843c39", "p")),
    *(Look("#2f8f83", "h"), Look("#393b79", "8"), Look("#b07d2b", "*")),
)


def pale(colour: str, share: float = 0.5) -> str:
    """Return the colour `#rrggbb`, mixed with this share of white."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
