"""Which drafts of a pass the target accepts: the default rule, coupled verification (pure).

The target chooses a token at every row of the pass, with its own noise
(`engine/choice/coupling.py`). From the root's row on, the path goes to the draft that equals the
choice, as long as there is one (`accepted_path`). These drafts are accepted, and the first choice
that was not drafted follows them. So the text is the target's own, whatever was drafted.

Under the classical rules the engine has judged the drafts by their probabilities
(`engine/choice/classical_rules.py`), and says how many are accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.economics import Kind
from proto.messages import FinishReason, Hit, Logprobs, Open, Rule
from proto.tree import Node
from target_node.compute import NO_TOKEN, Judge, Outcome, Part


@dataclass(frozen=True, slots=True)
class Siblings:
    """The drafts of one position of the text, and the token that the target has chosen there."""

    token: int
    drafts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of a pass about the drafts of a text.

    A value, from which nothing has followed yet.

    verified  the drafts that were in the pass, by row
    accepted  those of them that the target has chosen too, along one path
    rejected  the likeliest path of the other verified drafts below the accepted ones
    tokens    the tokens with which the text goes on, up to its end
    finish    why the text ends with them; None: it goes on
    hit       whether the first token had been drafted
    along     the drafts at each position that has a chosen token, also beyond the text's end, as
              far as there were drafts
    copies    the kinds of copied drafts, by path hash
    outcome   the outcome from which all this was derived
    """

    verified: tuple[Node, ...]
    accepted: tuple[Node, ...]
    rejected: tuple[Node, ...]
    tokens: tuple[int, ...]
    finish: FinishReason | None
    hit: Hit
    along: tuple[Siblings, ...]
    copies: Mapping[int, Kind]
    outcome: Outcome

    @property
    def sources(self) -> tuple[int, ...]:
        """Return who drafted each accepted token of the text; (): source 0 drafted them all."""
        sources = tuple(node.source for node in self.accepted[: self.num_accepted])
        return sources if any(sources) else ()

    @property
    def logprobs(self) -> Logprobs | None:
        """Return those of the tokens, if they were asked for."""
        return self.outcome.logprobs and self.outcome.logprobs.part(0, len(self.tokens))

    @property
    def has_rejected(self) -> bool:
        """True if some draft of the pass was not accepted."""
        return len(self.accepted) < len(self.verified)

    @property
    def num_accepted(self) -> int:
        """Return the number of accepted drafts for which the text has room."""
        return min(len(self.accepted), len(self.tokens))


def rest_of(nodes: Sequence[Node], parents: Sequence[int], row: int) -> list[Node]:
    """Return the likeliest path of a subtree below a row, as `laid_out` has arranged it."""
    rest: list[Node] = []
    for index in range(row, len(nodes)):
        if parents[index] != index:
            break
        rest.append(nodes[index])
    return rest


def judge_of(opened: Open, chain: Sequence[Node]) -> Judge | None:
    """Return how the drafts of a pass are judged by a classical rule; None: by equality."""
    if opened.rule is Rule.COUPLED:
        return None
    proposals = tuple(node.proposal for node in chain if node.proposal is not None)
    drafts = tuple(node.token for node in chain)
    return Judge(opened.rule, drafts, proposals, opened.incarnation)


def accepted_path(
    drafted: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Return the rows along which the target's choices go, from the root's on.

    drafted  token of each row but the root's
    parents  the row that each of them follows
    chosen   the target's choice at each row
    """
    rows = {step: row for row, step in enumerate(zip(parents, drafted, strict=True), 1)}
    path = [0]
    while (row := rows.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(row)
    return path


def chosen_of(
    drafted: Sequence[int], parents: Sequence[int], outcome: Outcome
) -> tuple[list[int], tuple[int, ...]]:
    """Return the rows that the target's choices go along, and the tokens chosen there.

    drafted, parents  as in `accepted_path`
    """
    if outcome.num_accepted is not None:
        return list(range(outcome.num_accepted + 1)), outcome.tokens
    rows = accepted_path(drafted, parents, outcome.tokens)
    chosen = (outcome.tokens[row] for row in rows)
    return rows, tuple(token for token in chosen if token != NO_TOKEN)


def rows_on_text(part: Part, outcome: Outcome) -> list[int]:
    """Return the rows of a pass that lie on the text: committed tokens and accepted drafts."""
    num_before = len(part.feed.tokens) - part.num_asked
    rows = list(range(num_before))
    if outcome.num_accepted is not None:
        rows += range(num_before, num_before + outcome.num_accepted + 1)
    elif part.num_asked:
        rows += (
            num_before + row for row in accepted_path(part.drafted, part.parents, outcome.tokens)
        )
    return rows
