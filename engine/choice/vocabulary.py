"""The tokens of a model as the library of grammars reads them, and matchers of grammars over them.

Owns every call of llguidance that loads or compiles; `grammar.py` makes masks with the matchers.
Needs no torch: the coordinator compiles each grammar with the same code before a text is sent.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoint.tokenizer_files import changed_ns, read_tokenizer
from engine.errors import GrammarError, ModelError

# An additional token, which no text has: where the library allows it, the text may end. The model's
# own end-of-text tokens are then allowed in its place, however many they are.
END = "<|the end of a structured text|>"
# White space between the parts of a JSON text. The library's own pattern has no upper limit, and
# some models would write line breaks until the text is as long as it may be.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Work that may be done before a grammar counts as too complex, in the library's own units: at the
# beginning and at one position. Its defaults are 1,000,000, 200,000 and 2,000. With those a pattern
# of 30 characters took 0.7 s to be refused (now 0.07 s), and a schema of 2,000 optional properties
# failed in the middle of a text.
FUEL, STEP_FUEL, MAX_ITEMS = 200_000, 50_000, 20_000
MAX_KEPT = 32  # grammars that stay compiled
# Said of rules with max_tokens or stop, whose matchers cannot follow drafts and leave them again.
NO_WAY_BACK = "a rule has max_tokens or stop; leave them out"
# Added to rules that name tokens by number. Where such a token alone may come, the library takes
# the digits of its number for text that is certain to follow, and a matcher that is moved back to
# this place goes on in the middle of the number.
TOKEN_BY_NUMBER, NO_FORCING = "<[", '\n%llguidance {"no_forcing": true}\n'
LONGEST_REASON = 56  # characters of the library's reason that are shown
# How some of the library's reasons begin, and what is said instead.
IN_OUR_WORDS = {
    "NoExtension": "no text fits it",
    "oneOf constraints are not supported": "oneOf of overlapping schemas; use anyOf",
}


class Matcher(Protocol):
    """A place in a grammar (`llguidance.LLMatcher`): moves along tokens, and back."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Move along the tokens as far as the grammar allows them; return how many those are."""

    def rollback(self, num_tokens: int) -> bool:
        """Move back by so many tokens; return False if that is not possible."""

    def compute_bitmask(self) -> bytes:
        """Return the allowed tokens: bit i of this little-endian number is that of token i."""

    def is_error(self) -> bool:
        """Return True if the grammar was wrong or too complex; the matcher is then of no use."""

    def get_error(self) -> str:
        """Return the reason of the error; "" if there is none."""

    def deep_copy(self) -> "Matcher":
        """Return another matcher at the same place."""


