"""How often a head's drafts, or a drafter's, are what the target says: on its own texts.

The target writes texts after held-out prompts, and head and drafter choose with its noise
(coupling; none where the texts are greedy). A draft is made as if those before it in its chain were
right.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.training.heads import Head
from lab.training.teacher import ENDED, Noise, Teacher, Tokens

NUM_DRAFTS = 4  # drafts of a chain
MOST_NUMBERS = 1 << 26  # logits at once
Hits = Callable[[Tensor, Noise], Tensor]  # takes text [B, T]; bool [B, T, NUM_DRAFTS] by place


def head_hits(head: Head, teacher: Teacher) -> Hits:
    """Return the function that says which drafts of a head equal the target's text.

    [b, q, s]: draft s of the chain whose first draft is for place q is token q + s.
    """

    def hits(text: Tensor, noise: Noise) -> Tensor:
        features, _ = teacher.read(text, teacher.shared.layers)
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
        is_said = (written != ENDED).cpu()
        for row, prompt in enumerate(some):
            is_said[row, : len(prompt)] = False
        is_said[:, :2] = False
        last = length - NUM_DRAFTS + 1  # a chain begins where all of its drafts have a place
        whole = is_said.unfold(1, NUM_DRAFTS, 1).all(dim=-1)
        for at, hits in enumerate(hits_of):
            right = hits(written.clamp(min=0), noise)[:, :last].cpu().long().cumprod(dim=-1)
            right = right[whole]
            num_right[at] += right.sum(dim=0)
            num_tried[at] += torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), 1).sum(dim=0)
    return (num_right / num_tried.clamp(min=1)).tolist()
