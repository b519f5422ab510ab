"""Runs the Computes of a target: one pass each, and the choice or judgement by its logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch

from engine.choice.classical_rules import Distribution, block_trial, token_trial
from engine.choice.coupling import choose, choose_later
from engine.choice.coupling_on_gpu import Later
from engine.choice.judging import judge, life_of
from engine.choice.logprobs import report
from engine.choice.sampling import Sampling, sampling_of
from engine.device import fetch, is_host, send
from engine.errors import GrammarError, NotFinite
from engine.forward.forward import Layers, are_finite, as_bytes
from engine.forward.not_finite import Again
from engine.heads.head_loading import LoadedHead
from engine.loading import Engine
from engine.places import Places
from engine.room import scored_rows
from node.costs import Costs
from node.dispatcher import Dispatcher
from node.entrance import Entrance, Own
from node.forwards import Forwards, SimulatedDevice, in_two, vocabulary_of
from node.lanes import Lanes
from node.loading import kept_of, placing_of
from node.loop import Loop
from node.placing import Place, Placing
from node.process import Heart
from node.rows import PREFILL_CHUNKS
from node.turns import Launched
from proto.links.transport import Connection
from proto.messages import OFF, Logprobs, Role, Rule, Welcome
from proto.node_config import NodeConfig
from target_node.accepting import accepted_path, rows_on_text
from target_node.compute import (
    NO_TOKEN,
    Action,
    Compute,
    Computed,
    FeatureRows,
    Judge,
    Outcome,
    Part,
)
from target_node.known import Known
from target_node.remembering import memory_of
from target_node.resting import Courses
from target_node.scheduling import Schedule
from target_node.verifying import Verifying

TRIALS = {Rule.TOKEN: token_trial, Rule.BLOCK: block_trial}


def serve(
    config: NodeConfig,
    engine: Engine,
    welcome: Welcome,
    connection: Connection,
    heart: Heart,
    *,
    has_lifeline: bool = True,
) -> NoReturn:
    """Verify for the coordinator that has sent this Welcome; never returns (see `Loop.run`)."""
    executor, device = engine.executor, SimulatedDevice.of(config)
    places = engine.places
    elsewhere = {} if places is None else {Place.SHARED: places.measured[Place.SHARED]}
    memory = memory_of(config, engine, kept_of(config))
    known = Known(
        fixed_rows=engine.executor.fixed_rows,
        costs=Costs(
            device.at_least(engine.pass_s),
            {k: v for k, v in elsewhere.items() if v},
            is_alone=config.computes_alone,
        ),
        courses=Courses(memory.earlier),
        placing=_placing(config, places),
        chunk=PREFILL_CHUNKS[engine.loaded.device.type],
        scored_chunk=scored_rows(engine.loaded.vocab_size),
    )
    lanes = Lanes(executor.lanes.count, executor.capacity, windows=executor.windows)
    schedule = Schedule(lanes, known, num_per_pass=executor.num_lanes_per_pass)
    dispatcher: Dispatcher[Verifying, Computed, Action] = Dispatcher(lanes, schedule)
    forwards = Forwards(
        *(executor, heart, device, vocabulary_of(config), engine.pass_s),
        on_gpu=engine.loaded.device.type == "cuda",
    )
    worker = Worker(forwards, places)
    loaded = engine.loaded
    assert not isinstance(loaded, LoadedHead), "a target is no head"
    own = Own(Role.TARGET, loaded.vocab_size, engine.max_len, loaded.num_layers)
    loop: Loop[Any, Any]
    if engine.home_drafter is None:
        entrance: Entrance[Computed, Action] = Entrance(dispatcher, own)
        loop = Loop(connection, heart, executor, entrance, worker.launch)
    else:
        from target_node.home_worker import WithDrafter  # a target alone loads no drafter

        both = WithDrafter(
            *(config, engine, engine.home_drafter, dispatcher, known),
            *(worker.launch, welcome.vocab_size, heart),
        )
        loop = both.loop(connection, heart, own)
    loop.remember = memory.keep
    loop.run(has_lifeline=has_lifeline)


def _placing(config: NodeConfig, places: Places | None) -> Placing | None:
    """Return what decides where passes run, or whether models take turns; None: nothing does."""
    if places is not None:
        return placing_of(places, config.placement)
    return Placing(has_drafters_core=True) if config.shares_gpu else None


@dataclass(frozen=True, slots=True)
class Begun:
    """A pass that was launched; all lists have an entry for each text.

    asks      rows whose logits are wanted
    layers    whose hidden states are wanted
    logits    [n, V] of these rows, on the device
    choices   returns the tokens chosen at these rows; None: nothing is chosen yet
    features  [number of all rows, width] on the device, or None
    """

    asks: Sequence[range]
    layers: Layers
    logits: Sequence[torch.Tensor]
    choices: Sequence[Later[list[int]] | None]
    features: torch.Tensor | None


class Worker:
    """Computes for one target: runs passes, and chooses or judges tokens by their logits.

    places  the CPU cores between which passes move; None: there is no choice
    """

    def __init__(self, forwards: Forwards, places: Places | None = None) -> None:
        self.forwards = forwards
        self.places = places

    def launch(self, action: Compute) -> Launched[Computed]:
        """Start a pass, and the choices at the asked rows; return what says when it ends."""
        return self.forwards.as_launched(self._in_two(action))

    def compute(self, action: Compute) -> Computed:
        """Run the Compute and return its result; on one rank, lack of memory is a result, too.

        Valid once a simulated device has ended it.

        Raises EngineError if one of several ranks lacks memory.
        """
        return self._in_two(action)()

    def _in_two(self, action: Compute) -> Later[Computed]:
        """Launch the pass; return what ends it. Errors as for `compute`, at either moment."""
        return in_two(
            partial(self._run, action),
            partial(self._ended, action),
            partial(self._failed, action),
        )

    def _failed(self, action: Compute, error: RuntimeError | MemoryError) -> Computed:
        """Return the result of a pass that lacks memory. Raises any other error."""
        failure, is_alone = self.forwards.without_memory(error), len(action.parts) == 1
        nothing = Outcome((), is_unusual=True, failure=failure, is_cause=is_alone)
        return Computed(action.ticket, (nothing,) * len(action.parts), self.forwards.done())

    def _run(self, action: Compute) -> Begun:
        """Launch a pass and the choices of its tokens."""
        if self.places is not None:
            self.places.go(action.place)
        parts = action.parts
        asks = [_rows_asked_of(part) for part in parts]
        layers = tuple(dict.fromkeys(layer for part in parts for layer in part.layers))
        out = self.forwards.run([part.feed for part in parts], asks, layers)
        ends = pairwise(accumulate(map(len, asks), initial=0))
        logits = [out.logits[start:end] for start, end in ends]
        choices = list(map(self._choice, parts, logits))
        return Begun(asks, layers, logits, choices, out.features)

    def _choice(self, part: Part, logits: torch.Tensor) -> Later[list[int]] | None:
        """Begin to choose a text's tokens by its logits [n, V]; None: what ends the pass does."""
        if part.judge is not None or not part.num_asked:
            return None
        spec = part.opened.sampling
        try:
            processed = self._processed(logits, part)
        except (GrammarError, NotFinite):  # both are found again, and how far the text can go
            return None
        drawn = spec.seed, spec.sample_index, part.positions
        return choose_later(processed, _sampling_of(part), *drawn)

    def _ended(self, action: Compute, begun: Begun) -> Computed:
        """Return what came of a pass, once its device has ended it."""
        parts, layers = action.parts, begun.layers
        outcomes: list[Outcome | None] = [
            self._outcome_if_finite(part, logits, choice)
            for part, logits, choice in zip(parts, begun.logits, begun.choices, strict=True)
        ]
        if begun.features is not None:
            ends = pairwise(accumulate((len(part.feed.tokens) for part in parts), initial=0))
            outcomes = [
                outcome and _with_features(part, outcome, begun.features[start:end], layers)
                for part, outcome, (start, end) in zip(parts, outcomes, ends, strict=True)
            ]
        # Last, because another forward overwrites the results that this one has on the device.
        whole = tuple(
            outcome or self._again(part, len(ask), layers)
            for part, ask, outcome in zip(parts, begun.asks, outcomes, strict=True)
        )
        return Computed(action.ticket, whole, self.forwards.done())

    def _outcome_if_finite(
        self, part: Part, logits: torch.Tensor, choice: Later[list[int]] | None
    ) -> Outcome | None:
        """Return the outcome by the logits [n, V] of one text; None if some are not finite.

        choice  returns the chosen tokens; None: nothing was chosen yet
        """
        try:
            if choice is not None:
                tokens = tuple(choice())
                return Outcome(tokens, None, _logprobs(logits, tokens, part))
            return self._outcome_as_far_as_held(
                part, Again(logits, (True,) * max(1, part.num_asked), None)
            )
        except NotFinite:
            return None

    def _again(self, part: Part, num_asked: int, layers: Layers) -> Outcome:
        """Compute a text's rows again, one by one, and return the outcome.

        So a bad draft spoils no other row.
        """
        again = self.forwards.run_again(part.feed, num_asked, layers)
        bad = Outcome((), is_unusual=True, bad_at=part.feed.positions[-num_asked])
        if again.culprit is not None:
            return replace(bad, bad_at=again.culprit)
        try:
            outcome = self._outcome_as_far_as_held(part, again)
        except NotFinite:  # finite logits may have been made infinite, for example by biases
            return bad
        outcome = replace(outcome, is_unusual=True)
        if again.features is None:
            return outcome
        return _with_features(part, outcome, again.features, layers)

    def _outcome_as_far_as_held(self, part: Part, rows: Again) -> Outcome:
        """Return the outcome by the good rows after which the text's grammar can be followed.

        What cannot be followed behind a draft ends no text: alone, the target may never come there.
        If the draft is right, the next pass begins with it and finds the same. Raises NotFinite.
        """
        try:
            return self._outcome_of_good(part, rows)
        except GrammarError as error:
            paths = part.paths()
            is_good = tuple(
                good and self._can_follow(part, rows.logits[row : row + 1], paths[row])
                for row, good in enumerate(rows.is_good)
            )
            if not is_good[0]:
                return _stuck(error)
            outcome = self._outcome_of_good(part, replace(rows, is_good=is_good))
            return replace(outcome, is_unusual=True)

    def _can_follow(self, part: Part, logits: torch.Tensor, path: tuple[int, ...]) -> bool:
        """True if the text's grammar has a mask for the row with these logits [1, V]."""
        try:
            self._processed(logits, part, [path])
        except GrammarError:
            return False
        return True

    def _outcome_of_good(self, part: Part, rows: Again) -> Outcome:
        """Return the outcome by the good rows. Raises NotFinite, GrammarError."""
        if all(rows.is_good):
            return self._outcome(part, rows.logits)
        if part.judge is not None:
            return self._outcome_of_chain(part, part.judge, rows)
        return self._outcome_of_tree(part, rows)

    def _outcome_of_chain(self, part: Part, wanted: Judge, again: Again) -> Outcome:
        """Return the outcome of a chain, judged up to the first draft whose row is bad.

        If that draft is accepted, no token follows it here, and the next pass begins with it.
        """
        count = again.is_good.index(False)
        wanted = replace(wanted, drafts=wanted.drafts[:count], proposals=wanted.proposals[:count])
        logits = again.logits[:count]
        part = _first_rows(part, count)
        num_accepted, tokens = _judged(
            self._processed(logits, part), _sampling_of(part), wanted, part, is_cut=True
        )
        return Outcome(tokens, num_accepted, _logprobs(logits, tokens, replace(part, judge=wanted)))

    def _outcome_of_tree(self, part: Part, again: Again) -> Outcome:
        """Return the outcome of a tree, with the target's choices at the good rows only."""
        good = [row for row, is_good in enumerate(again.is_good) if is_good]
        logits, spec = again.logits[good], part.opened.sampling
        positions, paths = [part.positions[row] for row in good], part.paths()
        processed = self._processed(logits, part, [paths[row] for row in good])
        chosen = choose(processed, _sampling_of(part), spec.seed, spec.sample_index, positions)
        tokens = [NO_TOKEN] * len(again.is_good)
        for row, token in zip(good, chosen, strict=True):
            tokens[row] = token
        return Outcome(tuple(tokens), None, _logprobs(again.logits, tokens, part))

    def _outcome(self, part: Part, logits: torch.Tensor) -> Outcome:
        """Return the outcome by the logits [n, V] of one text. Raises NotFinite, GrammarError."""
        tokens: tuple[int, ...] = ()
        num_accepted: int | None = None
        spec = part.opened.sampling
        sampling = _sampling_of(part)
        if part.judge is not None:
            processed = self._processed(logits, part)
            num_accepted, tokens = _judged(processed, sampling, part.judge, part)
        elif part.num_asked:
            processed = self._processed(logits, part)
            tokens = tuple(
                choose(processed, sampling, spec.seed, spec.sample_index, part.positions)
            )
        return Outcome(tokens, num_accepted, _logprobs(logits, tokens, part))

    def _processed(
        self, logits: torch.Tensor, part: Part, paths: Sequence[tuple[int, ...]] | None = None
    ) -> torch.Tensor:
        """Return the logits [n, V] after this text's processors, each row with its own path.

        paths  of these rows; None: the rows are all that were asked
        """
        if not part.opened.sampling.has_processors:
            return logits
        paths = part.paths() if paths is None else paths
        return self.forwards.processed(logits, part.opened, part.committed, paths)


