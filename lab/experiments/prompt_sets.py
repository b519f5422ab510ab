"""Reads files of prompts, in the formats of the benchmarks that they come from.

In a plain text file each line is a prompt. In JSON Lines a record has a `prompt` (HumanEval), or
`turns` of a conversation (Spec-Bench), and may have a name (`task_id`, `question_id`) and a
`category`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from coordinator.api.chat import ChatTemplate
from coordinator.api.prompts import Tokenization, is_json, lines_of
from proto.errors import ConfigurationError

NAMES = ("task_id", "question_id", "id")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, or the user's turns of a conversation.

    name, category  as the file states them; empty: the file has none
    """

    turns: tuple[str, ...]
    name: str = ""
    category: str = ""


def read(path: Path, limit: int | None) -> list[Prompt]:
    """Return at most `limit` prompts (None: all), spread evenly over the file.

    Raises ConfigurationError.
    """
    numbered = lines_of(path)
    if is_json(path, numbered[0][1]):
        prompts = [_of_record(line, f"{path}, line {number}") for number, line in numbered]
    else:
        prompts = [Prompt((line,), str(number)) for number, line in numbered]
    count = min(limit or len(prompts), len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def _of_record(line: str, where: str) -> Prompt:
    """Return the prompt in a line of JSON. Raises ConfigurationError that names `where`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON ({error})") from error
    match record:
        case {"prompt": str(prompt)}:
            turns = (prompt,)
        case {"turns": [str(), *_] as found} if all(isinstance(turn, str) for turn in found):
            turns = tuple(found)
        case _:
            raise ConfigurationError(
                f'{where}: expected an object with "prompt", a text, or "turns", a list of texts'
            )
    name = next((str(record[key]) for key in NAMES if key in record), "")
    return Prompt(turns, name, str(record.get("category", "")))


class Conversation:
    """The turns of a prompt as token ids; each turn follows the answers so far.

    max_tokens  each turn is cut after this many tokens
    template    chat template; None: turns and answers are joined with two line breaks
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenization: Tokenization,
        *,
        max_tokens: int,
        template: ChatTemplate | None,
    ) -> None:
        self._left = list(prompt.turns)
        self._tokenization = tokenization
        self._max_tokens = max_tokens
        self._template = template
        self._said: list[dict[str, str]] = []
        self._ids: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Return True if there is no further turn."""
        return not self._left

    def next_turn(self) -> tuple[int, ...]:
        """Take the user's next turn; return the ids of the conversation, this turn included.

        Raises ConfigurationError if the chat template refuses the conversation.
        """
        turn = self._left.pop(0)
        encode = self._tokenization.encode
        if self._template is None:
            text = turn if not self._ids else f"\n\n{turn}\n\n"
            self._ids += encode(text, special_tokens=not self._ids)[: self._max_tokens]
        else:
            ids = encode(turn, special_tokens=False)[: self._max_tokens]
            self._said.append({"role": "user", "content": self._tokenization.decode(ids)})
            rendered = self._template.render(self._said)
            self._ids = encode(rendered, special_tokens=self._template.is_plain)
        return self._ids

    def answered(self, tokens: tuple[int, ...]) -> None:
        """Add the model's answer (token ids) to the conversation."""
        if self._template is None:
            self._ids += tokens
        else:
            text = self._tokenization.decode(tokens)
            self._said.append({"role": "assistant", "content": text})
