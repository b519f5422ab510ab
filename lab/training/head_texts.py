"""The texts that heads learn from: prompts for the target, or windows of the texts as they are.

Owns which texts are held out, and which piece of which text comes next. Everything follows from a
number (of a prompt, of a window), so that a run that was interrupted goes on with the same. Knows
no model.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coordinator.api import prompts
from coordinator.api.prompts import Tokenization
from lab.training.corpus import library_texts
from proto.errors import ConfigurationError

Tokens = npt.NDArray[np.int64]
SEED = 20
PROMPT_LEN = 64  # tokens of a long text that the target continues
HELD_OUT_EVERY = 20  # of so many texts one is held out
FEWEST_TOKENS, FEWEST_AS_IS = 64, 1024  # of all texts together


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as tokens.

    start   tokens with which the tokenizer begins every text; often () or the one named BOS
    end     the token between two texts; None: there is none
    digest  SHA-256 (hex) of the tokens, which tells these texts from others
    """

    training: Sequence[Tokens]
    held_out: Sequence[Tokens]
    start: Tokens
    end: int | None
    digest: str

    def prompt(self, number: int, longest: int, *, held_out: bool = False) -> Tokens:
        """Return the number-th prompt: a text of at most `longest` tokens, or a piece of a longer.

        After all have been given they are given again in another order, long ones in other pieces.
        """
        texts = self.held_out if held_out else self.training
        sizes = np.array([len(text) for text in texts])
        first_units = np.concatenate(([0], np.cumsum(np.maximum(1, sizes // longest))))
        epoch, index = divmod(number, int(first_units[-1]))
        order = np.random.default_rng([SEED, epoch]).permutation(int(first_units[-1]))
        unit = int(order[index])
        which = int(np.searchsorted(first_units, unit, side="right")) - 1
        text = texts[which]
        if len(text) > longest:
            phase = int(np.random.default_rng([SEED, epoch, unit]).integers(longest))
            length = min(PROMPT_LEN, longest)
            begin = min((unit - int(first_units[which])) * longest + phase, len(text) - length)
            text = text[begin : begin + length]
        return np.concatenate((self.start, text))

    def windows(self, length: int) -> Tokens:
        """Return the training texts one after another, cut into windows [n, length]."""
        between = self.start if self.end is None else np.append(self.end, self.start)
        parts = [part for text in self.training for part in (between, text)]
        stream = np.concatenate(parts)[len(between) - len(self.start) :]
        num_windows = len(stream) // length
        return stream[: num_windows * length].reshape(num_windows, length)


def read_texts(
    path: Path | None, tokenization: Tokenization, end: int | None, *, as_is: bool
) -> Texts:
    """Return the texts of a file, or without one those of Python's standard library, as tokens.

    as_is  a file that is no JSON Lines is one text, and not a prompt in each line

    Raises ConfigurationError: the file is empty, or binary, or has too little text.
    """
    if path is None:
        training, held_out = (library_texts(held_out=held) for held in (False, True))
        return _texts(tokenization, training, held_out, end)
    found = _file(path, as_is=as_is)
    if len(found) >= 2 * HELD_OUT_EVERY:
        held_out = found[::HELD_OUT_EVERY]
        training = [text for at, text in enumerate(found) if at % HELD_OUT_EVERY]
    elif len(found) > 1:
        *training, last = found
        held_out = [last]
    else:
        cut = len(found[0]) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
        training, held_out = [found[0][:cut]], [found[0][cut:]]
    made = _texts(tokenization, training, held_out, end)
    num_tokens = sum(map(len, made.training))
    fewest = FEWEST_AS_IS if as_is else FEWEST_TOKENS
    if num_tokens < fewest or not made.held_out:
        raise ConfigurationError(
            f"--texts: {path} has {num_tokens} tokens, and at least {fewest} are needed; "
            "give more text"
        )
    return made


def _file(path: Path, *, as_is: bool) -> list[str]:
    """Return the texts of a file. Raises ConfigurationError."""
    whole = prompts.text_of(path)
    if "\0" in whole:
        raise ConfigurationError(f"--texts: {path} is no text (character {whole.index(chr(0))})")
    if not whole.strip():
        raise ConfigurationError(f"--texts: {path} is empty; give a file with text")
    is_json = prompts.is_json(path, prompts.lines_of(path)[0][1])
    return prompts.from_file(path) if is_json or not as_is else [whole]


def _texts(
    tokenization: Tokenization, training: list[str], held_out: list[str], end: int | None
) -> Texts:
    parts = []
    for texts in (training, held_out):
        encoded = tokenization.raw.encode_batch(texts, add_special_tokens=False)
        parts.append([np.array(one.ids, dtype=np.int64) for one in encoded if one.ids])
    start = np.array(tokenization.encode(""), dtype=np.int64)
    digest = hashlib.sha256()
    for tokens in (start, *parts[0], *parts[1]):
        digest.update(tokens.tobytes())
    return Texts(parts[0], parts[1], start, end, digest.hexdigest())
