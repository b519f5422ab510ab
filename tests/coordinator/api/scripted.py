"""A pair without processes: its streams are real, and a test says what comes of each text."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

from coordinator.api.config import SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.reasoning import Thoughts
from coordinator.api.requests import Request
from coordinator.text.detokenization import Ending, IdStream
from coordinator.text.metrics import Metrics
from coordinator.text.session_events import Emit
from coordinator.text.stream import Reader, TokenStream
from coordinator.text.timed_session import Result
from proto.errors import ClosedError, ConfigurationError, SlipstreamError
from proto.messages import FinishReason
from tests.coordinator.text.test_stops import METRICS

MAX_PROMPT_LEN = 5
SEED = 77  # that is drawn where none is given


class Script:
    """What a text that was asked for is, and what comes of it."""

    def __init__(
        self, prompt: tuple[int, ...], params: SamplingParams, index: int, reader: Reader | None
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.index = index
        self.reader = reader
        self.is_cancelled = False
        self.stream = TokenStream(self._cancel, self.end, lambda: None, reader)

    def _cancel(self) -> None:
        self.is_cancelled = True
        self.stream.put(ClosedError("the text was cancelled"))

    def add(self, *tokens: int) -> None:
        """A pass."""
        self.stream.put(Emit(tokens, 0, 0, ()))

    def end(self) -> None:
        """The text is complete."""
        self.stream.put(Result(FinishReason.LENGTH, METRICS, lambda _: METRICS))

    def fail(self, error: SlipstreamError) -> None:
        """The text cannot be completed."""
        self.stream.put(error)


class ScriptedPair:
    """Stands for a `Pair` where requests and batches need one."""

    def __init__(self, num_seqs: int) -> None:
        self.num_seqs = num_seqs
        self.asked: list[Script] = []
        self.service = self  # as far as `check_alive` goes
        self.begin: Callable[[Script], None] = lambda _: None  # called for each text

    max_len, is_ready = 1 << 20, True
    config = SimpleNamespace(target="a", start_timeout_s=60.0)

    def how_longer(self) -> str:
        """It cannot be longer."""
        return ""

    def check_alive(self) -> None:
        """It is."""

    def simulated(self) -> None:
        """Nothing is."""

    def marked(self, metrics: Metrics, _: None) -> Metrics:
        """As they are."""
        return metrics

    def generate(
        self,
        prompt: tuple[int, ...],
        _: SpeculationConfig,
        params: SamplingParams,
        *,
        sample_index: int,
        reader: Reader | None,
        is_watched: bool = False,
        thoughts: Thoughts | None = None,
        written: tuple[int, ...] = (),
    ) -> tuple[TokenStream, int]:
        """As `Pair.generate`."""
        assert thoughts is None
        script = Script(prompt, params, sample_index, reader)
        self.begin(script)
        self.asked.append(script)
        return script.stream, SEED if params.seed is None else params.seed

    def encode(self, prompt: str, **_: bool) -> tuple[int, ...]:
        """A token for each letter."""
        return tuple(map(ord, prompt))

    def check_length(self, num_tokens: int) -> None:
        """Any length is right."""

    def check(self, prompt: tuple[int, ...]) -> None:
        """A prompt has few letters."""
        if len(prompt) > MAX_PROMPT_LEN:
            raise ConfigurationError(f"the prompt has {len(prompt)} tokens")

    def decoder(self, _: Sequence[int], **_more: object) -> IdStream:
        """Tokens are shown as numbers."""
        return IdStream()

    def ending(self, params: SamplingParams) -> Ending:
        """Stop strings only."""
        return Ending(strings=params.stop)

    def as_pair(self) -> Pair:
        """For those who know its type."""
        return cast(Pair, self)

    def request(self, *prompt: int, params: SamplingParams | None = None) -> Request:
        """A prompt to be continued."""
        return Request(
            self.as_pair(), SpeculationConfig(), None, prompt, params or SamplingParams()
        )
