"""Predicts the speed of each arm with the simulator, from costs that the experiment measured.

The costs come from `ar` (plain decoding) and from `sync` with several K. The time of a pass is
known by its number of rows. Of the wait for K drafts, the slope over K is one draft step, and half
of the rest is the way to the drafter. Under `sync` nothing overlaps, so these costs do not contain
what two models that run at once take from each other. Where devices are simulated their costs are
known, and the hosts' costs are fitted so that the simulated speeds of these arms equal the measured
ones. The ranks (how the drafter ranks the target's tokens) are those of the same texts, which both
models read again (`lab/pair/chances.py`).

If there is a file of `measure` for the pair, costs and ranks are taken from it instead.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from coordinator.api.config import PairConfig, SpeculationConfig
from lab.experiments.description import Arm
from lab.experiments.folder import write_whole
from lab.experiments.rows import Row
from lab.experiments.runner import Job
from lab.pair.measuring import judged
from lab.pair.record import Measured, MeasuredNode, kind_of
from lab.pair.requests import Request, Said
from proto.messages import Policy, Role
from rehearsal.acceptance import Trace, cut, read, written
from rehearsal.planning import DRAFTER_ROWS, LEAST_LEN, TARGET_ROWS, rehearse
from rehearsal.setting import Forwards, NodeCosts

LEAST_SYNCS = 2  # least number of `sync` arms from which the cost of a draft step can be derived
CHOSEN_LATER = ("", "auto", "fastest")  # number types and devices that a start decides
NUM_TOKENS = 320  # of the text that is rehearsed with the ranks of a measured pair

Costs = tuple[NodeCosts, NodeCosts]  # costs of the target and of the drafter


@dataclass(frozen=True, slots=True)
class Decoding:
    """Measured means of the texts of one arm, first tokens left out; seconds are per pass.

    pass_s  time in the target's model
    wait_s  time that the target waited
    host_s  the rest of the time
    """

    tokens_per_second: float
    tokens_per_pass: float
    pass_s: float
    wait_s: float
    host_s: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Decoding":
        """Return the means over all passes of those rows that have `figures`."""
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
    """Return the seconds that a text spent in the target's model after its first pass (the prompt).

    The time to the first token is taken as time in the model.
    """
    in_model_s: float = text["target_busy"] * text["elapsed_s"] - text["time_to_first_token_s"]
    return max(0.0, in_model_s)


def costs_of(plain: Decoding, syncs: Mapping[int, Decoding]) -> Costs:
    """Return the costs of target and drafter as measured by plain decoding and `sync` (by K).

    At least two `sync` arms are needed.
    """
    passes = [(1, plain.pass_s)]
    for k, decoding in sorted(syncs.items()):  # a pass of more rows is only faster by noise
        passes.append((k + 1, max(decoding.pass_s, passes[-1][1])))
    (first, first_s), (last, last_s) = passes[0], passes[-1]
    forward = Forwards(tuple(passes), (last_s - first_s) / (last - first))
    line = linear_regression(list(syncs), [decoding.wait_s for decoding in syncs.values()])
    step = Forwards(((1, max(1e-6, line.slope)),))
    # Plain decoding waits for no drafts: its wait is the loop's own time from verdict to next pass.
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
    """Return the costs of target and drafter whose devices are simulated, with fitted host costs.

    The forwards take the time that is set. The target's host takes what plain decoding takes
    besides its passes. The drafter's host time per step and the time of a message are fitted so
    that the simulated `sync` arms are as fast as they were measured.
    """
    from scipy.optimize import least_squares  # it may be missing, and only this needs it

    forward = _device(config.simulate_target_ms, config.simulate_target_ms_per_row)
    step = _device(config.simulate_draft_ms, config.simulate_draft_ms_per_row)
    plain_s = 1 / plain.tokens_per_second
    target = NodeCosts(forward, max(0.0, plain_s - forward.of(1)), timed_rows=TARGET_ROWS)

    def drafter(host_s: float, way_s: float) -> NodeCosts:
        """Return the drafter's costs for this host time per step and extra time of a message."""
        return NodeCosts(step, host_s, _delay_s(config) + way_s, DRAFTER_ROWS)

    def misses(unknown: Sequence[float]) -> list[float]:
        return too_slow(config, (target, drafter(*unknown)), syncs, trace)

    found = least_squares(
        misses, [5e-4, 2e-4], bounds=(0.0, 0.1), x_scale=1e-4, diff_step=0.2, max_nfev=12
    )
    return target, drafter(*found.x)


def too_slow(
    config: PairConfig,
    costs: Costs,
    syncs: Sequence[tuple[SpeculationConfig, Decoding]],
    trace: Trace,
) -> list[float]:
    """Return for each `sync` arm: simulated / measured time of a pass - 1.

    It is above 0 where the simulation with these costs is slower than what was measured. Passes are
    compared, because tokens per pass depend on the trace alone.
    """
    shares = []
    for setting, decoding in syncs:
        figures = rehearse(setting.make(config), *costs, trace, is_whole=True)
        pass_s = decoding.tokens_per_pass / decoding.tokens_per_second
        shares.append(figures.tokens_per_pass / figures.tokens_per_second / pass_s - 1)
    return shares


def _device(forward_ms: float, row_ms: float) -> Forwards:
    """Return the costs of a simulated device."""
    return Forwards(((1, forward_ms / 1e3),), row_ms / 1e3)


