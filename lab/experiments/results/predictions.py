"""What the predictor makes of the costs that an experiment measured, beside its measurements.

The costs are those of `ar` and of `sync` with several K: a pass by its rows; and of the wait for K
drafts the slope over K is a draft step, and half of what is left is the way to the drafter. Under
`sync` nothing overlaps, so whatever two models at once take from each other is not in these costs.
Where devices are simulated their costs are known, and the hosts' are what makes the rehearsals of
these arms as fast as they were. The ranks are those of the same texts (`lab/measure/ranks.py`).
"""

import subprocess
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from scipy.optimize import least_squares

from coordinator.api.config import PairConfig, SpeculationConfig
from lab.experiments.description import Arm
from lab.experiments.rows import Row
from proto.errors import NodeError
from proto.installation import ROOT
from proto.messages import Policy, Role
from rehearsal.acceptance import Trace, read
from rehearsal.planning import DRAFTER_ROWS, TARGET_ROWS, rehearse
from rehearsal.setting import Forwards, NodeCosts

LEAST_SYNCS = 2  # to read the costs of a draft step off
RANKS_LIMIT_S = 3600.0

Costs = tuple[NodeCosts, NodeCosts]  # of target and drafter


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
    def of(cls, rows: Sequence[Row]) -> "Decoding":
        """Means over all passes; what is neither model nor wait is the host's."""
        texts = [row.figures for row in rows if row.figures is not None]
        num_tokens = sum(text["num_tokens"] - 1 for text in texts)
        num_passes = sum(text["num_target_passes"] - 1 for text in texts)
        elapsed_s = sum(text["elapsed_s"] - text["time_to_first_token_s"] for text in texts)
        pass_s = sum(map(_model_s, texts)) / num_passes
        wait_s = sum(text["wait_s"] for text in texts) / num_passes
        return cls(
            num_tokens / elapsed_s,
            num_tokens / num_passes,
            pass_s,
            wait_s,
            max(0.0, elapsed_s / num_passes - pass_s - wait_s),
        )


def _model_s(text: Mapping[str, Any]) -> float:
    """In the target's model, but for the first pass, which reads the prompt.

    What precedes the first token is nearly all model.
    """
    in_model_s: float = text["target_busy"] * text["elapsed_s"] - text["time_to_first_token_s"]
    return max(0.0, in_model_s)


def costs_of(plain: Decoding, syncs: Mapping[int, Decoding]) -> Costs:
    """By the arms where nothing overlaps; `sync` by its K, at least two."""
    passes = [(1, plain.pass_s)]
    for k, decoding in sorted(syncs.items()):  # more rows never take less, but for noise
        passes.append((k + 1, max(decoding.pass_s, passes[-1][1])))
    (first, first_s), (last, last_s) = passes[0], passes[-1]
    forward = Forwards(tuple(passes), (last_s - first_s) / (last - first))
    line = linear_regression(list(syncs), [decoding.wait_s for decoding in syncs.values()])
    step = Forwards(((1, max(1e-6, line.slope)),))
    # Plain decoding waits for nobody: that is the loop's own time between a verdict and a pass.
    loop_s = plain.wait_s
    host_s = loop_s + median(decoding.host_s for decoding in (plain, *syncs.values()))
    hop_s = max(0.0, (line.intercept - loop_s) / 2)
    return (
        NodeCosts(forward, host_s, timed_rows=TARGET_ROWS),
        NodeCosts(step, hop_s=hop_s, timed_rows=DRAFTER_ROWS),
    )


def simulated_costs(
    config: PairConfig,
    plain: Decoding,
    syncs: Sequence[tuple[SpeculationConfig, Decoding]],
    trace: Trace,
) -> Costs:
    """Of devices whose forwards take what they are told.

    All else is the hosts': at the target whatever plain decoding takes beside its passes, at the
    drafter as much for each step, and on the way there and back, as makes the rehearsals of `sync`
    with several K as fast as they were.
    """
    forward = _device(config.simulate_target_ms, config.simulate_target_ms_per_row)
    step = _device(config.simulate_draft_ms, config.simulate_draft_ms_per_row)
    plain_s = 1 / plain.tokens_per_second
    target = NodeCosts(forward, max(0.0, plain_s - forward.of(1)), timed_rows=TARGET_ROWS)

    def drafter(host_s: float, way_s: float) -> NodeCosts:
        return NodeCosts(step, host_s, _delay_s(config) + way_s, DRAFTER_ROWS)

    def too_fast(unknown: Sequence[float]) -> list[float]:
        """Of each `sync`: by how much of a pass. Passes, as tokens are the trace's matter."""
        shares = []
        for setting, decoding in syncs:
            costs = target, drafter(*unknown)
            figures = rehearse(setting.make(config), *costs, trace, is_whole=True)
            pass_s = decoding.tokens_per_pass / decoding.tokens_per_second
            shares.append(figures.tokens_per_pass / figures.tokens_per_second / pass_s - 1)
        return shares

    found = least_squares(
        too_fast, [5e-4, 2e-4], bounds=(0.0, 0.1), x_scale=1e-4, diff_step=0.2, max_nfev=12
    )
    return target, drafter(*found.x)


