"""What changes the logits before temperature and cuts: bans, biases and penalties.

Owns the one interface for it and the order of vLLM: banned words, tokens that may not come yet,
biases, penalties. Knows no message; `proto.messages.SamplingSpec` happens to be a `Settings`.

Theory of operation
-------------------
A processor is a function of the tokens before a choice and of the logits there, so it is applied
position by position: under speculation the row that follows draft[:i] sees prompt + committed +
draft[:i], exactly the text that plain decoding would have at that place. Both models apply the same
processors, the drafter to its own logits, and so go on agreeing.

The committed text only grows while a session is open, so a processor may keep what it has counted
of it and add the few drafted tokens for the time of a call: no work grows with the context, but for
that of a repetition penalty with the number of different tokens in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.choice.sampling import Floats, Ids, to_host
from engine.device import send


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens before a choice.

    text        the committed tokens, prompt first: the same list from call to call, ever longer
    num_prompt  how many of them are the prompt
    drafted     the tokens between the text and the choice
    """

    text: Sequence[int]
    num_prompt: int
    drafted: Sequence[int]

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.text) - self.num_prompt + len(self.drafted)

    def last_generated(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens; fewer if there are fewer after the prompt."""
        num_drafted = min(count, len(self.drafted))
        start = max(self.num_prompt, len(self.text) - (count - num_drafted))
        drafted = self.drafted[len(self.drafted) - num_drafted :]
        return (*self.text[start:], *drafted)


class Processor(Protocol):
    """Changes rows of logits; -inf rules a token out. A function of path and row, nothing else."""

    def __call__(self, path: Path, row: Floats) -> None:
        """Change `row` [V] in place."""

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """Return the same of `rows` [n, V] on a device, which may be changed in place."""


class Settings(Protocol):
    """What the built-in processors are made of; ids that the model does not have are left out."""

    @property
    def repetition_penalty(self) -> float:
        """Divides the positive logits of seen tokens and multiplies the others; 1 is off."""

    @property
    def presence_penalty(self) -> float:
        """Taken off the logit of every generated token; 0 is off."""

    @property
    def frequency_penalty(self) -> float:
        """Taken off as often as the token was generated; 0 is off."""

    @property
    def bias_ids(self) -> tuple[int, ...]:
        """Tokens with a bias."""

    @property
    def bias_values(self) -> tuple[float, ...]:
        """Added to their logits."""

    @property
    def banned(self) -> tuple[tuple[int, ...], ...]:
        """Sequences whose last token may not follow the others."""

    @property
    def min_tokens(self) -> int:
        """Generated tokens before any of `late_ids` may come."""

    @property
    def late_ids(self) -> tuple[int, ...]:
        """The tokens that would end the text."""


MAX_TEXTS = 64  # whose processors are kept; those of another are made anew


class Opened(Protocol):
    """How a text was opened: `proto.messages.Open`."""

    @property
    def session(self) -> int:
        """Which text."""

    @property
    def sampling(self) -> Settings:
        """Its settings."""

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""


class ProcessorsByText:
    """The processors of the texts that were computed last, made once for each life of a text."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Opened, Processors]] = {}  # by session, the newest last

    def of(self, opened: Opened, text: Sequence[int], vocab_size: int) -> "Processors":
        """Those of a text; `text` as in `Path`."""
        known = self._made.pop(opened.session, None)
        if known is None or known[0] is not opened:
            known = opened, Processors(opened.sampling, text, opened.num_prompt, vocab_size)
        self._made[opened.session] = known
        if len(self._made) > MAX_TEXTS:
            del self._made[next(iter(self._made))]
        return known[1]


class Processors:
    """The processors of one text, from when it was opened.

    text, num_prompt  as in `Path`
    vocab_size        V
    """

    def __init__(
        self, settings: Settings, text: Sequence[int], num_prompt: int, vocab_size: int
    ) -> None:
        self._text = text
        self._num_prompt = num_prompt
        self._processors = built_in(settings, vocab_size)

    def apply(self, logits: torch.Tensor, drafted: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return processed logits [n, V] float32, a new tensor where `logits` are.

        drafted  per row, the tokens between the committed text and the choice

        A row in which nothing is left is given back as it was: then nothing can be obeyed.

        Raises:
            NotFinite: the logits are not finite.
        """
        assert len(drafted) == logits.shape[0]
        paths = [Path(self._text, self._num_prompt, tokens) for tokens in drafted]
        if logits.device.type != "cpu":
            return self.apply_there(logits, paths)
        rows = to_host(logits)
        changed = rows.copy()
        for row, path in zip(changed, paths, strict=True):
            for processor in self._processors:
                processor(path, row)
        is_empty = np.isneginf(changed.max(axis=1))
        changed[is_empty] = rows[is_empty]
        return torch.from_numpy(changed)

    def apply_there(self, logits: torch.Tensor, paths: Sequence[Path]) -> torch.Tensor:
        """What `apply` does, with some integers sent to the device and nothing fetched from it.

        Whoever chooses from the rows finds out whether they are finite.
        """
        with torch.inference_mode():
            changed = logits.clone()
            for processor in self._processors:
                changed = processor.there(paths, changed)
            is_empty = changed.amax(dim=1, keepdim=True).isneginf()
            return torch.where(is_empty, logits, changed)


def built_in(settings: Settings, vocab_size: int) -> tuple[Processor, ...]:
    """The processors that these settings switch on, in their order."""
    processors: list[Processor] = []
    if banned := [ids for ids in settings.banned if ids[-1] < vocab_size]:
        processors.append(BannedWords(banned))
    if settings.min_tokens > 0:
        processors.append(MinTokens(settings.min_tokens, _known(settings.late_ids, vocab_size)))
    if settings.bias_ids:
        processors.append(Bias(settings.bias_ids, settings.bias_values, vocab_size))
    if (
        settings.repetition_penalty != 1.0
        or settings.presence_penalty != 0.0
        or settings.frequency_penalty != 0.0
    ):
        processors.append(
            Penalties(
                repetition=settings.repetition_penalty,
                presence=settings.presence_penalty,
                frequency=settings.frequency_penalty,
                vocab_size=vocab_size,
            )
        )
    return tuple(processors)


class BannedWords:
    """Rules out a token that would complete a banned sequence of generated tokens."""

    def __init__(self, banned: Sequence[tuple[int, ...]]) -> None:
        self._always = _array([ids[0] for ids in banned if len(ids) == 1])
        self._after = [(ids[:-1], ids[-1]) for ids in banned if len(ids) > 1]
        self._longest = max((len(before) for before, _ in self._after), default=0)

    def __call__(self, path: Path, row: Floats) -> None:
        """See `Processor`."""
        row[self._always] = -np.inf
        row[self._following(path)] = -np.inf

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """See `Processor`."""
        always = self._always.tolist()
        return _ruled_out(rows, [[*always, *self._following(path)] for path in paths])

    def _following(self, path: Path) -> list[int]:
        """What may not come because of what is there."""
        tail = path.last_generated(self._longest)
        return [last for before, last in self._after if tail[len(tail) - len(before) :] == before]


class MinTokens:
    """Rules out the ends of the text until enough has been generated."""

    def __init__(self, min_tokens: int, late_ids: Ids) -> None:
        self._min_tokens = min_tokens
        self._late_ids = late_ids

    def __call__(self, path: Path, row: Floats) -> None:
        """See `Processor`."""
        if path.num_generated < self._min_tokens:
            row[self._late_ids] = -np.inf

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """See `Processor`."""
        late = self._late_ids.tolist()
        is_early = [path.num_generated < self._min_tokens for path in paths]
        return _ruled_out(rows, [late if early else [] for early in is_early])


class Bias:
    """Adds a table. A token that is named twice gets both."""

    def __init__(self, ids: Sequence[int], values: Sequence[float], vocab_size: int) -> None:
        pairs = [(i, value) for i, value in zip(ids, values, strict=True) if i < vocab_size]
        self._ids = _array([i for i, _ in pairs])
        self._values = np.array([value for _, value in pairs], dtype=np.float32)

    def __call__(self, path: Path, row: Floats) -> None:
        """See `Processor`."""
        del path  # a bias is the same everywhere
        np.add.at(row, self._ids, self._values)

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """See `Processor`."""
        del paths
        ids = send(torch.from_numpy(self._ids), rows.device)
        values = send(torch.from_numpy(self._values), rows.device)
        return rows.index_add_(1, ids, values.expand(len(rows), -1))


class Penalties:
    """Repetition (of prompt and generated tokens), then frequency and presence (of generated).

    The offsets are made of whole counts and rounded once, so a row does not depend on which of its
    tokens were committed and which drafted.
    """

    def __init__(
        self, *, repetition: float, presence: float, frequency: float, vocab_size: int
    ) -> None:
        self._repetition = np.float32(repetition)
        self._presence = presence
        self._frequency = frequency
        self._num_counted = 0  # committed tokens that are in the fields below
        self._is_seen = np.zeros(vocab_size, dtype=np.bool_)
        self._seen_ids: Ids = np.zeros(vocab_size, dtype=np.int64)  # in order; the first _num_seen
        self._num_seen = 0
        # Of generated tokens; while a row is changed, its drafted tokens are counted as well.
        self._counts: npt.NDArray[np.int32] = np.zeros(vocab_size, dtype=np.int32)
        self._offsets: Floats = np.zeros(vocab_size, dtype=np.float32)

    def __call__(self, path: Path, row: Floats) -> None:
        """See `Processor`."""
        self._catch_up(path)
        drafted = [token for token in path.drafted if token < len(row)]
        if self._repetition != 1.0:
            self._penalise(row, self._seen_ids[: self._num_seen])
            self._penalise(row, _array([i for i in set(drafted) if not self._is_seen[i]]))
        if self._presence != 0.0 or self._frequency != 0.0:
            for token in drafted:
                self._count(token, 1)
            row -= self._offsets
            for token in drafted:
                self._count(token, -1)

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """See `Processor`."""
        self._catch_up(paths[0])
        size = rows.shape[1]
        drafted = [[token for token in path.drafted if token < size] for path in paths]
        if self._repetition != 1.0:
            seen = send(torch.from_numpy(self._seen_ids[: self._num_seen]), rows.device)
            is_seen = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)
            is_seen.index_fill_(1, seen, value=True)
            is_seen.view(-1).index_fill_(0, _cells(drafted, rows), value=True)
            # A tensor: a device multiplies by the reciprocal of a number, and rounds otherwise.
            factor = torch.full((), float(self._repetition), device=rows.device)
            changed = torch.where(rows > 0, rows / factor, rows * factor)
            changed = changed.clamp(max=torch.finfo(torch.float32).max)
            rows = torch.where(is_seen, changed, rows)
        if self._presence != 0.0 or self._frequency != 0.0:
            rows = rows - self._offsets_there(drafted, rows)
        return rows

    def _offsets_there(self, drafted: Sequence[list[int]], rows: torch.Tensor) -> torch.Tensor:
        """What the generated tokens of each row are offset by, [n, V]."""
        counted = np.flatnonzero(self._counts)
        values: list[float] = []
        for tokens in drafted:
            for token in tokens:
                self._count(token, 1)
            values += (float(self._offsets[token]) for token in tokens)
            for token in tokens:
                self._count(token, -1)
        offsets = torch.zeros(rows.shape, device=rows.device)
        of_text = send(torch.from_numpy(self._offsets[counted]), rows.device)
        where = send(torch.from_numpy(counted), rows.device)
        offsets.index_copy_(1, where, of_text.expand(len(rows), -1))
        of_drafts = send(torch.tensor(values, dtype=torch.float32), rows.device)
        offsets.view(-1).index_copy_(0, _cells(drafted, rows), of_drafts)
        return offsets

    def _catch_up(self, path: Path) -> None:
        """Count what has been committed since the last call."""
        assert self._num_counted <= len(path.text), "a committed text never shrinks"
        for position in range(self._num_counted, len(path.text)):
            token = path.text[position]
            if token >= len(self._counts):
                continue
            if not self._is_seen[token]:
                self._is_seen[token] = True
                self._seen_ids[self._num_seen] = token
                self._num_seen += 1
            if position >= path.num_prompt:
                self._count(token, 1)
        self._num_counted = len(path.text)

    def _penalise(self, row: Floats, ids: Ids) -> None:
        logits = row[ids]
        with np.errstate(over="ignore"):
            changed = np.where(logits > 0, logits / self._repetition, logits * self._repetition)
        row[ids] = changed.clip(max=np.finfo(np.float32).max)  # -inf may come of it, inf may not

    def _count(self, token: int, change: int) -> None:
        """Count a generated token, or take it back."""
        self._counts[token] += change
        count = int(self._counts[token])
        self._offsets[token] = self._frequency * count + self._presence * (count > 0)


def _ruled_out(rows: torch.Tensor, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rule out some ids of each row [n, V], in place."""
    rows.view(-1).index_fill_(0, _cells(ids, rows), -math.inf)
    return rows


def _cells(ids: Sequence[Sequence[int]], rows: torch.Tensor) -> torch.Tensor:
    """Return where some ids of each row lie in all of `rows` [n, V], on their device."""
    size = rows.shape[1]
    found = [row * size + token for row, tokens in enumerate(ids) for token in tokens]
    return send(torch.tensor(found, dtype=torch.int64), rows.device)


def _known(ids: Sequence[int], vocab_size: int) -> Ids:
    return _array([i for i in ids if i < vocab_size])


def _array(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int64)
