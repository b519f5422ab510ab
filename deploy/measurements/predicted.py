"""What `plan` predicts for a pair, beside what is measured in the same minutes.

    python -m deploy.measurements.predicted PROMPTS [--temperature T] [--trace FILE]

The costs are those of `ar` and of `sync` with other K than those that are predicted: a pass by its
rows; and of the wait for K drafts the slope over K is a draft step, and half of what is left is the
way to the drafter. Under `sync` nothing overlaps, so whatever two models at once take from each
other is not in these costs. `pipelined` is therefore predicted twice: with them, and with passes as
long as it has itself. The ranks are those of the same texts (`deploy.measurements.ranks`); all
figures are of a text from its first token on. Wants a machine for itself.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression, median

from scipy.optimize import least_squares

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.frozen import checked
from coordinator.api.pair import Pair
from coordinator.launching.launcher import ROOT
from coordinator.text.metrics import Metrics
from deploy.experiments.arms import (
    Run,
    add_options,
    encoded,
    measure,
    pair_arm,
    spread,
    wait_for_quiet,
)
from deploy.experiments.tables import machine
from proto.errors import NodeError, SlipstreamError
from proto.messages import Role
from rehearsal.acceptance import Trace, read, shares
from rehearsal.performance import Figures, rehearse
from rehearsal.planning import DRAFTER_ROWS, TARGET_ROWS
from rehearsal.setting import Forwards, NodeCosts

PLAIN = checked(SpeculationConfig, policy="ar")
CALIBRATED = (1, 3, 6)  # K of `sync`
PREDICTED = (2, 4)
PIPELINED = "pipelined K=4"


def settings() -> dict[str, SpeculationConfig]:
    """Everything that is measured, by its name."""
    syncs = {
        f"sync K={k}": checked(SpeculationConfig, policy="sync", num_speculative_tokens=k)
        for k in (*CALIBRATED, *PREDICTED)
    }
    return {"ar": PLAIN, **syncs, PIPELINED: checked(SpeculationConfig, policy="pipelined")}


@dataclass(frozen=True, slots=True)
class Decoding:
    """What the texts of one arm took after their first tokens; seconds of a pass.

    pass_s  in the model
    """

    tokens_per_second: float
    tokens_per_pass: float
    pass_s: float
    wait_s: float
    host_s: float

    @classmethod
    def of(cls, texts: Sequence[Metrics]) -> "Decoding":
        """Means over all passes; what is neither model nor wait is the host's."""
        num_tokens = sum(text.num_tokens - 1 for text in texts)
        num_passes = sum(text.num_target_passes - 1 for text in texts)
        elapsed_s = sum(text.elapsed_s - text.time_to_first_token_s for text in texts)
        pass_s = sum(map(_model_s, texts)) / num_passes
        wait_s = sum(text.wait_s for text in texts) / num_passes
        return cls(
            num_tokens / elapsed_s,
            num_tokens / num_passes,
            pass_s,
            wait_s,
            max(0.0, elapsed_s / num_passes - pass_s - wait_s),
        )


def decoding(runs: Sequence[Run], arm: str) -> Decoding:
    """Of all texts of an arm."""
    return Decoding.of([run.text.metrics for run in runs if run.arm == arm and run.text.metrics])


def _model_s(text: Metrics) -> float:
    """In the target's model, but for the first pass, which reads the prompt.

    What precedes the first token is nearly all model.
    """
    return max(0.0, text.target_busy * text.elapsed_s - text.time_to_first_token_s)


Costs = tuple[NodeCosts, NodeCosts]  # of target and drafter


def costs_of(found: dict[str, Decoding]) -> Costs:
    """By the arms where nothing overlaps."""
    syncs = {k: found[f"sync K={k}"] for k in CALIBRATED}
    passes = [(1, found["ar"].pass_s)]
    for k, decoding in syncs.items():  # more rows never take less, but for noise
        passes.append((k + 1, max(decoding.pass_s, passes[-1][1])))
    (first, first_s), (last, last_s) = passes[0], passes[-1]
    forward = Forwards(tuple(passes), (last_s - first_s) / (last - first))
    line = linear_regression(list(syncs), [decoding.wait_s for decoding in syncs.values()])
    step = Forwards(((1, max(1e-6, line.slope)),))
    # Plain decoding waits for nobody: that is the loop's own time between a verdict and a pass.
    loop_s = found["ar"].wait_s
    host_s = loop_s + median(decoding.host_s for decoding in found.values())
    hop_s = max(0.0, (line.intercept - loop_s) / 2)
    return (
        NodeCosts(forward, host_s, timed_rows=TARGET_ROWS),
        NodeCosts(step, hop_s=hop_s, timed_rows=DRAFTER_ROWS),
    )


