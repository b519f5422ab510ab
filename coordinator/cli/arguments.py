"""Reads the words of a command line before typer does: other programs' flags become ours.

What is unknown is refused here, with the flag that was probably meant: only one that could take the
value that was typed.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import typer

from coordinator.cli import foreign
from proto.errors import MIN_BEGINNING
from proto.installation import program

REST = "--"  # behind it are no more flags
HELP_ALL, PROMPT, PROMPT_FILE = "--help-all", "--prompt", "--prompt-file"
NUMBER = re.compile(r"-[\d.]")
ALIKE = 0.72  # how alike the names of two flags are, from 0 to 1, if one may stand for the other
# Flags of llama.cpp whose values belong together.
CONTEXT, SLOTS = ("-c", "--ctx-size"), ("-np", "--parallel")
WHOLE, NUMBERS = ("N", "SEED"), ("NUMBER", "SECONDS", "MS", "MICROSECONDS")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command.

    value  the placeholder for its value, as in the help; "": it has none
    """

    name: str
    value: str = ""

    def could_be(self, given: str | None) -> bool:
        """True if the flag may be meant where this value was typed; None: there was none."""
        if given is None or not self.value:
            return True
        if "|" in self.value:
            return bool(get_close_matches(given, self.value.split("|"), n=1))
        kind = int if self.value in WHOLE else float if self.value in NUMBERS else str
        try:
            kind(given)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Known:
    """What a command knows: its name behind that of the program, and its flags by name."""

    command: str
    flags: Mapping[str, Flag]
    takes_prompt: bool = False

    @property
    def is_server(self) -> bool:
        """True if sampling parameters come with requests."""
        return "--port" in self.flags


def in_our_words(words: Sequence[str], known: Known) -> list[str]:
    """Return the words of a command line in our spelling. Raises TyperException, with one line."""
    made: list[str] = []
    prompts: list[str] = []
    rest, theirs = deque(words), dict[str, str]()
    while rest and rest[0] != REST:
        word = rest.popleft()
        if not word.startswith("-") or word == "-" or NUMBER.match(word):
            made.append(word)
            continue
        name, equals, value = word.partition("=")
        name = _dashed(name, known)
        ours = name if name in known.flags else foreign.NAMES.get(name, "")
        if ours == foreign.PROMPT and PROMPT in known.flags:
            ours = PROMPT
        if ours == foreign.PROMPT and known.takes_prompt:
            prompts.append(_value(name, value if equals else None, rest, known))
        elif ours in known.flags:
            given = value if equals else None
            if known.flags[ours].value:
                given = theirs[name] = _value(name, given, rest, known)
            made += _written(name, ours, given)
        else:
            made += _elsewhere(name, value if equals else None, rest, known)
    _check_together(theirs)
    if prompts:
        return [*made, *(rest or (REST,)), *prompts]
    return [*made, *rest]


def _dashed(name: str, known: Known) -> str:
    """Return a flag's name with dashes in the place of underscores, as vLLM allows both."""
    if name in known.flags or not name.startswith("--"):
        return name
    return "--" + name[2:].replace("_", "-")


def _value(name: str, given: str | None, rest: deque[str], known: Known) -> str:
    if given is not None:
        return given
    if not rest:
        raise typer.TyperException(f"{name} needs a value; {full_help(known)} says which")
    return rest.popleft()


def _written(name: str, flag: str, value: str | None) -> Sequence[str]:
    """Return a flag of ours with its value (None: it has none) as typer reads it.

    name  as it was typed
    """
    if value is None:
        return (flag,)
    words = foreign.VALUES.get((name, value), (flag, value))
    return (f"{words[0]}={words[1]}",) if words else ()


def _elsewhere(name: str, given: str | None, rest: deque[str], known: Known) -> Sequence[str]:
    """Return our words for a flag that the command does not have. Raises TyperException.

    given  the value behind its equals sign; None: there is none
    """
    if name in (*foreign.DONE, *foreign.DONE_BY.get(known.command, ())):
        return ()
    if (switch := foreign.SWITCHES.get(name)) is not None and switch[0] in known.flags:
        return switch
    value = _follows(rest) if given is None else given
    words = foreign.BY_VALUE.get(name, {}).get((value or "").lower())
    if words is not None and (not words or words[0] in known.flags):
        _take(value, given, rest)
        return words
    if _is_nothing(name, value):
        _take(None if _is_switch(name) else value, given, rest)
        return ()
    raise typer.TyperException(_refusal(name, value, known))


def _take(value: str | None, given: str | None, rest: deque[str]) -> None:
    """Remove the next word if it is the value."""
    if value is not None and given is None:
        rest.popleft()