def _stuck(error: GrammarError) -> Outcome:
    """Return the outcome for a text whose grammar cannot be followed; it ends the text."""
    why = f"the target cannot follow this text's grammar: {error}"
    return Outcome((), is_unusual=True, failure=why, is_cause=True)


def _sampling_of(part: Part) -> Sampling:
    spec = part.opened.sampling
    return sampling_of(spec.temperature, spec.top_k, spec.top_p, spec.min_p)


def _first_rows(part: Part, count: int) -> Part:
    """Return the part with only the first `count` of the asked rows."""
    num_left_out = part.num_asked - count
    feed = replace(part.feed, tokens=part.feed.tokens[: len(part.feed.tokens) - num_left_out])
    return replace(part, feed=feed, num_asked=count, parents=part.parents[: count - 1])


def _rows_asked_of(part: Part) -> range:
    num_rows = len(part.feed.tokens)
    return range(0 if part.scored else num_rows - part.num_asked, num_rows)


def _with_features(part: Part, outcome: Outcome, features: torch.Tensor, layers: Layers) -> Outcome:
    """Return the outcome with the features of the rows on the text, out of features [n, F].

    layers  whose hidden states those are; other texts of the pass may want others
    """
    if not part.layers or outcome.failure:
        return outcome
    if part.layers != layers:
        size = features.shape[1] // len(layers)
        blocks = [layers.index(layer) * size for layer in part.layers]
        features = torch.cat([features[:, block : block + size] for block in blocks], dim=1)
    rows = rows_on_text(part, outcome)
    there = features[: len(rows)] if rows[-1] == len(rows) - 1 else _picked(features, rows)
    # Decided where they are: for a chunk of a prompt the host would take longer than a GPU's pass.
    is_finite = None if is_host(there) else there.isfinite().all()[None]
    found = fetch(there)
    if not (are_finite(found) if is_finite is None else bool(fetch(is_finite))):
        return outcome  # a head can do without features
    dtype = str(features.dtype).removeprefix("torch.")
    return replace(outcome, features=FeatureRows(dtype, len(rows), as_bytes(found)))


def _picked(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return these rows of a tensor, on the same device."""
    return tensor[send(torch.tensor(rows), tensor.device)]


def _judged(
    logits: torch.Tensor, sampling: Sampling, wanted: Judge, part: Part, *, is_cut: bool = False
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
        is_cut=is_cut,
    )


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], part: Part) -> Logprobs | None:
    """Return the logprobs of the chosen tokens that can be committed; None if not wanted."""
    spec = part.opened.sampling
    if not spec.reports:
        return None
    if part.scored:
        reported = report(logits, part.scored, spec.num_prompt_logprobs)
    elif tokens and spec.num_logprobs != OFF:
        if part.judge is None:
            rows = accepted_path(part.drafted, part.parents, tokens)
            rows = [row for row in rows if tokens[row] != NO_TOKEN]
            logits, tokens = _picked(logits, rows), [tokens[row] for row in rows]
        reported = report(logits, tokens, spec.num_logprobs)
    else:
        return None
    return Logprobs(reported.ids, reported.values, reported.ranks)