def _delay_s(config: PairConfig) -> float:
    """Return the one-way delay of the drafter's simulated link in seconds; 0: no such link."""
    link = config.links.get(Role.DRAFTER)
    return 0.0 if link is None else link.hop_s


def predict(arms: Sequence[Arm], rows: Sequence[Row], ranks: Trace) -> dict[str, float]:
    """Return the predicted tokens per second of each arm that can be predicted, by name.

    The speed includes the time to the first token. An arm can be predicted if `ar` and `sync` with
    two K or more were measured with the same pair (with any link), one text at a time, with drafts
    of a model and coupled verification.
    """
    measured = _rows_by_arm(rows)
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


def _rows_by_arm(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of texts that were written one at a time and have figures, by arm."""
    measured: dict[str, list[Row]] = {}
    for row in rows:
        if not row.void and row.figures is not None and row.num_rows == 1:
            measured.setdefault(row.arm, []).append(row)
    return measured


def predict_of_pair(pair: Measured, arms: Sequence[Arm], rows: Sequence[Row]) -> dict[str, float]:
    """Return the predicted tokens per second of each arm with a pair that `measure` has measured.

    The speed includes the time to the first token. No other arms are needed. The ranks are those of
    the texts with the nearest temperature in the file.
    """
    measured = _rows_by_arm(rows)
    found: dict[str, float] = {}
    for arm in arms:
        if arm.name in measured and is_of_pair(arm, pair):
            costs = pair.costs(kind_of(arm.speculation.policy))
            ranks = cut(pair.trace(arm.sampling.temperature), 1, NUM_TOKENS)
            found[arm.name] = _predicted(arm, costs, measured[arm.name], ranks)
    return found


def is_of_pair(arm: Arm, pair: Measured) -> bool:
    """True if an arm can be predicted and has the models, types and devices of a measured pair."""
    config = arm.pair
    named: list[tuple[str, str, str, MeasuredNode]] = [
        (config.target, config.dtype, config.target_device, pair.target)
    ]
    if arm.speculation.drafts:
        named.append((config.drafter, config.drafter_dtype, config.drafter_device, pair.drafter))
    return (
        _can_be_predicted(arm)
        and not (config.simulate_target_ms or config.simulate_draft_ms)
        and all(
            _is_same_model(name, node.model)
            and dtype in (*CHOSEN_LATER, node.dtype)
            and device in (*CHOSEN_LATER, node.device)
            for name, dtype, device, node in named
        )
    )


def _is_same_model(name: str, other: str) -> bool:
    return name == other or Path(name).resolve() == Path(other).resolve()


def _can_be_predicted(arm: Arm) -> bool:
    """True if the arm drafts with a model (or not at all) and verifies by coupling."""
    has_drafts = not arm.speculation.drafts or has_ranks(arm.pair)
    is_plain = not arm.work.peer and not arm.speculation.also_copies
    return has_drafts and is_plain and arm.speculation.verify == "coupled"


def has_ranks(config: PairConfig) -> bool:
    """True if drafts come from a draft model alone, whose ranks can be recorded."""
    return config.has_draft_process and not config.drafter_is_head and not config.heads


def _never_overlaps(policy: Policy) -> bool:
    """True if drafter and target wait for each other, and each pass for all K drafts (`sync`)."""
    k = policy.num_speculative_tokens
    return policy.has_drafter and (policy.window, policy.launch_min, policy.launch_accepted) == (
        k,
        k,
        k,
    )


def _costs_of_group(
    group: Sequence[Arm], measured: Mapping[str, list[Row]], ranks: Trace
) -> Costs | None:
    """Return the costs of target and drafter without a link; None if too little was measured."""
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
    """Return the predicted tokens per second of one arm, the time to its first token included."""
    target, drafter = costs
    drafter = replace(drafter, hop_s=drafter.hop_s + _delay_s(arm.pair))
    figures = rehearse(arm.speculation.make(arm.pair), target, drafter, ranks, is_whole=True)
    num_tokens = median(len(row.tokens) for row in rows)
    first_s = median(row.ttft_s for row in rows)
    return num_tokens / (first_s + (num_tokens - 1) / figures.tokens_per_second)


def recorded(job: Job, rows: Sequence[Row], path: Path) -> Trace:
    """Return how the drafter ranks the tokens of an arm's texts; record it to `path` if it is new.

    job   an arm without drafts: its texts are those of the target alone

    Texts that are too short to be rehearsed are left out. Raises NodeError, OutputError.
    """
    if not path.exists():
        pair = job.arm.pair
        texts = tuple(_texts(job, _rows_by_arm(rows).get(job.arm.name, [])))
        if not texts:
            return ()
        request = Request(
            *(pair.target, pair.target_revision, pair.dtype),
            *(pair.drafter, pair.drafter_revision, pair.dtype),
            device="cpu",
            texts=texts,
        )
        write_whole(path, "".join(written(text.positions) + "\n" for text in judged(request)))
    return read(path.read_text(encoding="utf-8").splitlines())


def _texts(job: Job, rows: Sequence[Row]) -> Iterator[Said]:
    """Yield the text of each prompt once, in the order of the prompts."""
    temperature = job.arm.sampling.temperature
    by_prompt = {row.prompt: row for row in rows if len(row.tokens) > LEAST_LEN}
    for index, row in sorted(by_prompt.items()):
        prompt = job.talk(job.prompts[index]).next_turn()
        yield Said(prompt, row.tokens, temperature, row.seed)
