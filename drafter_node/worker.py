"""Runs the Computes of a drafter: one forward each, and a choice of drafts from its logits."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch

from drafter_node.compute import NONE_ALLOWED, NOTHING, Action, Children, Compute, Part, Proposed
from drafter_node.drafting import Drafting
from drafter_node.known import Known
from drafter_node.scheduling import Schedule
from drafter_node.translation.dispatcher import TranslatingDispatcher
from drafter_node.translation.text import Languages
from engine.checkpoint.model import DTYPES
from engine.choice.coupling import chain_choice, chain_inputs, rank_later
from engine.choice.coupling_on_gpu import Later
from engine.choice.judging import life_of, sample_draft
from engine.choice.sampling import sampling_of
from engine.choice.translated import TranslatedChoice
from engine.errors import EngineError, GrammarError, NotFinite
from engine.forward.forward import over_all
from engine.heads.head_loading import LoadedHead
from engine.layout.slots import Feed
from engine.loading import Engine, tokenizer_of
from engine.words import (
    UNTRANSLATABLE,
    Shared,
    TokenizerWords,
    UnknownKind,
    shared,
    unpacked,
)
from node.costs import Passes
from node.dispatcher import Dispatcher
from node.entrance import Entrance, Own
from node.forwards import Forwards, SimulatedDevice, in_two, vocabulary_of
from node.lanes import Lanes
from node.loop import Loop
from node.process import Heart
from node.rows import CHAINS, PREFILL_CHUNKS
from node.turns import Launched
from proto.errors import ModelError
from proto.links.transport import Connection
from proto.messages import MAX_WINDOW, Proposal, Role, Welcome
from proto.node_config import NodeConfig

Choices = Sequence[Later[tuple[Children, ...]]]
"""What returns the children of each part of a Compute, by asked row."""

LITTLE = 0.5  # of the tokens of a sample text; if fewer are shared, people are warned


def serve(
    config: NodeConfig,
    engine: Engine,
    welcome: Welcome,
    connection: Connection,
    heart: Heart,
    *,
    has_lifeline: bool = True,
) -> NoReturn:
    """Draft for the coordinator that has sent this Welcome; never returns (see `Loop.run`)."""
    device = SimulatedDevice.of(config)
    languages = languages_of(config, engine, welcome)
    if languages is not None:
        heart.trouble(words_on(shared(languages.own, languages.target)))
    known = known_of(engine, device, welcome.source, is_translated=languages is not None)
    inner = machines_of(engine, known, engine.executor.lanes.count)
    dispatcher = (
        inner if languages is None else TranslatingDispatcher(inner, languages, known.max_len)
    )
    forwards = Forwards(
        *(engine.executor, heart, device, vocabulary_of(config), engine.pass_s),
        on_gpu=engine.loaded.device.type == "cuda",
    )
    worker = Worker(config, engine, forwards, welcome.vocab_size, connection.has_frames, languages)
    own = Own(Role.DRAFTER, features=bytes_of_features(engine))
    entrance: Entrance[Proposed, Action] = Entrance(dispatcher, own)
    Loop(connection, heart, engine.executor, entrance, worker.launch).run(has_lifeline=has_lifeline)


def known_of(
    engine: Engine, device: SimulatedDevice, source: int, *, is_translated: bool = False
) -> Known:
    """Return what is known of this drafter; `source` is its number in drafts and acks."""
    return Known(
        max_len=engine.max_len,
        source=source,
        steps=Passes(device.at_least(engine.pass_s)),
        chunk=PREFILL_CHUNKS[engine.loaded.device.type],
        is_translated=is_translated,
        **about_head(engine),
    )


def machines_of(
    engine: Engine, known: Known, num_lanes: int
) -> Dispatcher[Drafting, Proposed, Action]:
    """Return what holds the machines of the texts that this drafter drafts, one in each lane."""
    executor = engine.executor
    lanes = Lanes(num_lanes, executor.capacity, is_head=known.is_head, windows=executor.windows)
    together = min(executor.num_lanes_per_pass, num_lanes)
    return Dispatcher(lanes, Schedule(lanes, known, num_per_pass=together))


def languages_of(config: NodeConfig, engine: Engine, welcome: Welcome) -> Languages | None:
    """Return the vocabularies of drafter and target; None: they have the same.

    Raises ModelError if one of them cannot be read or translated.
    """
    if not welcome.tokenizer:
        return None
    try:
        own = TokenizerWords(tokenizer_of(config.model, config.revision))
        target = TokenizerWords(unpacked(welcome.tokenizer))
    except UnknownKind as error:
        raise ModelError(UNTRANSLATABLE) from error
    except EngineError as error:
        raise ModelError(str(error)) from error
    return Languages(own, target, engine.loaded.eos_token_ids)


def words_on(found: Shared) -> str:
    """Return a line for people on how much the vocabularies of drafter and target share."""
    vocabulary, sample = round(100 * found.vocabulary), round(100 * found.sample)
    line = f"its tokenizer has {vocabulary} % of the target's tokens ({sample} % in a sample text)"
    return f"{line}: few drafts may be right" if found.sample < LITTLE else line


def about_head(engine: Engine) -> dict[str, Any]:
    """Return the fields of `Known` that describe a head; {} for an ordinary model."""
    loaded = engine.loaded
    if not isinstance(loaded, LoadedHead):
        return {}
    return {"is_head": True, "depth": loaded.depth or MAX_WINDOW}


def bytes_of_features(engine: Engine) -> dict[str, int]:
    """Return how many bytes a token's features have, by number type; {}: the model reads none."""
    loaded = engine.loaded
    if not isinstance(loaded, LoadedHead):
        return {}
    return {name: loaded.feature_size * dtype.itemsize for name, dtype in DTYPES.items()}


