"""The table of an experiment as Markdown, to be pasted into a page: a row per arm.

Arms that differ in the temperature alone are one row, with columns for each temperature. Below the
table stand the facts: prompts, machine, day, commit, and what was not measured.
"""

from collections.abc import Mapping, Sequence

from lab.experiments.description import SHORT
from lab.experiments.folder import ArmRecord, Header
from lab.experiments.results.summary import Summary, overall
from lab.experiments.results.words import baseline_words, facts, shortened, swept

NONE = "\N{EN DASH}"
VERSIONS = ("torch", "transformers")  # whose versions stand below the table


def markdown(header: Header, summaries: Sequence[Summary]) -> str:
    """Return the table and the facts, as lines of Markdown."""
    whole = {one.arm: one for one in overall(summaries)}
    arms = [arm for arm in header.arms if arm.name in whole]
    temperatures = list(dict.fromkeys(_temperature(arm) for arm in arms))
    rows: dict[str, dict[float, ArmRecord]] = {}
    for arm in arms:
        rows.setdefault(_label(arm, whole[arm.name]), {})[_temperature(arm)] = arm
    fastest: dict[float, float] = {}
    for arm in arms:
        speeds = fastest.get(_temperature(arm), 0.0), _speed(whole[arm.name])
        fastest[_temperature(arm)] = max(speeds)
    chosen = swept(header.arms)
    base = baseline_words(header)
    head = ["", *(cell for temperature in temperatures for cell in _heads(temperature, base))]
    lines = [head, ["---"] * len(head)]
    for label, by_temperature in rows.items():
        cells = [label]
        for temperature in temperatures:
            if one := by_temperature.get(temperature):
                cells.append(_speed_words(whole[one.name], fastest[temperature]))
                cells.append(_ratio_words(whole[one.name], _chosen(one, chosen)))
            else:
                cells += [NONE, NONE]
        lines.append(cells)
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*table, "", " ".join([*facts(header, whole), *_when(header)]), ""])


def _temperature(arm: ArmRecord) -> float:
    """Return the temperature of an arm; without a setting 0, which is greedy."""
    return float(arm.settings.get("temperature", 0.0))


def _heads(temperature: float, base: str) -> tuple[str, str]:
    """Return the heads of both columns of a temperature."""
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{how}: tokens/s", f"times {base} (95 %)"


def _label(arm: ArmRecord, found: Summary) -> str:
    """Return the name of a row: the arm's without its temperature and what a sweep chose.

    For a peer it also states the version, and what else the peer has said of itself.
    """
    words = (arm.swept_from or arm.name).split(" ")
    name = " ".join(word for word in words if word != f"T={arm.settings.get('temperature')}")
    peer = str(arm.settings.get("peer", ""))
    said = {place.host.removeprefix(peer).strip() for place in found.hosts if place.role == "peer"}
    return shortened(name) + (f" ({'; '.join(sorted(said))})" if said else "")


def _chosen(arm: ArmRecord, chosen: Mapping[str, set[str]]) -> str:
    """Return the settings that the arm's sweep chose, in words; "" if nothing was swept."""
    names = sorted(chosen.get(arm.swept_from, ())) if arm.swept_from else []
    return "".join(f", {SHORT.get(name, name)} = {arm.settings[name]}" for name in names)


def _speed(found: Summary) -> float:
    """Return the median of the tokens per second; 0 without one."""
    return 0.0 if found.tokens_per_second is None else found.tokens_per_second.median


def _speed_words(found: Summary, fastest: float) -> str:
    """Return the cell with the tokens per second, bold if no other arm has more."""
    if found.tokens_per_second is None:
        return "void"
    speed = f"{_speed(found):.1f}"
    return f"**{speed}**" if _speed(found) == fastest else speed


def _ratio_words(found: Summary, chosen: str) -> str:
    """Return the cell with the speed-up, its interval, and what a sweep chose."""
    return NONE if found.speedup is None else found.speedup.words + chosen


def _when(header: Header) -> list[str]:
    """Return a sentence that states day, versions and commit of the last run."""
    if not header.runs:
        return []
    run = header.runs[-1]
    said = [
        run.at[:10],
        *(f"{name} {run.versions[name]}" for name in VERSIONS if name in run.versions),
    ]
    said += [f"commit {run.commit}"] if run.commit else []
    return [f"{', '.join(said)}."]
