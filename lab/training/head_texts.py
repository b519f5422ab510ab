"""The texts that heads learn from: prompts for the target, or windows of the texts as they are.

Owns which texts are held out, and which piece of which text comes next. Everything follows from a
number (of a prompt, of a window), so that a run that was interrupted goes on with the same. Knows
no model, only its tokenizer and its chat template.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coordinator.api import prompts
from coordinator.api.chat import ChatTemplate
from coordinator.api.prompts import Tokenization
from lab.training.corpus import library_texts
from proto.errors import ConfigurationError

Tokens = npt.NDArray[np.int64]
SEED = 20
PROMPT_LEN = 64  # tokens of a long text that the target continues
MOST_AROUND = 96  # tokens of a chat template around a message
HELD_OUT_EVERY = 20  # of so many texts one is held out
FEWEST_TOKENS, FEWEST_AS_IS = 64, 1024  # of all texts together


@dataclass(frozen=True, slots=True)
class Chat:
    """Puts texts into a target's chat template, each as the one message of a user.

    num_around  tokens of a prompt that are not of the message
    """

    template: ChatTemplate
    tokenization: Tokenization
    num_around: int = 0

    @classmethod
    def of_model(
        cls, model: str, revision: str | None, tokenization: Tokenization
    ) -> "Chat | None":
        """Return the chat of a model; None if it has no template of its own.

        Raises ModelError or ConfigurationError if the template cannot be used for that.
        """
        template = ChatTemplate.of_model(model, revision)
        if template.is_plain:
            return None
        chat = cls(template, tokenization)
        message = chat.tokens_of("a")
        try:
            num_around = len(chat.prompt(message)) - len(message)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; add --no-chat-template") from error
        if num_around > MOST_AROUND:
            raise ConfigurationError(
                f"{model}: its chat template is {num_around} tokens long, and at most "
                f"{MOST_AROUND} fit; add --no-chat-template"
            )
        return replace(chat, num_around=num_around)

    def tokens_of(self, text: str) -> Tokens:
        """Return the tokens of a text alone."""
        return np.array(self.tokenization.encode(text, special_tokens=False), dtype=np.int64)

    def prompt(self, message: Tokens) -> Tokens:
        """Return the tokens of a prompt with this message, as `generate --chat` makes it.

        The answer begins where the prompt ends.
        """
        content = self.tokenization.raw.decode(message.tolist(), skip_special_tokens=False)
        return self.tokens_of(self.template.render([{"role": "user", "content": content}]))


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as tokens.

    start   tokens with which the tokenizer begins every text; often () or the one named BOS
    end     the token between two texts; None: there is none
    digest  SHA-256 (hex) of the tokens, which tells these texts from others
    chat    makes a prompt of each text; None: the text itself is the prompt
    """

    training: Sequence[Tokens]
    held_out: Sequence[Tokens]
    start: Tokens
    end: int | None
    digest: str
    chat: Chat | None = None

    def prompt(self, number: int, length: int, *, held_out: bool = False) -> Tokens:
        """Return the number-th prompt: at most `length` tokens, made of a text or a piece of it.

        After all have been given they are given again in another order, long ones in other pieces.
        """
        num_around = len(self.start) if self.chat is None else self.chat.num_around
        text = self._piece(number, max(1, length - num_around), held_out=held_out)
        if self.chat is None:
            return np.concatenate((self.start, text))
        # A piece may have more tokens in the template: where it was cut inside of a character.
        while len(prompt := self.chat.prompt(text)) > length and len(text) > 1:
            text = text[: len(text) // 2]
        return prompt

    def _piece(self, number: int, longest: int, *, held_out: bool) -> Tokens:
        """Return the number-th text of at most `longest` tokens, or piece of a longer one."""
        texts = self.held_out if held_out else self.training
        sizes = np.array([len(text) for text in texts])
        first_units = np.concatenate(([0], np.cumsum(np.maximum(1, sizes // longest))))
        epoch, index = divmod(number, int(first_units[-1]))
        order = np.random.default_rng([SEED, epoch]).permutation(int(first_units[-1]))
        unit = int(order[index])
        which = int(np.searchsorted(first_units, unit, side="right")) - 1
        text = texts[which]
        if len(text) <= longest:
            return text
        phase = int(np.random.default_rng([SEED, epoch, unit]).integers(longest))
        length = min(PROMPT_LEN, longest)
        begin = min((unit - int(first_units[which])) * longest + phase, len(text) - length)
        return text[begin : begin + length]

    def windows(self, length: int) -> Tokens:
        """Return the training texts one after another, cut into windows [n, length]."""
        between = self.start if self.end is None else np.append(self.end, self.start)
        parts = [part for text in self.training for part in (between, text)]
        stream = np.concatenate(parts)[len(between) - len(self.start) :]
        num_windows = len(stream) // length
        return stream[: num_windows * length].reshape(num_windows, length)


def read_texts(
    path: Path | None,
    tokenization: Tokenization,
    end: int | None,
    *,
    as_is: bool,
    chat: Chat | None = None,
) -> Texts:
    """Return the texts of a file, or without one those of Python's standard library, as tokens.

    as_is  a file that is no JSON Lines is one text, and not a prompt in each line
    chat   makes a prompt of each text

    Raises ConfigurationError: the file is empty, or binary, or has too little text.
    """
    if path is None:
        training, held_out = (library_texts(held_out=held) for held in (False, True))
        return replace(_texts(tokenization, training, held_out, end), chat=chat)
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
    num_tokens = sum(map(len, (*made.training, *made.held_out)))
    fewest = FEWEST_AS_IS if as_is else FEWEST_TOKENS
    if num_tokens < fewest or not (made.training and made.held_out):
        raise ConfigurationError(
            f"--prompt-file: {path} has {num_tokens} tokens, and at least {fewest} are needed; "
            "give more text"
        )
    return replace(made, chat=chat)


def _file(path: Path, *, as_is: bool) -> list[str]:
    """Return the texts of a file. Raises ConfigurationError."""
    whole = prompts.text_of(path)
    if "\0" in whole:
        raise ConfigurationError(
            f"--prompt-file: {path} is no text (character {whole.index(chr(0))})"
        )
    if not whole.strip():
        raise ConfigurationError(f"--prompt-file: {path} is empty; give a file with text")
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
