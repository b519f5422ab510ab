"""How a session wants each token to be chosen, and the logprobs it gets: values inside messages."""

from dataclasses import dataclass

OFF = -1  # no logprobs
# Below this temperature a text is greedy: logits divided by a smaller number overflow. The same
# number is in engine/choice/sampling.py.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How the tokens of a text are chosen; every default is neutral (temperature 0: greedy).

    temperature          below GREEDY_BELOW the text is greedy
    seed, sample_index   key the noise that drafter and target share
    bias_ids, bias_values  equally many: `bias_values[i]` is added to the logit of token
                           `bias_ids[i]`
    banned               token sequences whose last token may not follow the others (bad_words)
    min_tokens, late_ids   the ids `late_ids` may not come before `min_tokens` tokens were generated
    grammar              what the answer must fit, as llguidance writes it; "": it may be anything
    end_ids              with a grammar: the tokens that may end the answer where it fits
    allowed_ids          the only tokens that may be generated; (): any of them may
    num_logprobs         alternatives that are reported for every generated token; OFF: no logprobs
    num_prompt_logprobs  the same for the tokens of the prompt
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sample_index: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    late_ids: tuple[int, ...] = ()
    num_logprobs: int = OFF
    num_prompt_logprobs: int = OFF
    grammar: str = ""
    end_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """True if tokens are chosen without randomness."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_processors(self) -> bool:
        """True if logits are changed before sampling: by penalties, biases, bans or masks."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bias_ids)
            or bool(self.banned)
            or self.min_tokens > 0
            or bool(self.grammar)
            or bool(self.allowed_ids)
        )

    @property
    def scores_prompt(self) -> bool:
        """True if logprobs of the prompt's tokens are wanted."""
        return self.num_prompt_logprobs != OFF

    @property
    def reports(self) -> bool:
        """True if any logprobs are wanted, of generated tokens or of the prompt."""
        return self.num_logprobs != OFF or self.scores_prompt


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of tokens under the target's own distribution, before any sampling setting.

    ids, values  row after row, equally many in each: the token itself, then the likeliest
                 alternatives, best first; values are natural logarithms
    ranks        one for each row: the rank of the token itself; 1 is the likeliest
    """

    ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ranks)

    def __add__(self, other: "Logprobs") -> "Logprobs":
        return Logprobs(self.ids + other.ids, self.values + other.values, self.ranks + other.ranks)

    @property
    def width(self) -> int:
        """Return the number of entries in a row (the token and its alternatives); 0: no rows."""
        return len(self.ids) // len(self.ranks) if self.ranks else 0

    def part(self, start: int, stop: int) -> "Logprobs":
        """Return rows [start, stop) as new Logprobs."""
        low, high = start * self.width, stop * self.width
        return Logprobs(self.ids[low:high], self.values[low:high], self.ranks[start:stop])
