"""Logits processors, applied before temperature and cuts: masks, bans, biases, penalties.

Owns the interface of a processor and vLLM's order of them: the mask of a grammar (`grammar.py`) or
of allowed tokens (`allowed.py`), banned words, minimum number of tokens, biases, penalties. Knows
no message; `proto.messages.SamplingSpec` has the fields of `Settings`.

Theory of operation
-------------------
A processor changes the logits of one position as a function of the tokens before it. Under
speculation, the row that follows draft[:i] is processed with prompt + committed + draft[:i], which
is exactly the text that plain decoding would have there. Drafter and target apply the same
processors, each to its own logits, so that their choices still agree.

The committed text only grows while a text is open. So a processor keeps counts of the committed
tokens and adds the few drafted ones for the time of a call. The work of a call does not grow with
the context, except that of a repetition penalty: it grows with the number of different tokens.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.choice.allowed import Allowed
from engine.choice.grammar import GrammarMask
from engine.choice.path import Path as Path
from engine.choice.sampling import Floats, Ids, to_host
from engine.choice.vocabulary import Vocabulary
from engine.device import send
from engine.errors import GrammarError


class Processor(Protocol):
    """A function of the tokens before a position that changes its logits; -inf bans a token."""

    def __call__(self, path: Path, row: Floats) -> None:
        """Change the logits `row` [V] float32 of the position after `path`, in place."""

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """Return changed logits [n, V] float32 on `rows`' device; may change `rows` in place.

        paths  [n]: per row, the tokens before its position
        """


class Settings(Protocol):
    """Settings of the built-in processors; token ids that the model does not have are ignored."""

    @property
    def repetition_penalty(self) -> float:
        """Return the factor by which the logits of tokens in the text are made smaller.

        Positive logits are divided by it, others multiplied. 1 is off.
        """

    @property
    def presence_penalty(self) -> float:
        """Return what is subtracted once from the logit of a generated token; 0: off."""

    @property
    def frequency_penalty(self) -> float:
        """Return what is subtracted from a logit for each time its token was generated; 0: off."""

    @property
    def bias_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens whose logits get a bias."""

    @property
    def bias_values(self) -> tuple[float, ...]:
        """Return the biases that are added to the logits of `bias_ids`, in that order."""

    @property
    def banned(self) -> tuple[tuple[int, ...], ...]:
        """Return the banned token sequences: the last token of each may not follow the others."""

    @property
    def min_tokens(self) -> int:
        """Return the number of tokens that must be generated before any of `late_ids` may come."""

    @property
    def late_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that would end the text."""

    @property
    def grammar(self) -> str:
        """Return the grammar that the answer must fit, as llguidance writes it; "": any answer."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the end-of-text tokens that may come where the grammar accepts the answer."""

    @property
    def allowed_ids(self) -> tuple[int, ...]:
        """Return the ids of the only tokens that may be generated; (): any of them may."""


MAX_TEXTS = 64  # number of texts whose processors are kept; for others they are made anew


class Opened(Protocol):
    """The message that opened a text (`proto.messages.Open`), as far as it is needed here."""

    @property
    def session(self) -> int:
        """Return the number of the text (session)."""

    @property
    def sampling(self) -> Settings:
        """Return the sampling settings of the text."""

    @property
    def num_prompt(self) -> int:
        """Return the number of tokens of the text's prompt."""


class ProcessorsByText:
    """Cache of the processors of the `MAX_TEXTS` texts used last.

    Processors are made anew when a text is opened again, by another `Open` message.

    vocabulary  of the target, for grammars; None: there is none here
    """

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self._vocabulary = vocabulary
        self._made: dict[int, tuple[Opened, Processors]] = {}  # session -> ..., the newest last

    def of(self, opened: Opened, text: Sequence[int], vocab_size: int) -> "Processors":
        """Return the processors of the opened text, made if not cached; `text` as in `Path`.

        Raises GrammarError: the text's grammar cannot be followed here.
        """
        known = self._made.pop(opened.session, None)
        if known is None or known[0] is not opened:
            made = Processors(
                opened.sampling, text, opened.num_prompt, vocab_size, self._vocabulary
            )
            known = opened, made
        self._made[opened.session] = known
        if len(self._made) > MAX_TEXTS:
            del self._made[next(iter(self._made))]
        return known[1]


