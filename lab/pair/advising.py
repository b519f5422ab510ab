"""Asks `plan` what it makes of a measured pair: how fast policies are, which is best."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.text.metrics import Metrics
from lab.pair.measuring import COMPARED_AT, Job
from lab.pair.record import Advice, Chances, Kind, Measured, Speed
from proto.policies import POLICIES, PolicyName
from rehearsal.acceptance import Position, Trace, cut
from rehearsal.planning import LEAST_LEN, Case, Plan, make_plan, rehearse
from rehearsal.setting import Forwards, NodeCosts

NUM_TOKENS = 320  # of the text that is rehearsed
DRAFTS = (4, 8, 16)  # values of K that are tried
SLOWER_LINKS_MS = (1.0, 10.0)  # added to the way of a draft
FASTER = 2.0


def case_of(measured: Measured, temperature: float) -> Case:
    """Return the case of one text at a temperature, for `plan`."""
    trace = cut(measured.trace(temperature), 1, NUM_TOKENS)
    return Case(
        *measured.costs(Kind.BESIDE),
        trace,
        apart=measured.costs(Kind.APART),
        plain=measured.costs(Kind.PLAIN)[0],
    )


def speeds_of(
    measured: Measured,
    chances: Chances,
    written: Sequence[tuple[Job, Metrics]],
    config: PairConfig,
) -> list[Speed]:
    """Return how fast each policy wrote texts of one temperature, and what is expected for them.

    written  all texts that were written to be compared. Those that are too short for a rehearsal
             do not count, but for decoding without drafts, which takes as long in any text
    """
    long = {
        (text.prompt, text.seed): text.positions
        for text in chances.texts
        if len(text.ranks) > LEAST_LEN
    }
    texts: dict[PolicyName, list[Metrics]] = {}
    traces: dict[PolicyName, dict[tuple[tuple[int, ...], int], tuple[Position, ...]]] = {}
    for job, metrics in written:
        name, text = job.speculation.policy, (job.prompt, job.seed)
        if not POLICIES[name].drafts and metrics.num_tokens > 1:
            text = next(iter(long), text)
        if job.temperature == chances.temperature and text in long:
            texts.setdefault(name, []).append(metrics)
            traces.setdefault(name, {})[text] = long[text]
    case = case_of(measured, chances.temperature)
    return [
        speed_of(name, chances.temperature, texts[name], config, case, tuple(trace.values()))
        for name, trace in traces.items()
    ]


def speed_of(
    name: PolicyName,
    temperature: float,
    texts: Sequence[Metrics],
    config: PairConfig,
    case: Case,
    trace: Trace,
) -> Speed:
    """Return how fast a policy wrote some texts, beside what is expected for their trace.

    Neither counts the first token of a text, which is the time to read the prompt.
    """
    seconds = sum(text.elapsed_s - text.time_to_first_token_s for text in texts)
    num_tokens = sum(text.num_tokens - 1 for text in texts)
    num_passes = sum(text.num_target_passes - 1 for text in texts)
    num_drafts = sum(text.num_draft_tokens for text in texts)
    num_accepted = sum(text.num_accepted_tokens for text in texts)
    policy = SpeculationConfig(policy=name).make(config)
    costs = case.costs(POLICIES[name])
    expected = rehearse(policy, *costs, trace, is_whole=True).tokens_per_second
    return Speed(
        temperature,
        name,
        round(num_tokens / seconds, 1),
        round(expected, 1),
        round(num_tokens / num_passes, 2),
        round(num_accepted / num_drafts, 3) if num_drafts else None,
    )


def advice_of(measured: Measured, say: Callable[[str], None]) -> tuple[Advice, ...]:
    """Return the best policy as measured, and with other devices and links.

    say  is told what is being rehearsed
    """
    found = []
    for temperature in COMPARED_AT:
        say(f"temperature {temperature:g}")
        plan = make_plan(case_of(measured, temperature), DRAFTS, wider=())
        found.append(_advice(f"as measured, temperature {temperature:g}", plan))
    case = case_of(measured, 0.0)
    for what, other in _others(case):
        say(what)
        found.append(_advice(what, make_plan(other, DRAFTS, wider=())))
    return tuple(found)


def _others(case: Case) -> list[tuple[str, Case]]:
    """Return what could be different, in words, and the case that it would be."""
    alone = case
    if case.apart is not None:
        target, drafter = (costs.forward for costs in case.apart)
        alone = replace(
            case,
            target=replace(case.target, forward=target),
            drafter=replace(case.drafter, forward=drafter),
        )
    more = [
        (f"the way {more_ms:g} ms longer", case.over(case.drafter.hop_s + more_ms / 1e3))
        for more_ms in SLOWER_LINKS_MS
    ]
    return [
        ("models that do not slow each other", alone),
        ("a target twice as fast", case.changed(_faster, _same)),
        ("a drafter twice as fast", case.changed(_same, _faster)),
        *more,
    ]


def _same(costs: NodeCosts) -> NodeCosts:
    return costs


def _faster(costs: NodeCosts) -> NodeCosts:
    """Return the costs of a device that computes in half the time, beside the same host."""
    known = tuple((rows, seconds / FASTER) for rows, seconds in costs.forward.known)
    return replace(costs, forward=Forwards(known, costs.forward.row_s / FASTER))


def _advice(what: str, plan: Plan) -> Advice:
    cell = plan.winner or plan.plain
    flags = f"--policy {cell.policy}"
    if cell.k is not None:
        flags += f" --num-speculative-tokens {cell.k}"
    if cell.window is not None:
        flags += f" --window {cell.window}"
    return Advice(
        what, flags, round(plan.speedup(cell), 2), round(cell.figures.tokens_per_second, 1)
    )