def _refusal(name: str, value: str | None, known: Known) -> str:
    """Return the line for a flag that has no equal here, or that nobody has."""
    key, _, inner = name.partition(".")
    if key in known.flags and inner:
        return f"{name}: write one JSON object, {key} '{{\"{inner}\": ...}}'"
    if line := _instead(name, known):
        return f"{name}: {line.replace('{}', program())}"
    hint = meant(name, known, value)
    return f"there is no option {name}; " + (f"did you mean {hint}?" if hint else lists(known))


def lists(known: Known) -> str:
    """Return where the flags of a command are listed."""
    return f"`{' '.join((program(), *known.command.split(), full_help(known)))}` lists them"


def full_help(known: Known) -> str:
    """Return the flag that shows all flags of a command."""
    return HELP_ALL if HELP_ALL in known.flags else "--help"


def _follows(rest: deque[str]) -> str | None:
    """Return the next word if it may be a value; None: it is a flag, or there is none."""
    if not rest or (rest[0].startswith("-") and not NUMBER.match(rest[0])):
        return None
    return rest[0]


def _instead(name: str, known: Known) -> str:
    """Return what to do in the place of a flag of another program; "": it is none."""
    if name in foreign.INSTEAD:
        return foreign.INSTEAD[name]
    if foreign.NAMES.get(name) == foreign.PROMPT:
        where = f"{PROMPT_FILE} FILE holds the prompts" if PROMPT_FILE in known.flags else ""
        return where or foreign.NO_PROMPT.get(known.command, "")
    if known.is_server:
        from coordinator.api.params import SamplingParams

        ours = foreign.NAMES.get(name, name)[2:].replace("-", "_")
        if ours in SamplingParams.model_fields:
            return f'clients send "{ours}" with each request'
    _, instead = _not_ours(name)
    return f"this is no setting here: {instead}" if instead else ""


def _not_ours(name: str) -> tuple[Sequence[object], str]:
    """Return what values of a setting of vLLM's change nothing, and what to use instead."""
    from coordinator.api.vllm import NOT_OURS

    return NOT_OURS.get(name[2:].replace("-", "_"), ((), ""))


def _is_nothing(name: str, value: str | None) -> bool:
    """True if a setting of vLLM's that we do not have asks for what is done anyway."""
    accepted, _ = _not_ours(name)
    if _is_switch(name):
        return True in accepted
    return value is not None and value in [str(one) for one in accepted]


def _is_switch(name: str) -> bool:
    """True if a setting of vLLM's that we do not have is written without a value."""
    return any(isinstance(one, bool) for one in _not_ours(name)[0])


def _check_together(theirs: Mapping[str, str]) -> None:
    """Refuse llama.cpp's size of the whole context beside its number of texts."""
    size = next((theirs[name] for name in CONTEXT if name in theirs), "")
    slots = next((theirs[name] for name in SLOTS if name in theirs), "")
    if not (size.isdecimal() and slots.isdecimal() and int(size) and int(slots) > 1):
        return
    each = int(size) // int(slots)
    raise typer.TyperException(
        f"llama.cpp divides -c {size} among -np {slots} texts; here each text has its own room: "
        f"--max-model-len {each} --max-num-seqs {slots}"
    )


# -- hints -----------------------------------------------------------------------------------------


def meant(name: str, known: Known, given: str | None) -> str:
    """Return our flag that was probably meant; "": none is alike and could take the value."""
    found: dict[str, Flag] = {}
    for word, flag in _candidates(known):
        if flag.could_be(given):
            found.setdefault(word.strip("-"), flag)
    word = name.strip("-").lower()
    near = get_close_matches(word, found, n=1, cutoff=ALIKE)
    if not near and len(word) >= MIN_BEGINNING:
        near = [one for one in found if one.startswith(word)]
    return found[near[0]].name if near else ""


def _candidates(known: Known) -> Iterator[tuple[str, Flag]]:
    """Yield every long name that the command takes, with its flag."""
    for name, flag in known.flags.items():
        if name.startswith("--"):
            yield name, flag
    for name, ours in foreign.NAMES.items():
        if name.startswith("--") and ours in known.flags:
            yield name, known.flags[ours]


def setting(word: str, known: Known) -> str:
    """Return the flag for a word like `max_new_tokens=64`, with its value; "": it is none."""
    name, equals, value = word.partition("=")
    flag = _dashed(f"--{name}", known)
    flag = foreign.NAMES.get(flag, flag)
    return f"{flag} {value}" if equals and flag in known.flags else ""
