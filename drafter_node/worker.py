"""What a Compute means to the drafter: one forward, and drafts that are chosen from its logits."""

from dataclasses import replace

import torch

from drafter_node.drafting import Drafting
from drafter_node.events import Action, Children, Compute, Part, Proposed
from drafter_node.known import Known
from drafter_node.scheduling import Schedule
from engine.coupling import choose_scored
from engine.judging import life_of, sample_draft
from engine.loading import Engine
from engine.sampling import sampling_of
from engine.slots import Feed
from node.costs import Passes
from node.follower import Follower
from node.forwards import Forwards
from node.lanes import Lanes
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
    executor, least_s = engine.executor, config.min_forward_ms / 1e3
    steps = Passes({rows: max(least_s, took) for rows, took in engine.pass_s.items()})
    known = Known(max_len=engine.max_len, source=welcome.source, steps=steps)
    lanes = Lanes(executor.lanes.count, executor.capacity)
    schedule = Schedule(lanes, known, num_per_pass=executor.num_lanes_per_pass)
    follower: Follower[Drafting, Proposed, Action] = Follower(lanes, schedule)
    worker = Worker(config, engine, Forwards(executor, heart, least_s), welcome.vocab_size)
    Loop(connection, heart, executor, follower, worker.compute).run()


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
        """Run a forward and choose the children that it is asked for."""
        feeds = [self._readable(part.feed) for part in action.parts]
        asks = [
            () if part.position is None else (len(part.feed.tokens) - 1,) for part in action.parts
        ]
        rows = iter(self.forwards.run(feeds, asks))
        children = tuple(
            Children((), ()) if part.position is None else self._children(next(rows)[None], part)
            for part in action.parts
        )
        return Proposed(action.ticket, children, self.forwards.done())

    def _readable(self, feed: Feed) -> Feed:
        """The feed with ids that the embedding has.

        The target's vocabulary may have a longer padded tail, which means nothing here.
        """
        if max(feed.tokens) < self.num_rows:
            return feed
        known = tuple(min(token, self.num_rows - 1) for token in feed.tokens)
        return replace(feed, tokens=known)

    def _children(self, logits: torch.Tensor, part: Part) -> Children:
        """What follows the last row of a text, by its logits [1, V]."""
        if part.opened.sampling.has_processors:
            # The target's, on our own logits.
            logits = self.forwards.processed(
                logits[:, : self.vocab_size], part.opened, part.committed, [part.drafted]
            )
        if part.sampled_in is None:
            return self._coupled(logits, part)
        return self._sampled(logits, part, part.sampled_in)

    def _sampled(self, logits: torch.Tensor, part: Part, life: int) -> Children:
        """A draft of the classical rules, its score and what it was sampled from."""
        spec = part.opened.sampling
        token, score, ids, weights = sample_draft(
            logits,
            sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p),
            seed=spec.seed,
            life=life_of(spec.sample_index, life),
            number=part.number,
            num_valid=self.vocab_size,
            max_candidates=self.max_candidates,
        )
        proposal = Proposal(tuple(ids.tolist()), tuple(weights.tolist()))
        return Children((token,), (score,), (proposal,))

    def _coupled(self, logits: torch.Tensor, part: Part) -> Children:
        """A draft that is chosen with the target's own noise, and its score."""
        assert part.position is not None
        spec = part.opened.sampling
        chosen, logs = choose_scored(
            logits,
            sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p),
            spec.seed,
            spec.sample_index,
            (part.position,),
            num_valid=self.vocab_size,
        )
        return Children(tuple(chosen), tuple(logs))
