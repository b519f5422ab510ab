"""Every policy of the table at its best parameters, on the same prompts in the same minutes.

    python -m deploy.experiments.policies PROMPTS [--backend B] [--temperature T]

The parameters of each policy are swept first: on some of the prompts, or, with `--trace`, in
virtual time (`rehearsal/`) on recorded ranks (`deploy.measurements.ranks`), where the costs are
known because the devices are simulated. Then all run in alternation, in an order drawn anew for
each prompt. Wants a machine for itself.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from scipy.stats import binom

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.frozen import checked
from coordinator.api.pair import Pair
from coordinator.cli.display import simulation
from deploy.experiments.arms import (
    Arm,
    Run,
    add_options,
    best_arm,
    encoded,
    measure,
    pair_arm,
    spread,
    void_share,
    wait_for_quiet,
)
from deploy.experiments.tables import equality, machine, paired_ratios, swept
from deploy.measurements.predicted import decoding, simulated_costs
from proto.errors import ConfigurationError, SlipstreamError
from proto.messages import Role
from proto.policies import PolicyName
from rehearsal.acceptance import Trace, read
from rehearsal.performance import rehearse
from rehearsal.setting import Forwards, NodeCosts

HOST_S = 3e-4  # of a pass and of a draft step, about: for what is rehearsed
DRAFTS: dict[PolicyName, Sequence[int]] = {  # K
    "sync": (1, 2, 3, 4, 5, 6),
    "pearl": (2, 3, 4, 6),
    "amusd": (2, 4, 8),
    "pipelined": (2, 4, 8),
    "ssd": (2, 3, 4, 6),
    "tree": (4, 8, 16),
    "auto": (8, 15),
}
BASE = "sync"  # what all are compared with
CALIBRATION = ("sync K=1", "sync K=6")  # besides the best, for what is predicted
LAUNCHES: dict[PolicyName, Sequence[int]] = {"tree": (1, 2, 3)}  # drafts that start a pass


def settings(policy: PolicyName) -> dict[str, SpeculationConfig]:
    """What is tried of a policy, by its name."""
    tried: dict[str, SpeculationConfig] = {}
    for k in DRAFTS[policy]:
        name = f"{policy} K={k}"
        numbers = {"policy": policy, "num_speculative_tokens": k}
        if policy not in LAUNCHES:
            tried[name] = checked(SpeculationConfig, **numbers)
        for launch in LAUNCHES.get(policy, ()):
            options = {"launch_min": launch, "launch_hit": launch}
            tried[f"{name} m={launch}"] = checked(
                SpeculationConfig, **numbers, policy_option=options
            )
    return tried


def rehearsed(
    tried: dict[str, SpeculationConfig], config: PairConfig, ranks: Trace
) -> dict[str, float]:
    """Tokens a second of each in virtual time, by the costs that are simulated.

    Raises ConfigurationError: one of them is not.
    """
    if not config.simulate_target_ms or not config.simulate_draft_ms:
        raise ConfigurationError(
            "--trace rehearses simulated costs: give --simulate-target-ms and --simulate-draft-ms, "
            "or leave it out"
        )
    hop = config.links.get(Role.DRAFTER)
    target = Forwards(((1, config.simulate_target_ms / 1e3),))
    drafter = Forwards(((1, config.simulate_draft_ms / 1e3),))
    return {
        name: rehearse(
            setting.make(config),
            NodeCosts(target, HOST_S),
            NodeCosts(drafter, HOST_S, hop_s=0.0 if hop is None else hop.hop_s),
            ranks,
        ).tokens_per_second
        for name, setting in tried.items()
    }


def predictions(
    runs: Sequence[Run],
    chosen: Mapping[str, SpeculationConfig],
    config: PairConfig,
    ranks: Trace,
) -> str:
    """Tokens a second of each as measured and as rehearsed, from the first token of a text on.

    The hosts' costs are those of plain decoding and of `sync`, so these are right by themselves as
    far as the ranks are.
    """
    measured = {name: decoding(runs, name) for name in chosen}
    syncs = {name: (chosen[name], measured[name]) for name in chosen if name.startswith("sync")}
    costs = simulated_costs(config, measured["ar"], syncs, ranks)
    lines = [
        f"hosts: {costs[0].host_s * 1e3:.2f} ms a pass, {costs[1].host_s * 1e3:.2f} a draft step, "
        f"{costs[1].hop_s * 1e3:.2f} a way with the link",
        f"{'':<20}{'tokens/s':>9}{'predicted':>11}{'tokens/pass':>20}{'predicted':>11}",
    ]
    for name, setting in chosen.items():
        real, figures = measured[name], rehearse(setting.make(config), *costs, ranks, is_whole=True)
        off = figures.tokens_per_second / real.tokens_per_second - 1
        lines.append(
            f"{name:<20}{real.tokens_per_second:>9.1f}{figures.tokens_per_second:>11.1f} "
            f"({off:+.0%}){real.tokens_per_pass:>13.2f}{figures.tokens_per_pass:>11.2f}"
        )
    return "\n".join(lines)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of the median, at 95 %: between two of the ratios, by how many lie on either side."""
    ordered = sorted(ratios)
    low = max(0, int(binom.ppf(0.025, len(ordered), 0.5)) - 1)
    return ordered[low], ordered[len(ordered) - 1 - low]


