"""Simulates a slow, narrow, unsteady or lossy link: when each message arrives, if it does (pure).

Theory of operation
-------------------
A link has two directions. A message starts when those before it have left; its bytes take the time
that the bandwidth gives. It arrives after the delay, plus or minus the jitter, unless it is lost.
Messages arrive in the order in which they were sent, as over TCP: a message that would overtake
another arrives at the same time. With `reorder` it does overtake.

A user writes drafter:delay=5ms,jitter=1ms,loss=1%,bandwidth=100Mbit for both directions,
to-drafter:... or from-drafter:... for one, as seen from the coordinator. Random numbers come from a
function that is passed in, so that the same seed loses the same messages.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Generic, NamedTuple, TypeVar

from proto.errors import ConfigurationError, shown
from proto.messages import Role

MAX_IN_FLIGHT = 4096  # messages in one direction; further ones are refused
MAX_DELAY_S, MAX_LOSS = 1.0, 0.5  # with more, nodes count as silent or no message gets through
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MIN_BITS_PER_S = 64e3  # with less, heartbeats alone fill it
BITS = {"k": 1e3, "M": 1e6, "G": 1e9}
SETTINGS = ("delay", "jitter", "loss", "bandwidth", "reorder")
EXPECTED = (
    "expected drafter or target, or one direction of it as in to-drafter or from-drafter, a colon "
    "and some of delay=5ms,jitter=1ms,loss=1%,bandwidth=100Mbit,reorder"
)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Link:
    """The properties of one direction of a link.

    delay_s      seconds on the way
    jitter_s     largest deviation from the delay; at most the delay
    loss         the probability that a message is lost, 0 to 1
    reorder      messages may overtake each other
    bytes_per_s  the bandwidth
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    reorder: bool = False
    bytes_per_s: float = inf


class Links(NamedTuple):
    """Both directions of the link between the coordinator and a node."""

    to_node: Link = Link()
    from_node: Link = Link()

    @property
    def hop_s(self) -> float:
        """Return the mean delay of the two directions, in seconds."""
        return (self.to_node.delay_s + self.from_node.delay_s) / 2


class Direction(Generic[Item]):
    """The messages that are on their way in one direction of a link.

    draw  returns a random number in [0, 1); called twice for each message
    """

    def __init__(self, link: Link, draw: Callable[[], float]) -> None:
        self._link = link
        self._draw = draw
        self._num_put = 0
        self.newest_s = inf  # arrival time of the message put in last; infinity: none was put in
        self._last_s = -inf  # latest arrival time of all messages; unused with `reorder`
        self._free_s = -inf  # when the last message has left
        self._flying: list[tuple[float, int, Item]] = []  # a heap: arrival, number, message

    def put(self, item: Item, now: float, *, may_be_lost: bool, num_bytes: int = 0) -> bool:
        """Send a message; False if too many are on their way; True also for one that gets lost."""
        if len(self._flying) >= MAX_IN_FLIGHT:
            return False
        self._free_s = max(now, self._free_s) + num_bytes / self._link.bytes_per_s
        is_lost = self._draw() < self._link.loss
        arrival = self._free_s + self._link.delay_s + self._link.jitter_s * (2 * self._draw() - 1)
        if is_lost and may_be_lost:
            return True
        if not self._link.reorder:
            arrival = self._last_s = max(arrival, self._last_s)
        self._num_put, self.newest_s = self._num_put + 1, arrival
        heappush(self._flying, (arrival, self._num_put, item))
        return True

    def __len__(self) -> int:
        return len(self._flying)

    def take(self, now: float) -> list[Item]:
        """Return the messages that have arrived, in the order of their arrival."""
        arrived = []
        while self._flying and self._flying[0][0] <= now:
            arrived.append(heappop(self._flying)[2])
        return arrived

    @property
    def next_s(self) -> float:
        """Return when the next message arrives; infinity if none is on its way."""
        return self._flying[0][0] if self._flying else inf


def parse_links(texts: Iterable[str]) -> dict[Role, Links]:
    """Return the links by the role of the node at their end. Raises ConfigurationError."""
    links: dict[Role, Links] = {}
    given: set[tuple[Role, str]] = set()
    for text in texts:
        place, colon, settings = text.partition(":")
        way, _, name = place.rpartition("-")
        if not colon or name not in list(Role) or way not in ("", "to", "from"):
            raise ConfigurationError(f"{EXPECTED}, got {shown(text)}")
        role, link = Role(name), _parse(text, settings)
        for field in ("to_node", "from_node") if not way else (f"{way}_node",):
            if (role, field) in given:
                raise ConfigurationError(f"the link to the {role} is given twice; give it once")
            given.add((role, field))
            links[role] = links.get(role, Links())._replace(**{field: link})
    return links


def _parse(text: str, settings: str) -> Link:
    found: dict[str, str] = {}
    for setting in settings.split(","):
        name, _, value = setting.partition("=")
        if name not in SETTINGS or name in found:
            raise ConfigurationError(f"{EXPECTED}, got {shown(text)}")
        found[name] = value
    if found.get("reorder"):
        raise ConfigurationError(f"reorder has no value, got {shown(text)}")
    link = Link(
        delay_s=_seconds(text, found.get("delay", "0s")),
        jitter_s=_seconds(text, found.get("jitter", "0s")),
        loss=_chance(text, found.get("loss", "0")),
        reorder="reorder" in found,
        bytes_per_s=_bandwidth(text, found["bandwidth"]) if "bandwidth" in found else inf,
    )
    if link.jitter_s > link.delay_s:
        raise ConfigurationError(f"the jitter is longer than the delay, got {shown(text)}")
    return link


def _seconds(text: str, value: str) -> float:
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", value)
    seconds = float(number[1]) * SECONDS[number[2]] if number else -1.0
    if not 0 <= seconds <= MAX_DELAY_S:
        raise ConfigurationError(
            f"a time is written as 300us, 5ms or 0.5s, up to {MAX_DELAY_S:g} s; got {shown(text)}"
        )
    return seconds


def _chance(text: str, value: str) -> float:
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", value)
    chance = float(number[1]) / (100 if number[2] else 1) if number else -1.0
    if not 0 <= chance <= MAX_LOSS:
        raise ConfigurationError(
            f"loss is written as 1% or 0.01, up to {MAX_LOSS:.0%}; got {shown(text)}"
        )
    return chance


def _bandwidth(text: str, value: str) -> float:
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG])bit", value)
    bits = float(number[1]) * BITS[number[2]] if number else 0.0
    if bits < MIN_BITS_PER_S:
        raise ConfigurationError(
            "a bandwidth is written as 64kbit, 100Mbit or 10Gbit, at least 64kbit; got "
            f"{shown(text)}"
        )
    return bits / 8
