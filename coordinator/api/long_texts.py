"""Has long prompts read by a process of its own (`reading.py`), so that no other text waits for it.

The process reads one prompt after another. It is started when it is needed, ended if an answer
takes too long, and ends by itself when nobody asks: the memory that a long text took is given back.
"""

import ctypes
import json
import os
import subprocess
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from coordinator.api import own_process
from proto.errors import BusyError, ConfigurationError, ModelError

if TYPE_CHECKING:
    from coordinator.api.chat import ChatTemplate, PromptForm

WAIT_S = 60.0  # until others' long prompts are read
# Seconds that may pass for each second of processor time, and beyond: the machine may be busy.
PATIENCE, START_S = 4, 30.0
# Seconds of processor time for a question: so many, and so many more for each megabyte.
COMPUTE_S, COMPUTE_S_PER_MB = 5, 5
END_S = 1.0  # in which a process ends that has closed its pipes
CANNOT = "cannot start a process that reads the prompt"
FAILED = "the prompt takes too much time or memory to read; shorten it"
ERRORS = {"ConfigurationError": ConfigurationError, "ModelError": ModelError}

Answer = tuple[Mapping[str, Any], bytes]


def compute_s(question_bytes: int) -> int:
    """Return the seconds of processor time that a question of so many bytes may take."""
    return COMPUTE_S + COMPUTE_S_PER_MB * (question_bytes >> 20)


def give_memory_back() -> None:
    """Let the C library give the memory that it keeps for later back to the system."""
    with suppress(OSError, AttributeError):  # another library may have no such function
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True, slots=True)
class Read:
    """A text that was read.

    num_tokens  of its tokens, or, where `is_least`, so many at least
    ids         None: there are more than were wanted
    """

    text: str
    num_tokens: int
    ids: tuple[int, ...] | None
    is_least: bool = False


class LongTexts:
    """Reads long texts with one tokenizer, in a process of its own.

    packed  returns the tokenizer as bytes; none: there is no tokenizer, and none is needed
    """

    def __init__(self, packed: Callable[[], bytes]) -> None:
        self._packed = packed
        self._lock = threading.Lock()  # held by whoever waits for an answer
        self._process: _Process | None = None
        self._owner = os.getpid()
        self._is_closed = False

    def encode(self, text: str, *, special_tokens: bool, most: int | None) -> Read:
        """Encode a text, which must be valid Unicode. Raises BusyError, ConfigurationError.

        most  the ids of more tokens are not wanted; None: they are
        """
        asked = {"kind": "encode", "special_tokens": special_tokens, "most": most}
        said, ids = self._ask(asked, text.encode())
        return _read(text, said, ids)

    def chat(
        self,
        template: "ChatTemplate",
        conversation: Mapping[str, Any],
        form: "PromptForm",
        *,
        special_tokens: bool,
        most: int | None,
    ) -> Read:
        """Render a conversation and encode the prompt.

        conversation  {"messages": ..., "arguments": ...}, of JSON values alone

        Raises BusyError, ConfigurationError, ModelError.
        """
        asked = {"kind": "chat", "special_tokens": special_tokens, "most": most}
        stated = asdict(form)
        del stated["add_special_tokens"]
        data = json.dumps({**conversation, "form": stated}).encode()
        said, found = self._ask({**asked, "template": template.made_of}, data)
        size = said["text_bytes"]
        return _read(found[:size].decode(errors="surrogatepass"), said, found[size:])

    def echo(self, text: str, ids: Sequence[int]) -> list[int]:
        """Return where each token of a text begins in it. Raises BusyError, ConfigurationError."""
        data = text.encode()
        asked = {"kind": "echo", "text_bytes": len(data)}
        _, begins = self._ask(asked, data + array("i", ids).tobytes())
        return array("q", begins).tolist()

    def count(self, body: bytes, most: int) -> tuple[int, int]:
        """Return how many values JSON has, and how many lists, objects and fields of objects.

        Bytes that are no JSON have none.

        most  values after which it does not matter how many more there are

        Raises BusyError, ConfigurationError.
        """
        said, _ = self._ask({"kind": "count", "most": most}, body)
        return said["num_values"], said["num_parts"]

    def close(self) -> None:
        """End the process; a forked child of whoever started it leaves it alone."""
        self._is_closed = True  # whoever waits for others' prompts starts no other process
        if self._process is not None and os.getpid() == self._owner:
            self._process.end()

    def _ask(self, question: Mapping[str, Any], data: bytes) -> Answer:
        """Return the process's answer. Raises BusyError, ConfigurationError, ModelError."""
        if not self._lock.acquire(timeout=WAIT_S):
            raise BusyError("other long prompts are being read; try again later")
        try:
            answer = None if self._is_closed else self._answer(question, data)
        finally:
            self._lock.release()
        if answer is None:
            raise ConfigurationError(FAILED)
        if "error" in answer[0]:
            kind, line = answer[0]["error"]
            raise ERRORS[kind](line)
        return answer

    def _answer(self, question: Mapping[str, Any], data: bytes) -> Answer | None:
        """Ask the process, or another one if it has ended meanwhile; None: it gives no answer."""
        limit_s = PATIENCE * compute_s(len(data)) + START_S
        if self._process is not None:
            answer = self._process.ask(question, data, limit_s)
            if answer is not None:
                return answer
            had_ended = self._process.has_ended()  # by itself: nobody had asked for a while
            self._process.end()
            self._process = None
            if self._is_closed or not had_ended:
                return None
        self._process = _Process(self._packed())
        answer = self._process.ask(question, data, limit_s)
        if answer is None:
            self._process.end()
            self._process = None
        return answer


class _Process:
    """The process, and the pipes to it. Raises ConfigurationError if it cannot be started."""

    def __init__(self, tokenizer: bytes) -> None:
        self._process = own_process.start("coordinator.api.reading", CANNOT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._asked = Connection(os.dup(self._process.stdin.fileno()), readable=False)
            self._said = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        except OSError as error:  # no file descriptor is left
            self._process.kill()
            self._process.wait()
            raise own_process.not_started(CANNOT, error) from error
        finally:
            self._process.stdin.close()
            self._process.stdout.close()
        with suppress(OSError):  # whoever asks it sees that it has ended
            self._asked.send_bytes(tokenizer)

    def ask(self, question: Mapping[str, Any], data: bytes, limit_s: float) -> Answer | None:
        """Return the answer; None: the process has ended, also because it took too long."""
        hurry = threading.Timer(limit_s, self._process.kill)
        hurry.daemon = True
        hurry.start()
        try:
            self._asked.send_bytes(json.dumps(question).encode())
            self._asked.send_bytes(data)
            return json.loads(self._said.recv_bytes()), self._said.recv_bytes()
        except (OSError, EOFError):
            return None
        finally:
            hurry.cancel()

    def has_ended(self) -> bool:
        """True if the process, whose pipes are closed, has ended by itself and without an error."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_S) == 0
        return False

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._asked.close()
        self._said.close()


def _read(text: str, said: Mapping[str, Any], ids: bytes) -> Read:
    count = said["num_tokens"]
    found = tuple(array("i", ids))
    return Read(text, count, found if len(found) == count else None, said["is_least"])
