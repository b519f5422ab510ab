"""What a Compute means to the target: one pass, and what it chooses or judges by its logits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NoReturn

import torch

from engine.coupling import choose
from engine.features import as_bytes
from engine.judging import judge, life_of
from engine.loading import Engine
from engine.logprobs import report
from engine.sampling import Sampling, sampling_of
from engine.verification import Distribution, block_trial, careless_trial, token_trial
from node.costs import Costs
from node.follower import Follower
from node.forwards import Forwards
from node.lanes import Lanes
from node.loop import Loop
from node.process import Heart
from node.rows import PREFILL_CHUNKS
from node.simulated_device import SimulatedDevice
from proto.links.transport import Connection
from proto.messages import OFF, Logprobs, Rule, Welcome
from proto.node_config import NodeConfig
from target_node.accepting import rows_on_text, walk
from target_node.events import Action, Compute, Computed, FeatureRows, Judge, Outcome, Part
from target_node.known import Known
from target_node.scheduling import Schedule
from target_node.verifying import Verifying

TRIALS = {Rule.TOKEN: token_trial, Rule.BLOCK: block_trial, Rule.CARELESS: careless_trial}


def serve(
    config: NodeConfig,
    engine: Engine,
    welcome: Welcome,
    connection: Connection,
    heart: Heart,
    *,
    has_lifeline: bool = True,
) -> NoReturn:
    """Verify for the coordinator that has said Welcome (`Loop.run`)."""
    executor, device = engine.executor, SimulatedDevice.of(config)
    known = Known(
        fixed_rows=config.fixed_rows or None,
        costs=Costs(device.at_least(engine.pass_s)),
        chunk=PREFILL_CHUNKS[engine.loaded.device.type],
    )
    lanes = Lanes(executor.lanes.count, executor.capacity)
    schedule = Schedule(lanes, known, num_per_pass=executor.num_lanes_per_pass)
    follower: Follower[Verifying, Computed, Action] = Follower(lanes, schedule)
    worker = Worker(Forwards(executor, heart, device))
    if engine.heads is None:
        Loop(connection, heart, executor, follower, worker.compute).run(has_lifeline=has_lifeline)
    from target_node.heads import WithHeads  # it knows a drafter's machine, and this file

    vocab_size = welcome.vocab_size
    both = WithHeads(config, engine, engine.heads, follower, known, worker, vocab_size, heart)
    both.loop(connection, heart).run(has_lifeline=has_lifeline)


class Worker:
    """One target."""

    def __init__(self, forwards: Forwards) -> None:
        self.forwards = forwards

    def compute(self, action: Compute) -> Computed:
        """Run a pass and choose, or judge, at the rows that it is asked for."""
        parts = action.parts
        asks = [_rows_asked_of(part) for part in parts]
        layers = next((part.layers for part in parts if part.layers), ())
        out = self.forwards.run([part.feed for part in parts], asks, layers)
        ends = pairwise(accumulate(map(len, asks), initial=0))
        outcomes = [
            self._outcome(part, out.logits[start:end])
            for part, (start, end) in zip(parts, ends, strict=True)
        ]
        if out.features is not None:
            ends = pairwise(accumulate((len(part.feed.tokens) for part in parts), initial=0))
            outcomes = [
                _with_features(part, outcome, out.features[start:end])
                for part, outcome, (start, end) in zip(parts, outcomes, ends, strict=True)
            ]
        return Computed(action.ticket, tuple(outcomes), self.forwards.done())

    def _outcome(self, part: Part, logits: torch.Tensor) -> Outcome:
        """What the rows of one text say, [n, V]."""
        tokens: tuple[int, ...] = ()
        num_accepted: int | None = None
        spec = part.opened.sampling
        sampling = sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        if part.judge is not None:
            processed = self._processed(logits, part)
            num_accepted, tokens = _judged(processed, sampling, part.judge, part)
        elif part.num_asked:
            processed = self._processed(logits, part)
            tokens = tuple(
                choose(processed, sampling, spec.seed, spec.sample_index, part.positions)
            )
        return Outcome(tokens, num_accepted, _logprobs(logits, tokens, part))

    def _processed(self, logits: torch.Tensor, part: Part) -> torch.Tensor:
        """The logits [num_asked, V] after the processors of this text, each row after its path."""
        if not part.opened.sampling.has_processors:
            return logits
        return self.forwards.processed(logits, part.opened, part.committed, part.paths())


def _rows_asked_of(part: Part) -> range:
    num_rows = len(part.feed.tokens)
    return range(0 if part.scored else num_rows - part.num_asked, num_rows)


def _with_features(part: Part, outcome: Outcome, features: torch.Tensor) -> Outcome:
    """The outcome with the features [n, F] of those of its rows that lie on the text."""
    if not part.layers:
        return outcome
    rows = rows_on_text(part, outcome)
    found = features[: len(rows)] if rows[-1] == len(rows) - 1 else features[rows]
    dtype = str(features.dtype).removeprefix("torch.")
    return replace(outcome, features=FeatureRows(dtype, len(rows), as_bytes(found)))


def _judged(
    logits: torch.Tensor, sampling: Sampling, wanted: Judge, part: Part
) -> tuple[int, tuple[int, ...]]:
    spec = part.opened.sampling
    return judge(
        logits,
        sampling,
        TRIALS[wanted.rule],
        wanted.drafts,
        [Distribution.of(proposal.ids, proposal.probs) for proposal in wanted.proposals],
        seed=spec.seed,
        life=life_of(spec.sample_index, wanted.incarnation),
        number=part.number,
    )


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], part: Part) -> Logprobs | None:
    """Of the choices that can be committed."""
    spec = part.opened.sampling
    if not spec.reports:
        return None
    if part.scored:
        reported = report(logits, part.scored, spec.num_prompt_logprobs)
    elif tokens and spec.num_logprobs != OFF:
        if part.judge is None:
            rows = walk(part.drafted, part.parents, tokens)
            logits, tokens = logits[rows], [tokens[row] for row in rows]
        reported = report(logits, tokens, spec.num_logprobs)
    else:
        return None
    return Logprobs(reported.ids, reported.values, reported.ranks)
