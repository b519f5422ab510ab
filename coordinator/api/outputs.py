"""The outputs of generation, in the shapes and names of vLLM, and how they are assembled (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from coordinator.api.speculation import SpeculationPart, TokenTexts
from coordinator.text.detokenization import Decoder, Ending, Piece, StopStrings
from coordinator.text.metrics import Metrics, origins, shown_rejected
from coordinator.text.session_events import Emit
from proto.errors import ConfigurationError, shown
from proto.messages import FinishReason, Logprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural log of a token's probability in the target, before temperature and the like.

    rank           1 is the likeliest token
    decoded_token  its text as it reads after another token, so that a leading space is shown
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # by token id: the token of the text, then the likeliest


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt; in a stream, what one pass has added to it.

    index               which of the `n` continuations
    text                the text without special tokens; the ids if the target has no tokenizer
    token_ids           the tokens up to and including the one that ended the text
    finish_reason       "stop" or "length"; "error" if the text could not be completed; None while
                        more is to come
    stop_reason         the stop string or stop token that ended the text; None: its length or an
                        end-of-text token of the model
    token_origins       for each token `draft:SOURCE` (`origins.SOURCES`), `recovered`, `bonus` or
                        `plain`
    metrics             of the whole text, at its end; None if it could not be completed
    error               why the text could not be completed, in one line; None: it was
    logprobs            for each token, if they were asked for
    text_offsets        for each token where it begins in the text, in characters, if logprobs were
                        asked for; a token within a character begins where that character does
    cumulative_logprob  the sum of the tokens' log-probabilities
    speculation         in a stream of a request that is watched: each token's text and origin, and
                        what both devices did (`Request.watch`)
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_origins: tuple[str, ...] = ()
    metrics: Metrics | None = None
    logprobs: list[TokenLogprobs] | None = None
    text_offsets: list[int] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    speculation: SpeculationPart | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its continuations.

    prompt           None if the prompt was given as token ids
    finished         True if nothing will be added; in a stream only the last output has it
    seed             the seed that was used: from the parameters, or a fresh one if they had none
    prompt_logprobs  for each token of the prompt, if they were asked for; None for the first
    request_id       as given to `AsyncLLM.generate`, else a number of this LLM's or a random word
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    request_id: str = field(default="", compare=False)


class Assembly:
    """Assembles the output of one text from the tokens of its passes, up to the text's end.

    ending  where the text ends; stop strings are searched for here and nowhere else
    index   the number of this continuation of the prompt
    token_texts  gives each token its part of the text; None: nobody asked for that
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: Sequence[int],
        seed: int,
        decoder: Decoder,
        *,
        ending: Ending | None = None,
        index: int = 0,
        token_texts: TokenTexts | None = None,
        request_id: str = "",
    ) -> None:
        self._base = RequestOutput(
            prompt, list(prompt_ids), [], finished=False, seed=seed, request_id=request_id
        )
        self._decoder = decoder
        self._ending = ending or Ending()
        self._stops = StopStrings(self._ending.strings, is_shown=self._ending.is_shown)
        self.index = index
        self._token_texts = token_texts
        self._parts: list[CompletionOutput] = []
        self._token_ids: list[int] = []  # of all parts
        self._num_resumed = 0  # of these: written elsewhere

    @property
    def is_stopped(self) -> bool:
        """True if a stop string has been found; tokens after it are not part of the text."""
        return self._stops.found is not None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the text has so far."""
        return len(self._token_ids)

    @property
    def has_parts(self) -> bool:
        """True if any output of the text has come."""
        return bool(self._parts)

    def scored(self, logprobs: Logprobs) -> None:
        """Store the prompt's logprobs, from its second token on."""
        rows = self._named(logprobs)
        self._base = replace(self._base, prompt_logprobs=[None, *rows])

    def resume(self, written: Sequence[int]) -> str:
        """Begin behind tokens that were written elsewhere; return the text that they have shown.

        No part tells of them. Text that they hold back comes with the tokens that follow.

        Raises ConfigurationError if a stop string has ended the text before the last of them.
        """
        kept, part = self.cut(Emit(tuple(written), 0, 0, ()))
        if len(kept.tokens) < len(written):
            raise ConfigurationError(
                f"the stop string {shown(self._stops.found)} ends the text among the tokens that "
                "are written already: nothing follows it"
            )
        self._num_resumed = len(written)
        return part.outputs[0].text

    @property
    def num_new_tokens(self) -> int:
        """Return the number of tokens that the text has so far, without those written elsewhere."""
        return self.num_tokens - self._num_resumed

    def push(self, emit: Emit) -> RequestOutput:
        """Add the tokens of a pass; return the output that they add."""
        return self.cut(emit)[1]

    def cut(self, emit: Emit) -> tuple[Emit, RequestOutput]:
        """Add a pass; return (its part before the end of the text, the output it adds)."""
        assert not self.is_stopped
        text = ""
        pieces, rejected = self._pieces_of(emit)
        for number, piece in enumerate(pieces, 1):
            may_stop = self.num_tokens + number > self._ending.min_tokens
            text += self._stops.push(piece.text, may_stop=may_stop)
            if self.is_stopped:
                emit = emit.first(number)
                break
        part = CompletionOutput(self.index, text, list(emit.tokens), token_origins=origins(emit))
        if emit.logprobs is not None:
            rows = self._named(emit.logprobs)
            total = sum(row[token].logprob for row, token in zip(rows, emit.tokens, strict=True))
            begins = [piece.begin for piece in pieces[: len(emit.tokens)]]
            part = replace(part, logprobs=rows, cumulative_logprob=total, text_offsets=begins)
        self._add(part)
        if self._token_texts is not None:  # what is told is not kept: `whole` has no need of it
            texts = [piece.text for piece in pieces[: len(emit.tokens)]]
            told = self._token_texts.push(emit, texts, rejected, text)
            part = replace(part, speculation=told)
        return emit, self._output(part, finished=False)

    def finish(
        self,
        reason: str,
        metrics: Metrics | None,
        *,
        is_last: bool = True,
        error: str | None = None,
    ) -> RequestOutput:
        """Return the last part: text that was held back, how the text ended, its metrics.

        is_last  no other continuation of the prompt is open
        error    why the text could not be completed
        """
        text = ""
        if not self.is_stopped:
            may_stop = self.num_tokens > self._ending.min_tokens
            text = self._stops.push(self._decoder.finish(), may_stop=may_stop)
            text += self._stops.finish()
        if self.is_stopped:
            reason, error = FinishReason.STOP.value, None
        part = CompletionOutput(
            self.index,
            text,
            [],
            finish_reason=reason,
            stop_reason=self._stop_reason(reason),
            metrics=metrics,
            error=error,
        )
        self._add(part)
        if self._token_texts is not None:
            part = replace(part, speculation=self._token_texts.finish(text))
        return self._output(part, finished=is_last)

    def whole(self) -> RequestOutput:
        """Return the output of the whole text; call it after `finish`."""
        last = self._parts[-1]
        rows = [row for part in self._parts for row in part.logprobs or ()]
        begins = [begin for part in self._parts for begin in part.text_offsets or ()]
        totals = [part.cumulative_logprob or 0.0 for part in self._parts]
        complete = replace(
            last,
            text="".join(part.text for part in self._parts),
            token_ids=self._token_ids,
            token_origins=tuple(origin for part in self._parts for origin in part.token_origins),
            logprobs=rows or None,
            text_offsets=begins if rows else None,
            cumulative_logprob=sum(totals) if rows else None,
        )
        return self._output(complete, finished=True)

    def _pieces_of(self, emit: Emit) -> tuple[list[Piece], str]:
        """Return what each token adds to the text, and the rejected drafts as text, if wanted."""
        if self._token_texts is None:
            return self._pieces(emit.tokens), ""
        pieces = self._pieces(emit.tokens[: emit.num_accepted])
        rejected = self._decoder.preview(shown_rejected(emit))
        return [*pieces, *self._pieces(emit.tokens[emit.num_accepted :])], rejected

    def _pieces(self, tokens: Sequence[int]) -> list[Piece]:
        """Return what each token adds. A stop token is in the ids, but not in the text."""
        if not self._ending.is_shown and tokens and tokens[-1] in self._ending.stop_ids:
            return [*self._decoder.placed(tokens[:-1]), Piece("", self._decoder.end)]
        return self._decoder.placed(tokens)

    def _stop_reason(self, reason: str) -> int | str | None:
        if self._stops.found is not None or reason != FinishReason.STOP.value:
            return self._stops.found
        last = self._token_ids[-1]
        return last if last in self._ending.named_ids else None

    def _add(self, part: CompletionOutput) -> None:
        self._parts.append(part)
        self._token_ids += part.token_ids

    def _named(self, logprobs: Logprobs) -> list[TokenLogprobs]:
        """Return logprob rows as dicts by token id; the text's own token has its true rank."""
        rows: list[TokenLogprobs] = []
        name = cache(self._decoder.single)  # most tokens come again and again
        for number, rank in enumerate(logprobs.ranks):
            row = logprobs.part(number, number + 1)
            entries = zip(row.ids, row.values, (rank, *range(1, row.width)), strict=True)
            found: TokenLogprobs = {}
            for token, value, place in entries:
                if token not in found:
                    found[token] = Logprob(value, place, name(token))
            rows.append(found)
        return rows

    def _output(self, completion: CompletionOutput, *, finished: bool) -> RequestOutput:
        return replace(self._base, outputs=[completion], finished=finished)


def merged(texts: Sequence[RequestOutput]) -> RequestOutput:
    """Return several texts of one prompt as one output; the first has the prompt's logprobs."""
    return replace(texts[0], outputs=[output for text in texts for output in text.outputs])
