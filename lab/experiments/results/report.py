"""The report of an experiment: one HTML page with all of it, for a phone as for a desk.

Nothing is loaded from elsewhere and nothing runs: pictures are in the page, and what not everybody
wants to see is behind a `<details>`. The template stands beside this file.
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

# Of the CSV file: where each column stands in a summary.
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
    """What a summary has there; None: nothing."""
    found: Any = summary
    for name in COLUMNS[column].split("."):
        if found is None:
            return None
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


def _written(found: Any) -> str:
    if isinstance(found, tuple):
        found = [round(one, 4) if isinstance(one, float) else one for one in found]
    if isinstance(found, list | dict):
        return json.dumps(found)
    if isinstance(found, float):
        return f"{found:.6g}"
    return "" if found is None else str(found)


def to_csv(summaries: Iterable[Summary]) -> str:
    """A line per arm and category; lists and tables in JSON, empty where there is no figure."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in summaries:
        writer.writerow(_written(value(one, column)) for column in COLUMNS)
    return file.getvalue()


def table(summaries: Iterable[Summary]) -> str:
    """Lines for each arm, of at most 80 columns, for a terminal."""
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
    """Arms and their figures, which are `width` long; a long name has a line of its own."""
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
    """What each arm brings to its devices; empty where plain decoding on all was not measured."""
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
CAPTIONS = {
    "speedup.png": "Speed-up of each arm, in its 95 % interval: tokens per second over those of "
    "its baseline, within the same prompt and repetition.",
    "along_x.png": "Speed-up over {x}. The bands are the 95 % intervals. A ring is where "
    "speculation stops paying, or begins to.",
    "categories.png": "Speed-up by category of prompts, of the fastest arm of each policy.",
    "acceptance.png": "In how many of the passes with drafts the first draft, the second and so on "
    "was accepted.",
    "tokens_per_pass.png": "How many tokens a target pass brought, its own included. Dotted: the "
    "mean.",
    "predicted.png": "Tokens per second as the predictor has them and as they were measured; the "
    "grey band is 10 % to either side.",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words; the first of each is what the row is about."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture of the page.

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
    """The whole page.

    trace_note  where a trace of the experiment is, in words
    command     that makes the same experiment again
    """
    # Names of arms and texts of prompts are anybody's: everything is escaped.
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
    """What most readers want."""
    waits = ("TTFT ms", "p50 ms", "p99 ms")
    drafts = ("tokens a pass", "accepted", "texts equal")
    return Table(
        ("arm", "tokens/s", f"times {base} (95 %)", *waits, *drafts),
        tuple(
            (
                shortened(one.arm),
                "void" if one.tokens_per_second is None else f"{one.tokens_per_second.median:.1f}",
                NOTHING if one.speedup is None else one.speedup.words,
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
    """Two plain replicas write twice as much; `all` is plain decoding on as many devices."""
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
    """Speed-ups, or tokens a second of an arm without a baseline."""
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
    if one.tokens_per_second is None:
        return "void"
    if one.speedup is None:
        return f"{one.tokens_per_second.median:.1f} tokens/s"
    return one.speedup.words


def _shared(arms: Sequence[ArmRecord]) -> dict[str, str]:
    """The settings that all arms have in common."""
    if not arms:
        return {}
    return {
        name: str(value)
        for name, value in arms[0].settings.items()
        if all(name in arm.settings and arm.settings[name] == value for arm in arms)
    }


def _settings(arms: Sequence[ArmRecord]) -> Table:
    """What else each has."""
    shared = _shared(arms)
    rows = []
    for arm in arms:
        own = (f"{name} = {value}" for name, value in arm.settings.items() if name not in shared)
        baseline = shortened(arm.baseline) if arm.baseline else NOTHING
        rows.append((arm.name, "; ".join(own) or NOTHING, baseline, arm.swept_from or NOTHING))
    return Table(("arm", "settings", "compared with", "the fastest of"), tuple(rows))


def _places(whole: Sequence[Summary]) -> Table:
    """Which rows came from where: by arm and role, each host with its number of rows."""
    roles = list(dict.fromkeys(place.role for one in whole for place in one.hosts))
    rows = []
    for one in whole:
        if one.hosts:
            cells = (
                ", ".join(f"{it.host} ({it.num_rows})" for it in one.hosts if it.role == role)
                for role in roles
            )
            rows.append((shortened(one.arm), *(cell or NOTHING for cell in cells)))
    return Table(("arm", *roles), tuple(rows))


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
