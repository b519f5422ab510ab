"""What a Compute means to the target: one pass, and what it chooses or judges by its logits."""

from collections.abc import Sequence

import torch

from engine.coupling import choose
from engine.judging import judge, life_of
from engine.logprobs import report
from engine.sampling import Sampling, sampling_of
from engine.verification import Distribution, block_trial, careless_trial, token_trial
from node.costs import Costs
from node.follower import Follower
from node.forwards import Forwards
from node.loop import Loop, introduce, load
from node.process import Heart
from proto.messages import OFF, Logprobs, Rule
from proto.node_config import NodeConfig
from proto.transport import Connection
from target_node.events import Compute, Computed, Judge
from target_node.verifying import Verifying

WARM_ROWS = (1, 2, 3, 5, 9)
# A program costs half a minute and a copy of the weights, a graph next to nothing.
PROGRAM_ROWS = {"compiled": (1, 9), "graphs": (1, 2, 3, 5, 9, 17)}
TRIALS = {Rule.TOKEN: token_trial, Rule.BLOCK: block_trial, Rule.CARELESS: careless_trial}


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Load, introduce ourselves, and verify until the process ends."""
    engine = load(config, heart, warm_rows=WARM_ROWS, row_counts=PROGRAM_ROWS)
    introduce(config, connection, engine)
    executor, least_s = engine.executor, config.min_forward_ms / 1e3
    machine = Verifying(
        num_slots=executor.capacity,
        fixed_rows=config.fixed_rows or None,
        costs=Costs({rows: max(least_s, took) for rows, took in engine.pass_s.items()}),
    )
    worker = Worker(Forwards(executor, heart, machine, least_s))
    Loop(connection, heart, executor, Follower(machine), worker.compute).run()


class Worker:
    """One target."""

    def __init__(self, forwards: Forwards) -> None:
        self.forwards = forwards

    def compute(self, action: Compute) -> Computed:
        """Run a pass and choose, or judge, at the rows that it is asked for."""
        num_rows = len(action.feed.tokens)
        ask = range(0 if action.scored else num_rows - action.num_asked, num_rows)
        logits = self.forwards.run(action.feed, ask)
        tokens: tuple[int, ...] = ()
        num_accepted: int | None = None
        spec = action.sampling
        sampling = sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        if action.judge is not None:
            processed = self._processed(logits, action)
            num_accepted, tokens = _judged(processed, sampling, action.judge, action)
        elif action.num_asked:
            processed = self._processed(logits, action)
            tokens = tuple(
                choose(processed, sampling, spec.seed, spec.sample_index, action.positions)
            )
        logprobs = _logprobs(logits, tokens, action) if spec.reports else None
        return Computed(action.ticket, tokens, self.forwards.done(), num_accepted, logprobs)

    def _processed(self, logits: torch.Tensor, action: Compute) -> torch.Tensor:
        """The logits [num_asked, V] after the processors of this text, each row after its path."""
        if not action.sampling.has_processors:
            return logits
        drafted = action.drafted
        return self.forwards.processed(logits, [drafted[:i] for i in range(action.num_asked)])


def _judged(
    logits: torch.Tensor, sampling: Sampling, wanted: Judge, action: Compute
) -> tuple[int, tuple[int, ...]]:
    return judge(
        logits,
        sampling,
        TRIALS[wanted.rule],
        wanted.drafts,
        [Distribution.of(proposal.ids, proposal.probs) for proposal in wanted.proposals],
        seed=action.sampling.seed,
        life=life_of(action.sampling.sample_index, wanted.incarnation),
        number=action.ticket,
    )


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], action: Compute) -> Logprobs | None:
    """Of the choices that can be committed: up to the first that differs from the draft."""
    spec = action.sampling
    if action.scored:
        reported = report(logits, action.scored, spec.num_prompt_logprobs)
    elif tokens and spec.num_logprobs != OFF:
        pairs = enumerate(zip(tokens, action.drafted, strict=False))
        last = next((i for i, (token, draft) in pairs if token != draft), len(action.drafted))
        reported = report(logits, tokens[: last + 1], spec.num_logprobs)
    else:
        return None
    return Logprobs(reported.ids, reported.values, reported.ranks)
