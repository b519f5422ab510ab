"""The report of an experiment as tables, a CSV file and one HTML page, for phone and desktop.

The page loads nothing and runs no script: pictures are in the page, and details are hidden in
`<details>`. Its template is `page.html.j2`, beside this file.
"""

import base64
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from coordinator.cli.wrapping import wrapped
from coordinator.text.metrics import MISSES
from lab.experiments.folder import ArmRecord, Header
from lab.experiments.results.summary import Summary, overall
from lab.experiments.results.words import (
    AXES,
    answers,
    baseline_words,
    clipped,
    shortened,
    warnings,
)
from lab.experiments.rows import Row

# -- tables ----------------------------------------------------------------------------------------

# Summaries as a CSV file, and as tables for a terminal.

TERMINAL = 80  # columns
VOID = f"{'void':>9}  "  # in the place of figures

# For each column of the CSV file: the attribute of a summary that it shows.
COLUMNS = {
    "arm": "arm",
    "category": "category",
    "prompts": "num_prompts",
    "texts": "num_texts",
    "void_share": "void_share",
    "void": "void",
    "tokens_per_second": "tokens_per_second.median",
    "tokens_per_second_q1": "tokens_per_second.low",
    "tokens_per_second_q3": "tokens_per_second.high",
    "speedup": "speedup.mean",
    "speedup_low": "speedup.low",
    "speedup_high": "speedup.high",
    "speedup_again_low": "speedup.again_low",
    "speedup_again_high": "speedup.again_high",
    "speedup_median": "speedup.median",
    "pairs": "speedup.num_pairs",
    "unpaired": "speedup.num_unpaired",
    "resampled": "speedup.unit",
    "num_resampled": "speedup.num_units",
    "ttft_ms": "ttft_ms",
    "itl_p50_ms": "itl_p50_ms",
    "itl_p99_ms": "itl_p99_ms",
    "tokens_per_pass": "tokens_per_pass",
    "acceptance_rate": "drafts.acceptance_rate",
    "acceptance_by_position": "drafts.by_position",
    "accepted_by_source": "drafts.by_source",
    "hits_by_source": "drafts.hits_by_source",
    "hit_rate": "drafts.hit_rate",
    **{f"miss_{why}": f"drafts.misses.{why}" for why in MISSES},
    "bytes_per_token": "bytes_per_token",
    "target_busy": "busy.target",
    "drafter_busy": "busy.drafter",
    "target_idle": "busy.idle",
    "host_ms_per_pass": "host_ms_per_pass",
    "compared": "num_compared",
    "equal": "num_equal",
    "drafters_lost": "num_drafters_lost",
    "devices": "num_devices",
    "per_device": "per_device",
    "over_replicas": "over_replicas",
    "over_all_devices": "over_all_devices.mean",
    "over_all_devices_low": "over_all_devices.low",
    "over_all_devices_high": "over_all_devices.high",
    "hosts": "hosts",
    "load": "load",
}


def value(summary: Summary, column: str) -> Any:
    """Return the value of a column in a summary; None if there is none."""
    found: Any = summary
    for name in COLUMNS[column].split("."):
        if found is None:
            return None
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


def _written(found: Any) -> str:
    """Return a value as the text of a CSV cell."""
    if isinstance(found, tuple):
        found = [round(one, 4) if isinstance(one, float) else one for one in found]
    if isinstance(found, list | dict):
        return json.dumps(found)
    if isinstance(found, float):
        return f"{found:.6g}"
    return "" if found is None else str(found)


