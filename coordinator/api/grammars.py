"""Makes grammars of what requests want, and refuses what is wrong, endless or too large.

Every grammar is compiled by a process of its own (`compiling.py`) before a text is sent, and that
process is ended if it takes too long. Whoever asks waits for it, never the service's thread. Loaded
by the first request that wants a grammar.
"""

import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coordinator.api import own_process
from coordinator.api.reasoning import Thoughts
from coordinator.api.structured import FOLLOW, NAME, TOO_COMPLEX, StructuredOutputsParams
from proto.errors import BusyError, ConfigurationError
from proto.installation import missing
from proto.messages import MAX_GRAMMAR_LEN

PACKAGE = "llguidance"
# Most seconds of processor time for a grammar: more than the process itself allows (COMPILE_S), for
# what cannot be interrupted there. And most seconds, also on a busy machine.
PROCESSOR_S, ANSWER_S = 0.9, 10.0
LOOK_S = 0.05  # how often the processor time is looked at
START_S = 30.0  # until the process is ready
QUEUE_S = 5.0  # how long a request waits until others' grammars are compiled
# Grammars that are not checked again: more than texts wait by default, so that none is compiled
# when its turn comes, in the thread that serves all.
MAX_CHECKED = 512
MAX_SPACE = 32  # white space between the thoughts and the text
# Without this line a matcher that is moved back to a token which a rule names by its number goes on
# in the middle of the number.
NO_FORCING = '%llguidance {"no_forcing": true}'
_READ_BYTES = 1 << 16


