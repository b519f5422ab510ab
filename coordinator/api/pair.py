"""Running models: the node processes and the service between them, as one object."""

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from coordinator.api import prompts
from coordinator.api.chat import NO_ARGUMENTS, USUAL, Arguments, ChatTemplate, PromptForm
from coordinator.api.config import ALONE, PairConfig, SpeculationConfig
from coordinator.api.config_base import called, reviewed
from coordinator.api.conversations import Messages
from coordinator.api.encoding import prompt_of
from coordinator.api.models.lengths import how_longer, not_smaller, shortened, too_long
from coordinator.api.models.nodes import node_configs
from coordinator.api.models.preflight import known_limits, look_at
from coordinator.api.params import SamplingParams
from coordinator.api.patience import Patience
from coordinator.api.prompts import Tokenization, TooManyTokensError
from coordinator.api.reasoning import Thoughts
from coordinator.api.resuming import review_written
from coordinator.api.simulated import simulated_by
from coordinator.api.special_tokens import read_special_tokens
from coordinator.api.structured import StructuredOutputsParams
from coordinator.api.text_ends import open_ends
from coordinator.api.without_effect import of_devices
from coordinator.cluster.fitting import TargetWords
from coordinator.cluster.registry import NOT_JOINED
from coordinator.cluster.service import Service
from coordinator.launching.launcher import Launcher, NodeLauncher
from coordinator.launching.places import by_name
from coordinator.text.detokenization import Decoder, Ending, IdStream
from coordinator.text.metrics import Metrics, Simulated
from coordinator.text.stream import Reader, TokenStream
from coordinator.tracing import writing
from proto.errors import ConfigurationError, ModelError, NodeError, shown
from proto.messages import (
    MAX_BAN_TOKENS,
    MAX_REFERENCE_LEN,
    OFF,
    FinishReason,
    Hello,
    Limits,
    Role,
    SamplingSpec,
)
from proto.system import check_spare

if TYPE_CHECKING:
    from coordinator.api.grammars import Grammars

Say = Callable[[dict[Role, str]], None]
MakeLauncher = Callable[[], NodeLauncher]