def simulated_costs(
    config: PairConfig,
    plain: Decoding,
    syncs: Mapping[str, tuple[SpeculationConfig, Decoding]],
    trace: Trace,
) -> Costs:
    """Of devices whose forwards take what they are told, whatever the rows.

    All else is the hosts': at the target whatever plain decoding takes beside its passes, at the
    drafter as much for each step, and on the way there and back, as makes the rehearsals of `sync`
    with several K as fast as they were.
    """
    link = config.links.get(Role.DRAFTER)
    delay_s = 0.0 if link is None else link.hop_s
    forward = Forwards(((1, config.simulate_target_ms / 1e3),))
    step = Forwards(((1, config.simulate_draft_ms / 1e3),))
    plain_s = 1 / plain.tokens_per_second
    target = NodeCosts(forward, max(0.0, plain_s - forward.of(1)), timed_rows=TARGET_ROWS)

    def drafter(host_s: float, way_s: float) -> NodeCosts:
        return NodeCosts(step, host_s, delay_s + way_s, DRAFTER_ROWS)

    def too_fast(unknown: Sequence[float]) -> list[float]:
        """Of each `sync`: by how much of a pass. Passes, as tokens are the trace's matter."""
        shares = []
        for setting, decoding in syncs.values():
            costs = target, drafter(*unknown)
            figures = rehearse(setting.make(config), *costs, trace, is_whole=True)
            pass_s = decoding.tokens_per_pass / decoding.tokens_per_second
            shares.append(figures.tokens_per_pass / figures.tokens_per_second / pass_s - 1)
        return shares

    found = least_squares(
        too_fast, [5e-4, 2e-4], bounds=(0.0, 0.1), x_scale=1e-4, diff_step=0.2, max_nfev=12
    )
    return target, drafter(*found.x)


def slowed(costs: NodeCosts, times: float) -> NodeCosts:
    """Forwards that take so many times as long."""
    known = tuple((rows, seconds * times) for rows, seconds in costs.forward.known)
    return replace(costs, forward=Forwards(known, costs.forward.row_s * times))


def recorded(options: argparse.Namespace, config: PairConfig) -> Trace:
    """The ranks of the texts that are measured. Raises SlipstreamError."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or Path(folder) / "ranks.jsonl"
        if options.trace is None:
            arguments = {
                "--out": path,
                "--target": config.target,
                "--drafter": config.drafter,
                "--temperature": options.temperature,
                "--num-prompts": options.num_prompts,
                "--max-tokens": options.max_tokens,
                "--device": options.ranks_device,
            }
            words = [str(word) for pair in arguments.items() for word in pair]
            command = [sys.executable, "-m", "deploy.measurements.ranks", str(options.prompts)]
            if subprocess.run([*command, *words], cwd=ROOT, check=False).returncode:
                raise NodeError("the ranks were not recorded; the reason is above")
        return read(path.read_text(encoding="utf-8").splitlines())


def measured(options: argparse.Namespace, config: PairConfig) -> dict[str, Decoding]:
    """Every arm on the same prompts, alternating. Raises SlipstreamError."""
    with Pair(config) as pair:
        prompts = encoded(pair, spread(options.prompts, options.num_prompts))
        arms = [
            pair_arm(name, pair, setting, options.max_tokens)
            for name, setting in settings().items()
        ]
        runs: list[Run] = measure(
            arms,
            prompts,
            temperature=options.temperature,
            repetitions=options.repetitions,
            say=lambda line: print(line, file=sys.stderr),
        )
    return {arm.name: decoding(runs, arm.name) for arm in arms}


def compare(found: dict[str, Decoding], trace: Trace, config: PairConfig) -> str:
    """The table: a line for every arm."""
    target, drafter = costs_of(found)
    passes = ", ".join(f"{s * 1e3:.2f} of {rows}" for rows, s in target.forward.known)
    lines = [
        f"costs: pass ms {passes} rows, host {target.host_s * 1e3:.2f}; draft step "
        f"{drafter.forward.of(1) * 1e3:.2f}, one-way hop {drafter.hop_s * 1e3:.2f}",
        "ranks: " + ", ".join(f"{share:.3f}" for share in shares(trace)),
        f"{'':<30}{'tokens/s':>17}{'predicted':>11}{'tokens/pass':>14}{'predicted':>11}",
    ]

    def line(name: str, decoding: Decoding, figures: Figures) -> str:
        ratio = figures.tokens_per_second / decoding.tokens_per_second
        return (
            f"{name:<30}{decoding.tokens_per_second:>17.1f}{figures.tokens_per_second:>11.1f}"
            f" ({ratio - 1:+.0%}){decoding.tokens_per_pass:>8.2f}{figures.tokens_per_pass:>11.2f}"
        )

    for name, setting in settings().items():
        figures = rehearse(setting.make(config), target, drafter, trace, is_whole=True)
        lines.append(line(name, found[name], figures))
        if name == PIPELINED:
            rows = 1 + round(figures.num_drafted / figures.num_passes)
            times = found[name].pass_s / target.forward.of(rows)
            figures = rehearse(
                setting.make(config), slowed(target, times), drafter, trace, is_whole=True
            )
            lines.append(line(f"  with passes x {times:.2f}", found[name], figures))
    return "\n".join(lines)


def main() -> int:
    """Measure, predict, print; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, num_prompts=8, max_tokens=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--trace", type=Path, help="ranks of these texts, recorded before")
    parser.add_argument("--ranks-device", default="cpu", help="where they are recorded, if not")
    options = parser.parse_args()
    names = ("target", "drafter", "simulate_target_ms", "simulate_draft_ms")
    try:
        given = {name: getattr(options, name) for name in names}
        config = checked(PairConfig, max_num_seqs=1, **given)
        trace = recorded(options, config)
        print(f"machine: {machine()}\nload of others: {wait_for_quiet():.2f} cores", flush=True)
        print(compare(measured(options, config), trace, config))
    except (OSError, SlipstreamError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
