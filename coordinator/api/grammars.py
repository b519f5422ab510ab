"""Makes grammars of what requests want, and refuses what is wrong, endless or too large.

Every grammar is compiled here, with the code of the nodes, before a text is sent. That happens in
the thread of whoever asks, never in the service's thread. Loaded by the first such request.
"""

import json
import time
from functools import lru_cache

from tokenizers import Tokenizer

from coordinator.api.endless import has_an_end
from coordinator.api.structured import NAME, StructuredOutputsParams
from engine.choice import vocabulary
from engine.choice.vocabulary import PACKAGE, Vocabulary
from engine.errors import GrammarError
from proto.errors import ConfigurationError
from proto.installation import missing
from proto.messages import MAX_GRAMMAR_LEN

# Seconds of this thread's own CPU time that compiling may take. What takes longer would take the
# nodes as long, and other texts would wait for them.
COMPILE_S = 0.5
NUM_TRIED = 16  # tokens of an answer that are tried out: some grammars fail after the first one
MAX_CHECKED = 256  # grammars that are not checked again


class Grammars:
    """Compiles the grammars of requests for one target, and keeps what it has checked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._checked = lru_cache(MAX_CHECKED)(self._check)

    def of(self, wanted: StructuredOutputsParams) -> str:
        """Return the grammar for the nodes, as llguidance writes it. Raises ConfigurationError."""
        kind, source = wanted.kind, wanted.source
        try:
            source.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"{NAME}: {kind} is not valid Unicode") from error
        return self._checked(kind, source, wanted.disable_any_whitespace)

    def _check(self, kind: str, source: str, is_compact: bool) -> str:  # noqa: FBT001
        """Return the grammar once it is compiled. Raises ConfigurationError."""
        try:
            known = self._vocabulary or vocabulary.byte_vocabulary(self._tokenizer)
            self._vocabulary = known
            grammar = _written(kind, source, is_compact=is_compact)
            began = time.thread_time()
            known.try_out(grammar, NUM_TRIED)
            took_s = time.thread_time() - began
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"{NAME} needs {missing(PACKAGE, 'structured')}") from error
        except GrammarError as error:
            raise ConfigurationError(f"{NAME}: {kind} cannot be used: {error}") from error
        if len(grammar) > MAX_GRAMMAR_LEN or took_s > COMPILE_S:
            raise ConfigurationError(f"{NAME}: {kind} is too complex; make it simpler")
        if kind == "json" and not has_an_end(json.loads(source)):
            raise ConfigurationError(
                f"{NAME}: no JSON text fits this schema: what it requires never ends"
            )
        return grammar


def _written(kind: str, source: str, *, is_compact: bool) -> str:
    """Return a schema, pattern, list or grammar in the form that llguidance reads."""
    match kind:
        case "json" | "json_object":
            schema = "{}" if source.strip() == "true" else source  # the library wants a dict
            return vocabulary.of_json_schema(schema, is_compact=is_compact)
        case "regex":
            return vocabulary.of_regex(source)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(source))
            return vocabulary.of_lark("start: " + " | ".join(texts))
        case "grammar":
            return vocabulary.of_lark(source)
    raise AssertionError(f"unknown kind {kind}")