def to_csv(summaries: Iterable[Summary]) -> str:
    """Return a CSV line per arm and category; lists and tables as JSON, missing figures empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in summaries:
        writer.writerow(_written(value(one, column)) for column in COLUMNS)
    return file.getvalue()


def table(summaries: Iterable[Summary]) -> str:
    """Return a table for a terminal, a line of at most 80 columns per arm."""
    whole = list(overall(summaries))
    ratios = {one.arm: "-" if one.speedup is None else one.speedup.words for one in whole}
    base = "x base (95 %)"
    width = max(len(words) for words in (base, *ratios.values()))
    heads = (
        f"{'':>9}  {'':<{width}}{'TTFT':>6}{'p50':>6}{'p99':>6}{'tokens':>7}{'texts':>8}",
        f"{'tokens/s':>9}  {base:<{width}}{'ms':>6}{'ms':>6}{'ms':>6}{'a pass':>7}{'equal':>8}",
    )
    rows = [("", [head]) for head in heads]
    for one in whole:
        if one.tokens_per_second is None:
            first, *others = wrapped(one.void, len(heads[0]) - len(VOID), "")
            rows.append((one.arm, [VOID + first, *(" " * len(VOID) + line for line in others)]))
            continue
        length = "-" if one.tokens_per_pass is None else f"{one.tokens_per_pass:.2f}"
        equal = f"{one.num_equal}/{one.num_compared}" if one.num_compared else "-"
        figures = (
            f"{one.tokens_per_second.median:>9.1f}  {ratios[one.arm]:<{width}}"
            f"{one.ttft_ms:>6.0f}{one.itl_p50_ms:>6.1f}{one.itl_p99_ms:>6.1f}{length:>7}{equal:>8}"
        )
        rows.append((one.arm, [figures]))
    return _beside(rows, len(heads[0]))


def _beside(rows: Iterable[tuple[str, list[str]]], width: int) -> str:
    """Return lines of arms and figures (`width` long); a long name has a line of its own."""
    names = max(0, TERMINAL - width)
    lines: list[str] = []
    for arm, (first, *others) in rows:
        name = shortened(arm)
        if len(name) >= names:
            lines.append(clipped(name, TERMINAL))
            name = ""
        lines += [f"{name:<{names}}{first}", *(" " * names + line for line in others)]
    return "\n".join(line.rstrip() for line in lines)


def device_table(summaries: Iterable[Summary]) -> str:
    """Return a table of speeds per device; "" if plain decoding on all devices was not measured."""
    whole = [one for one in overall(summaries) if one.tokens_per_second is not None]
    if not any(one.over_all_devices for one in whole):
        return ""
    heads = (
        f"{'':>9}{'tokens/s':>10}{'':>12}  {'x all for the':<18}",
        f"{'devices':>9}{'each':>10}{'x replicas':>12}  {'target (95 %)':<18}",
    )
    rows = [("", [head]) for head in heads]
    for one in whole:
        replicas = "-" if one.over_replicas is None else f"{one.over_replicas:.2f}"
        over_all = "-" if one.over_all_devices is None else one.over_all_devices.words
        figures = f"{one.num_devices:>9}{one.per_device:>10.1f}{replicas:>12}  {over_all}"
        rows.append((one.arm, [figures]))
    return _beside(rows, len(heads[0]))


# -- report ----------------------------------------------------------------------------------------

TEMPLATE = Path(__file__).with_name("page.html.j2")
NOTHING = "\N{EN DASH}"
MAX_SHARING = 3  # names of arms that share a row; more are counted
CAPTIONS = {
    "speedup.png": "Speed-up of each arm, in its 95 % interval: tokens per second over those of "
    "its baseline, within the same prompt and repetition.",
    "along_x.png": "Speed-up over {x}. The whiskers are the 95 % intervals; lines stand a little "
    "beside each other. A ring is where speculation stops paying, or begins to.",
    "categories.png": "Speed-up by category of prompts, of the arm of each policy with the "
    "highest mean.",
    "acceptance.png": "In how many of the passes with drafts the first draft, the second and so on "
    "was accepted.",
    "tokens_per_pass.png": "How many tokens a target pass brought, its own included. Dotted: the "
    "mean.",
    "predicted.png": "Tokens per second as the predictor has them and as they were measured; the "
    "grey band is 10 % to either side.",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page; the first cell of each row is its name."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture in the HTML page.

    source  its PNG file as a data URL
    """

    name: str
    caption: str
    source: str


