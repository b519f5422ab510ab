"""What the process that computes chances is asked, and what it answers; knows no tensor."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Said:
    """A text that the target has written: token ids of the prompt, and of what followed.

    temperature, seed  with which it was written
    """

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Request:
    """Both models by name, where they shall run, and the texts that they read.

    device  of both models; several, joined by commas, share the target
    """

    target: str
    target_revision: str | None
    target_dtype: str
    drafter: str
    drafter_revision: str | None
    drafter_dtype: str
    device: str
    texts: tuple[Said, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A text as the drafter sees it; each list has one entry for every token that was said.

    overlaps  sum over tokens of min(p, q): the chance that the classical rules accept a draft
    ranks     rank of the target's token among the drafter's choices, 0 for the first; None: none
    scores    of the drafter's choices (natural logarithms), the likeliest first
    """

    overlaps: tuple[float, ...]
    ranks: tuple[int | None, ...]
    scores: tuple[tuple[float, ...], ...]