class Vocabulary:
    """The tokens of one tokenizer, loaded into llguidance; compiles grammars.

    size  number of tokens; the id of the additional token END

    The constructor raises ModuleNotFoundError if llguidance is not installed, and GrammarError if
    it cannot read this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        whole = Tokenizer.from_str(tokenizer.to_str())
        whole.add_special_tokens([AddedToken(END, special=True)])
        end = whole.token_to_id(END)
        assert end is not None
        self.size = end
        try:
            self._tokens = LLTokenizer(whole.to_str(), eos_token=end)
        except ValueError as error:
            raise GrammarError(f"no grammars with this tokenizer: {_short(str(error))}") from error
        self._limits = LLParserLimits(
            initial_lexer_fuel=FUEL,
            step_lexer_fuel=STEP_FUEL,
            max_items_in_row=MAX_ITEMS,
            verbose_errors=False,
        )
        self._compiled: dict[str, Matcher] = {}  # by grammar, those used last at the end

    def matcher(self, grammar: str, *, anew: bool = False) -> Matcher:
        """Return a matcher at the beginning of a grammar, written as llguidance writes it.

        anew  compile it again: matchers of one grammar share what the library has worked out, and
              one that came to a limit may have brought the others there

        Raises GrammarError.
        """
        made = self._compiled.pop(grammar, None)
        if made is None or anew:
            made = self._compile(grammar)
        self._compiled[grammar] = made
        if len(self._compiled) > MAX_KEPT:
            del self._compiled[next(iter(self._compiled))]
        return made.deep_copy()

    def try_out(self, grammar: str, num_tokens: int) -> None:
        """Follow a grammar along some answer of so many tokens, or to its end.

        Raises GrammarError: the grammar is wrong, or too complex already there.
        """
        matcher = self.matcher(grammar)
        for _ in range(num_tokens):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            check(matcher)
            token = (allowed & -allowed).bit_length() - 1  # the first one; END is the last
            if token == self.size:
                return
            num_taken = matcher.try_consume_tokens([token])
            check(matcher)
            if not matcher.rollback(num_taken):
                raise GrammarError(NO_WAY_BACK)
            matcher.try_consume_tokens([token])
            check(matcher)

    def num_fitting(self, grammar: str, written: bytes) -> int:
        """Return how many bytes at the beginning of a text fit a grammar.

        For a vocabulary of bytes. Raises GrammarError: the grammar is too complex there.
        """
        matcher = self.matcher(grammar)
        fitting: int = matcher.try_consume_tokens(self._tokens.tokenize_bytes(written))
        check(matcher)
        return fitting

    def _compile(self, grammar: str) -> Matcher:
        from llguidance import LLMatcher

        made: Matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        check(made)
        return made


def byte_vocabulary(special: Sequence[str]) -> Vocabulary:
    """Return a vocabulary of the 256 bytes and these special tokens, to try grammars out.

    A vocabulary of 128,000 tokens takes a second and 118 MB to load, and for half of that second no
    other thread of Python runs. What makes a grammar wrong or too complex shows with bytes as well.
    """
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: number for number, sign in enumerate(signs)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    return Vocabulary(made)


def check(matcher: Matcher) -> None:
    """Raise GrammarError if the matcher cannot go on."""
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))


def _short(reason: str) -> str:
    """Return the library's reason as one short line, without the place in its own text."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    for beginning, words in IN_OUR_WORDS.items():
        if line.startswith(beginning):
            return words
    line = line.split(" 1 | ")[0].split("error: ")[-1].removesuffix(" ^")
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 4]} ..."


def of_json_schema(schema: str, *, is_compact: bool = False) -> str:
    """Return the grammar of the JSON texts that fit a schema. Raises GrammarError.

    is_compact  no white space between the parts of the text
    """
    options: dict[str, Any] = {"whitespace_pattern": WHITE_SPACE}
    if is_compact:
        options = {"whitespace_flexible": False}
    try:
        return str(_library().grammar_from_json_schema(schema, defaults=options))
    except ValueError as error:
        raise GrammarError(_short(str(error))) from error


def of_regex(pattern: str) -> str:
    """Return the grammar of the texts that match a pattern from beginning to end."""
    return str(_library().grammar_from_regex(pattern))


def of_lark(rules: str) -> str:
    """Return the grammar of rules in the form of Lark, or in that of GBNF. Raises GrammarError."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        lark = any_to_lark(rules)
        if TOKEN_BY_NUMBER in lark:
            lark += NO_FORCING  # the last such line holds
        return str(_library().grammar_from_lark(lark))
    except (GbnfToLarkError, ValueError, LookupError, RecursionError) as error:
        raise GrammarError(_short(str(error))) from error


def _library() -> Any:
    from llguidance import LLMatcher

    return LLMatcher


@lru_cache(maxsize=4)
def _read(folder: Path, _changed_ns: tuple[int, ...]) -> Vocabulary:
    return Vocabulary(read_tokenizer(folder).tokenizer)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer in a model's folder, kept until its files change.

    It is read while the node starts, because no other thread runs for a part of that time.

    Returns None if there is no tokenizer, llguidance is not installed or cannot read it.
    """
    try:
        return _read(folder, changed_ns(folder))
    except (ModelError, ModuleNotFoundError, GrammarError):
        return None
