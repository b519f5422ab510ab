"""`python -m coordinator.api.reading`: reads long prompts in a process of its own.

It gets frames on standard input and answers each on standard output (`multiprocessing`'s framing).
The first frame is the target's tokenizer, packed. Then each question is a frame of JSON and a frame
of bytes (a text in UTF-8, or a conversation as JSON), and so is each answer: {"num_tokens": ...}
and the token ids, or {"error": [kind, line]}.

The library holds Python's interpreter while it encodes, needs a hundred times the memory of a text,
and cannot be interrupted; a chat template may also run for ever. So this process limits itself,
whoever asks ends it if an answer takes too long, and it ends by itself when nobody has asked for a
while (`long_texts.py`).
"""

import gc
import json
import os
import resource
import sys
from array import array
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from coordinator.api.chat import ChatTemplate
from coordinator.api.long_texts import Answer, compute_s, give_memory_back
from coordinator.api.models.folders import unpacked
from coordinator.api.prompts import Tokenization
from coordinator.api.token_names import TokenNames
from proto.errors import ConfigurationError, ModelError

IDLE_S = 20.0  # without a question, until the process ends
MEMORY_BYTES = 6 << 30  # that a text may take at most
NICENESS = 10  # whoever writes texts goes before whoever reads long ones


class Reader:
    """Answers questions about long texts, with one tokenizer."""

    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization
        self._names = TokenNames(tokenization)
        self._templates: dict[str, ChatTemplate] = {}  # by what they are made of; the latest

    def answer(self, question: Mapping[str, Any], data: bytes) -> Answer:
        """Return the answer to a question. Raises ConfigurationError, ModelError."""
        match question["kind"]:
            case "encode":
                return self._encoded(data.decode(), question)
            case "chat":
                prompt = self._rendered(json.loads(data), question)
                said, ids = self._encoded(prompt, question)
                text = prompt.encode(errors="surrogatepass")
                return {**said, "text_bytes": len(text)}, text + ids
            case "echo":
                size = question["text_bytes"]
                given = array("i", data[size:])
                _, begins = self._names.echo_here(data[:size].decode(), given)
                return {}, array("q", begins).tobytes()
            case "count":
                num_values, num_parts = counted(data, question["most"])
                return {"num_values": num_values, "num_parts": num_parts}, b""
        raise AssertionError(f"unknown question {question['kind']}")

    def _encoded(self, text: str, question: Mapping[str, Any]) -> Answer:
        """Return the number of tokens, and their ids unless there are more than wanted."""
        most, size = question["most"], len(text.encode(errors="surrogatepass"))
        if most is not None and (least := self._tokenization.least(size, most)) > most:
            return {"num_tokens": least, "is_least": True}, b""
        ids = self._tokenization.encode_here(text, special_tokens=question["special_tokens"])
        is_wanted = most is None or len(ids) <= most
        return {"num_tokens": len(ids), "is_least": False}, array(
            "i", ids
        ).tobytes() if is_wanted else b""

    def _rendered(self, given: Mapping[str, Any], question: Mapping[str, Any]) -> str:
        key = json.dumps(question["template"])
        if key not in self._templates:
            self._templates = {key: ChatTemplate(*question["template"])}
        return self._templates[key].render(given["messages"], given["arguments"], **given["form"])


def counted(body: bytes, most: int) -> tuple[int, int]:
    """Return how many values JSON has, and how many lists, objects and fields of objects.

    most  values after which it does not matter how many more there are
    """
    num_values = num_parts = 0
    try:
        left = [json.loads(body)]
    except (ValueError, RecursionError):
        return 0, 0  # whoever reads it says what is wrong
    while left and num_values <= most:
        one = left.pop()
        if isinstance(one, list | dict):
            num_values += len(one)
            num_parts += 1 + len(one) * isinstance(one, dict)
            if num_values <= most:
                parts = one if isinstance(one, list) else one.values()
                left += [part for part in parts if isinstance(part, list | dict)]
    return num_values, num_parts


def _limit_this_process() -> None:
    """Bound the memory, and let the system end this process before any other."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min(MEMORY_BYTES, total // 2)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        os.nice(NICENESS)
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_time(question_bytes: int) -> None:
    """Let the system end this process if the next question takes too much processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + compute_s(question_bytes)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _answered(reader: Reader, question: Mapping[str, Any], data: bytes) -> Answer:
    try:
        return reader.answer(question, data)
    except (ConfigurationError, ModelError) as error:
        return {"error": [type(error).__name__, str(error)]}, b""


def main() -> None:
    """Answer until nobody asks any more, or whoever asks is gone."""
    gc.disable()  # nothing here refers to itself
    asked = Connection(os.dup(sys.stdin.fileno()), writable=False)
    said = Connection(os.dup(sys.stdout.fileno()), readable=False)
    _limit_this_process()
    with suppress(EOFError, OSError):  # whoever asks has ended
        packed = asked.recv_bytes()
        reader = Reader(Tokenization(unpacked(packed) if packed else Tokenizer(models.BPE())))
        while asked.poll(IDLE_S):
            question, data = json.loads(asked.recv_bytes()), asked.recv_bytes()
            _limit_time(len(data))
            answer, found = _answered(reader, question, data)
            said.send_bytes(json.dumps(answer).encode())
            said.send_bytes(found)
            del data, answer, found
            give_memory_back()


if __name__ == "__main__":
    main()
