"""The entrance of a drafter that has another tokenizer than the target (pure).

It stands between the wire and the `Dispatcher`: what is behind it knows the drafter's tokens alone,
and what is sent has the target's.

    Open         -> Open, and the tail of the text to its machine
    Verdict      -> Verdict, and the tail
    Heartbeat    -> a mark of a text that is as here becomes one of the drafter's tokens
    Draft, marks <- in the target's tokens
    Compute      <- with the place of each choice in the target's text

Where the drafter's tokens of a text were settled too early, the coordinator is asked for an Open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drafter_node.compute import Action, Compute, Part, Proposed
from drafter_node.drafting import Drafting
from drafter_node.translation.text import Languages, Tail, Translation, Unsettled
from node.dispatcher import Dispatcher
from node.events import Afterwards, Arrived, Send, Tick, gap
from proto.messages import Draft, Heartbeat, Open, SessionMark, Verdict, Welcome
from proto.tree import Diverged


class TranslatingDispatcher:
    """A `Dispatcher` that speaks the target's tokens, with machines that speak the drafter's.

    max_len  most tokens of a text that the drafter can read
    """

    def __init__(
        self,
        inner: Dispatcher[Drafting, Proposed, Action],
        languages: Languages,
        max_len: int,
    ) -> None:
        self._inner = inner
        self._languages = languages
        self._max_len = max_len
        self._translations: dict[int, Translation] = {}  # of the open texts, by session

    def handle(self, event: Arrived | Tick | Afterwards | Proposed, now: float) -> Sequence[Action]:
        """Handle an event at `now` (seconds, monotonic); returns the actions that it asks for."""
        match event:
            case Arrived(Open() as message):
                return self._on_open(message, now)
            case Arrived(Verdict() as message):
                return self._on_verdict(message, now)
            case Arrived(Heartbeat() as message):
                marks = tuple(map(self._own_mark, message.marks))
                event = Arrived(replace(message, marks=marks))
            case Arrived(Welcome()):
                self._translations.clear()
        return self._spoken(self._inner.handle(event, now))

    @property
    def texts(self) -> Mapping[int, Drafting]:
        """Return the machines of the open texts, by session, the oldest first."""
        return self._inner.texts

    @property
    def translations(self) -> Mapping[int, Translation]:
        """Return the open texts in both vocabularies, by session."""
        return {session: self._translations[session] for session in self._inner.texts}

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return how far each open text has come here, in the target's tokens, for a heartbeat."""
        found = []
        for mark in self._inner.marks:
            text = self._translations[mark.session].speech.text
            # What the model has read is counted in the drafter's tokens, so it is not told.
            found.append(replace(mark, length=len(text), path_hash=text.root, num_read=0))
        return tuple(found)

    def story(self, session: int | None = None) -> str:
        """Return the last events of an open text, or of all texts; "" if there are none."""
        return self._inner.story(session)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self._inner.check()
        assert self._inner.texts.keys() <= self._translations.keys()
        for translation in self._translations.values():
            translation.speech.check()

    # -- in ---------------------------------------------------------------------------------------

    def _on_open(self, message: Open, now: float) -> Sequence[Action]:
        made = Translation(message, self._languages, self._max_len)
        actions = self._inner.handle(Arrived(made.opened), now)
        text = self._inner.texts.get(message.session)
        if text is None or text.opened is not made.opened:
            return actions  # there is no room for it, or it was opened already
        open_ = self._inner.texts
        self._translations = {key: one for key, one in self._translations.items() if key in open_}
        self._translations[message.session] = made
        self._go_on(text, made.tail)
        return actions

    def _on_verdict(self, message: Verdict, now: float) -> Sequence[Action]:
        text = self._inner.texts.get(message.session)
        if text is None:
            return ()
        translation = self._translations[message.session]
        try:
            own = translation.verdict(message, text.tree)
        except (Diverged, Unsettled):
            own = None
        if own is None:
            length = len(translation.speech.text)
            return (gap(message.session, text.opened.incarnation, length),)
        tail = translation.tail
        # Translated at once: what it names may be gone afterwards.
        actions = self._spoken(self._inner.handle(Arrived(own), now))
        self._go_on(text, tail)
        return actions

    def _go_on(self, text: Drafting, tail: Tail) -> None:
        text.go_on(
            tail.tokens, tail.said, self._languages.follows, may_be_longer=tail.may_be_longer
        )

    def _own_mark(self, mark: SessionMark) -> SessionMark:
        text = self._inner.texts.get(mark.session)
        if text is None:
            return mark
        own = text.tree.text
        is_ours = self._translations[mark.session].speech.text.is_prefix(
            mark.length, mark.path_hash
        )
        # A text of this length has no other hash, so a mark with it is of another text.
        path_hash = own.root if is_ours else ~own.root & (1 << 64) - 1
        return replace(mark, length=len(own), path_hash=path_hash)

    # -- out --------------------------------------------------------------------------------------

    def _spoken(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Return the actions with drafts in the target's tokens, and places for the choices."""
        return [self._said(action) for action in actions]

    def _said(self, action: Action) -> Action:
        match action:
            case Send(Draft() as message):
                text = self._inner.texts[message.session]
                return Send(self._translations[message.session].draft(message, text.tree))
            case Compute():
                return replace(action, parts=tuple(map(self._placed, action.parts)))
        return action

    def _placed(self, part: Part) -> Part:
        translation = self._translations[part.opened.session]
        return replace(part, places=tuple(map(translation.place, part.drafted)))