def layers_of(engine: Engine) -> tuple[int, ...]:
    """Return the target's layers whose features the head reads; () for an ordinary model."""
    return engine.loaded.layers if isinstance(engine.loaded, LoadedHead) else ()


class Worker:
    """Computes for one drafter: runs forwards, and chooses drafts from their logits.

    vocab_size  token ids from this number on are never drafted
    is_called   returns True if a message has arrived
    languages   the vocabularies of drafter and target; None: they have the same
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        forwards: Forwards,
        vocab_size: int,
        is_called: Callable[[], bool],
        languages: Languages | None = None,
    ) -> None:
        self.translated: TranslatedChoice | None = None
        if languages is not None:
            self.translated = TranslatedChoice(languages.own, languages.target, languages.eos_ids)
        self.is_called = is_called
        self.max_candidates = config.max_candidates
        self.num_rows = engine.loaded.vocab_size  # rows of the embedding
        self.head = engine.loaded if isinstance(engine.loaded, LoadedHead) else None
        self.forwards = forwards
        self.vocab_size = vocab_size

    def launch(self, action: Compute) -> Launched[Proposed]:
        """Start the forward, and the choice of children; return what says when it ends.

        Further steps are made where the first one ends. On a simulated device all but the last
        have ended when this returns.
        """
        return self.forwards.as_launched(self._in_two(action))

    def compute(self, action: Compute) -> Proposed:
        """Run the Compute and return its result, valid once a simulated device has ended it.

        Raises EngineError if one of several ranks lacks memory.
        """
        return self._in_two(action)()

    def _in_two(self, action: Compute) -> Later[Proposed]:
        """Launch the first step; return what ends it and makes the others. Errors as `compute`."""
        return in_two(
            partial(self._run, action.parts),
            partial(self._ended, action, self.forwards.num_received),
            partial(self._failed, action),
        )

    def _failed(self, action: Compute, error: RuntimeError | MemoryError) -> Proposed:
        """Return the result of steps that lack memory. Raises any other error."""
        self.forwards.without_memory(error)
        nothing = ((),) * len(action.parts)
        return Proposed(action.ticket, nothing, self.forwards.done(), has_failed=True)

    def _ended(self, action: Compute, heard: int, choices: Choices) -> Proposed:
        """Return the result of the first step, once its device has ended it, and of the others.

        heard  frames that had been received when it was launched
        """
        children, model_us = _children_of(choices), self.forwards.done()
        first, num_steps = action.parts[0], 1
        if first.ahead:
            children, model_us, num_steps = self._further(first, children[0], model_us, heard)
        if not all(one.is_finite for of_text in children for one in of_text):
            self.forwards.trouble(
                f"its {'head computes' if self.head else 'model computes'} numbers that are not "
                "finite for some texts, and those have fewer drafts or none"
            )
        return Proposed(action.ticket, children, model_us, num_steps)

    def _further(
        self, first: Part, begun: tuple[Children, ...], model_us: int, heard: int
    ) -> tuple[tuple[tuple[Children, ...], ...], int, int]:
        """Make the steps behind the first; return the chain, microseconds and steps of all."""
        chain, num_steps = list(begun), 1
        while first.is_followed(chain):
            self.forwards.wait()
            # Beside a GPU a message may have been handled already since the first step began.
            if self.is_called() or self.forwards.num_received != heard:
                break
            made, step_us = self._steps(first.after(chain), first.ahead[len(chain) :])
            num_steps += len(made)
            model_us += step_us
            for following in made:
                # Of steps that were made at once, those behind an end of the text are dropped.
                if first.is_followed(chain):
                    chain.append(following)
        return (tuple(chain),), model_us, num_steps

    def _steps(self, part: Part, ahead: Sequence[Feed]) -> tuple[list[Children], int]:
        """Make the next step, or several at once if possible; returns results and microseconds.

        ahead  the feeds of the steps behind the next one
        """
        made = None
        if ahead and part.sampled_in is None and part.opened.policy.branches == 1:
            count = next(number for number in CHAINS if number <= 1 + len(ahead))
            made = self._chain(part, [part.feed, *ahead[: count - 1]])
        if made is None:
            ((following,),) = _children_of(self._run((part,)))
            return [following], self.forwards.done()
        return made, self.forwards.done()

    def _chain(self, part: Part, feeds: Sequence[Feed]) -> list[Children] | None:
        """Run these steps as one recorded graph; return their children; None: none is recorded."""
        spec = part.opened.sampling
        sampling = sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        num_valid = self._num_valid(part)
        choice = chain_choice(sampling, num_valid=num_valid)
        readable = [self._readable(feed) for feed in feeds]
        if not self.forwards.can_chain(readable, choice):
            return None
        positions = [feed.positions[0] + 1 for feed in feeds]
        inputs = chain_inputs(
            sampling, spec.seed, spec.sample_index, positions, num_valid=num_valid
        )
        try:
            tokens, scores = self.forwards.run_chain(readable, choice, inputs)
        except NotFinite:
            return [NOTHING]
        return [Children((token,), (score,)) for token, score in zip(tokens, scores, strict=True)]

    def _run(self, parts: Sequence[Part]) -> Choices:
        """Launch a forward and the choices of each part's children; return what returns these."""
        feeds = [self._readable(part.feed) for part in parts]
        if self.head is not None and (dtype := next((p.feature_dtype for p in parts), "")):
            self.head.feature_dtype = dtype
        asks = [
            range(len(part.feed.tokens) - part.num_asked, len(part.feed.tokens)) for part in parts
        ]
        out = self.forwards.run(feeds, asks)
        ends = list(accumulate(map(len, asks), initial=0))
        return [
            self._children(out.logits[start:end], out.ids, part) if part.num_asked else _no_children
            for part, (start, end) in zip(parts, pairwise(ends), strict=True)
        ]

    def _num_valid(self, part: Part) -> int:
        """Return from which token id on nothing is drafted for this text.

        A drafter that has joined before its target may know tokens that the target lacks.
        """
        return min(self.vocab_size, part.opened.num_ids)

    def _readable(self, feed: Feed) -> Feed:
        """Return the feed with token ids that the model's embedding has.

        The target's vocabulary may have a longer padded tail; its ids have no meaning here.
        """
        if max(feed.tokens) < self.num_rows:
            return feed
        known = tuple(min(token, self.num_rows - 1) for token in feed.tokens)
        return replace(feed, tokens=known)

    def _children(
        self, logits: torch.Tensor, ids: torch.Tensor | None, part: Part
    ) -> Later[tuple[Children, ...]]:
        """Begin to choose the children after each asked row of a text, by the logits of its rows.

        logits, ids  as in `Output`

        If a row is not finite, there are no children after any row: one bad row spoils the others.
        """
        try:
            chosen = self._chosen(logits, ids, part)
        except NotFinite:
            return partial(self._children_of_some, logits, ids, part)

        def end() -> tuple[Children, ...]:
            try:
                return chosen()
            except NotFinite:
                return self._children_of_some(logits, ids, part)

        return end

    def _children_of_some(
        self, logits: torch.Tensor, ids: torch.Tensor | None, part: Part
    ) -> tuple[Children, ...]:
        """Return the children of a text of which not every row has any.

        Either the logits are not finite, or the text allows none of the tokens that have logits: a
        grammar may want one that a head with a vocabulary of its own does not know.
        """
        if not bool(logits.amax(1).isfinite().all()) or not part.opened.sampling.has_processors:
            return (NOTHING,) * part.num_asked
        made: list[Children] = []
        for row in range(part.num_asked):
            alone = part.of_row(row)
            try:
                made += self._chosen(logits[row : row + 1], ids, alone)()
            except NotFinite:
                made.append(NONE_ALLOWED)
        return tuple(made)

    def _chosen(
        self, logits: torch.Tensor, ids: torch.Tensor | None, part: Part
    ) -> Later[tuple[Children, ...]]:
        """Begin to choose the children as `_children`. This and its result raise NotFinite."""
        if part.opened.sampling.has_processors or part.sampled_in is not None:
            logits, ids = over_all(logits, ids, self.num_rows), None
        if part.opened.sampling.has_processors:
            # The same processors as the target's, on the drafter's logits. A drafter that cannot
            # follow the text's grammar drafts all the same: the target has the last word.
            with suppress(GrammarError):
                logits = self.forwards.processed(
                    logits[:, : self._num_valid(part)], part.opened, part.committed, part.drafted
                )
        if part.sampled_in is None:
            return self._coupled(logits, ids, part)
        return partial(self._sampled, logits, part, part.sampled_in)

    def _sampled(self, logits: torch.Tensor, part: Part, life: int) -> tuple[Children, ...]:
        """Return a draft sampled by the classical rules, score and distribution; logits [1, V]."""
        spec = part.opened.sampling
        token, score, ids, weights = sample_draft(
            logits,
            sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p),
            seed=spec.seed,
            life=life_of(spec.sample_index, life),
            number=part.number,
            num_valid=self._num_valid(part),
            max_candidates=self.max_candidates,
        )
        proposal = Proposal(tuple(ids.tolist()), tuple(weights.tolist()))
        return (Children((token,), (score,), (proposal,)),)

    def _coupled(
        self, logits: torch.Tensor, known: torch.Tensor | None, part: Part
    ) -> Later[tuple[Children, ...]]:
        """Begin to choose drafts of each row with the target's noise, and scores.

        logits, known  as in `Output`
        """
        spec, num_ranked = part.opened.sampling, part.opened.policy.branches
        sampling = sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        drawn = sampling, spec.seed, spec.sample_index
        ranked: Later[tuple[list[list[int]], list[list[float]]]]
        if self.translated is not None:
            places = [(place.position, place.begun, place.rest) for place in part.places]
            ranked = partial(
                self.translated.rank_scored,
                *(logits, *drawn, places, num_ranked),
                num_valid=self.vocab_size,
            )
        else:
            ranked = rank_later(
                *(logits, *drawn, part.positions, num_ranked),
                num_valid=self._num_valid(part),
                ids=known,
            )

        def end() -> tuple[Children, ...]:
            ids, scores = ranked()
            return tuple(
                Children(tuple(tokens), tuple(logs))
                for tokens, logs in zip(ids, scores, strict=True)
            )

        return end


def _no_children() -> tuple[Children, ...]:
    """Return (): no row was asked for."""
    return ()


def _children_of(choices: Choices) -> tuple[tuple[Children, ...], ...]:
    """Return the children that were chosen for each part."""
    return tuple(choice() for choice in choices)
