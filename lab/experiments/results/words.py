"""The results of an experiment in sentences: the answers, and warnings about the figures."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.cluster.link import parse_links
from lab.experiments.folder import ArmRecord, Header
from lab.experiments.results.ratios import MIN_PROMPTS
from lab.experiments.results.summary import Summary, overall
from lab.experiments.rows import Row
from proto.messages import Role
from proto.policies import POLICIES

# -- names -----------------------------------------------------------------------------------------

# The names of arms in pictures and tables, and which arms are points of one line.

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
AXES = {
    "link": "one-way hop, ms",
    COST_RATIO: "target pass, in draft steps",
    "num_speculative_tokens": "drafts in a pass, at most (K)",
}


def shortened(name: str) -> str:
    """Return the name of an arm with shorter words for common settings."""
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name.strip()


def clipped(name: str, num_columns: int) -> str:
    """Return the name cut to at most `num_columns` characters.

    The middle is cut, because names of arms differ at the beginning and the end.
    """
    if len(name) <= num_columns:
        return name
    end = (num_columns - 1) // 2
    return f"{name[: num_columns - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"


def family(arm: ArmRecord) -> str:
    """Return the arm's policy, or peer and mode: the group of arms that share a colour."""
    peer = arm.settings.get("peer")
    if peer:
        return f"{peer} {arm.settings.get('mode', 'plain')}"
    return str(arm.settings.get("policy", "auto"))


def is_plain(arm: ArmRecord) -> bool:
    """True if the arm drafts nothing."""
    if arm.settings.get("peer"):
        return bool(arm.settings.get("mode", "plain") == "plain")
    row = POLICIES.get(arm.settings.get("policy", "auto"))
    return row is not None and not row.drafts


def baseline_words(header: Header) -> str:
    """Return words for what a speed-up of 1 means."""
    bases = {arm.baseline for arm in header.arms if arm.baseline}
    if all(is_plain(arm) for arm in header.arms if arm.name in bases):
        return "plain decoding"
    return shortened(bases.pop()) if len(bases) == 1 else "the baseline"


@dataclass(frozen=True, slots=True)
class Series:
    """Arms that form one line of a picture: they differ only in the setting on the x axis.

    points  (x, name) of each arm, in the order of x
    """

    label: str
    family: str
    points: tuple[tuple[float | str, str], ...]


def x_of(header: Header, arm: ArmRecord) -> float | str | None:
    """Return the arm's value on the x axis (hops: ms, 0 without a link); None: it has none."""
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
    """Return the lines of a picture over `header.x`, from measured arms with a baseline.

    Arms are on one line if all other settings are the same. Settings that were swept are ignored,
    because (for example) the best number of drafts differs with the distance.
    """
    if not header.x:
        return []
    ignored = swept(header.arms)
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


