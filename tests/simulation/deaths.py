"""A coordinator that dies at any moment, and comes back with what was synced of its journal.

The records, the ledger and what a client is told behind its last token are the real ones
(`coordinator/journal`). The disk is played: it syncs what is noted after a while, in order, and of
the rest a death leaves a part, which may end within a record.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from coordinator.cluster import router_events as e
from coordinator.journal.ledger import Action, Append, KeptText, Ledger
from coordinator.journal.records import Asked, Came, Ended, Head, Record, read
from coordinator.text.session_events import Emit, NodeId
from coordinator.text.timed_session import Result
from proto.messages import FinishReason, Rule
from rehearsal.node import SimulatedNode
from rehearsal.world import PAUSE_S, Host
from rehearsal.world import World as Machines

if TYPE_CHECKING:
    from tests.simulation.world import World

HEAD = Head("toy", 0)
ROOM, LEAST_BYTES = 1 << 24, 1500
CLIENT_S = 0.5  # after the coordinator is back, until its clients are


class Disk:
    """A file that syncs what is written after a while."""

    def __init__(self, world: "World", random: Random) -> None:
        self.world = world
        self.random = random
        self.synced = b""
        self._waiting: deque[tuple[Action, Callable[[], None]]] = deque()

    def write(self, actions: list[Action], then: Callable[[], None]) -> None:
        """Do this, and then that once it is synced."""
        timeline = self.world.timeline
        for action in actions:
            self._waiting.append((action, then if action is actions[-1] else _nothing))
            due = timeline.now + self.world.scenario.faults.sync_s
            timeline.at(due, partial(self._sync, action))

    def _sync(self, action: Action) -> None:
        if not self._waiting or self._waiting[0][0] is not action:
            return  # its coordinator has died
        _, then = self._waiting.popleft()
        self._apply(action)
        then()

    def _apply(self, action: Action) -> None:
        self.synced = self.synced + action.line if isinstance(action, Append) else action.content

    def die(self) -> None:
        """Keep a part of what waits: whole records, and perhaps a piece of the next one."""
        waiting = [action for action, _ in self._waiting]
        self._waiting.clear()
        num_kept = self.random.randint(0, len(waiting))
        for action in waiting[:num_kept]:
            self._apply(action)
        if num_kept < len(waiting) and isinstance(last := waiting[num_kept], Append):
            self.synced += last.line[: self.random.randrange(len(last.line))]


class MortalHost(Host):
    """The coordinator, with a journal and clients that come back by the ids of their requests."""

    def __init__(self, machines: Machines, world: "World") -> None:
        super().__init__(machines)
        self._outside = world
        self._disk = Disk(world, Random(f"disk {world.scenario.seed}"))
        self._life, self._is_alive = 1, True
        self._num_told: dict[int, int] = {}  # tokens that a client has, by session
        self._over: set[int] = set()  # texts whose clients know the end
        self._begin_life({})
        self._disk.synced = self._ledger.compact().content

    def _begin_life(self, texts: dict[int, KeptText]) -> None:
        self._ledger = Ledger(HEAD, ROOM, LEAST_BYTES)
        self._kept = texts
        self._num_noted = {number: len(text.tokens) for number, text in texts.items()}
        self._reading: set[int] = set()  # texts whose clients are there
        self._back: set[int] = set()  # those whose clients are back, and wait for what they have
        self._ends: dict[int, Result | Ended] = {}  # texts that have ended

    # -- asking -----------------------------------------------------------------------------------

    def _submit(self) -> None:
        if self._is_alive:
            super()._submit()
        else:
            self.world.timeline.at(self.world.timeline.now + CLIENT_S, self._submit)

    def _ask(self, number: int, written: tuple[int, ...] = ()) -> None:
        if number not in self._kept:
            prompt = self.world.setting.texts[number - 1].prompt
            asked = Asked(str(number), 0.0, "/", "", "", {}, (prompt,), 1, number)
            self._note(asked)
            self._kept[number], self._num_noted[number] = KeptText(), 0
            self._reading.add(number)
            self._num_told.setdefault(number, 0)
        super()._ask(number, written)

    def _note(self, record: Record, then: Callable[[], None] | None = None) -> None:
        actions = self._ledger.note(record)
        self._disk.write(actions, then or _nothing)

    # -- telling ----------------------------------------------------------------------------------

    @property
    def waits_for_the_disk(self) -> bool:
        """Whether a text that is written again would have other tokens."""
        return self._outside.scenario.rule is not Rule.COUPLED

    def _perform(self, action: e.Action) -> None:
        match action:
            case e.Deliver(session, Emit() as emit):
                at = self._num_noted[session]
                self._num_noted[session] += len(emit.tokens)
                tell = partial(self._came, self._life, session, at, emit)
                self._noted(Came(str(session), 0, at, emit.tokens), tell)
            case e.End(session, Result() as result):
                tell = partial(self._ended, self._life, session, result)
                self._noted(Ended(str(session), 0, result.reason.value), tell)
            case _:
                super()._perform(action)

    def _noted(self, record: Record, tell: Callable[[], None]) -> None:
        if self.waits_for_the_disk:
            self._note(record, tell)
        else:
            self._note(record)
            tell()

    def _came(self, life: int, session: int, at: int, emit: Emit) -> None:
        if life != self._life:
            return
        self._kept[session].add(at, emit.tokens, None)
        if session in self._reading:
            self._tell(session, emit)
        else:
            self._come_back(session)

    def _ended(self, life: int, session: int, end: Result | Ended) -> None:
        if life != self._life:
            return
        self._ends[session] = end
        if session in self._reading:
            self._tell_end(session)
        else:
            self._come_back(session)

    def _tell(self, session: int, emit: Emit) -> None:
        self._num_told[session] += len(emit.tokens)
        self.world.watcher.delivered(session, emit)

    def _tell_end(self, session: int) -> None:
        end = self._ends[session]
        reason = end.reason if isinstance(end, Result) else FinishReason(end.reason)
        self._outside.judge.completed_for(session, reason)
        self._over.add(session)
        self._num_left -= 1
        self.world.over = self._num_left == 0
        if self.world.setting.submit_every_s is None:
            self._submit_later(PAUSE_S)

    def _come_back(self, session: int) -> None:
        """A client resumes its answer, if there is as much of it as it has."""
        if session not in self._back or len(self._kept[session].tokens) < self._num_told[session]:
            return
        self._back.discard(session)
        self._reading.add(session)
        self._outside.judge.stats["resumed"] += 1
        if (emit := self._kept[session].behind(self._num_told[session])) is not None:
            self._tell(session, emit)
        if session in self._ends:
            self._tell_end(session)

    # -- dying ------------------------------------------------------------------------------------

    def die(self) -> None:
        """End the coordinator, and with it the work of all nodes."""
        self._outside.tell("coordinator", "dies", "")
        self._is_alive = False
        self._life += 1
        self._disk.die()
        for node in self.world.nodes:
            node.crash()
        found = read(self._disk.synced)
        assert not found.garbled, f"the journal is damaged: {found.garbled}"
        synced: dict[int, int] = {}
        for record in found.records:
            if isinstance(record, Came):
                synced[int(record.name)] = record.at + len(record.tokens)
        waits = self.waits_in_truth
        self._outside.judge.died(self._num_told if waits else {}, synced)

    @property
    def waits_in_truth(self) -> bool:
        """What `waits_for_the_disk` must be."""
        return self._outside.scenario.rule is not Rule.COUPLED

    def come_back(self) -> None:
        """Start the coordinator again: it reads the journal, and goes on with its texts."""
        self._outside.tell("coordinator", "is back", "")
        self._is_alive = True
        ledger = Ledger(HEAD, ROOM)
        ledger.replay(read(self._disk.synced).records)
        texts = {int(name): answer.texts[0] for name, answer in ledger.answers.items()}
        self._begin_life(texts)
        self._ledger.answers.update(
            {
                name: type(answer)(answer.asked, [_copy(one) for one in answer.texts])
                for name, answer in ledger.answers.items()
            }
        )
        self._disk.write([self._ledger.compact()], _nothing)
        self.router = self._new_router()
        self._texts.clear()
        for node in self.world.nodes:
            self._outside.start(node)
        for number in sorted(texts):
            self._take_up(number)
        for number in sorted(self._num_told.keys() - self._over):
            delay_s = CLIENT_S * self._disk.random.random()
            client = partial(self._client_is_back, self._life, number)
            self.world.timeline.at(self.world.timeline.now + delay_s, client)

    def _take_up(self, number: int) -> None:
        """Go on with a text of the journal."""
        text = self._kept[number]
        if number in self._over:
            return
        if text.end is not None:
            self._ends[number] = text.end
        elif (reason := self._complete(number)) is not None:
            self._ends[number] = Ended(str(number), 0, reason.value)
        else:
            self._outside.judge.stats["taken up"] += 1
            self._ask(number, tuple(text.tokens))

    def _complete(self, number: int) -> FinishReason | None:
        """Why a text is complete although the journal does not say so."""
        asked, tokens = self.world.setting.texts[number - 1], self._kept[number].tokens
        if tokens and tokens[-1] in asked.limits.stop_ids:
            return FinishReason.STOP
        is_long = len(asked.prompt) + len(tokens) >= asked.limits.max_len
        return FinishReason.LENGTH if is_long else None

    def _client_is_back(self, life: int, number: int) -> None:
        """A client repeats its request by the same id."""
        if life != self._life or not self._is_alive:
            return
        if not self.is_known(number):
            self._ask(number)
            self._reading.discard(number)
        self._back.add(number)
        self._come_back(number)

    def is_known(self, number: int) -> bool:
        """Whether there is an answer by this id."""
        return number in self._kept

    # -- the world --------------------------------------------------------------------------------

    def ended(self, node_id: NodeId) -> None:
        """A process has ended; one that another coordinator has started is nobody's."""
        if self._is_alive and self.router.registry.find(node_id) is not None:
            super().ended(node_id)

    def greet(self, node: SimulatedNode) -> None:
        """A node introduces itself."""
        if self._is_alive and not node.alive:
            super().greet(node)

    def receive(self, node_id: NodeId, frame: bytes) -> None:
        """A frame comes; from a node of another coordinator it says nothing."""
        if self._is_alive and self.router.registry.find(node_id) is not None:
            super().receive(node_id, frame)

    def _handle(self, event: e.Event) -> None:
        if self._is_alive:
            super()._handle(event)


def _copy(text: KeptText) -> KeptText:
    return KeptText(list(text.tokens), list(text.logprobs), text.scored, text.end)


def _nothing() -> None:
    """Do nothing."""
