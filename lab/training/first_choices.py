"""How often a head's drafts, or a drafter's, are what the target says: on its own texts.

The target writes texts after held-out prompts, and head and drafter choose with its noise
(coupling; none where the texts are greedy). A draft is made as if those before it in its chain were
right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.training.heads import Head
from lab.training.teacher import ENDED, Noise, Teacher, Tokens

NUM_DRAFTS = 4  # drafts of a chain
MOST_NUMBERS = 1 << 28  # logits at once
Hits = Callable[[Tensor, Noise], Tensor]  # takes text [B, T]; bool [B, T, NUM_DRAFTS] by place


def head_hits(head: Head, teacher: Teacher, known: Tensor | None = None) -> Hits:
    """Return the function that says which drafts of a head equal the target's text.

    [b, q, s]: draft s of the chain whose first draft is for place q is token q + s.

    known  the features [B, T, F] of that text; None: the target reads it
    """

    def hits(text: Tensor, noise: Noise) -> Tensor:
        features = teacher.read(text, teacher.shared.layers)[0] if known is None else known
        found = torch.zeros(*text.shape, NUM_DRAFTS, dtype=torch.bool, device=text.device)
        for step, state in enumerate(head.states(features.float(), text, NUM_DRAFTS)):
            logits = head.of_target(head.factors(state, step).logits().float())
            # The first draft of a row is for place row + 2; the last row's last draft has none.
            for row in range(min(state.shape[1], text.shape[1] - 2 - step)):
                said = (logits[:, row] + noise(row + 2 + step)).argmax(dim=-1)
                found[:, row + 2, step] = said == text[:, row + 2 + step]
        return found

    return hits


def drafter_hits(drafter: Any) -> Hits:
    """Return the same for a drafter, a transformers model with the target's vocabulary."""

    def hits(text: Tensor, noise: Noise) -> Tensor:
        logits = drafter(input_ids=text, use_cache=False).logits.float()
        found = torch.zeros(*text.shape, NUM_DRAFTS, dtype=torch.bool, device=text.device)
        for place in range(1, text.shape[1]):
            scores = logits[:, place - 1]
            offered = noise(place)[:, : scores.shape[1]]
            right = (scores[:, : offered.shape[1]] + offered).argmax(dim=-1) == text[:, place]
            for step in range(min(NUM_DRAFTS, place)):
                found[:, place - step, step] = right
        return found

    return hits


@torch.inference_mode()
def rates(
    teacher: Teacher,
    hits_of: Sequence[Hits],
    prompts: Sequence[Tokens],
    length: int,
    temperature: float,
) -> list[list[float]]:
    """Return of each the rates [NUM_DRAFTS] at which drafts are right if those before them are.

    prompts  that the target continues to `length` tokens
    """
    at_once = max(1, min(16, MOST_NUMBERS // (length * teacher.vocab_size)))
    num_right = torch.zeros(len(hits_of), NUM_DRAFTS)
    num_tried = torch.zeros(len(hits_of), NUM_DRAFTS)
    for first in range(0, len(prompts), at_once):
        some = prompts[first : first + at_once]
        noise = teacher.noise([temperature] * len(some), first)
        written = teacher.write(some, length, noise)
        whole = whole_chains(written, some)
        for at, hits in enumerate(hits_of):
            right = in_a_row(hits(written.clamp(min=0), noise), whole)
            num_right[at] += right.sum(dim=0)
            num_tried[at] += torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), 1).sum(dim=0)
    return (num_right / num_tried.clamp(min=1)).tolist()


def whole_chains(written: Tensor, prompts: Sequence[Tokens]) -> Tensor:
    """Return bool [B, places]: all drafts of a chain that begins there are for the target's tokens.

    written  the texts [B, T] that the target made of the prompts
    """
    is_said = (written != ENDED).cpu()
    for row, prompt in enumerate(prompts):
        is_said[row, : len(prompt)] = False
    is_said[:, :2] = False
    return is_said.unfold(1, NUM_DRAFTS, 1).all(dim=-1)


def in_a_row(hits: Tensor, whole: Tensor) -> Tensor:
    """Return int64 [chains, NUM_DRAFTS]: 1 where a draft and all before it in its chain are right.

    hits   bool [B, T, NUM_DRAFTS] as `Hits` says
    whole  which chains count (`whole_chains`)
    """
    return hits[:, : whole.shape[1]].cpu().long().cumprod(dim=-1)[whole]


@dataclass(frozen=True, slots=True)
class Quality:
    """How good a head is, greedy, on held-out texts.

    first   share of first drafts that are right
    tokens  tokens of a pass that verifies chains of NUM_DRAFTS drafts
    """

    first: float
    tokens: float


class Watched:
    """Held-out texts that the target has written greedily, by which a head is looked at."""

    def __init__(self, teacher: Teacher, prompts: Sequence[Tokens], length: int) -> None:
        """Let the target continue the prompts to `length` tokens, and read what it has written."""
        self._teacher = teacher
        greedy = teacher.noise([0.0] * len(prompts), 0)
        written = teacher.write(prompts, length, greedy)
        self._whole = whole_chains(written, prompts)
        self._text = written.clamp(min=0)
        with torch.inference_mode():
            self._features = teacher.read(self._text, teacher.shared.layers, with_logits=False)[0]

    @torch.inference_mode()
    def quality(self, head: Head) -> Quality:
        """Return how good a head is now."""
        hits = head_hits(head, self._teacher, self._features)
        silence = torch.zeros(len(self._text), 1, device=self._text.device)
        right = in_a_row(hits(self._text, lambda _place: silence), self._whole)
        if not len(right):
            return Quality(0.0, 1.0)
        shares = right.float().mean(dim=0)
        return Quality(float(shares[0]), 1.0 + float(shares.sum()))