def table(runs: Sequence[Run], arms: Sequence[str], sync: str) -> str:
    """One line per arm."""
    lines = [
        f"{'':<20}{'tokens/s':>9}{'x ar':>6} {'(95 %)':<12}{'x sync':>6} {'(95 %)':<12}"
        f"{'length':>7}{'hits':>6}{'target':>8}{'drafter':>8}{'idle':>6}"
    ]
    for arm in arms:
        mine = [run for run in runs if run.arm == arm]
        if share := void_share(mine):
            lines.append(f"{arm:<20}{'void':>9}  {share:.0%} of the forwards took too long")
            continue
        words = f"{arm:<20}{median(run.text.tokens_per_second for run in mine):>9.1f}"
        for base in ("ar", sync):
            ratios = paired_ratios(runs, arm, base)
            low, high = interval(ratios)
            words += f"{median(ratios):>6.2f} {f'({low:.2f}-{high:.2f})':<12}"
        texts = [run.text.metrics for run in mine if run.text.metrics is not None]
        lines.append(
            f"{words}{mean(m.mean_acceptance_length for m in texts):>7.2f}"
            f"{mean(m.hit_rate for m in texts):>6.0%}{mean(m.target_busy for m in texts):>8.0%}"
            f"{mean(m.drafter_busy for m in texts):>8.0%}{mean(m.target_idle for m in texts):>6.0%}"
        )
    return "\n".join(lines)


def compare(options: argparse.Namespace, config: PairConfig, pair: Pair, value: float) -> str:
    """Sweep, measure; returns the tables of one temperature."""

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    prompts = encoded(pair, spread(options.prompts, options.num_prompts))
    lines, chosen = [f"\ntemperature {value:g}"], []
    alone = checked(SpeculationConfig, policy="ar")
    plain = pair_arm("ar", pair, alone, options.max_tokens)
    made = {"ar": alone}
    ranks = None
    if options.trace is not None:
        ranks = read(options.trace.read_text(encoding="utf-8").splitlines())
    for policy in DRAFTS:
        if policy not in (*options.policy, BASE):
            continue
        tried = settings(policy)
        arms: dict[str, Arm] = {
            name: pair_arm(name, pair, setting, options.max_tokens)
            for name, setting in tried.items()
        }
        if len(arms) == 1:
            (best,) = arms.values()
        elif ranks is not None:
            speeds = rehearsed(tried, config, ranks)
            best = arms[max(speeds, key=lambda name: speeds[name])]
            lines.append(f"rehearsed: {swept(speeds)}")
        else:
            best, speeds = best_arm(list(arms.values()), prompts, temperature=value, say=say)
            lines.append(swept(speeds))
        chosen.append(best)
        made[best.name] = tried[best.name]
    names = [arm.name for arm in (plain, *chosen)]
    calibration = []
    if ranks is not None:
        syncs = settings("sync")
        made |= {name: syncs[name] for name in CALIBRATION}
        calibration = [
            pair_arm(name, pair, made[name], options.max_tokens)
            for name in CALIBRATION
            if name not in names
        ]
    runs = measure(
        [plain, *chosen, *calibration],
        prompts,
        temperature=value,
        repetitions=options.repetitions,
        say=say,
    )
    lines += [table(runs, names, names[1]), equality(runs, names[1:], "ar")]
    if ranks is not None:
        lines.append(predictions(runs, made, config, ranks))
    return "\n".join(lines)


def main() -> int:
    """Measure, print; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = PairConfig()
    add_options(parser, num_prompts=20, max_tokens=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default=defaults.backend)
    parser.add_argument(
        "--policy", choices=tuple(DRAFTS), action="append", help="besides sync; default: all"
    )
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 0.8")
    parser.add_argument("--link", action="append", default=[], help="drafter:delay=3ms")
    parser.add_argument("--trace", type=Path, help="rehearse the sweeps on these recorded ranks")
    options = parser.parse_args()
    options.policy = options.policy or list(DRAFTS)
    names = ("target", "drafter", "dtype", "backend", "simulate_target_ms", "simulate_draft_ms")
    try:
        given = {name: getattr(options, name) for name in names}
        fixed = {"max_num_seqs": 1, "drafter_restarts": 0, "link": tuple(options.link)}
        config = checked(PairConfig, **fixed, **given)
        print(f"machine: {machine()}\nload of others: {wait_for_quiet():.2f} cores", flush=True)
        print(
            f"at most {options.num_prompts} prompts, {options.max_tokens} tokens, "
            f"{options.repetitions} repetitions, {config.dtype}, {config.backend}"
        )
        if config.simulated is not None:
            print(simulation(config.simulated))
        with Pair(config) as pair:
            for value in options.temperature or (0.0, 0.8):
                print(compare(options, config, pair, value), flush=True)
    except (OSError, SlipstreamError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