def page(
    header: Header,
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    pictures: Mapping[str, bytes],
    trace_note: str = "",
    *,
    command: str = "",
) -> str:
    """Return the report as one HTML page.

    trace_note  words that say where traces of the experiment are
    command     the command that runs the same experiment again
    """
    # Names of arms and prompts come from users, so everything is escaped.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    whole = overall(summaries)
    measured = {one.arm for one in whole}
    arms = [arm for arm in header.arms if arm.name in measured]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        header=header,
        answers=answers(header, summaries),
        warnings=warnings(header, rows, summaries),
        drawn=_drawn(header, pictures),
        main=_main(whole, baseline_words(header)),
        details=[_speeds(whole), _drafting(whole), _work(whole), _devices(whole)],
        categories=_categories(summaries),
        shared=_shared(arms),
        settings=_settings(arms),
        places=_places(whole),
        runs=[(run, ", ".join(f"{k} {v}" for k, v in run.versions.items())) for run in header.runs],
        num_rows=sum(row.stage == "main" for row in rows),
        num_swept=sum(row.stage != "main" for row in rows),
        trace_note=trace_note,
        command=command,
    )


def _drawn(header: Header, pictures: Mapping[str, bytes]) -> list[Drawn]:
    """Return the pictures with their captions, as data URLs."""
    x = AXES.get(header.x, header.x.replace("_", " ")).split(",")[0]
    return [
        Drawn(
            name.removesuffix(".png").replace("_", " "),
            CAPTIONS.get(name, name).replace("{x}", x),
            "data:image/png;base64," + base64.b64encode(data).decode("ascii"),
        )
        for name, data in pictures.items()
    ]


def _main(whole: Sequence[Summary], base: str) -> Table:
    """Return the table with the main figures of each arm."""
    waits = ("TTFT ms", "p50 ms", "p99 ms")
    drafts = ("tokens a pass", "accepted", "texts equal")
    return Table(
        ("arm", f"times {base} (95\N{NO-BREAK SPACE}%)", "tokens/s", *waits, *drafts),
        tuple(
            (
                shortened(one.arm),
                NOTHING if one.speedup is None else one.speedup.words,
                "void" if one.tokens_per_second is None else f"{one.tokens_per_second.median:.1f}",
                _number(one.ttft_ms, "{:.0f}"),
                _number(one.itl_p50_ms, "{:.1f}"),
                _number(one.itl_p99_ms, "{:.1f}"),
                _number(one.tokens_per_pass, "{:.2f}"),
                _number(None if one.drafts is None else one.drafts.acceptance_rate, "{:.0%}"),
                f"{one.num_equal}/{one.num_compared}" if one.num_compared else NOTHING,
            )
            for one in whole
        ),
    )


def _speeds(whole: Sequence[Summary]) -> Table:
    """Return the table with the details of speeds and speed-ups."""
    pairs = (
        "median of ratios",
        "pairs",
        "unpaired",
        "resampled",
        "interval ± %",
        "same prompts (95 %)",
    )
    rows = []
    for one in whole:
        spread, ratio = one.tokens_per_second, one.speedup
        words = [NOTHING] * 6
        if ratio is not None:
            half = _number(ratio.half_width and 100 * ratio.half_width, "{:.1f}")
            words = [f"{ratio.median:.2f}", f"{ratio.num_pairs}", f"{ratio.num_unpaired}"]
            words += [f"{ratio.num_units} {ratio.unit}", half, ratio.again_words or NOTHING]
        quartiles = NOTHING if spread is None else f"{spread.low:.1f} to {spread.high:.1f}"
        shares = (f"{one.num_texts}", f"{one.void_share:.0%}", quartiles)
        rows.append((shortened(one.arm), *shares, *words))
    return Table(("arm", "texts", "void", "tokens/s, quartiles", *pairs), tuple(rows))


def _drafting(whole: Sequence[Summary]) -> Table:
    """Return the table about drafts: hits, misses by cause, acceptance by source and position."""
    head = ("arm", "hits", *(f"missed: {why}" for why in MISSES))
    head += ("accepted by source", "hits by source")
    rows = []
    for one in whole:
        if (drafts := one.drafts) is not None:
            sources, hits = (
                ", ".join(f"{name} {number}" for name, number in by_source.items())
                for by_source in (drafts.by_source, drafts.hits_by_source)
            )
            shares = (drafts.hit_rate, *(drafts.misses[why] for why in MISSES))
            positions = " ".join(f"{100 * share:.0f}" for share in drafts.by_position)
            rows.append(
                (
                    shortened(one.arm),
                    *(f"{share:.0%}" for share in shares),
                    sources or NOTHING,
                    hits or NOTHING,
                    positions or NOTHING,
                )
            )
    return Table((*head, "accepted by position, %"), tuple(rows))


