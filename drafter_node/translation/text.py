"""One text in two vocabularies: the target's tokens, and those that the drafter reads (pure).

Theory of operation
-------------------
The target's tokens are the text. What they say, in bytes, is encoded once more as the drafter's own
tokenizer would have it, because that is what its model was trained on:

    the target     ... | def |  f | ibon | acci |
    the drafter    ... | def |  fib | onacci        the end may change with the next token

Only a drafter's token that will hardly change any more is *settled*, and committed in the drafter's
machine. Those behind it are its *tail*: nodes of its tree that are certain, and may be taken back.
What the drafter adds to the tail are drafts; they are translated back:

    the drafter's path    tail | (x | ):\\n
    in bytes                     (x):\\n
    the target's tokens          ( | x | ): | \\n

The last of the target's tokens on a path is not drafted yet: with the drafter's next token it may
become a longer one. It is drafted if the drafter has no more to say.

A draft's score is the chance of the drafter's path up to the token's end, given that up to its
beginning. Special tokens are matched by their role: the token that ends a text, and the one before
every text. Others are read in their written form, and never drafted.

An end of the text that is settled and changes all the same is read anew (`Unsettled`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafter_node.compute import ChoicePoint
from drafter_node.sending import all_of, some_of
from engine.words import Words
from proto.messages import (
    ANY_ID,
    MAX_NODES_PER_DRAFT,
    MAX_WINDOW,
    Draft,
    Open,
    Rule,
    SamplingSpec,
    Verdict,
)
from proto.tree import Node, SpeculationTree

LOOK_BACK = 64  # bytes before the tail that are encoded along with it
# Tokens of a tail without a space; if there are more, only the last few stay in it.
TAIL_MAX, TAIL_KEPT = 24, 8


class Unsettled(Exception):
    """The drafter's tokenizer gives other tokens for a part of the text that was settled."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What of the text the drafter's machine does not have as committed tokens.

    tokens  the drafter's tokens of it, which may change
    said    the same in bytes
    may_be_longer  True: longer tokens begin like the last one
    """

    tokens: tuple[int, ...]
    said: bytes
    may_be_longer: bool = False


@dataclass(frozen=True, slots=True)
class Languages:
    """The two vocabularies.

    own      the drafter's
    target   the target's
    eos_ids  the drafter's tokens that end a text
    """

    own: Words
    target: Words
    eos_ids: tuple[int, ...]

    @property
    def eos(self) -> bytes:
        """Return the written form of the drafter's end of a text; b"": it has none."""
        names = (self.own.specials.get(id_, "") for id_ in self.eos_ids)
        return next(filter(None, names), "").encode()

    def heard(self, token: int, ends: Sequence[int]) -> bytes:
        """Return what a token of the target says, as the drafter reads it.

        ends  the target's tokens that end this text
        """
        words = self.target
        said = words.bytes_of[token] if token < len(words) else b""
        if said is not None:
            return said
        if token in words.starts:
            return b""
        return self.eos if token in ends else words.specials.get(token, "").encode()

    def follows(self, said: bytes, token: int) -> bytes | None:
        """Return what of these bytes is left behind a token of the drafter; None: it differs."""
        own = self.said_by(token)
        if own is None:
            return None
        if len(own) >= len(said):
            return b"" if own.startswith(said) else None
        return said[len(own) :] if said.startswith(own) else None

    def said_by(self, token: int) -> bytes | None:
        """Return what a token of the drafter says; None: nothing that can be translated."""
        if token in self.eos_ids:
            return self.eos or None
        return self.own.bytes_of[token] if token < len(self.own) else None