def _device(forward_ms: float, row_ms: float) -> Forwards:
    return Forwards(((1, forward_ms / 1e3),), row_ms / 1e3)


def _delay_s(config: PairConfig) -> float:
    link = config.links.get(Role.DRAFTER)
    return 0.0 if link is None else link.hop_s


def predict(arms: Sequence[Arm], rows: Sequence[Row], ranks: Trace) -> dict[str, float]:
    """Tokens a second by arm, the first token included, of those that can be predicted.

    These are arms of a pair (with whatever link) on which `ar` and `sync` with two K or more were
    measured, one text at once, with drafts of a model and coupled verification.
    """
    measured: dict[str, list[Row]] = {}
    for row in rows:
        if not row.void and row.figures is not None and row.num_rows == 1:
            measured.setdefault(row.arm, []).append(row)
    groups: dict[Hashable, list[Arm]] = {}
    for arm in arms:
        if arm.name in measured and _can_be_predicted(arm):
            key = arm.pair.model_copy(update={"link": ()}), arm.sampling.temperature
            groups.setdefault(key, []).append(arm)
    found: dict[str, float] = {}
    for group in groups.values():
        costs = _costs_of_group(group, measured, ranks)
        if costs is not None:
            for arm in group:
                found[arm.name] = _predicted(arm, costs, measured[arm.name], ranks)
    return found


def _can_be_predicted(arm: Arm) -> bool:
    has_drafts = not arm.speculation.drafts or has_ranks(arm.pair)
    is_plain = not arm.work.peer and not arm.speculation.also_copies
    return has_drafts and is_plain and arm.speculation.verify == "coupled"


def has_ranks(config: PairConfig) -> bool:
    """Whether drafts come from a draft model alone, whose ranks can be recorded."""
    return config.has_draft_model and not config.drafter_is_head and not config.heads


def _never_overlaps(policy: Policy) -> bool:
    """Whether the drafter waits for the target, and the target for all of its drafts."""
    k = policy.num_speculative_tokens
    return policy.has_drafter and (policy.window, policy.launch_min, policy.launch_hit) == (k, k, k)


def _costs_of_group(
    group: Sequence[Arm], measured: Mapping[str, list[Row]], ranks: Trace
) -> Costs | None:
    """Without a link; None: too little was measured."""
    decodings = {arm.name: Decoding.of(measured[arm.name]) for arm in group}
    plain = [arm for arm in group if not arm.speculation.drafts]
    policies = {arm.name: arm.speculation.make(arm.pair) for arm in group}
    syncs = {
        policies[arm.name].num_speculative_tokens: arm
        for arm in group
        if _never_overlaps(policies[arm.name]) and not arm.pair.link
    }
    if not plain or len(syncs) < LEAST_SYNCS:
        return None
    alone = decodings[plain[0].name]
    config = plain[0].pair
    if config.simulate_target_ms and config.simulate_draft_ms:
        calibrated = [(arm.speculation, decodings[arm.name]) for arm in syncs.values()]
        config = config.model_copy(update={"link": ()})
        return simulated_costs(config, alone, calibrated, ranks)
    return costs_of(alone, {k: decodings[arm.name] for k, arm in syncs.items()})


def _predicted(arm: Arm, costs: Costs, rows: Sequence[Row], ranks: Trace) -> float:
    target, drafter = costs
    drafter = replace(drafter, hop_s=drafter.hop_s + _delay_s(arm.pair))
    figures = rehearse(arm.speculation.make(arm.pair), target, drafter, ranks, is_whole=True)
    num_tokens = median(len(row.tokens) for row in rows)
    first_s = median(row.ttft_s for row in rows)
    return num_tokens / (first_s + (num_tokens - 1) / figures.tokens_per_second)


def recorded(arm: Arm, path: Path) -> Trace:
    """The ranks of an arm's prompts, recorded if they are not there yet. Raises SlipstreamError."""
    if not path.exists():
        arguments = {
            "--out": path.absolute(),
            "--target": arm.pair.target,
            "--drafter": arm.pair.drafter,
            "--dtype": arm.pair.dtype,
            "--temperature": arm.sampling.temperature,
            "--max-tokens": arm.sampling.max_tokens,
            "--max-prompt-tokens": arm.work.max_prompt_tokens,
        }
        if arm.work.limit is not None:
            arguments["--num-prompts"] = arm.work.limit
        words = [str(word) for pair in arguments.items() for word in pair]
        prompts = str(Path(arm.work.prompts).absolute())
        command = [sys.executable, "-m", "lab.measure.ranks", prompts, *words]
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False
        )
        if ended.returncode:
            line = (ended.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise NodeError(f"the ranks were not recorded: {line}")
    return read(path.read_text(encoding="utf-8").splitlines())
