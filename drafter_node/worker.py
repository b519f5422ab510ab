"""The thin loop around `drafting`: it gives the machine a clock, a socket and a model."""

import time
from dataclasses import replace

import torch

from drafter_node.drafting import Drafting
from drafter_node.events import (
    Action,
    Allocate,
    Arrived,
    Compute,
    Event,
    MoveRows,
    Proposed,
    Send,
    Tick,
    WaitUntil,
)
from engine.coupling import choose_scored
from engine.errors import EngineError, OutOfMemory
from engine.executor import Executor
from engine.judging import life_of, sample_draft
from engine.prepare import Prepared, prepare
from engine.processors import Newest
from engine.sampling import sampling_of
from proto.codec import encode
from proto.errors import ModelError, NodeError
from proto.messages import Fingerprint, Hello, Message, Proposal, Welcome
from proto.node import Heart, NodeConfig, serve, shake_hands
from proto.stopwatch import Phase
from proto.transport import Connection

IDLE_S = 1.0
WARM_ROWS = (1, 2, 3)
PROGRAM_ROWS = {"compiled": (1, 4), "graphs": (1, 2, 4, 8, 16)}


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Load, introduce ourselves, and draft until the process ends."""

    def say(state: str) -> None:
        heart.state = state

    try:
        prepared = prepare(
            config.model,
            revision=config.revision,
            dtype=config.dtype,
            device=config.device,
            max_len=config.max_model_len,
            fixed_rows=None,
            warm_rows=WARM_ROWS,
            say=say,
            backend=config.backend,
            row_counts=PROGRAM_ROWS,
        )
    except OutOfMemory as error:
        raise NodeError(str(error)) from error
    except EngineError as error:
        raise ModelError(str(error)) from error
    say("ready")
    welcome = shake_hands(connection, _hello(config, prepared))
    try:
        Worker(config, connection, heart, prepared, welcome).run()
    except EngineError as error:
        raise NodeError(str(error)) from error


def _hello(config: NodeConfig, prepared: Prepared) -> Hello:
    loaded = prepared.loaded
    return config.hello(
        fingerprint=Fingerprint(prepared.vocab_size, prepared.digest, loaded.eos_token_ids),
        logits_size=loaded.vocab_size,
        max_model_len=prepared.max_len,
        dtype=str(loaded.dtype).removeprefix("torch."),
        num_parameters=loaded.num_parameters,
        load_s=prepared.load_s,
    )


class Worker:
    """One drafter, one loop: drain the verdicts, tick, run a forward, send the draft."""

    def __init__(
        self,
        config: NodeConfig,
        connection: Connection,
        heart: Heart,
        prepared: Prepared,
        welcome: Welcome,
    ) -> None:
        self.config = config
        self.connection = connection
        self.heart = heart
        self.executor: Executor = prepared.executor
        self.num_rows = prepared.loaded.vocab_size  # of the embedding
        self.vocab_size = welcome.vocab_size  # ids from here on are never drafted
        self._processors = Newest()
        self.machine = Drafting(
            max_len=prepared.max_len,
            num_slots=prepared.executor.capacity,
            source=welcome.source,
        )

    def run(self) -> None:
        """Serve for ever; the lifeline ends the process."""
        serve(self.connection, self.heart.watch, self._on_message, self._on_drained)

    def _on_message(self, message: Message) -> None:
        self._handle(Arrived(message))

    def _on_drained(self) -> float:
        self.heart.mark = self.machine.mark
        return self._handle(Tick())

    def _handle(self, event: Event) -> float:
        """Let the machine decide and do it; returns how long the loop may wait for messages."""
        timeout_s = IDLE_S
        for action in self.machine.handle(event, time.monotonic()):
            timeout_s = min(timeout_s, self._perform(action))
        return timeout_s

    def _perform(self, action: Action) -> float:
        enter = self.heart.watch.enter
        match action:
            case Send(message):
                enter(Phase.SEND)
                self.connection.send(encode(message))
            case Compute():
                done = self._compute(action)
                enter(Phase.DECIDE)
                self._handle(done)
                return 0.0
            case MoveRows(move):
                enter(Phase.MOVE)
                self.executor.move(move)
            case WaitUntil(deadline):
                return deadline - time.monotonic()
            case Allocate():
                pass  # the cache was made for the longest text
        enter(Phase.DECIDE)
        return IDLE_S

    def _compute(self, action: Compute) -> Proposed:
        started = time.perf_counter()
        enter = self.heart.watch.enter
        enter(Phase.PREPARE)
        tokens: tuple[int, ...] = ()
        scores: tuple[float, ...] = ()
        ask = () if action.position is None else (len(action.feed.tokens) - 1,)
        feed = action.feed
        if max(feed.tokens) >= self.num_rows:
            # The target's vocabulary may have a longer padded tail, which means nothing here.
            known = tuple(min(token, self.num_rows - 1) for token in feed.tokens)
            feed = replace(feed, tokens=known)
        prepared = self.executor.prepare(feed, ask)
        enter(Phase.MODEL)
        logits = self.executor.forward(prepared)
        enter(Phase.CHOOSE)
        spec = action.sampling
        sampling = sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        proposals: tuple[Proposal, ...] = ()
        if action.position is not None and action.sampled_in is not None:
            token, score, ids, weights = sample_draft(
                self._processed(logits, action),
                sampling,
                seed=spec.seed,
                life=life_of(spec.sample_index, action.sampled_in),
                number=action.ticket,
                num_valid=self.vocab_size,
                max_candidates=self.config.max_candidates,
            )
            tokens, scores = (token,), (score,)
            proposals = (Proposal(tuple(ids.tolist()), tuple(weights.tolist())),)
        elif action.position is not None:
            chosen, logs = choose_scored(
                self._processed(logits, action),
                sampling,
                spec.seed,
                spec.sample_index,
                (action.position,),
                num_valid=self.vocab_size,
            )
            tokens, scores = tuple(chosen), tuple(logs)
        self.heart.progress += 1
        self.heart.num_uncaptured = self.executor.num_uncaptured
        elapsed = time.perf_counter() - started
        if self.config.min_forward_ms > elapsed * 1e3:
            time.sleep(self.config.min_forward_ms / 1e3 - elapsed)
            elapsed = time.perf_counter() - started
        return Proposed(action.ticket, tokens, scores, round(elapsed * 1e6), proposals)

    def _processed(self, logits: torch.Tensor, action: Compute) -> torch.Tensor:
        """The logits [1, V] after the processors of this text: the target's, on our own logits."""
        if not action.sampling.has_processors:
            return logits
        opened = self.machine.opened
        assert opened is not None
        logits = logits[:, : self.vocab_size]
        processors = self._processors.of(opened, self.machine.tree.text.tokens, logits.shape[1])
        return processors.apply(logits, [action.drafted])
