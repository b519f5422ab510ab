"""What the nodes of the simulator compute with, where the target has one choice everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafter_node import compute as drafter
from drafter_node.translation.text import Languages
from proto.messages import Proposal
from rehearsal.cache import fold
from rehearsal.setting import Text
from rehearsal.world import Models
from target_node import compute as target
from tests.simulation.scenario import Scenario
from tests.simulation.toys import LIKELY, ToyModel

AHEAD = 3  # the target's tokens of which a drafter with other tokens thinks when it says the next


def models_of(scenario: Scenario) -> Models:
    """Return the target and the drafter of a scenario."""
    alone = Deterministic(scenario.model)
    if scenario.languages is None:
        return alone
    return Translated(alone, scenario.languages, scenario.texts)


@dataclass(frozen=True, slots=True)
class Deterministic:
    """The target has one choice everywhere, so that every rule must write the same text."""

    model: ToyModel

    def draft(
        self, part: drafter.Part, digests: Sequence[int], index: int
    ) -> tuple[drafter.Children, ...]:
        """See `rehearsal.world.Models`."""
        is_coupled = part.sampled_in is None
        children = []
        for digest in digests:
            tokens, scores = self.model.propose(digest, index)
            certain = () if is_coupled else tuple(Proposal((token,), (1.0,)) for token in tokens)
            children.append(drafter.Children(tokens, scores, certain))
        return tuple(children)

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """See `rehearsal.world.Models`."""
        choices = tuple(map(self.model.choose, digests))
        if part.judge is None:
            return target.Outcome(choices)
        drafts = part.judge.drafts
        assert len(part.judge.proposals) == len(drafts)
        same = [draft == choice for draft, choice in zip(drafts, choices, strict=False)]
        accepted = same.index(False) if False in same else len(drafts)
        return target.Outcome(choices[: accepted + 1], accepted)


@dataclass(frozen=True, slots=True)
class Translated:
    """A drafter that thinks as the toy drafter does, and says it in tokens of its own.

    texts  by session, from 1 on: what no model could know is how the target has read a prompt
    """

    alone: Deterministic
    languages: Languages
    texts: Sequence[Text]

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """See `rehearsal.world.Models`."""
        return self.alone.verify(part, digests)

    def draft(
        self, part: drafter.Part, digests: Sequence[int], index: int
    ) -> tuple[drafter.Children, ...]:
        """See `rehearsal.world.Models`."""
        rows = zip(part.drafted, part.positions, part.places, digests, strict=True)
        return tuple(
            # The text may be longer by now than it was when this forward began.
            self._after(part, (*part.committed[: end - len(path)], *path), place, digest, index)
            for path, end, place, digest in rows
        )

    def _after(
        self,
        part: drafter.Part,
        own: Sequence[int],
        place: drafter.ChoicePoint,
        digest: int,
        index: int,
    ) -> drafter.Children:
        """Return what the drafter says after these tokens of its own."""
        seen = 0
        for token in own:
            seen = fold(seen, token)
        assert seen == digest, "the drafter's cache holds another path"
        said = self._said(own) + place.rest
        tokens, begun = self._thought(said, part.opened.session, place)
        text = 0
        for token in tokens:
            text = fold(text, token)
        chosen: dict[int, float] = {}
        for rank, token in enumerate(self.alone.model.propose(text, index)[0]):
            said = self._written(token)
            if place.rest and said.startswith(begun):
                longer = place.rest + said[len(begun) :]
                chosen.setdefault(self.languages.own.following(longer)[0], LIKELY - rank)
            elif said.startswith(begun):
                self._say(text, token, begun, rank, index, chosen)
        assert chosen, "the drafter is asked about what it has not drafted"
        return drafter.Children(tuple(chosen), tuple(chosen.values()))

    def _say(
        self, text: int, token: int, begun: bytes, rank: int, index: int, chosen: dict[int, float]
    ) -> None:
        """Add the drafter's token that says this token of the target, and its score, to `chosen`.

        text   digest of what is before the target's token, of which `begun` is said
        """
        own, model = self.languages.own, self.alone.model
        said, ends = b"", []
        for _ in range(AHEAD):
            if token in model.stop_ids:
                break
            said += self._written(token)
            ends.append(len(said))
            text = fold(text, token)
            token = model.propose(text, index)[0][0]
        rest = said[len(begun) :]
        first = own.following(rest)[0] if rest else self.languages.eos_ids[0]
        length = len(begun) + len(own.bytes_of[first] or b"")
        starts = [start for start in (0, *ends) if len(begun) <= start < max(1, length)]
        chosen.setdefault(first, LIKELY * len(starts) - rank)

    def _written(self, token: int) -> bytes:
        """Return what a token of the target says; b"": it ends the text."""
        return self.languages.target.bytes_of[token] or b""

    def _said(self, own: Sequence[int]) -> bytes:
        return b"".join(self.languages.said_by(token) or b"" for token in own)

    def _thought(
        self, said: bytes, session: int, place: drafter.ChoicePoint
    ) -> tuple[tuple[int, ...], bytes]:
        """Return the target's tokens of a text that are whole, and how the next one begins."""
        languages, prompt = self.languages, self.texts[session - 1]
        read = b"".join(languages.heard(one, prompt.limits.stop_ids) for one in prompt.prompt)
        assert said.startswith(read), "the drafter is asked about the middle of the prompt"
        tokens = list(prompt.prompt)
        rest = said[len(read) :]
        for token in languages.target.following(rest):
            word = self._written(token)
            is_open = len(tokens) >= place.position and word == rest
            if is_open and next(languages.target.beginning_with(word), None) is not None:
                break
            tokens.append(token)
            rest = rest[len(word) :]
        assert place.position <= len(tokens), "a choice is placed beyond what is said"
        return tuple(tokens), rest