class Pair:
    """Target and drafter, loaded and warm. A context manager that ends both nodes at its exit.

    with_drafter   False starts the target alone (for the policy `ar`), without heads. The drafter
                   `ngram` and a head in the target's process need no drafter process either
    say            called again and again during the start with each node's state, for people
    check          called with the pair before a process is started, to refuse a request early
    make_launcher  makes the launcher that starts the node processes. With the default, on this
                   machine, devices and models are checked first (`preflight`)
    awaits_target  if no target is left, texts wait for another one, whoever starts it. Without it
                   they wait only for one that is started again here; else the pair ends then
    traced         record what every process does, for `write_trace`
    tunes          each node chooses by timing anew, while the others do nothing: they start one
                   after another

    The constructor raises ModelError, NodeError, IncompatibleError, TransportError or
    ConfigurationError, with a one-line message.
    """

    def __init__(
        self,
        config: PairConfig,
        *,
        with_drafter: bool = True,
        say: Say | None = None,
        check: "Callable[[Pair], None] | None" = None,
        make_launcher: MakeLauncher = Launcher,
        awaits_target: bool = False,
        traced: bool = False,
        tunes: bool = False,
    ) -> None:
        self.config = config = reviewed(PairConfig, config, "config")
        check_spare()
        self._drafts = with_drafter
        preflight = look_at(config, drafts=with_drafter) if make_launcher is Launcher else None
        self.tokenization = Tokenization.of_model(config.target, config.target_revision)
        self._references: dict[str, tuple[int, ...]] = {"": ()}  # tokens by file, only the latest
        if check is not None:
            check(self)
        if preflight is not None:
            preflight.fetch(say)
        self._launcher = make_launcher()
        try:
            self.service = Service(
                self._launcher,
                busy_poll_s=config.busy_poll_us / 1e6,
                max_num_seqs=config.num_seqs,
                links=config.links,
                link_seed=config.link_seed,
                restarts={
                    Role.TARGET: config.target_restarts,
                    Role.DRAFTER: config.drafter_restarts,
                },
                awaits_target=awaits_target,
                keeps_bits=config.reproducible,
                traced=traced,
            )
            self._tell_tokenizer()
            self.service.start()
            self._launch(say, drafts=with_drafter, tunes=tunes)
        except BaseException as error:
            self.close(_why(error))
            raise

    def _tell_tokenizer(self) -> None:
        """Tell the registry about the target's tokenizer."""
        tokenization, registry = self.tokenization, self.service.registry
        if tokenization is None:
            return
        digests = tokenization.digests()
        if self._launcher.is_by_hand:
            registry.tokenizer = digests
        if not self.config.require_same_tokenizer:
            registry.words = TargetWords(digests, tokenization.packed)

    def _launch(self, say: Say | None, *, drafts: bool, tunes: bool) -> None:
        """Start the nodes, and wait until they are ready: one after another if they tune."""
        for node in node_configs(
            self.config,
            endpoint=self.service.endpoint,
            outside=self.service.outside,
            secret=self.service.secret,
            drafts=drafts,
        ):
            self.service.launch(replace(node, tunes=tunes))
            if tunes:
                self._wait_until_ready(say)
        self._wait_until_ready(say)

    def _wait_until_ready(self, say: Say | None) -> None:
        patience = Patience(self.config.start_timeout_s, time.monotonic())
        while not self.service.registry.none_expected():
            self.service.check_alive()
            if patience.is_over(self.states(), time.monotonic()):
                states = ", ".join(f"{role}: {state}" for role, state in self.states().items())
                longer = f"raise {called('start_timeout_s')}"
                is_missing = NOT_JOINED in self.states().values()
                advice = f"start it, or {longer}" if is_missing else f"{longer} for large models"
                raise NodeError(
                    "the nodes are not ready and have told nothing new for "
                    f"{patience.limit_s:.0f} s ({states}); {advice}"
                )
            if say is not None:
                say(self.states())
            time.sleep(0.02)
        self.service.check_alive()
        self.service.wait_for_round_trips()

    def states(self) -> dict[Role, str]:
        """Return what the nodes of each role are doing, in words for people."""
        return self.service.states()

    def whereabouts(self) -> list[str]:
        """Return a line on each node's host and device; [] if the pair has no keys (one host)."""
        if self._launcher.keys is None:
            return []
        registry = self.service.registry
        return [
            f"{registry.name(node)}: {Path(hello.model).name}, {hello.dtype}, on {hello.host} "
            f"({hello.device}, {hello.backend}), "
            f"{1e3 * (node.round_trips.now_s or 0.0):.1f} ms there and back"
            for role in Role
            for node in registry.ready(role)
            if (hello := node.hello) is not None
        ]

    def notices(self, params: SamplingParams | None = None) -> list[str]:
        """Return a line for each limit on text or draft length that the user did not set.

        Also which model it is by default, what `open_ends` says, and what does not fit together.

        params  of all texts that will be asked for; None: they are not known
        """
        target, drafters = self.hello(Role.TARGET), self.service.registry.hellos(Role.DRAFTER)
        lines = shortened(self.config, target, drafters)
        lines += [*not_smaller(target, drafters), *of_devices(self.config, target, drafters)]
        found = self.config.found_drafter if self._drafts else []
        return [*self.config.chosen, *found, *lines, *self.open_ends(params)]

    def open_ends(self, params: SamplingParams | None = None) -> list[str]:
        """Return a line if the target's files leave open which tokens end a text, else []."""
        params = params or SamplingParams()
        if params.ignore_eos:
            return []
        hello = self.hello(Role.TARGET)
        token, token_id = self.eos_token or (None, None)
        if token_id is not None and token_id >= hello.logits_size:
            token_id = None
        return open_ends(
            hello.fingerprint.eos_ids,
            token,
            token_id,
            params.stop_token_ids,
            has_strings=bool(params.stop),
        )

    @cached_property
    def eos_token(self) -> tuple[str, int] | None:
        """Return the `eos_token` of the target's tokenizer and its id; None if it has none."""
        if self.tokenization is None:
            return None
        try:
            found = read_special_tokens(self.config.target, self.config.target_revision)
        except ModelError:  # a file that cannot be read is named where it is needed
            return None
        token = found.get("eos_token")
        token_id = None if token is None else self.tokenization.raw.token_to_id(token)
        return None if token is None or token_id is None else (token, token_id)

    def hello(self, role: Role) -> Hello:
        """Return the Hello of a node of this role, which must be there."""
        return self.service.registry.hellos(role)[0]

    def simulated(self) -> Simulated | None:
        """Return the simulated hardware with its counts so far; None if nothing is simulated."""
        return simulated_by(self.config, self.service.registry)

    def marked(self, metrics: Metrics, before: Simulated | None) -> Metrics:
        """Return a text's metrics with the simulated hardware since `before`, its start."""
        now = self.simulated()
        elapsed_ms = metrics.elapsed_s * 1e3
        return replace(metrics, simulated=now and before and now.since(before, elapsed_ms))

    @property
    def is_ready(self) -> bool:
        """True if a target is there that can work."""
        return bool(self.service.registry.ready(Role.TARGET))

    @property
    def max_len(self) -> int:
        """Return the most tokens of a text and its prompt."""
        return self._limits()[0]

    @property
    def num_seqs(self) -> int:
        """Return how many texts can be generated at once now, by the config and targets' room."""
        return self.service.registry.num_lanes(self.config.num_seqs)

    def pids(self) -> dict[str, int]:
        """Return the process ids of the nodes, by role; of several nodes of a role, by name."""
        return by_name(self._launcher.pids())

    def encode(
        self, prompt: str, *, special_tokens: bool = True, is_limited: bool = False
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises ConfigurationError, for long ones BusyError.

        special_tokens  add the tokens that the tokenizer itself puts around a text
        is_limited      refuse a prompt that is too long for the target, as soon as that is known
        """
        if not isinstance(prompt, str):
            raise ConfigurationError(f"a prompt is a string here, not {shown(prompt)}")
        most = self.max_len - 1 if is_limited else None
        with self._refusing_long():
            return self._tokenizer().encode(prompt, special_tokens=special_tokens, most=most)

    def encode_chat(
        self,
        messages: Messages,
        arguments: Arguments = NO_ARGUMENTS,
        form: PromptForm = USUAL,
        *,
        is_limited: bool = False,
    ) -> tuple[str, tuple[int, ...]]:
        """Return a conversation as (prompt, token ids); `arguments` go to the template.

        is_limited  as for `encode`

        Raises ConfigurationError, ModelError, BusyError.
        """
        most = self.max_len - 1 if is_limited else None
        said = (messages, arguments)
        with self._refusing_long():
            return prompt_of(self._tokenizer(), self.chat_template, said, form, most=most)

    @contextmanager
    def _refusing_long(self) -> Iterator[None]:
        """Say of a prompt that has too many tokens how many the target takes."""
        try:
            yield
        except TooManyTokensError as error:
            raise self._too_long(error.num_tokens, is_least=error.is_least) from None

    def _too_long(self, num_tokens: int, *, is_least: bool = False) -> ConfigurationError:
        """Return the error for a prompt of so many tokens, or of so many at least."""
        limit = too_long(self.config, num_tokens, self.max_len, has_heads=self._has_heads_at_home)
        count = f"at least {num_tokens}" if is_least else num_tokens
        return ConfigurationError(f"the prompt has {count} tokens, but {limit}")

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the target's chat template. Raises ModelError."""
        return ChatTemplate.of_model(self.config.target, self.config.target_revision)

    @cached_property
    def grammars(self) -> "Grammars":
        """Return what compiles grammars for this target. Raises ConfigurationError."""
        if self.tokenization is None:
            raise ConfigurationError(
                f"structured_outputs: {self.config.target} has no tokenizer.json; leave them out"
            )
        from coordinator.api.grammars import Grammars  # knows the engine; most texts need none

        return Grammars(self.tokenization.raw)

    def _tokenizer(self) -> Tokenization:
        if self.tokenization is None:
            raise ConfigurationError(
                f"{self.config.target} has no tokenizer.json; give the prompt as token ids "
                "(--prompt-ids)"
            )
        return self.tokenization

    def decoder(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
    ) -> Decoder:
        """Return a decoder that turns the tokens of one answer to this prompt into text.

        shown  names of special tokens that are part of the text in any case
        """
        if self.tokenization is None:
            return IdStream()
        return self.tokenization.stream(
            prompt, skip_special_tokens=skip_special_tokens, shown=shown
        )

    def generate(
        self,
        prompt: tuple[int, ...],
        speculation: SpeculationConfig,
        params: SamplingParams,
        *,
        sample_index: int = 0,
        reader: Reader | None = None,
        is_watched: bool = False,
        thoughts: Thoughts | None = None,
        written: tuple[int, ...] = (),
    ) -> tuple[TokenStream, int]:
        """Start a text; return (its stream, its seed). Raises ConfigurationError, NodeError.

        The stream ends by tokens only: `Assembly`, which makes text of the tokens, finds stop
        strings.

        reader      is notified of the stream's items (`Service.submit`); None: the caller iterates
                    it
        is_watched  its passes say what both devices did (`Emit.spans`)
        thoughts    what the answer may begin with; a grammar holds only what follows them
        written     tokens of the answer that were written elsewhere, reviewed; more follow them
        """
        self.check(prompt)
        params = self.reviewed_params(params)
        if not isinstance(speculation, SpeculationConfig):
            line = f"speculation: expected SpeculationConfig, got {shown(speculation)}"
            raise ConfigurationError(line)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if not params.speculate:
            speculation = ALONE
        if speculation.drafts and speculation.verify != "coupled" and self.drafts_in_other_words:
            raise ConfigurationError(speculation.needs_one_tokenizer)
        lookup = None
        if speculation.uses_ngrams(self.config):
            lookup = speculation.lookup(self._reference(speculation.reference))
        max_len = min(self.max_len, len(prompt) + params.max_tokens)
        stream = self.service.submit(
            prompt,
            sampling=self._sampling(params, seed, sample_index, thoughts),
            policy=speculation.make(self.config),
            limits=Limits(max_len, tuple(sorted(self.ending(params).stop_ids))),
            rule=speculation.rule,
            lookup=lookup,
            reader=reader,
            is_watched=is_watched,
            written=written,
        )
        return stream, seed

    def review_written(
        self, num_prompt: int, written: tuple[int, ...], params: SamplingParams
    ) -> FinishReason | None:
        """Return why an answer of these tokens is complete; None: more follows (`resuming.py`)."""
        (most, num_ids), stop_ids = self._limits(), self.ending(params).stop_ids
        return review_written(written, params, num_ids, stop_ids, most - num_prompt)

    @property
    def drafts_in_other_words(self) -> bool:
        """True if a drafter that has joined has another tokenizer than the target."""
        target = self.hello(Role.TARGET).fingerprint
        drafters = self.service.registry.hellos(Role.DRAFTER)
        return any(not one.layers and not one.fingerprint.is_like(target) for one in drafters)

    def _limits(self) -> tuple[int, int]:
        """Return (most tokens of a text, size of logits); bounds until the target runs."""
        if hasattr(self, "service"):
            hellos = self.service.registry.hellos(Role.TARGET)
            return min(one.max_model_len for one in hellos), hellos[0].logits_size
        return known_limits(self.config)

    @property
    def _has_heads_at_home(self) -> bool:
        return hasattr(self, "service") and self.hello(Role.TARGET).has_heads

    def how_longer(self) -> str:
        """Return advice on how to allow longer texts; "" if the model itself takes no more."""
        return how_longer(self.config, self._limits()[0], has_heads=self._has_heads_at_home)

    def ending(self, params: SamplingParams) -> Ending:
        """Return the stop strings and stop tokens of a text with these parameters."""
        eos_ids = self.hello(Role.TARGET).fingerprint.eos_ids
        model_ids = frozenset(() if params.ignore_eos else eos_ids)
        return Ending(
            strings=params.stop,
            stop_ids=model_ids.union(params.stop_token_ids),
            named_ids=frozenset(params.stop_token_ids) - model_ids,
            is_shown=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _grammar(self, form: StructuredOutputsParams | None, thoughts: Thoughts | None) -> str:
        """Return the grammar of an answer as the nodes read it; "": it is free."""
        if form is None:
            return ""
        grammar = self.grammars.of(form)
        return grammar if thoughts is None else self.grammars.behind(thoughts, grammar)

    def _sampling(
        self, params: SamplingParams, seed: int, sample_index: int, thoughts: Thoughts | None
    ) -> SamplingSpec:
        eos_ids = self.hello(Role.TARGET).fingerprint.eos_ids
        late_ids = frozenset(eos_ids).union(params.stop_token_ids)
        wanted = params.prompt_logprobs if sample_index == 0 else None  # only for the first text
        form = params.structured_outputs
        end_ids = eos_ids or params.stop_token_ids
        if form is not None and not end_ids:
            raise ConfigurationError(
                f"{form.title}: this target has no end-of-text token; name one in "
                f"{called('stop_token_ids')}"
            )
        allowed = params.allowed_token_ids or ()
        if form is not None and allowed and not {*end_ids} & {*allowed}:
            raise ConfigurationError(
                f"{called('allowed_token_ids')}: with {form.title} a token that ends the text "
                f"must be among them, such as {min(end_ids)}"
            )
        return SamplingSpec(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=seed,
            sample_index=sample_index,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias_ids=tuple(params.logit_bias),
            bias_values=tuple(params.logit_bias.values()),
            banned=self._tokenizer().bans(params.bad_words) if params.bad_words else (),
            min_tokens=params.min_tokens,
            late_ids=tuple(sorted(late_ids)) if params.min_tokens else (),
            num_logprobs=OFF if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=OFF if wanted is None else wanted,
            grammar=self._grammar(form, thoughts),
            end_ids=() if form is None else tuple(sorted(end_ids)),
            allowed_ids=tuple(sorted(set(allowed))),
        )

    def reviewed_params(self, given: object) -> SamplingParams:
        """Return these parameters checked again, also for this target. Raises ConfigurationError.

        A grammar is compiled the first time, which may take some tenths of a second.
        """
        params = reviewed(SamplingParams, given, "sampling_params")
        _, size = self._limits()
        named = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, ids in named.items():
            if any(token >= size for token in ids):
                raise ConfigurationError(f"{called(name)}: token ids must lie in 0..{size - 1}")
        if params.bad_words:
            bans = self._tokenizer().bans(params.bad_words)
            if sum(map(len, bans)) > MAX_BAN_TOKENS:
                raise ConfigurationError(
                    f"{called('bad_words')}: more than {MAX_BAN_TOKENS} tokens; leave some out"
                )
        if params.structured_outputs is not None:
            self.grammars.of(params.structured_outputs)
        return params

    def _reference(self, file: str) -> tuple[int, ...]:
        """Return the tokens of a reference text, which is read once. Raises ConfigurationError."""
        if file not in self._references:
            if self.tokenization is None:
                raise ConfigurationError(
                    f"{self.config.target} has no tokenizer.json to read {file}"
                )
            found = self.tokenization.encode(prompts.text_of(Path(file)), special_tokens=False)
            _, size = self._limits()
            tokens = tuple(token for token in found if token < size)  # the target chooses no other
            if len(tokens) > MAX_REFERENCE_LEN:
                raise ConfigurationError(
                    f"the reference {file} has {len(tokens)} tokens; shorten it to "
                    f"{MAX_REFERENCE_LEN}"
                )
            self._references = {"": (), file: tokens}
        return self._references[file]

    def check_length(self, num_tokens: int) -> None:
        """Raise ConfigurationError if the target cannot take a prompt of so many tokens."""
        if num_tokens >= self.max_len:
            raise self._too_long(num_tokens)

    def check(self, prompt: tuple[int, ...]) -> None:
        """Raise ConfigurationError if the target cannot take the prompt."""
        if not isinstance(prompt, tuple) or any(type(token) is not int for token in prompt):
            raise ConfigurationError(f"a prompt is a tuple of token ids here, not {shown(prompt)}")
        _, size = self._limits()
        if not prompt:
            raise ConfigurationError("the prompt is empty: give at least one token")
        self.check_length(len(prompt))
        beyond = next((token for token in prompt if not 0 <= token < size), None)
        if beyond is not None:
            raise ConfigurationError(
                f"prompt ids must lie in 0..{size - 1}, and the prompt has {beyond}"
                f"{self._said_of(beyond)}"
            )

    def _said_of(self, beyond: int) -> str:
        """Return words on a token id that the model lacks and the tokenizer has, else ""."""
        if self.tokenization is None:
            return ""
        added = self.tokenization.raw.get_added_tokens_decoder().get(beyond)
        if added is None:
            return ""
        return f" ({shown(added.content)}, which the tokenizer has and the model lacks)"

    def write_trace(self, path: Path) -> None:
        """Write what was recorded since the last trace, or since the start, as a Chrome trace.

        Only for a pair made with `traced`, between texts or after them, also after a failed text.
        It takes up to half a second, until the nodes have sent all records. Raises OutputError.
        """
        assert self.service.tape is not None, "the pair was not started with traced=True"
        self.service.wait_for_traces()
        settings = self.config.model_dump(mode="json", exclude_defaults=True)
        writing.write(path, writing.trace_of(self.service.tape.take(), settings))

    def close(self, why: str = "it was closed") -> None:
        """End both nodes. May be called twice. `why` goes into the log."""
        if hasattr(self, "service"):
            self.service.close(why)
        if (grammars := self.__dict__.get("grammars")) is not None:  # a cached property
            grammars.close()
        if (tokenization := self.__dict__.get("tokenization")) is not None:
            tokenization.long_texts.close()
        self._launcher.close()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(_why(error))


def _why(error: BaseException | None) -> str:
    """Return why the nodes are ended, for the log, without any part of a prompt or a text."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    return "its work is done" if error is None else f"after an error ({type(error).__name__})"