def _work(whole: Sequence[Summary]) -> Table:
    """Return the table about busy and idle times, messages and load."""
    shares = ("target busy", "drafter busy", "target idle")
    return Table(
        ("arm", *shares, "host ms a pass", "bytes a token", "drafters lost", "load of others"),
        tuple(
            (
                shortened(one.arm),
                *(f"{share:.0%}" for share in one.busy or ()),
                *(() if one.busy else (NOTHING,) * 3),
                _number(one.host_ms_per_pass, "{:.2f}"),
                _number(one.bytes_per_token, "{:.0f}"),
                f"{one.num_drafters_lost}",
                f"{one.load:.2f}",
            )
            for one in whole
        ),
    )


def _devices(whole: Sequence[Summary]) -> Table:
    """Return the table of speeds per device.

    `times plain replicas`: compared with one plain replica on each device. `times all for the
    target`: compared with plain decoding on as many devices.
    """
    return Table(
        ("arm", "devices", "tokens/s a device", "times plain replicas", "times all for the target"),
        tuple(
            (
                shortened(one.arm),
                f"{one.num_devices}",
                _number(one.per_device, "{:.1f}"),
                _number(one.over_replicas, "{:.2f}"),
                NOTHING if one.over_all_devices is None else one.over_all_devices.words,
            )
            for one in whole
        ),
    )


def _categories(summaries: Sequence[Summary]) -> Table | None:
    """Return the table of speed-ups (baselines: tokens/s) by category; None without categories."""
    found = {(one.arm, one.category): one for one in summaries}
    categories = list(dict.fromkeys(one.category for one in summaries if one.category))
    if not categories:
        return None
    rows = []
    for whole in overall(summaries):
        cells = [found.get((whole.arm, category)) for category in categories]
        rows.append(
            (shortened(whole.arm), *(NOTHING if one is None else _cell(one) for one in cells))
        )
    return Table(("arm", *categories), tuple(rows))


def _cell(one: Summary) -> str:
    """Return the words for one arm on one category."""
    if one.tokens_per_second is None:
        return "void"
    if one.speedup is None:
        return f"{one.tokens_per_second.median:.1f} tokens/s"
    return one.speedup.words


def _shared(arms: Sequence[ArmRecord]) -> dict[str, str]:
    """Return the settings that have one value in all arms."""
    if not arms:
        return {}
    return {
        name: str(value)
        for name, value in arms[0].settings.items()
        if all(name in arm.settings and arm.settings[name] == value for arm in arms)
    }


def _settings(arms: Sequence[ArmRecord]) -> Table:
    """Return the table of the settings in which the arms differ."""
    shared = _shared(arms)
    rows = []
    for arm in arms:
        own = (f"{name} = {value}" for name, value in arm.settings.items() if name not in shared)
        baseline = shortened(arm.baseline) if arm.baseline else NOTHING
        rows.append((arm.name, "; ".join(own) or NOTHING, baseline, arm.swept_from or NOTHING))
    return Table(("arm", "settings", "compared with", "chosen from"), tuple(rows))


def _places(whole: Sequence[Summary]) -> Table:
    """Return a table with the hosts by role, and the number of texts of each host.

    Arms that ran on the same hosts share a row.
    """
    roles = list(dict.fromkeys(place.role for one in whole for place in one.hosts))
    arms: dict[tuple[str, ...], list[str]] = {}
    for one in whole:
        if one.hosts:
            cells = (
                ", ".join(f"{it.host} ({it.num_rows} texts)" for it in one.hosts if it.role == role)
                for role in roles
            )
            arms.setdefault(tuple(cell or NOTHING for cell in cells), []).append(one.arm)
    rows = []
    for cells_of, names in arms.items():
        which = ", ".join(map(shortened, names[:MAX_SHARING]))
        if len(names) > MAX_SHARING:
            which += f" and {len(names) - MAX_SHARING} more"
        if len(names) == len(whole) > 1:
            which = f"all {len(names)} arms"
        each = " each)" if len(names) > 1 else ")"
        rows.append((which, *(cell.replace(" texts)", f" texts{each}") for cell in cells_of)))
    return Table(("arms", *roles), tuple(rows))


def _number(value: float | None, form: str) -> str:
    """Return the formatted number; a dash for None."""
    return NOTHING if value is None else form.format(value)
