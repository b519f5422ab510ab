"""Finds and runs llama.cpp's own programs, and reads what they print.

A program writes one text and ends. Its figures are those of its own timing lines, so loading the
model is in none of them. The forms of the lines are those of the version that `build_llamacpp.py`
builds; a program of another version that prints others is refused in one line.

llama.cpp prints in a thread that is not waited for at the end, so on a busy machine the last lines
may be lost (`UnknownTimes`): then the same text is written again.
"""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.experiments.peers.gguf_file import llama_cpp_folder

COMPLETION, SPECULATIVE = "llama-completion", "llama-speculative-simple"
BENCH, QUANTIZE = "llama-bench", "llama-quantize"
PROGRAMS = (COMPLETION, SPECULATIVE, BENCH, QUANTIZE)
BUILD = "python -m lab.experiments.peers.build_llamacpp"
LIMIT_S = 300.0  # most seconds for a program to load a model and write a text

_PROMPT_TOKEN = re.compile(r"^\S+ I +(\d+) -> '", re.MULTILINE)
_PROMPT = re.compile(r"prompt eval time = +([\d.]+) ms / +(\d+) tokens")
_EVAL = re.compile(r": +eval time = +([\d.]+) ms / +(\d+) runs")
_ENCODED = re.compile(r"encoded +(\d+) tokens in +([\d.]+) seconds")
_DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
_ACCEPTED = re.compile(r"n_accept += (\d+)")
_VERSION = re.compile(r"version: (\S+)")
END = "\n\n"  # after a text `llama-completion` prints this once, the speculative program twice


class ProgramError(Exception):
    """A program is missing, failed, took too long, or printed something unknown; one line."""


class UnknownTimes(ProgramError):
    """A program printed no times in the forms that are known, or lost its last lines."""


@dataclass(frozen=True, slots=True)
class Made:
    """A text that a program wrote, with the times that it states.

    text               as bytes: a text may end in the middle of a character
    prompt_tokens      ids of the prompt's tokens; (): the program does not print them
    num_prompt_tokens  number of them
    prompt_s           seconds in which it read the prompt
    num_tokens         tokens of the text
    writing_s          seconds in which it wrote them, without the first if `has_first_free`
    num_passes         passes of the target in `writing_s`
    has_first_free     the first token came of the prompt's pass, and costs no other
    """

    text: bytes
    prompt_tokens: tuple[int, ...]
    num_prompt_tokens: int
    prompt_s: float
    num_tokens: int
    writing_s: float
    num_passes: int
    has_first_free: bool

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of writing, without the prompt."""
        written = self.num_tokens - self.has_first_free
        return written / self.writing_s if self.writing_s else 0.0


# -- finding and running ---------------------------------------------------------------------------


def found(name: str) -> Path | None:
    """Return the path of a program: the one that our command built, or else that on the PATH."""
    own = llama_cpp_folder() / "bin" / name
    path = own if own.is_file() else shutil.which(name)
    return None if path is None else Path(path)


def what_is_missing() -> str:
    """Return which command builds the programs if one of them is missing; "" if all are there."""
    if all(found(name) for name in PROGRAMS):
        return ""
    return f"build it: `{BUILD}`"


def run(name: str, *arguments: object, limit_s: float = LIMIT_S) -> tuple[bytes, str]:
    """Run a program to its end; return its standard output and its messages.

    Raises ProgramError.
    """
    path = found(name)
    if path is None:
        raise ProgramError(f"there is no {name}; {what_is_missing()}")
    try:
        ended = subprocess.run(
            [path, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"{name} was ended after {limit_s:g} s without a result") from error
    except OSError as error:
        raise ProgramError(f"{name} does not start: {error.strerror}") from error
    messages = ended.stderr.decode(errors="replace")
    if ended.returncode:
        said = [line for line in messages.splitlines() if "error" in line]
        why = f": {said[-1].strip()[:60]}" if said else ""
        raise ProgramError(f"{name} ended with status {ended.returncode}{why}")
    return ended.stdout, messages


def version() -> str:
    """Return llama.cpp's version. Raises ProgramError."""
    _, messages = run(COMPLETION, "--version")
    said = _VERSION.search(messages)
    return said[1] if said else "of unknown version"


# -- reading ---------------------------------------------------------------------------------------


def completion(output: bytes, messages: str) -> Made:
    """Return what `llama-completion` wrote (with --verbose-prompt, without the prompt's text).

    Raises UnknownTimes.
    """
    prompt, writing = _PROMPT.search(messages), _EVAL.search(messages)
    if prompt is None or writing is None:
        raise _unknown(COMPLETION)
    num_passes = int(writing[2])
    return Made(
        output.removesuffix(END.encode()),
        tuple(map(int, _PROMPT_TOKEN.findall(messages))),
        int(prompt[2]),
        float(prompt[1]) / 1e3,
        num_passes + 1,
        float(writing[1]) / 1e3,
        num_passes,
        has_first_free=True,
    )


def speculative(output: bytes, messages: str, prompt: bytes) -> Made:
    """Return what `llama-speculative-simple` wrote after the prompt.

    Raises UnknownTimes.
    """
    encoded, decoded = _ENCODED.search(messages), _DECODED.search(messages)
    accepted = _ACCEPTED.search(messages)
    start = END.encode() + prompt
    is_whole = output.startswith(start) and output.endswith(2 * END.encode())
    if encoded is None or decoded is None or accepted is None or not is_whole:
        raise _unknown(SPECULATIVE)
    num_tokens = int(decoded[1])
    return Made(
        output.removeprefix(start).removesuffix(2 * END.encode()),
        (),
        int(encoded[1]),
        float(encoded[2]),
        num_tokens,
        float(decoded[2]),
        num_tokens - int(accepted[1]),
        has_first_free=False,
    )


def bench(output: bytes) -> dict[int, float]:
    """Return the tokens per second that `llama-bench -o json` found, by number of threads.

    Raises UnknownTimes.
    """
    try:
        found = {int(one["n_threads"]): float(one["avg_ts"]) for one in json.loads(output)}
    except (ValueError, KeyError, TypeError) as error:
        raise _unknown(BENCH) from error
    if not found:
        raise _unknown(BENCH)
    return found


def fastest(speeds: dict[int, float]) -> int:
    """Return the key with the highest speed; of equals the lowest."""
    return max(sorted(speeds), key=lambda one: speeds[one])


def numbers_of_threads(num_cores: int) -> list[int]:
    """Return the numbers of threads to try: 1, 2, 4 and so on, and all cores."""
    powers = [1 << power for power in range(num_cores.bit_length())]
    return [*(one for one in powers if one < num_cores), num_cores]


def _unknown(name: str) -> UnknownTimes:
    return UnknownTimes(f"{name} prints unknown times; use `{BUILD}`")