class Translation:
    """One text, in one life, in both vocabularies.

    opened  the Open for the drafter's machine
    tail    what follows the text that this machine has
    speech  the text and the drafts in the target's tokens
    """

    def __init__(self, opened: Open, languages: Languages, max_len: int) -> None:
        """Encode the text of an Open of the target.

        max_len  most tokens that the drafter can read
        """
        self._languages = languages
        self._limits = opened.limits
        self._num_ids = opened.num_ids
        self._window = opened.policy.window
        self.speech = SpeculationTree(opened.key, opened.tokens, max_nodes=MAX_NODES_PER_DRAFT)
        self._text = bytearray()
        self._num_settled = 0  # bytes of the text that the committed tokens say
        self.tail = Tail((), b"")
        self._hear(opened.tokens)
        settled = list(languages.own.starts)
        settled += self._read(num_wanted=0 if settled else 1)
        if not settled:
            settled = [next(iter(languages.eos_ids), 0)]  # a machine needs a token to begin with
        self._num_per_token = self._ratio(len(settled) + len(self.tail.tokens))
        self.opened = self._own_open(opened, settled, max_len)

    def _ratio(self, num_own: int) -> float:
        """Return how many tokens of the drafter there are for one of the target's."""
        return min(4.0, max(1.0, num_own / max(1, len(self.speech.text))))

    def _own_open(self, opened: Open, settled: Sequence[int], max_len: int) -> Open:
        languages, policy, spec = self._languages, opened.policy, opened.sampling
        ends = any(id_ in languages.target.specials for id_ in opened.limits.stop_ids)
        window = min(MAX_WINDOW, round(policy.window * self._num_per_token) + 1)
        if not policy.window or opened.rule is not Rule.COUPLED:
            window = 0  # the classical rules judge a draft by the chance that its drafter gave it
        return replace(
            opened,
            tokens=tuple(settled),
            num_prompt=len(settled),
            # What looks at token ids cannot be asked of another vocabulary.
            sampling=SamplingSpec(
                temperature=spec.temperature,
                top_k=spec.top_k,
                top_p=spec.top_p,
                min_p=spec.min_p,
                seed=spec.seed,
                sample_index=spec.sample_index,
            ),
            rule=Rule.COUPLED,
            num_ids=ANY_ID,
            policy=replace(policy, window=window),
            limits=replace(
                opened.limits, max_len=max_len, stop_ids=languages.eos_ids if ends else ()
            ),
        )

    # -- from the target --------------------------------------------------------------------------

    def verdict(self, message: Verdict, committed: SpeculationTree) -> Verdict | None:
        """Return a verdict of the target for the drafter's machine; None: a message was missed.

        committed  the machine's text

        Raises Diverged, or Unsettled: the text must be opened anew, and stays as it was until then.
        """
        news = self.speech.news(message.base_len, message.base_hash, message.tokens)
        if news is None:
            return None
        text, num_heard = committed.text, len(self._text)
        self._hear(news)
        try:
            tokens = tuple(self._read())
        except Unsettled:
            del self._text[num_heard:]
            raise
        self.speech.advance(news)
        return replace(message, base_len=len(text), base_hash=text.root, tokens=tokens)

    def _hear(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text += self._languages.heard(token, self._limits.stop_ids)

    def _read(self, num_wanted: int = 0) -> list[int]:
        """Encode the end of the text; return the tokens that are settled now, and keep the tail.

        num_wanted  so many are settled at least, if there are as many
        """
        pairs = self._unsettled_tokens()
        end = self._num_settled
        limit = self._settled_end(pairs)
        if num_wanted and pairs:
            limit = max(limit, pairs[min(num_wanted, len(pairs)) - 1][1])
        count = 0
        while count < len(pairs) and pairs[count][1] <= limit:
            end = pairs[count][1]
            count += 1
        self._num_settled = end
        said = bytes(self._text[end:])
        tail = tuple(token for token, _ in pairs[count:])
        last = (self._languages.said_by(tail[-1]) if tail else None) or b""
        longer = self._languages.own.beginning_with(last) if last else iter(())
        self.tail = Tail(tail, said, next(longer, None) is not None)
        return [token for token, _ in pairs[:count]]

    def _unsettled_tokens(self) -> list[tuple[int, int]]:
        """Return (token, its end in the text) of what is not settled. Raises Unsettled."""
        text, settled = self._text, self._num_settled
        near = max(0, settled - LOOK_BACK)
        while 0 < near < settled and text[near] & 0xC0 == 0x80:
            near += 1
        for start in dict.fromkeys((near, 0)):
            ids, ends = self._languages.own.read(bytes(text[start:]))
            pairs = [(id_, start + end) for id_, end in zip(ids, ends, strict=True)]
            if settled == 0 or any(end == settled for _, end in pairs):
                return [pair for pair in pairs if pair[1] > settled or settled == 0]
        raise Unsettled

    def _settled_end(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Return up to which byte tokens are settled: the last word may change, others hardly."""
        text, settled = self._text, self._num_settled
        end = len(text)
        while end > settled and not text[end - 1 : end].isspace():
            end -= 1
        while end > settled and text[end - 1 : end].isspace():
            end -= 1
        if sum(stop > end for _, stop in pairs) > TAIL_MAX:
            end = pairs[-TAIL_KEPT][1] - 1
        return end

    # -- from the drafter -------------------------------------------------------------------------

    def draft(self, message: Draft, tree: SpeculationTree) -> Draft:
        """Return a Draft of the drafter's machine in the target's tokens.

        tree  the machine's tree, which has the nodes of the message
        """
        new: list[int] = []
        passed = set(message.parents)
        for index, node in enumerate(_nodes_of(message, tree)):
            if index in passed:
                continue  # a longer path of this message says it too
            is_last = message.done and not node.children
            new += self._say(_path(node, tree), is_last=is_last)
        speech = self.speech
        said = all_of(speech) if message.first_number == 1 else None
        if said is None:
            live = [key for key in new if key in speech.nodes]
            said = some_of(speech, live) if live else None
        nodes = () if said is None else said.nodes
        return replace(
            message,
            parent_hash=speech.root if said is None else said.parent,
            parent_len=len(speech.text) if said is None else said.length,
            tokens=tuple([node.token for node in nodes]),
            parents=() if said is None else said.parents,
            scores=tuple([node.score for node in nodes]),
        )

    def _say(self, path: Sequence[Node], *, is_last: bool) -> list[int]:
        """Draft what a path of the drafter's tree says; return the keys of new nodes.

        is_last  True: nothing will follow this path
        """
        spoken = self._spoken([node.token for node in path])
        if spoken is None:
            return []
        said, has_end = spoken
        tokens = self._languages.target.following(said) if said else ()
        num_whole = len(tokens) if is_last or has_end else len(tokens) - 1
        chances = self._chances(path)
        new: list[int] = []
        parent, end, before = self.speech.root, 0, 0.0
        for token in tokens[: max(0, num_whole)]:
            end += len(self._languages.target.bytes_of[token] or b"")
            chance = next((chance for stop, chance in chances if stop >= end), chances[-1][1])
            key = self._grow(parent, token, chance - before, path[-1].source, new)
            if key is None:
                return new
            parent, before = key, chance
        # What the target has no token for stays unsaid, and so does the end behind it.
        if has_end and end == len(said) and (eos := self._eos()) is not None:
            self._grow(parent, eos, chances[-1][1] - before, path[-1].source, new)
        return new

    def _spoken(self, tokens: Sequence[int]) -> tuple[bytes, bool] | None:
        """Return what a path adds to the text, and whether it ends the text there.

        It is read up to a token that cannot be translated. None: the path contradicts the text.
        """
        languages, rest = self._languages, self.tail.said
        said = b""
        has_end = False
        for token in tokens:
            word = languages.said_by(token)
            if word is None:
                break
            if token in languages.eos_ids and not rest[len(said) :]:
                has_end = True
                break
            said += word
        if not said.startswith(rest[: len(said)]):
            return None
        return said[len(rest) :], has_end

    def _chances(self, path: Sequence[Node]) -> list[tuple[int, float]]:
        """Return (end in bytes behind the text, log chance of the path so far) of each node."""
        end, chance = -len(self.tail.said), 0.0
        found: list[tuple[int, float]] = []
        for node in path:
            end += len(self._languages.said_by(node.token) or b"")
            if found or end > 0:
                chance += node.score
            found.append((end, chance))
        return found

    def _grow(
        self, parent: int, token: int, score: float, source: int, new: list[int]
    ) -> int | None:
        """Return the child of a draft with this token; None: none may follow, or there is no room.

        None may follow at the end of the target's window, which the drafter's own only resembles,
        and none for which the target has no logits.
        A new one is added to the keys in `new`.
        """
        speech, limits = self.speech, self._limits
        above = speech.nodes.get(parent)
        length = len(speech.text) if above is None else above.position + 1
        if length + 1 > min(limits.max_len - 1, len(speech.text) + self._window):
            return None
        if token >= self._num_ids or (above is not None and above.token in limits.stop_ids):
            return None
        if (child := speech.child(parent, token)) is not None:
            return child.key
        num_children = len(speech.children(parent))
        speech.grow(parent, (token,), (min(0.0, score),), source)
        grown = speech.children(parent)[num_children:]
        new += grown
        return grown[0] if grown else None

    def _eos(self) -> int | None:
        """Return the target's token that ends this text; None: no special token does."""
        ends = [id_ for id_ in self._limits.stop_ids if id_ in self._languages.target.specials]
        name = self._languages.eos.decode()
        named = [id_ for id_ in ends if self._languages.target.specials[id_] == name]
        return next(iter(named or ends), None)

    def place(self, tokens: Sequence[int]) -> ChoicePoint:
        """Return where the target is when the drafter chooses what follows this path."""
        spoken = self._spoken(tokens)
        said = spoken[0] if spoken is not None else b""
        length = len(self.speech.text)
        if not said:
            path = b"".join(self._languages.said_by(token) or b"" for token in tokens)
            return ChoicePoint(length, b"", self.tail.said[len(path) :])
        found = self._languages.target.following(said)
        if not found:
            return ChoicePoint(length, b"")
        return ChoicePoint(
            length + len(found) - 1, self._languages.target.bytes_of[found[-1]] or b""
        )


def _nodes_of(message: Draft, tree: SpeculationTree) -> list[Node]:
    """Return the nodes of a message, which are in the tree."""
    found: list[Node] = []
    for token, parent in zip(message.tokens, message.parents, strict=True):
        above = message.parent_hash if parent < 0 else found[parent].key
        node = tree.child(above, token)
        assert node is not None, "a draft that is not in the tree"
        found.append(node)
    return found


def _path(node: Node, tree: SpeculationTree) -> list[Node]:
    """Return the nodes from the first after the root to this one."""
    path = [node]
    while path[-1].parent != tree.root:
        path.append(tree.nodes[path[-1].parent])
    return path[::-1]
