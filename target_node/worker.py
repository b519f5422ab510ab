"""The thin loop around `verifying`: it gives the machine a clock, a socket and a model."""

import time
from collections.abc import Sequence

import torch

from engine.coupling import choose
from engine.errors import EngineError, OutOfMemory
from engine.judging import judge, life_of
from engine.loading import Engine, load_engine
from engine.logprobs import report
from engine.processors import Newest
from engine.sampling import Sampling, sampling_of
from engine.slots import NUM_TREE_SLOTS
from engine.verification import Distribution, block_trial, careless_trial, token_trial
from proto.codec import encode
from proto.errors import ModelError, NodeError
from proto.messages import OFF, Fingerprint, Hello, Logprobs, Message, Rule
from proto.node import Heart, NodeConfig, serve, shake_hands
from proto.stopwatch import Phase
from proto.transport import Connection
from target_node.events import (
    Action,
    Allocate,
    Arrived,
    Compute,
    Computed,
    Event,
    Judge,
    MoveRows,
    Send,
    Tick,
    WaitUntil,
)
from target_node.verifying import Verifying

IDLE_S = 1.0
WARM_ROWS = (1, 2, 3, 5, 9)
# A program costs half a minute and a copy of the weights, a graph next to nothing.
PROGRAM_ROWS = {"compiled": (1, 9), "graphs": (1, 2, 3, 5, 9, 17)}
TRIALS = {Rule.TOKEN: token_trial, Rule.BLOCK: block_trial, Rule.CARELESS: careless_trial}


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Load, introduce ourselves, and verify until the process ends."""

    def say(state: str) -> None:
        heart.state = state

    try:
        prepared = load_engine(
            config.model,
            revision=config.revision,
            dtype=config.dtype,
            device=config.device,
            max_len=config.max_model_len,
            fixed_rows=config.fixed_rows or None,
            warm_rows=(config.fixed_rows,) if config.fixed_rows else WARM_ROWS,
            say=say,
            backend=config.backend,
            row_counts=PROGRAM_ROWS,
        )
    except OutOfMemory as error:
        raise NodeError(str(error)) from error
    except EngineError as error:
        raise ModelError(str(error)) from error
    say("ready")
    shake_hands(connection, _hello(config, prepared))
    try:
        Worker(config, connection, heart, prepared).run()
    except EngineError as error:
        raise NodeError(str(error)) from error


def _hello(config: NodeConfig, prepared: Engine) -> Hello:
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
    """One target, one loop: drain the messages, tick, run a pass, send the verdict."""

    def __init__(
        self, config: NodeConfig, connection: Connection, heart: Heart, prepared: Engine
    ) -> None:
        self.config = config
        self.connection = connection
        self.heart = heart
        self.executor = prepared.executor
        least_s = config.min_forward_ms / 1e3
        self.machine = Verifying(
            num_slots=self.executor.capacity,
            fixed_rows=config.fixed_rows or None,
            pass_s={rows: max(least_s, seconds) for rows, seconds in prepared.pass_s.items()},
        )
        self._processors = Newest()

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
            case Allocate(max_len):
                if self.config.fixed_rows:
                    self.executor.set_total(max_len + NUM_TREE_SLOTS)
        enter(Phase.DECIDE)
        return IDLE_S

    def _compute(self, action: Compute) -> Computed:
        started = time.perf_counter()
        enter = self.heart.watch.enter
        enter(Phase.PREPARE)
        num_rows = len(action.feed.tokens)
        ask = range(0 if action.scored else num_rows - action.num_asked, num_rows)
        prepared = self.executor.lay_out((action.feed,), (ask,))
        enter(Phase.MODEL)
        logits = self.executor.forward(prepared).logits
        enter(Phase.CHOOSE)
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
        self.heart.progress += 1
        self.heart.num_uncaptured = self.executor.num_uncaptured
        elapsed = time.perf_counter() - started
        if self.config.min_forward_ms > elapsed * 1e3:
            time.sleep(self.config.min_forward_ms / 1e3 - elapsed)
            elapsed = time.perf_counter() - started
        return Computed(action.ticket, tokens, round(elapsed * 1e6), num_accepted, logprobs)

    def _processed(self, logits: torch.Tensor, action: Compute) -> torch.Tensor:
        """The logits [num_asked, V] after the processors of this text, each row after its path."""
        if not action.sampling.has_processors:
            return logits
        opened = self.machine.opened
        assert opened is not None
        processors = self._processors.of(opened, self.machine.tree.text.tokens, logits.shape[1])
        drafted = action.drafted
        return processors.apply(logits, [drafted[:i] for i in range(action.num_asked)])


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
