"""The benchmark's table: medians with their spread, ratios within prompt and repetition."""

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

from deploy.experiments.arms import Run, void_share

WIDTH = 100


def machine() -> str:
    """The hardware and the versions, in one paragraph."""
    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "pyzmq"))
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, {packages}"
    )


def paired_ratios(runs: Sequence[Run], arm: str, base: str) -> list[float]:
    """Arm / base, for each prompt and repetition."""
    speeds = {(run.arm, run.prompt, run.repetition): run.text.tokens_per_second for run in runs}
    return [
        speed / speeds[base, prompt, repetition]
        for (name, prompt, repetition), speed in speeds.items()
        if name == arm
    ]


def paired_ratio(runs: Sequence[Run], arm: str, base: str) -> tuple[float, float, float]:
    """Median, lower and upper quartile of arm / base over prompts and repetitions."""
    ratios = paired_ratios(runs, arm, base)
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = quantiles(ratios, n=4)
    return middle, low, high


def table(runs: Sequence[Run], arms: Sequence[str], *, plain: str, sync: str) -> str:
    """One line per arm; without figures where a simulated device was not kept up with."""
    void = {arm for arm in arms if void_share([run for run in runs if run.arm == arm])}
    lines = [
        f"{'':<22}{'tokens/s':>9}{'x plain':>8} {'(quartiles)':<12}{'x sync':>7}"
        f"{'TTFT':>7}{'p50':>6}{'p99':>7}{'length':>8}{'rate':>6}{'busy':>6}",
        f"{'':<22}{'':>9}{'':>8} {'':<12}{'':>7}{'ms':>7}{'ms':>6}{'ms':>7}",
    ]
    for arm in arms:
        mine = [run for run in runs if run.arm == arm]
        if arm in void:
            late = f"{void_share(mine):.0%} of the forwards took longer than simulated"
            lines.append(f"{arm:<22}{'void':>9}  {late}")
            continue
        ratio, low, high = paired_ratio(runs, arm, plain)
        over_plain = f"{ratio:>8.2f} {f'({low:.2f}-{high:.2f})':<12}"
        over_sync = f"{paired_ratio(runs, arm, sync)[0]:>7.2f}"
        lines.append(
            f"{arm:<22}{median(run.text.tokens_per_second for run in mine):>9.0f}"
            + (f"{'void':>8} {'':<12}" if plain in void else over_plain)
            + (f"{'void':>7}" if sync in void else over_sync)
            + f"{median(run.text.ttft_s for run in mine) * 1e3:>7.1f}"
            f"{median(run.text.p50_ms for run in mine):>6.1f}"
            f"{median(run.text.p99_ms for run in mine):>7.1f}" + _speculation(mine)
        )
    return "\n".join(line.rstrip() for line in lines)


def _speculation(runs: Sequence[Run]) -> str:
    metrics = [run.text.metrics for run in runs if run.text.metrics is not None]
    if not metrics:
        return f"{'-':>8}{'-':>6}{'-':>6}"
    passes = sum(m.num_target_passes for m in metrics)
    drafted = sum(m.num_draft_tokens for m in metrics)
    accepted = sum(m.num_accepted_tokens for m in metrics)
    rate = f"{accepted / drafted:.0%}" if drafted else "-"
    busy = median(m.target_busy for m in metrics)
    return f"{1 + accepted / passes:>8.2f}{rate:>6}{f'{busy:.0%}':>6}"


def equality(runs: Sequence[Run], arms: Sequence[str], base: str) -> str:
    """How many texts of each arm equal the base's."""
    texts = {(run.arm, run.prompt, run.repetition): run.text.tokens for run in runs}
    keys = [key[1:] for key in texts if key[0] == base]
    parts = []
    for arm in arms:
        same = sum(texts[arm, *key] == texts[base, *key] for key in keys)
        parts.append(f"{arm} {same}/{len(keys)}")
    return f"texts equal to {base}: " + ", ".join(parts)


def host_time(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """Median time per pass that is in no model and not waiting, by arm."""
    parts = []
    for arm in arms:
        figures = [
            run.text.metrics.host_ms_per_pass for run in runs if run.arm == arm and run.text.metrics
        ]
        if figures:
            parts.append(f"{arm} {median(figures):.2f}")
    return "host ms per pass: " + ", ".join(parts)


def lost_drafters(runs: Sequence[Run]) -> str:
    """By arm, how many texts went without their drafter: they measure the target alone."""
    lost = Counter(
        run.arm
        for run in runs
        if run.text.metrics is not None and run.text.metrics.drafter_lost_at is not None
    )
    return ", ".join(f"{arm} {number}" for arm, number in lost.items())


def swept(speeds: Mapping[str, float]) -> str:
    """Tokens a second of every setting that was tried."""
    parts = (f"{name} {f'{speed:.0f}' if speed else 'void'}" for name, speed in speeds.items())
    return "swept: " + ", ".join(parts)