def swept(arms: Sequence[ArmRecord]) -> dict[str, set[str]]:
    """Return the settings that each sweep chose among, by name of the sweep."""
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
    """Return the settings in which the lines differ, without those that make a family."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [
        name
        for name in names
        if name not in ("policy", "peer", "mode") and len({one.get(name) for one in settings}) > 1
    ]


def _label(arm: ArmRecord, told: Sequence[str]) -> str:
    """Return the label of a line: its family, and the settings that distinguish it."""
    own = (f"{name}={arm.settings[name]}" for name in told if name in arm.settings)
    return shortened(" ".join((family(arm), *own)))


def _in_order(points: Iterable[tuple[float | str, str]]) -> tuple[tuple[float | str, str], ...]:
    """Return the points sorted by number; if some x are words, all keep the order of the arms."""
    found = list(points)
    if any(isinstance(x, str) for x, _ in found):
        return tuple((str(x), name) for x, name in found)
    return tuple(sorted(found))


# -- words -----------------------------------------------------------------------------------------

BUSY_CORES = 0.25  # load by other processes (cores) above which a warning is given
MAX_ANSWERS = 12
MAX_WARNED = 8  # names of arms in a warning
MAX_NAMES = 4  # of arms in a sentence; more are counted
SIMULATED = (
    *("simulate_target_ms", "simulate_draft_ms"),
    *("simulate_target_ms_per_row", "simulate_draft_ms_per_row", "link"),
)


def facts(header: Header, measured: Collection[str]) -> list[str]:
    """Return sentences on what was measured or simulated, and what was not measured.

    measured  names of the measured arms
    """
    times = f", {header.repetitions} times each" if header.repetitions > 1 else ""
    prompts = f"{header.num_prompts} prompt{'s' * (header.num_prompts != 1)}"
    found = [f"{prompts}{times}, at most {header.max_tokens} tokens a text."]
    if header.speed:
        found.append(f"Speeds count what comes {header.speed} of a text.")
    arms = [arm for arm in header.arms if arm.name in measured]
    if any(arm.settings.get(name) for arm in arms for name in SIMULATED):
        found.append(
            f"Simulated: {_simulation(arms)}. Not measured: real devices and links like these."
        )
    elif header.runs:
        machine = header.runs[-1].machine
        others = "other machines" if "NVIDIA" in machine else "GPUs, and other machines"
        found.append(f"Measured on {machine.split(', Linux')[0]}. Not measured: {others}.")
    return found


def _simulation(arms: Sequence[ArmRecord]) -> str:
    """Return which hardware was simulated for these arms, in words."""
    words = []
    for name, what in (
        ("simulate_target_ms", "a target pass"),
        ("simulate_draft_ms", "a draft step"),
    ):
        times = [float(arm.settings[name]) for arm in arms if arm.settings.get(name)]
        if times:
            least, most = min(times), max(times)
            span = f"{most:g}" if least == most else f"{least:g} to {most:g}"
            words.append(f"{what} of {span}\N{NO-BREAK SPACE}ms")
    if any(arm.settings.get("link") for arm in arms):
        words.append("the link")
    return _listed(words or ["time for each row of a pass"])


def answers(header: Header, summaries: Sequence[Summary]) -> list[str]:
    """Return sentences: the fastest arm for each baseline, then whether the texts are equal."""
    whole = overall(summaries)
    rivals: dict[str, list[Summary]] = defaultdict(list)
    baselines = {arm.name: arm.baseline for arm in header.arms}
    for one in whole:
        if one.speedup is not None:
            rivals[baselines[one.arm]].append(one)
    words = baseline_words(header)
    found = [
        _compared(arms, words if len(rivals) == 1 else shortened(base))
        for base, arms in list(rivals.items())[:MAX_ANSWERS]
    ]
    if len(rivals) > MAX_ANSWERS:
        found.append(f"The other {len(rivals) - MAX_ANSWERS} comparisons are in the table.")
    if not rivals:
        found.append(_without_ratios(whole))
    return [*found, _equality(whole)]


def _compared(arms: Sequence[Summary], base: str) -> str:
    """Return a sentence on arms of one baseline: which is fastest, or that none is shown to be."""
    ranked = sorted(arms, key=_mean, reverse=True)
    first = ranked[0]
    ratio = first.speedup
    assert ratio is not None
    name = shortened(first.arm)
    alike = [shortened(one.arm) for one in ranked if _overlap(one, first)]
    figures = _figures(first, base)
    if ratio.low is None:
        which = f" has the highest mean of {len(arms)} arms" if len(arms) > 1 else ""
        return f"{name}{which}: {figures}. It was measured once: nothing is known of the spread."
    if ratio.low <= 1 <= (ratio.high or 0):
        one = f"{name} and {base}" if len(arms) == 1 else f"{base} and the best of {len(arms)} arms"
        return f"No difference is shown between {one}. {name} has the highest mean: {figures}."
    if len(alike) > 1:
        slower = len(arms) - len(alike)
        rest = f" The other {slower} {'is' if slower == 1 else 'are'} slower." if slower else ""
        return (
            f"No difference is shown between {_counted(alike, len(arms))}: their intervals "
            f"overlap. {name} has the highest mean: {figures}.{rest}"
        )
    if len(arms) == 1:
        return f"{name}: {figures}."
    return f"{name} is the fastest of {len(arms)} arms: {figures}."


def _figures(one: Summary, base: str) -> str:
    ratio, speed = one.speedup, one.tokens_per_second
    assert ratio is not None
    assert speed is not None
    limits = ""
    if ratio.low is not None:
        limits = f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.mean:.2f} times {base}{limits}, {speed.median:.3g} tokens/s"


def _counted(names: Sequence[str], num_all: int) -> str:
    """Return the names of a few arms, or else only how many of all they are."""
    if len(names) <= MAX_NAMES:
        return _listed(names)
    return f"all {num_all} arms" if len(names) == num_all else f"{len(names)} of {num_all} arms"


def _mean(summary: Summary) -> float:
    """Return the mean speed-up; 0 if there is none."""
    return 0.0 if summary.speedup is None else summary.speedup.mean


def _overlap(one: Summary, other: Summary) -> bool:
    """True if no difference is shown between both arms; one without an interval shows none."""
    a, b = one.speedup, other.speedup
    if a is None or b is None:
        return False
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return True
    return a.low <= b.high and b.low <= a.high


def _listed(names: Sequence[str], most: int = MAX_NAMES) -> str:
    shown = list(names[:most]) + ([f"{len(names) - most} others"] if len(names) > most else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _without_ratios(whole: Sequence[Summary]) -> str:
    """Return the sentence for an experiment without speed-ups."""
    speeds = {one.arm: one.tokens_per_second.median for one in whole if one.tokens_per_second}
    if not speeds:
        return "There is nothing to compare: no text that counts was measured."
    best = max(speeds, key=lambda arm: speeds[arm])
    return (
        f"There are no pairs to compare. {shortened(best)} wrote most tokens a second, "
        f"{speeds[best]:.3g} (median)."
    )


def _equality(whole: Sequence[Summary]) -> str:
    """Return a sentence that says whether the texts equal those of the baselines."""
    compared = sum(one.num_compared for one in whole)
    different = sum(one.num_different for one in whole)
    if not compared:
        return "No arm had to write the tokens of its baseline, so none was checked for that."
    if not different:
        return f"All {compared} texts that must be those of the baseline are, token by token."
    return f"{different} of {compared} texts that must be those of the baseline are not."


def warnings(header: Header, rows: Sequence[Row], summaries: Sequence[Summary]) -> list[str]:
    """Return sentences that limit what the figures mean, one per kind of problem."""
    whole = overall(summaries)
    num_compared = sum(one.speedup is not None for one in whole)
    return [
        *_simulated(header, {one.arm for one in whole}),
        *_missing(header, whole),
        *(line for kind in _kinds(whole) if (line := _kind(kind, num_compared))),
        *_load(header, [row for row in rows if row.stage == "main"]),
    ]


def _kinds(whole: Sequence[Summary]) -> Iterable[tuple[str, dict[str, str]]]:
    """Yield each kind of problem with its extent for each affected arm."""
    ratios = {one.arm: one.speedup for one in whole if one.speedup is not None}
    yield (
        "Void texts, which are in no speed",
        {one.arm: f"{one.void_share:.0%}; {one.void}" for one in whole if one.void_share},
    )
    yield (
        "Texts that are not those of the baseline",
        {
            one.arm: f"{one.num_different} of {one.num_compared}"
            for one in whole
            if one.num_different
        },
    )
    yield (
        "Texts that lost their drafter, and measure the target alone from there on",
        {
            one.arm: f"{one.num_drafters_lost} of {one.num_texts}"
            for one in whole
            if one.num_drafters_lost
        },
    )
    yield (
        "Measurements without a counterpart in the baseline, which are in no speed-up",
        {arm: f"{ratio.num_unpaired}" for arm, ratio in ratios.items() if ratio.num_unpaired},
    )
    yield (
        f"Speed-ups of fewer than {MIN_PROMPTS} measurements, with too narrow an interval or none",
        {arm: f"{ratio.num_units} {ratio.unit}" for arm, ratio in ratios.items() if ratio.is_rough},
    )
    yield (
        f"Intervals about these prompts and no others, since they are fewer than {MIN_PROMPTS}",
        {
            arm: f"{ratio.num_units} {ratio.unit}"
            for arm, ratio in ratios.items()
            if ratio.unit == "measurements" and not ratio.is_rough
        },
    )


def _kind(kind: tuple[str, dict[str, str]], num_all: int) -> str:
    """Return a sentence on what is wrong with arms, named, or only counted if they are many."""
    words, arms = kind
    if len(arms) <= MAX_WARNED:
        named = [f"{shortened(arm)} ({number})" for arm, number in arms.items()]
        return f"{words}: {_listed(named, MAX_WARNED)}." if named else ""
    counts = Counter(arms.values())
    if len(counts) == 1:
        every = "all " if len(arms) == num_all else ""
        return f"{words}: {every}{len(arms)} arms ({next(iter(counts))})."
    counted = [f"{number} arm{'s' * (number != 1)} ({what})" for what, number in counts.items()]
    return f"{words}: {_listed(counted, MAX_WARNED)}."


def _simulated(header: Header, measured: Collection[str]) -> Iterable[str]:
    """Yield a sentence if some arms simulate hardware."""
    arms = [arm for arm in header.arms if arm.name in measured]
    names = [name for name in SIMULATED if any(arm.settings.get(name) for arm in arms)]
    number = sum(any(arm.settings.get(name) for name in names) for arm in arms)
    if names:
        yield (
            f"{number} of {len(arms)} arms rehearse other hardware ({_listed(names)}): their "
            "figures are not of this machine as it is."
        )


def _missing(header: Header, whole: Sequence[Summary]) -> Iterable[str]:
    """Yield a sentence if some arms are not measured yet."""
    there = {one.arm for one in whole}
    absent = [arm.name for arm in header.arms if arm.name not in there and not arm.swept_from]
    if absent:
        yield f"Not measured yet: {_listed([shortened(name) for name in absent])}."


def _load(header: Header, rows: Sequence[Row]) -> Iterable[str]:
    """Yield sentences about the load by other processes."""
    busy = [row.load for row in rows if row.load > BUSY_CORES]
    if busy:
        yield (
            f"During {len(busy)} of {len(rows)} texts others used more than {BUSY_CORES} cores, "
            f"{max(busy):.2f} at most."
        )
    for run in header.runs:
        if run.load > BUSY_CORES:
            yield f"Before the run of {run.at} others used {run.load:.2f} cores."
