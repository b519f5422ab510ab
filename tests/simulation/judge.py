"""What must hold: the safety of every step, and the liveness of what follows the last fault.

Safety, after every step of every machine
    * every copy of the text is a beginning of what the target alone would have written, and within
      one life of a session at a node it never gets shorter
    * every token of the target's tree was drafted by the drafter, for that very path (path hashes)
    * what the drafter drafts is what its model says about that path: its cache is right; with
      other tokens than the target's it reads the text as its own tokenizer does
    * a verdict goes on from its base with the accepted tokens and one more, and is the truth
    * a pass is told once, with the drafts that it had when it was launched, whatever came since
    * an ack never counts over a gap, an Open that is not newer than another of its text changes
      nothing, and a text that was closed stays closed
    * an idle target has something to do or a deadline
    * what was emitted is the text to its end, with the right reason, and nothing after it
    * a draft is passed on to the target of its text and a verdict to its drafters, nobody else
    * a text has one target, and what another one still says of it does not make it longer
    * within a text no two drafters have one source number; under a classical rule one feeds it
Liveness is defined in `liveness.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.cluster import router_events
from coordinator.cluster.node import Health, Node, place_of
from coordinator.cluster.routing import Router
from coordinator.text.session import Session
from coordinator.text.session_events import Emit, EmitPrompt, EmitRead, NodeId
from coordinator.text.timed_session import Result
from drafter_node import compute as drafter
from drafter_node.translation.dispatcher import TranslatingDispatcher
from node.economics import WAIT_S_MAX
from node.events import Arrived
from proto import codec
from proto.messages import (
    COPIES,
    EARLIER_SOURCE,
    NGRAM_SOURCE,
    Close,
    Draft,
    Features,
    FinishReason,
    Message,
    Open,
    Role,
    Rule,
    Verdict,
)
from proto.tree import CommittedText, SpeculationTree
from rehearsal.cache import fold
from target_node import compute as target
from target_node import verifying
from tests.simulation.liveness import Liveness
from tests.simulation.scenario import Scenario, Text

if TYPE_CHECKING:
    from rehearsal.node import SimulatedNode
    from rehearsal.timeline import Timeline

EMPTY_PATH = (0, 0)  # digest and length


@dataclass(slots=True)
class Pass:
    """What a pass of the target was for one text when it was launched.

    has_right   the target knew the right next token then
    num_drafts  that it verifies
    is_told     a verdict has said what came of it
    """

    has_right: bool
    num_drafts: int
    is_told: bool = False


class Truth:
    """What the target alone would write, and every path that has been drafted beyond it."""

    def __init__(self, scenario: Scenario, text: Text, session: Session) -> None:
        self.limits = text.limits
        self.num_prompt = len(text.prompt)
        self.read_len = text.read_len
        self.tokens, self.reason = scenario.model.complete(text.prompt, text.limits)
        self.paths: dict[int, tuple[int, int]] = {}  # path hash -> digest and length
        self.said_len = 0  # how far any verdict has come
        # By target: the pass that is running, and the one that has ended last, which may not be
        # told yet.
        self.running: dict[str, Pass] = {}
        self.ended: dict[str, Pass] = {}
        self.emitted: list[int] = []
        self.finished: FinishReason | None = None
        hashes = CommittedText(session.text.key, self.tokens).path_hashes
        digest = 0
        self.paths[hashes[0]] = EMPTY_PATH
        for length, (token, path_hash) in enumerate(zip(self.tokens, hashes[1:], strict=True), 1):
            digest = fold(digest, token)
            self.paths[path_hash] = digest, length
        self.hashes = hashes


def _in_the_targets_tokens(node: "SimulatedNode", machine: Any) -> SpeculationTree:
    """Return the tree of a text at a node, with what its tokens say as the target would say it."""
    dispatcher = node.dispatcher
    if not isinstance(dispatcher, TranslatingDispatcher):
        tree = machine.tree
        assert isinstance(tree, SpeculationTree)
        return tree
    return dispatcher.translations[machine.opened.session].speech


class Judge:
    """Watches one world. Raises AssertionError."""

    def __init__(self, scenario: Scenario, timeline: "Timeline") -> None:
        self.scenario = scenario
        self.timeline = timeline
        self.truths: dict[int, Truth] = {}
        self.stats: Counter[str] = Counter()
        self.liveness: dict[int, Liveness] = {}  # by session
        self._told: dict[int, dict[NodeId, Role]] = defaultdict(dict)  # who was told, by session
        self._feeders: dict[int, NodeId] = {}  # the drafter that was told last, by session
        self._sessions: dict[int, Session] = {}
        self._targets: dict[int, NodeId] = {}  # the target that was told last, by session
        self._known: dict[int, int] = {}  # length of the coordinator's text, by session
        self._sources: dict[tuple[int, int], NodeId] = {}  # by session and source number
        # By node and text: life and length.
        self._lengths: dict[tuple[str, int], tuple[tuple[int, int], int]] = {}
        # Per life of a node and text: incarnation of the newest Open that was obeyed, and its tree.
        self._opened: dict[tuple[str, int, int], int] = {}
        self._trees: dict[tuple[str, int, int], Any] = {}
        self._dead: set[int] = set()  # texts whose coordinator has died since they were begun
        self._closed: set[tuple[str, int, int]] = set()  # per life of a node: texts
        # Drafters and texts of which this event has made them say that no more drafts come.
        self._done: set[tuple[str, int]] = set()
        # Per tree of a target: the draft numbers that have come, by life of the drafter.
        self._target_trees: dict[tuple[str, int], Any] = {}
        self._come: dict[tuple[str, int], dict[int, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )

    # -- facts ------------------------------------------------------------------------------------

    def begun(self, session: Session, text: Text) -> None:
        """A text begins."""
        truth = Truth(self.scenario, text, session)
        if (before := self.truths.get(session.session)) is not None:
            assert session.session in self._dead, "a text is opened twice"
            self._dead.discard(session.session)
            truth.emitted, truth.finished = before.emitted, before.finished
        self.truths[session.session] = truth
        self._sessions[session.session] = session
        self._known[session.session] = len(session.text)
        self.liveness[session.session] = Liveness(
            self.scenario, self.timeline, self.stats, session, len(truth.tokens)
        )

    def died(self, num_told: dict[int, int], synced: dict[int, int]) -> None:
        """The coordinator dies: it may have told only what its journal has, where that matters.

        num_told  tokens that clients have of texts of which another run would write others
        """
        for number, told in num_told.items():
            assert told <= synced.get(number, 0), "what was told is not in the journal"
        self.stats["coordinator died"] += 1
        self._dead.update(self.truths)
        for known in (self._told, self._feeders, self._targets, self._sources, self._known):
            known.clear()
        self._sessions.clear()
        for number in [one for one, truth in self.truths.items() if truth.finished is None]:
            self.liveness.pop(number, None)

    def completed_for(self, session: int, reason: FinishReason) -> None:
        """A client is told that this is all."""
        truth = self.truths[session]
        assert truth.finished is None, "a text ends twice"
        truth.finished = reason
        if session in self.liveness:
            self.liveness[session].completed()
        else:
            self.stats["texts"] += 1
        whole = truth.tokens[truth.num_prompt :]
        assert tuple(truth.emitted) == whole, "cut short"
        assert reason is truth.reason, f"ended by {reason}, not by {truth.reason}"

    def disturbed(self) -> None:
        """Something of the bad time has just shown itself."""
        for liveness in self.liveness.values():
            liveness.disturbed()

    def told(self, node_id: NodeId, message: Message, router: Router) -> None:
        """The router sends a message of its own."""
        if not isinstance(message, Open):
            return
        session = message.session
        num_prompt = self.truths[session].num_prompt
        assert message.num_prompt == num_prompt, "written tokens count as the prompt"
        self.liveness[session].disturbed()
        node = router.registry.find(node_id)
        assert node is not None, "a node that is gone is told a text"
        self._told[session][node_id] = node.role
        if node.role is Role.TARGET:
            self._told_to_target(session, node, router)
            return
        before = router.registry.find(self._feeders.get(session, node_id))
        if message.rule is not Rule.COUPLED and before is not None and before is not node:
            assert before.health is not Health.READY, "two drafters feed a classical text"
        self._feeders[session] = node_id

    def _told_to_target(self, session: int, node: Node, router: Router) -> None:
        """A target is told a text: no other one that is there may have it."""
        last = self._targets.get(session, node.id)
        self._targets[session] = node.id
        self.stats["moved"] += place_of(last) != node.place
        if self.scenario.keeps_bits and not self.scenario.same_bits:
            assert place_of(last) == node.place, "a text goes on with other bits"
        before = router.registry.find(last)
        if before is None or before is node or before.health is not Health.READY:
            return
        there = router.open_texts
        at = [one.targets for one in there if one.timed.machine.session == session]
        assert before.id not in at[0], "a text is told to two targets"

    def _is_heard(self, node: "SimulatedNode", session: int) -> bool:
        """Whether this target is the one that writes the text, as the coordinator sees it."""
        return self._targets.get(session) == node.id

    def passed_on(self, receiver: NodeId, frame: bytes, router: Router) -> None:
        """The router passes on what a node has sent."""
        message = codec.decode(frame)
        assert isinstance(message, Draft | Verdict | Features)
        wanted = Role.TARGET if isinstance(message, Draft) else Role.DRAFTER
        kind = type(message).__name__
        assert message.session in router.sessions, f"a {kind} reaches a text that is not its own"
        assert router.registry.find(receiver), f"a {kind} reaches a node that is gone"
        assert self._told[message.session].get(receiver) is wanted, (
            f"a {kind} reaches a node that does not have its text"
        )

    def delivered(self, session: int, item: Emit | EmitPrompt | EmitRead) -> None:
        """The reader of a text is handed something."""
        truth = self.truths[session]
        assert truth.finished is None, "tokens are emitted after the end"
        if isinstance(item, EmitRead):
            assert 0 < item.num_read <= truth.num_prompt, "more is read than there is"
            return
        assert isinstance(item, Emit)
        truth.emitted += item.tokens
        so_far = truth.num_prompt + len(truth.emitted)
        assert so_far <= len(truth.tokens), "a token is told twice"
        expected = truth.tokens[truth.num_prompt : so_far]
        assert tuple(truth.emitted) == expected, "what is emitted is not the target's text"

    def completed(self, session: int, result: Result) -> None:
        """The reader of a text is told that this is all."""
        truth = self.truths[session]
        assert truth.finished is None, "a text ends twice"
        truth.finished = result.reason
        self.liveness[session].completed()
        has_left = truth.read_len is not None and len(truth.emitted) >= truth.read_len
        if has_left and result.reason is FinishReason.STOP:
            self.stats["left by their readers"] += 1
            return
        assert truth.num_prompt + len(truth.emitted) == len(truth.tokens), "cut short"
        assert result.reason is truth.reason, f"ended by {result.reason}, not by {truth.reason}"

    def launched(self, node: "SimulatedNode", action: drafter.Compute | target.Compute) -> None:
        """A node begins a forward."""
        lanes = {part.feed.lane for part in action.parts}
        assert len(lanes) == len(action.parts), "two parts of a pass in one lane"
        assert len(lanes) <= self.scenario.num_per_pass, "too many texts in a pass"
        for part in action.parts:
            assert part.feed.masks is not None or len(lanes) == 1, "a chunk does not come alone"
            self._check_part(node, part)
        if len(lanes) > 1:
            self.stats[f"shared by the {node.role}"] += 1

    def _check_part(self, node: "SimulatedNode", part: drafter.Part | target.Part) -> None:
        num_rows = len(part.feed.tokens)
        fixed_rows = self.scenario.fixed_rows
        if part.feed.masks is not None:
            assert num_rows <= 64, f"{num_rows} rows in one pass"
            if node.role is Role.TARGET and fixed_rows is not None:
                assert num_rows <= fixed_rows, f"{num_rows} rows in a pass of {fixed_rows}"
        if isinstance(part, drafter.Part):
            last = max(part.feed.positions)
            assert last < self.scenario.drafter_max_len, "the drafter reads beyond its model's end"
            num_again = sum(bool(place.rest) for place in part.places)
            assert num_again <= 1, "only what lies above the text's end is asked along with it"
            num_asked = part.num_asked - num_again
            assert num_asked <= max(1, part.opened.policy.width), "too many rows are asked"
        else:
            asked = part.feed.positions[num_rows - part.num_asked :]
            assert part.positions == tuple(position + 1 for position in asked)
            if self._is_heard(node, part.opened.session):
                self.liveness[part.opened.session].pass_started()
            truth, tree = self.truths[part.opened.session], self._tree_of(node, part)
            following = truth.tokens[len(tree.text) : len(tree.text) + 1]
            # Among its rows: a long chain may be preferred to a draft that is likelier by itself.
            rows = zip(part.feed.positions, part.feed.tokens, strict=True)
            has_right = any((len(tree.text), token) in rows for token in following)
            truth.running[node.name] = Pass(has_right, max(0, part.num_asked - 1))

    @staticmethod
    def _tree_of(node: "SimulatedNode", part: target.Part) -> SpeculationTree:
        tree = node.dispatcher.texts[part.opened.session].tree
        assert isinstance(tree, SpeculationTree)
        return tree

    def sent(self, node: "SimulatedNode", message: Message) -> None:
        """A node sends a message."""
        match message:
            case Verdict():
                self._check_verdict(node, message)
                truth = self.truths[message.session]
                if self._is_heard(node, message.session):
                    self.liveness[message.session].verdict_issued(message, truth.limits)
            case Draft():
                said_by = self._sources.setdefault((message.session, message.source), node.id)
                assert said_by == node.id, "a source number is used twice"
                if message.done:
                    self._done.add((node.name, message.session))
                self.liveness[message.session].draft_sent(node.name, message)
            case _:
                pass

    def routed(self, router: Router, event: router_events.Event) -> None:
        """The router has handled an event."""
        router.check()
        if isinstance(event, router_events.Arrived) and isinstance(event.message, Verdict):
            self._check_heard(event.node, event.message.session)
        dropped = [node.id for node in router.registry.nodes if node.num_bad_frames]
        assert not dropped, "an honest message is outside of its text"

    def _check_heard(self, node_id: NodeId, session: int) -> None:
        """Only the target that has the text may make it longer."""
        length = len(self._sessions[session].text)
        if node_id != self._targets.get(session):
            self.stats["verdicts of lost targets"] += 1
            assert length == self._known[session], "the verdict of a lost target is applied"
        self._known[session] = length

    def handled(self, node: "SimulatedNode", event: Any) -> None:
        """A node has handled an event and its actions are done."""
        node.dispatcher.check()
        assert not node.entrance.num_dropped, "an honest message is outside of its text"
        message = event.message if isinstance(event, Arrived) else None
        if isinstance(message, Close):
            self._closed.add((node.name, node.life, message.session))
        if isinstance(message, Open):
            self._check_open(node, message)
        for session, machine in node.dispatcher.texts.items():
            text = (node.name, node.life, session)
            assert text not in self._closed, "a closed text is open again"
            assert machine.opened.session == session
            truth = self.truths[session]
            tree, opened = _in_the_targets_tokens(node, machine), machine.opened
            self._check_text(node, tree, opened, truth)
            if node.role is Role.DRAFTER:
                is_done = (node.name, session) in self._done
                self._check_drafts(node, tree, truth, is_done=is_done)
            else:
                self._check_target(node, machine, truth)
        self._done.clear()
        if isinstance(message, Verdict) and message.session in node.dispatcher.texts:
            self.liveness[message.session].verdict_applied(node.name, message)

    def heard(self, node: "SimulatedNode", event: Any) -> None:
        """A node has been told of an event, and has not answered yet."""
        if isinstance(event, target.Computed):
            for session in node.dispatcher.texts:
                if self._is_heard(node, session):
                    self.liveness[session].pass_ended()
                truth = self.truths[session]
                if (ended := truth.running.pop(node.name, None)) is not None:
                    truth.ended[node.name] = ended
        message = event.message if isinstance(event, Arrived) else None
        if isinstance(message, Draft) and message.session in node.dispatcher.texts:
            come = self._come[node.name, message.session][message.incarnation]
            come.update(range(message.first_number, message.number + 1))
            if self._is_heard(node, message.session):
                self.liveness[message.session].draft_arrived(message)

    def rested(self, node: "SimulatedNode") -> None:
        """A node has handled all that was there and has ticked."""
        if node.role is Role.DRAFTER or node.is_computing:
            return
        if all(machine.finished for machine in node.dispatcher.texts.values()):
            return
        soon = node.deadline <= self.timeline.now + WAIT_S_MAX
        assert soon, "the target waits without a deadline"

    def watch_clock(self) -> None:
        """Time has passed."""
        for liveness in self.liveness.values():
            liveness.watch_clock()

    def occupied(self, node: "SimulatedNode", began: float, until: float) -> None:
        """See `Watcher`."""

    def ended(self) -> None:
        """The last text is complete."""
        for truth in self.truths.values():
            assert truth.finished is not None

    # -- checks -----------------------------------------------------------------------------------

    def _check_open(self, node: "SimulatedNode", message: Open) -> None:
        text = (node.name, node.life, message.session)
        machine = node.dispatcher.texts.get(message.session)
        tree = None if machine is None else machine.tree
        if tree is None or tree is self._trees.get(text):
            return
        assert message.incarnation > self._opened.get(text, 0), "an old Open has been obeyed"
        self._opened[text], self._trees[text] = message.incarnation, tree

    def _check_text(
        self, node: "SimulatedNode", tree: SpeculationTree, opened: Open, truth: Truth
    ) -> None:
        tokens = tree.text.tokens
        life = (node.life, opened.incarnation)
        before = self._lengths.get((node.name, opened.session))
        if before == (life, len(tokens)):
            return
        assert tuple(tokens) == truth.tokens[: len(tokens)], f"the {node.role}'s text is wrong"
        if before is not None and before[0] == life:
            assert len(tokens) >= before[1], f"the {node.role}'s text got shorter"
        self._lengths[node.name, opened.session] = life, len(tokens)
        if isinstance(node.dispatcher, TranslatingDispatcher):
            self._check_reading(node.dispatcher, opened.session, tokens)

    def _check_reading(
        self, dispatcher: TranslatingDispatcher, session: int, tokens: Sequence[int]
    ) -> None:
        languages = self.scenario.languages
        assert languages is not None
        ends = self.scenario.model.stop_ids
        said = b"".join(languages.heard(token, ends) for token in tokens)
        own = [
            *dispatcher.texts[session].tree.text.tokens,
            *dispatcher.translations[session].tail.tokens,
        ]
        read = [*languages.own.starts, *languages.own.read(said)[0]]
        assert own == read, "the drafter reads the text as its tokenizer does not"

    def _check_target(
        self, node: "SimulatedNode", machine: verifying.Verifying, truth: Truth
    ) -> None:
        self._check_copies(machine, truth)
        for key in machine.tree.nodes:
            assert key in truth.paths, "the target's tree holds a token that nobody drafted there"
        text = node.name, machine.opened.session
        if self._target_trees.get(text) is not machine.tree:
            self._target_trees[text] = machine.tree
            self._come.pop(text, None)

    def _check_drafts(
        self, at: "SimulatedNode", tree: SpeculationTree, truth: Truth, *, is_done: bool
    ) -> None:
        model = self.scenario.model
        for key, node in tree.nodes.items():
            if key in truth.paths:
                continue
            digest, length = truth.paths[node.parent]
            tokens, _ = model.propose(digest, at.index)
            is_said = node.token in tokens or self._is_meant(node.token, tokens, is_done=is_done)
            assert is_said, "the drafter drafts what its model does not say"
            truth.paths[key] = fold(digest, node.token), length + 1
        deepest = max((node.position for node in tree.nodes.values()), default=0)
        ahead = deepest + 1 - len(tree.text)
        assert ahead <= self.scenario.policy.window, "the drafter runs beyond its window"
        # The target adds a token itself, so a draft of the very last one is never worth anything.
        assert deepest + 1 < truth.limits.max_len, "the drafter drafts past the longest text"

    def _is_meant(self, token: int, tokens: Sequence[int], *, is_done: bool) -> bool:
        """Whether a drafter that has other tokens says this one where it means one of `tokens`.

        It knows a single end of a text. Of what it has no time to end it says what there is.
        """
        languages, ends = self.scenario.languages, self.scenario.model.stop_ids
        if languages is None:
            return False
        if token in ends or not is_done:
            return token in ends and any(one in ends for one in tokens)
        words = [languages.target.bytes_of[one] or b"" for one in (token, *tokens)]
        return any(word.startswith(words[0]) for word in words[1:])

    def _check_copies(self, machine: verifying.Verifying, truth: Truth) -> None:
        """What the target drafts by itself stands somewhere in what was written, or given to it."""
        lookup = self.scenario.lookup
        for key, node in machine.tree.nodes.items():
            if node.source in COPIES and key not in truth.paths:
                assert lookup is not None, "the target drafts by itself without being told to"
                known = {*machine.tree.text.tokens, *lookup.reference}
                if node.source == EARLIER_SOURCE:
                    assert lookup.remember, "the target copies texts that are none of its business"
                    known = {token for other in self.truths.values() for token in other.tokens}
                assert node.token in known, "the target copies what is not there"
                digest, length = truth.paths[node.parent]
                truth.paths[key] = fold(digest, node.token), length + 1
        if lookup is None:
            return
        deepest = max((node.position for node in machine.tree.nodes.values()), default=0)
        assert deepest + 1 < truth.limits.max_len, "the target drafts past the longest text"

    def _check_verdict(self, node: "SimulatedNode", verdict: Verdict) -> None:
        truth = self.truths[verdict.session]
        base_len, tokens = verdict.base_len, verdict.tokens
        assert tokens, "a verdict says nothing"
        assert base_len <= len(truth.tokens), "a verdict beyond the end"
        assert truth.hashes[base_len] == verdict.base_hash, "a verdict on another text"
        end = base_len + len(tokens)
        assert tokens == truth.tokens[base_len:end], "a verdict is not the target's text"
        surplus = len(tokens) - verdict.num_accepted
        is_repeated = verdict.num_drafted == 0 and end <= truth.said_len
        assert surplus == 1 or is_repeated or (surplus == 0 and end == len(truth.tokens)), (
            f"{verdict.num_accepted} accepted tokens make {len(tokens)}"
        )
        truth.said_len = max(truth.said_len, end)
        if verdict.model_us:  # else it says again what was lost
            self._check_told(verdict, truth.ended.get(node.name))
        if self.scenario.is_oracle and end < len(truth.tokens):
            num_right = verdict.num_drafted
            if self.scenario.policy.branches > 1 or self.scenario.languages is not None:
                # Of a tree a path is right, and it begins with a draft; but a detour may have come
                # while the first choice is still on its way. So may a token that another one begins
                # with, from a drafter that has other tokens.
                last = truth.ended.get(node.name)
                had_right = last is not None and last.has_right
                num_right = max(had_right * min(1, num_right), verdict.num_accepted)
            assert verdict.num_accepted == num_right, "an oracle is contradicted"
        assert len(verdict.sources) in (0, verdict.num_accepted)
        if NGRAM_SOURCE in verdict.sources:
            self.stats["copied"] += 1
        if EARLIER_SOURCE in verdict.sources:
            self.stats["copied from earlier texts"] += 1
        if self.scenario.languages is not None:
            self.stats["translated"] += verdict.num_accepted
        self.stats[f"cause {verdict.cause.name}"] += 1
        if verdict.least_chance:
            self.stats["in turns"] += 1
            self.stats["accepted in turns"] += verdict.num_accepted
        for ack in verdict.acks:
            come = self._come[node.name, verdict.session][ack.incarnation]
            gap = next((n for n in range(1, ack.number + 1) if n not in come), None)
            assert gap is None, f"draft {gap} never came, but drafts up to {ack.number} are acked"

    @staticmethod
    def _check_told(verdict: Verdict, ended: Pass | None) -> None:
        assert ended is not None, "a verdict tells of a pass that has not ended"
        assert not ended.is_told, "a pass is told twice"
        ended.is_told = True
        assert verdict.num_drafted == ended.num_drafts, (
            f"a verdict counts {verdict.num_drafted} drafts, but its pass had {ended.num_drafts}"
        )