class Processors:
    """The logits processors of one text, which keep counts of its tokens while it is open.

    settings          which processors there are
    text, num_prompt  as in `Path`
    vocab_size        V, the number of logits of a row
    vocabulary        of the target, for a grammar

    The constructor raises GrammarError if there is a grammar that cannot be followed here.
    """

    def __init__(
        self,
        settings: Settings,
        text: Sequence[int],
        num_prompt: int,
        vocab_size: int,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._text = text
        self._num_prompt = num_prompt
        self._processors = built_in(settings, vocab_size)
        self._mask = _mask_of(settings, vocab_size, vocabulary)

    def apply(self, logits: torch.Tensor, drafted: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return processed logits [n, V] float32, a new tensor on the device of `logits`.

        logits   [n, V] float32, any device
        drafted  [n]: per row, the drafted tokens between the committed text and its position

        Where every token would be banned, only the bans of the grammar and of `allowed_ids` count.

        Raises:
            NotFinite: the logits are not finite; only raised for logits on a CPU.
            GrammarError: the grammar is too complex here.
        """
        assert len(drafted) == logits.shape[0]
        paths = [Path(self._text, self._num_prompt, tokens) for tokens in drafted]
        if logits.device.type != "cpu":
            return self.apply_there(logits, paths)
        rows = to_host(logits)
        if self._mask is not None:
            rows = rows.copy()
            self._mask.on_host(paths, rows)
            if not self._processors:
                return torch.from_numpy(rows)
        changed = rows.copy()
        for row, path in zip(changed, paths, strict=True):
            for processor in self._processors:
                processor(path, row)
        is_empty = np.isneginf(changed.max(axis=1))
        changed[is_empty] = rows[is_empty]
        return torch.from_numpy(changed)

    def apply_there(self, logits: torch.Tensor, paths: Sequence[Path]) -> torch.Tensor:
        """Return processed logits [n, V] float32 like `apply`, without waiting for the device.

        Only small tensors are sent to the device and nothing is fetched. Logits that are not finite
        are noticed later, when a token is chosen.

        logits  [n, V] float32
        paths   [n]: per row, the tokens before its position

        Raises GrammarError: the grammar is too complex here.
        """
        with torch.inference_mode():
            if self._mask is not None:
                logits = self._mask.there(paths, logits)
                if not self._processors:
                    return logits
            changed = logits.clone()
            for processor in self._processors:
                changed = processor.there(paths, changed)
            is_empty = changed.amax(dim=1, keepdim=True).isneginf()
            return torch.where(is_empty, logits, changed)


def _mask_of(
    settings: Settings, vocab_size: int, vocabulary: Vocabulary | None
) -> GrammarMask | Allowed | None:
    """Return the mask of a text whose bans always count; None: it has none. Raises GrammarError."""
    ids = _known(settings.allowed_ids, vocab_size)
    # A drafter with fewer logits may have none of the tokens: then it drafts what it likes.
    allowed = Allowed(ids, vocab_size) if len(ids) else None
    if not settings.grammar:
        return allowed
    if vocabulary is None:
        raise GrammarError("llguidance or tokenizer.json is missing there; add it")
    words = None if allowed is None else allowed.words
    return GrammarMask(vocabulary, settings.grammar, settings.end_ids, vocab_size, words)


def built_in(settings: Settings, vocab_size: int) -> tuple[Processor, ...]:
    """Return the processors that the settings switch on, in the order of application."""
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
    """Processor that bans each token that would complete a banned sequence of generated tokens."""

    def __init__(self, banned: Sequence[tuple[int, ...]]) -> None:
        self._always = _array([ids[0] for ids in banned if len(ids) == 1])
        self._after = [(ids[:-1], ids[-1]) for ids in banned if len(ids) > 1]
        self._longest = max((len(before) for before, _ in self._after), default=0)

    def __call__(self, path: Path, row: Floats) -> None:
        """Set the logits of tokens that would complete a banned word to -inf (see `Processor`)."""
        row[self._always] = -np.inf
        row[self._following(path)] = -np.inf

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] in which tokens that would complete a banned word are -inf."""
        always = self._always.tolist()
        return _ruled_out(rows, [[*always, *self._following(path)] for path in paths])

    def _following(self, path: Path) -> list[int]:
        """Return the tokens that would complete a banned sequence of two or more tokens."""
        tail = path.last_generated(self._longest)
        return [last for before, last in self._after if tail[len(tail) - len(before) :] == before]


class MinTokens:
    """Processor that bans end-of-text tokens until `min_tokens` tokens have been generated."""

    def __init__(self, min_tokens: int, late_ids: Ids) -> None:
        self._min_tokens = min_tokens
        self._late_ids = late_ids

    def __call__(self, path: Path, row: Floats) -> None:
        """Set the logits of end-of-text tokens to -inf where the text is too short yet."""
        if path.num_generated < self._min_tokens:
            row[self._late_ids] = -np.inf

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] with end-of-text tokens at -inf where the text is too short yet."""
        late = self._late_ids.tolist()
        is_early = [path.num_generated < self._min_tokens for path in paths]
        return _ruled_out(rows, [late if early else [] for early in is_early])


class Bias:
    """Processor that adds a bias to some tokens' logits; a token named twice gets both biases."""

    def __init__(self, ids: Sequence[int], values: Sequence[float], vocab_size: int) -> None:
        pairs = [(i, value) for i, value in zip(ids, values, strict=True) if i < vocab_size]
        self._ids = _array([i for i, _ in pairs])
        self._values = np.array([value for _, value in pairs], dtype=np.float32)

    def __call__(self, path: Path, row: Floats) -> None:
        """Add the biases to the logits of their tokens, in place (see `Processor`)."""
        del path  # a bias is the same at every position
        np.add.at(row, self._ids, self._values)

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """Add the biases to the logits [n, V] of their tokens, in place; return the logits."""
        del paths
        ids = send(torch.from_numpy(self._ids), rows.device)
        values = send(torch.from_numpy(self._values), rows.device)
        return rows.index_add_(1, ids, values.expand(len(rows), -1))


class Penalties:
    """Processor for repetition, then frequency and presence penalties.

    The repetition penalty counts prompt and generated tokens, the others only generated ones. A
    token's frequency and presence penalty is computed from its count and rounded once, so a row
    does not depend on which of its tokens were committed and which drafted.
    """

    def __init__(
        self, *, repetition: float, presence: float, frequency: float, vocab_size: int
    ) -> None:
        self._repetition = np.float32(repetition)
        self._presence = presence
        self._frequency = frequency
        self._num_counted = 0  # number of committed tokens counted in the fields below
        self._is_seen = np.zeros(vocab_size, dtype=np.bool_)
        # The first _num_seen entries: the different tokens of the text, in order of appearance.
        self._seen_ids: Ids = np.zeros(vocab_size, dtype=np.int64)
        self._num_seen = 0
        # Per token id, how often it was generated, and its penalty; while a row is being processed
        # its drafted tokens are counted as well.
        self._counts: npt.NDArray[np.int32] = np.zeros(vocab_size, dtype=np.int32)
        self._offsets: Floats = np.zeros(vocab_size, dtype=np.float32)

    def __call__(self, path: Path, row: Floats) -> None:
        """Change the logits of tokens already in the text, in place (see `Processor`)."""
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
        """Return logits [n, V] with penalties on tokens already in the text (see `Processor`)."""
        self._catch_up(paths[0])
        size = rows.shape[1]
        drafted = [[token for token in path.drafted if token < size] for path in paths]
        if self._repetition != 1.0:
            seen = send(torch.from_numpy(self._seen_ids[: self._num_seen]), rows.device)
            is_seen = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)
            is_seen.index_fill_(1, seen, value=True)
            is_seen.view(-1).index_fill_(0, _cells(drafted, rows), value=True)
            # A tensor, because dividing by a Python number multiplies by its reciprocal on a GPU,
            # which rounds differently.
            factor = torch.full((), float(self._repetition), device=rows.device)
            changed = torch.where(rows > 0, rows / factor, rows * factor)
            changed = changed.clamp(max=torch.finfo(torch.float32).max)
            rows = torch.where(is_seen, changed, rows)
        if self._presence != 0.0 or self._frequency != 0.0:
            rows = rows - self._offsets_there(drafted, rows)
        return rows

    def _offsets_there(self, drafted: Sequence[list[int]], rows: torch.Tensor) -> torch.Tensor:
        """Return the frequency and presence penalties to subtract, [n, V] float32.

        drafted  [n]: per row, its drafted tokens
        """
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
        """Count the tokens that were committed since the last call."""
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
        """Apply the repetition penalty to the tokens `ids` of `row` [V], in place."""
        logits = row[ids]
        with np.errstate(over="ignore"):
            changed = np.where(logits > 0, logits / self._repetition, logits * self._repetition)
        row[ids] = changed.clip(max=np.finfo(np.float32).max)  # overflow to -inf is allowed

    def _count(self, token: int, change: int) -> None:
        """Add `change` (1 or -1) to a generated token's count, and update its penalty."""
        self._counts[token] += change
        count = int(self._counts[token])
        self._offsets[token] = self._frequency * count + self._presence * (count > 0)


def _ruled_out(rows: torch.Tensor, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Set the logits of some ids per row of `rows` [n, V] to -inf, in place; return `rows`."""
    rows.view(-1).index_fill_(0, _cells(ids, rows), -math.inf)
    return rows


def _cells(ids: Sequence[Sequence[int]], rows: torch.Tensor) -> torch.Tensor:
    """Return the flat indices in `rows` [n, V] of some ids per row: int64 on `rows`' device."""
    size = rows.shape[1]
    found = [row * size + token for row, tokens in enumerate(ids) for token in tokens]
    return send(torch.tensor(found, dtype=torch.int64), rows.device)


def _known(ids: Sequence[int], vocab_size: int) -> Ids:
    """Return the ids that are below `vocab_size`, int64."""
    return _array([i for i in ids if i < vocab_size])


def _array(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int64)