def behind_thoughts(thoughts: Thoughts, grammar: str, token_ids: Mapping[str, int]) -> str:
    """Return the grammar of thoughts, white space, and a text that fits `grammar`.

    Where the prompt does not begin the thoughts, the text may also come alone.

    grammar    as llguidance writes it: JSON, or rules in the form of Lark
    token_ids  the marks that are tokens. To the library an added token is no text, so that it has
               to be named by its number; the letters of the closing one may come all the same
    """
    marks = thoughts.marks
    begin, sign = json.dumps(marks.opening), re.escape(marks.closing).replace("/", "\\/")
    thought = "TO_THE_END"
    if marks.opening in token_ids:
        begin = f"<[{token_ids[marks.opening]}]>"
    if marks.closing in token_ids:
        thought += f" | OPEN <[{token_ids[marks.closing]}]>"
    lines = [
        "start: thought SPACE? @answer"
        if thoughts.is_open
        else f"start: ({begin} thought SPACE?)? @answer",
        f"thought: {thought}",
        f"TO_THE_END: /(?s:.*){sign}/ & ~/(?s:.*){sign}(?s:.+)/",
        f"OPEN: /(?s:.*)/ & ~/(?s:.*){sign}(?s:.*)/",
        f"SPACE: /[ \\n\\r\\t]{{1,{MAX_SPACE}}}/",
        NO_FORCING,
    ]
    try:
        (answer,) = json.loads(grammar)["grammars"]
    except ValueError:
        answer = {"lark_grammar": grammar}
    rules = {"lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [rules, {**answer, "name": "answer"}]}, ensure_ascii=False)


class _WrongFormError(Exception):
    """What is wrong with a form; the message goes on behind its name."""


class Grammars:
    """Checks the grammars of requests for one target, and keeps what it has checked.

    tokenizer  the target's, whose special tokens a grammar may name
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_id = tokenizer.token_to_id
        added = tokenizer.get_added_tokens_decoder().values()
        self._compiler = Compiler([one.content for one in added if one.special])
        self._checked = lru_cache(MAX_CHECKED)(self._check)

    def of(self, wanted: StructuredOutputsParams) -> str:
        """Return the grammar for the nodes, as llguidance writes it.

        Raises ConfigurationError, and BusyError: others' grammars take too long.
        """
        kind, source = wanted.kind, wanted.source
        try:
            source.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"{wanted.name} is not valid Unicode") from error
        try:
            return self._checked(kind, source, wanted.disable_any_whitespace)
        except _WrongFormError as error:
            raise ConfigurationError(f"{wanted.name} {error}") from error

    def behind(self, thoughts: Thoughts, grammar: str) -> str:
        """Return the grammar of thoughts and then a text that fits `grammar`, which was checked.

        Raises ConfigurationError: both together are too long for the nodes.
        """
        names = (thoughts.marks.opening, thoughts.marks.closing)
        ids = {name: found for name in names if (found := self._token_id(name)) is not None}
        whole = behind_thoughts(thoughts, grammar, ids)
        if len(whole) > MAX_GRAMMAR_LEN:
            raise ConfigurationError(f"{NAME} {TOO_COMPLEX}")
        return whole

    def refuse_unfitting(self, wanted: StructuredOutputsParams, written: Sequence[bytes]) -> None:
        """Raise ConfigurationError if a text of these tokens is no beginning of what is wanted.

        written  the bytes of each token

        Also raises BusyError. A grammar that takes too long is not asked further: the target will.
        """
        answer = self._compiler.ask([FOLLOW, self.of(wanted), b"".join(written).hex()])
        ends = accumulate(map(len, written))
        if answer is None:
            return
        fitting = int(answer["num_fitting"])
        if (number := next((n for n, end in enumerate(ends) if end > fitting), None)) is not None:
            raise ConfigurationError(
                f"resume: token {number + 1} of {len(written)} does not fit {wanted.name}; send "
                "only those before it"
            )

    def close(self) -> None:
        """End the process. May be called twice."""
        self._compiler.close()

    def _check(self, kind: str, source: str, is_compact: bool) -> str:  # noqa: FBT001
        """Return the grammar once it is compiled.

        Raises _WrongFormError, ConfigurationError: no process can be started; BusyError.
        """
        if find_spec(PACKAGE) is None:
            raise _WrongFormError(f"needs {missing(PACKAGE, 'structured')}")
        answer = self._compiler.ask([kind, source, is_compact])
        if answer is None:
            raise _WrongFormError(TOO_COMPLEX)
        if "error" in answer:
            raise _WrongFormError(answer["error"])
        return str(answer["grammar"])


class Compiler:
    """The process that compiles grammars, one after another; started when it is needed."""

    def __init__(self, special: Sequence[str]) -> None:
        self._special = list(special)
        self._lock = threading.Lock()  # held by whoever waits for an answer
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._is_closed = False

    def ask(self, wanted: Sequence[object]) -> dict[str, Any] | None:
        """Return the process's answer; None: it took too long and was ended, or all is closed.

        Raises BusyError, and ConfigurationError: the process cannot be started.
        """
        if not self._lock.acquire(timeout=QUEUE_S):
            raise BusyError("other grammars are being compiled; try again later")
        try:
            process = self._process
            is_there = process is not None and process.poll() is None
            if self._is_closed:  # looked at last: `close` may have ended the process just now
                return None
            if process is None or not is_there:
                process = self._process = self._started()
            line = self._said(process, wanted, ANSWER_S, PROCESSOR_S)
        finally:
            self._lock.release()
        if line is None:
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> "subprocess.Popen[bytes]":
        process = own_process.start("coordinator.api.compiling", f"{NAME}: cannot start a process")
        self._process = process
        if self._said(process, self._special, START_S, START_S) != b"ready":
            raise ConfigurationError(
                f"{NAME}: `python -m coordinator.api.compiling` does not start; run it to see why"
            )
        return process

    def _said(
        self,
        process: "subprocess.Popen[bytes]",
        asked: Sequence[object],
        limit_s: float,
        processor_s: float,
    ) -> bytes | None:
        """Send a line to the process and return its answer; None: none in time, and it is ended.

        limit_s, processor_s  seconds that may pass, and that it may compute
        """
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + limit_s
            line = _line(process, deadline, _computed_s(process.pid) + processor_s)
        except OSError:
            line = None
        if line is None:
            _end(process)
        return line

    def close(self) -> None:
        """End the process; a forked child of whoever started it leaves it alone."""
        self._is_closed = True
        if self._process is not None and os.getpid() == self._owner:
            self._process.kill()  # whoever waits for an answer sees the end of the pipe
            with self._lock:
                _end(self._process)


def _line(
    process: "subprocess.Popen[bytes]", deadline: float, most_computed_s: float
) -> bytes | None:
    """Return the next line that a process prints, without its end; None: none comes in time."""
    assert process.stdout is not None
    source, read = process.stdout.fileno(), b""
    waiting = select.poll()  # `select.select` knows no number of a file above 1,023
    waiting.register(source, select.POLLIN)
    while time.monotonic() < deadline and _computed_s(process.pid) < most_computed_s:
        if waiting.poll(LOOK_S * 1000):
            part = os.read(source, _READ_BYTES)
            read += part
            if read.endswith(b"\n"):
                return read[:-1]
            if not part:
                return None
    return None


def _computed_s(pid: int) -> float:
    """Return the seconds for which a process has computed. Raises OSError if it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
