"""Summaries as a CSV file, and as tables for a terminal (pure)."""

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from coordinator.text.metrics import MISSES
from deploy.experiments.results.names import clipped, shortened
from deploy.experiments.results.summary import Summary, overall

NAME_COLUMNS = 34

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
    """A line of at most 100 columns per arm, for a terminal."""
    lines = [
        f"{'':<{NAME_COLUMNS}}{'tokens/s':>9}  {'x base (95 %)':<18}{'TTFT':>7}{'p50':>6}"
        f"{'p99':>7}{'length':>7}{'equal':>9}"
    ]
    for one in overall(summaries):
        name = f"{clipped(shortened(one.arm), NAME_COLUMNS - 1):<{NAME_COLUMNS}}"
        if one.tokens_per_second is None:
            lines.append(f"{name}{'void':>9}  {one.void}"[:100])
            continue
        length = "-" if one.tokens_per_pass is None else f"{one.tokens_per_pass:.2f}"
        equal = f"{one.num_equal}/{one.num_compared}" if one.num_compared else "-"
        ratio = "-" if one.speedup is None else one.speedup.words
        lines.append(
            f"{name}{one.tokens_per_second.median:>9.1f}  {ratio:<18}"
            f"{one.ttft_ms:>7.0f}{one.itl_p50_ms:>6.1f}{one.itl_p99_ms:>7.1f}{length:>7}{equal:>9}"
        )
    return "\n".join(line.rstrip() for line in lines)


def device_table(summaries: Iterable[Summary]) -> str:
    """What each arm brings to its devices; empty where plain decoding on all was not measured."""
    whole = [one for one in overall(summaries) if one.tokens_per_second is not None]
    if not any(one.over_all_devices for one in whole):
        return ""
    lines = [
        f"{'':<{NAME_COLUMNS}}{'devices':>9}{'tokens/s each':>15}{'x replicas':>12}"
        f"  {'x all for the target (95 %)'}"
    ]
    for one in whole:
        name = f"{clipped(shortened(one.arm), NAME_COLUMNS - 1):<{NAME_COLUMNS}}"
        replicas = "-" if one.over_replicas is None else f"{one.over_replicas:.2f}"
        over_all = "-" if one.over_all_devices is None else one.over_all_devices.words
        lines.append(f"{name}{one.num_devices:>9}{one.per_device:>15.1f}{replicas:>12}  {over_all}")
    return "\n".join(lines)
