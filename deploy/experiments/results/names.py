"""What arms are called in pictures and tables, and which of them are points of one line (pure)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.cluster.link import parse_links
from deploy.experiments.folder import ArmRecord, Header
from proto.messages import Role
from proto.policies import POLICIES

SHORT = {
    "num_speculative_tokens=": "K=",
    "temperature=": "T=",
    "link=drafter:": "",
    "link=": "",
    "drafter:": "",
    "simulate_target_ms=": "target=",
    "simulate_draft_ms=": "draft=",
    "policy_option=": "",
    "texts_at_once=": "texts=",
}
COST_RATIO = "cost_ratio"
COSTS = ("simulate_target_ms", "simulate_draft_ms")
AXES = {"link": "one-way hop, ms", COST_RATIO: "target pass, in draft steps"}


def shortened(name: str) -> str:
    """Without the words that say nothing new to whoever knows the settings."""
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name.strip()


def clipped(name: str, num_columns: int) -> str:
    """At most so long: arms begin and end differently, so what is cut is in the middle."""
    if len(name) <= num_columns:
        return name
    end = (num_columns - 1) // 2
    return f"{name[: num_columns - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"


def family(arm: ArmRecord) -> str:
    """Its policy, or the peer and what that does: what a colour stands for."""
    peer = arm.settings.get("peer")
    if peer:
        return f"{peer} {arm.settings.get('mode', 'plain')}"
    return str(arm.settings.get("policy", "auto"))


def is_plain(arm: ArmRecord) -> bool:
    """Whether it drafts nothing."""
    if arm.settings.get("peer"):
        return bool(arm.settings.get("mode", "plain") == "plain")
    row = POLICIES.get(arm.settings.get("policy", "auto"))
    return row is not None and not row.drafts


def baseline_words(header: Header) -> str:
    """What a speed-up of 1 is."""
    bases = {arm.baseline for arm in header.arms if arm.baseline}
    if all(is_plain(arm) for arm in header.arms if arm.name in bases):
        return "plain decoding"
    return shortened(bases.pop()) if len(bases) == 1 else "the baseline"


@dataclass(frozen=True, slots=True)
class Series:
    """Arms that differ in what is on the x axis, in its order.

    points  x and name of each arm
    """

    label: str
    family: str
    points: tuple[tuple[float | str, str], ...]


def x_of(header: Header, arm: ArmRecord) -> float | str | None:
    """Where it is on the x axis; None: it does not say."""
    if header.x == COST_RATIO:
        target, draft = (arm.settings.get(name) or 0.0 for name in COSTS)
        return target / draft if target and draft else None
    value = arm.settings.get(header.x)
    if header.x == "link":
        links = parse_links(value.split() if isinstance(value, str) else value or ())
        return links[Role.DRAFTER].hop_s * 1e3 if Role.DRAFTER in links else 0.0
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None if value is None else str(value)
    return value


def series(header: Header, measured: Sequence[str]) -> list[Series]:
    """The lines of a picture over `header.x`, of arms that are compared with another.

    Arms are on one line if all other settings are the same. What was swept does not count: the
    best number of drafts is another at another distance.
    """
    if not header.x:
        return []
    ignored = _swept(header.arms)
    on_x = {header.x, *(COSTS if header.x == COST_RATIO else ())}
    groups: dict[tuple[tuple[str, str], ...], list[ArmRecord]] = defaultdict(list)
    for arm in header.arms:
        if arm.name in measured and arm.baseline:
            skip = on_x | ignored.get(arm.swept_from, set())
            key = sorted(
                (name, str(value)) for name, value in arm.settings.items() if name not in skip
            )
            groups[tuple(key)].append(arm)
    told = _told_apart([dict(key) for key in groups])
    return [
        Series(
            _label(arms[0], told),
            family(arms[0]),
            _in_order((x, arm.name) for arm in arms if (x := x_of(header, arm)) is not None),
        )
        for arms in groups.values()
    ]


def _swept(arms: Sequence[ArmRecord]) -> dict[str, set[str]]:
    """The settings that a sweep chose, by what was swept."""
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for arm in arms:
        if arm.swept_from:
            for name, value in arm.settings.items():
                values[arm.swept_from][name].add(str(value))
    return {
        group: {name for name, found in named.items() if len(found) > 1}
        for group, named in values.items()
    }


def _told_apart(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings that are not the same in all, but for those that make a family."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [
        name
        for name in names
        if name not in ("policy", "peer", "mode") and len({one.get(name) for one in settings}) > 1
    ]


def _label(arm: ArmRecord, told: Sequence[str]) -> str:
    own = (f"{name}={arm.settings[name]}" for name in told if name in arm.settings)
    return shortened(" ".join((family(arm), *own)))


def _in_order(points: Iterable[tuple[float | str, str]]) -> tuple[tuple[float | str, str], ...]:
    """By number; words, and numbers beside words, stay in the order of the arms."""
    found = list(points)
    if any(isinstance(x, str) for x, _ in found):
        return tuple((str(x), name) for x, name in found)
    return tuple(sorted(found))
