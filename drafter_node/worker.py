"""What a Compute means to the drafter: one forward, and a draft that is chosen from its logits."""

from dataclasses import replace

import torch

from drafter_node.drafting import Drafting
from drafter_node.events import Compute, Proposed
from engine.coupling import choose_scored
from engine.judging import life_of, sample_draft
from engine.loading import Engine
from engine.sampling import sampling_of
from engine.slots import Feed
from node.follower import Follower
from node.forwards import Forwards
from node.loop import Loop, introduce, load
from node.process import Heart
from proto.messages import Proposal
from proto.node_config import NodeConfig
from proto.transport import Connection

WARM_ROWS = (1, 2, 3)
PROGRAM_ROWS = {"compiled": (1, 4), "graphs": (1, 2, 4, 8, 16)}


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Load, introduce ourselves, and draft until the process ends."""
    engine = load(config, heart, warm_rows=WARM_ROWS, row_counts=PROGRAM_ROWS)
    welcome = introduce(config, connection, engine)
    executor = engine.executor
    machine = Drafting(max_len=engine.max_len, num_slots=executor.capacity, source=welcome.source)
    forwards = Forwards(executor, heart, machine, config.min_forward_ms / 1e3)
    worker = Worker(config, engine, forwards, welcome.vocab_size)
    Loop(connection, heart, executor, Follower(machine), worker.compute).run()


class Worker:
    """One drafter.

    vocab_size  ids from here on are never drafted
    """

    def __init__(
        self, config: NodeConfig, engine: Engine, forwards: Forwards, vocab_size: int
    ) -> None:
        self.max_candidates = config.max_candidates
        self.num_rows = engine.loaded.vocab_size  # of the embedding
        self.forwards = forwards
        self.vocab_size = vocab_size

    def compute(self, action: Compute) -> Proposed:
        """Run a forward and choose the child that it is asked for."""
        ask = () if action.position is None else (len(action.feed.tokens) - 1,)
        logits = self.forwards.run(self._readable(action.feed), ask)
        tokens: tuple[int, ...] = ()
        scores: tuple[float, ...] = ()
        proposals: tuple[Proposal, ...] = ()
        if action.position is not None and action.sampled_in is not None:
            tokens, scores, proposals = self._sampled(logits, action, action.sampled_in)
        elif action.position is not None:
            tokens, scores = self._coupled(logits, action, action.position)
        return Proposed(action.ticket, tokens, scores, self.forwards.done(), proposals)

    def _readable(self, feed: Feed) -> Feed:
        """The feed with ids that the embedding has.

        The target's vocabulary may have a longer padded tail, which means nothing here.
        """
        if max(feed.tokens) < self.num_rows:
            return feed
        known = tuple(min(token, self.num_rows - 1) for token in feed.tokens)
        return replace(feed, tokens=known)

    def _sampled(
        self, logits: torch.Tensor, action: Compute, life: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[Proposal, ...]]:
        """A draft of the classical rules, its score and what it was sampled from."""
        spec = action.sampling
        token, score, ids, weights = sample_draft(
            self._processed(logits, action),
            sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p),
            seed=spec.seed,
            life=life_of(spec.sample_index, life),
            number=action.ticket,
            num_valid=self.vocab_size,
            max_candidates=self.max_candidates,
        )
        return (token,), (score,), (Proposal(tuple(ids.tolist()), tuple(weights.tolist())),)

    def _coupled(
        self, logits: torch.Tensor, action: Compute, position: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """A draft that is chosen with the target's own noise, and its score."""
        spec = action.sampling
        chosen, logs = choose_scored(
            self._processed(logits, action),
            sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p),
            spec.seed,
            spec.sample_index,
            (position,),
            num_valid=self.vocab_size,
        )
        return tuple(chosen), tuple(logs)

    def _processed(self, logits: torch.Tensor, action: Compute) -> torch.Tensor:
        """The logits [1, V] after the processors of this text: the target's, on our own logits."""
        if not action.sampling.has_processors:
            return logits
        return self.forwards.processed(logits[:, : self.vocab_size], [action.drafted])
