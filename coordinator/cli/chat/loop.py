"""Runs a conversation on loaded nodes: reads lines and answers them until there are no more."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from coordinator.api.chat import ChatTemplate
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.launch import LaunchConfig
from coordinator.api.models.folders import TOKENIZER, find
from coordinator.api.models.heads import kind_of
from coordinator.api.models.lengths import cut_answers
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.prompts import find_file
from coordinator.api.requests import Request
from coordinator.api.without_effect import without_effect
from coordinator.cli.chat.answer import Answer, Interrupts, LineInterruptedError
from coordinator.cli.chat.conversation import (
    COMMANDS,
    Command,
    Conversation,
    Entry,
    Lines,
    Message,
    Rendered,
    Say,
    TooLongError,
    Unknown,
    help_lines,
)
from coordinator.cli.chat.screen import TWICE, Pipe, Screen, Terminal, typed
from coordinator.cli.flags import Flags, with_settings
from coordinator.cli.generate import launcher_for
from coordinator.cli.harmless import harmless
from coordinator.cli.loading_screen import models_of
from coordinator.cli.writers import Progress, engines, how_far
from coordinator.text.detokenization import REPLACEMENT
from coordinator.text.metrics import Metrics
from proto.errors import (
    ConfigurationError,
    OutputError,
    SlipstreamError,
    TextError,
    did_you_mean,
    shown,
)
from proto.head_kinds import refuse_head
from proto.messages import FinishReason, Role

# -- loop ------------------------------------------------------------------------------------------

FOR_GOOD = "; or start with --drop-oldest"
NOTHING_IS_LOST = (
    "nothing is lost: /drop forgets the oldest turns and asks again, /reset forgets all"
)
FULL = "the conversation is full: /drop forgets the oldest turn, /reset all"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The settings of a conversation.

    drops      remove the oldest turns when the conversation has become too long
    arguments  variables for the chat template
    """

    speculation: SpeculationConfig
    params: SamplingParams
    drops: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Chat:
    """One conversation: reads lines from a screen, answers messages and does commands."""

    def __init__(
        self, pair: Pair, conversation: Conversation, settings: ChatSettings, screen: Screen
    ) -> None:
        self._pair = pair
        self._conversation = conversation
        self._settings = settings
        self._screen = screen
        self._lines = Lines()
        self._unanswered: str | None = None  # the last message, if it was too long

    def run(self) -> None:
        """Read and answer lines until there are no more. Raises SlipstreamError: nodes ended.

        Where no person reads the notes (a pipe), an error of a message is raised as well.
        """
        may_end = False  # the last input was Ctrl-C on an empty line
        while True:
            try:
                line = self._screen.read(is_more=self._lines.is_open)
            except LineInterruptedError as interrupted:
                was_empty = interrupted.line == "" and not self._lines.is_open
                self._lines.discard()
                if was_empty and may_end:
                    return
                may_end = was_empty
                if was_empty:
                    self._screen.note(TWICE)
                continue
            may_end = False
            entry = self._lines.finish() if line is None else self._lines.push(line)
            if entry is not None and not self._handle(entry):
                return
            if line is None:
                return

    def _handle(self, entry: Entry) -> bool:
        """Answer or obey; return False at the end. A person is shown errors; a pipe raises them."""
        try:
            match entry:
                case Say(text):
                    self._say(text)
                case Command("quit"):
                    return False
                case Command(name, argument):
                    self._obey(name, argument)
                case Unknown(name):
                    raise ConfigurationError(
                        f"there is no command /{name}; /help lists them, and with a space before "
                        f"the / the line is a message{did_you_mean(name, COMMANDS)}"
                    )
        except (ConfigurationError, TextError) as error:
            if not self._screen.is_person:
                raise
            self._screen.note(str(error))
        return True

    def _obey(self, name: str, argument: str) -> None:
        conversation, note = self._conversation, self._screen.note
        match name:
            case "help":
                for line in help_lines():
                    note(line)
            case "reset":
                conversation.reset()
                self._unanswered = None
                note("the conversation begins anew")
            case "system" if argument:
                conversation.system = "" if argument in ('""', "''") else argument
                note("from the next answer on; /reset forgets what was said before")
            case "system":
                note(conversation.system or "there is no system message")
            case "drop":
                self._drop()

    def _drop(self) -> None:
        if self._unanswered is not None:
            self._say(self._unanswered, drops=True)
        elif self._conversation.drop_oldest():
            self._screen.note(f"forgotten; {_turns(self._conversation.num_turns)} left")
        else:
            self._screen.note("there is no turn to forget")

    # -- an answer --------------------------------------------------------------------------------

    def _say(self, text: str, *, drops: bool = False) -> None:
        """Ask and answer a message. Raises ConfigurationError; then the message is withdrawn."""
        self._unanswered = None
        self._conversation.ask(text)
        answer = None
        try:
            rendered = self._rendered(drops=drops or self._settings.drops)
            answer = self._answered(rendered)
        except TooLongError as error:
            self._unanswered = text
            has_turns = self._conversation.num_turns > 0 and not self._settings.drops
            line = NOTHING_IS_LOST + self._for_good if has_turns else f"shorten it{self._longer}"
            raise TooLongError(f"{error}; {line}") from error
        finally:
            if answer is None:
                self._conversation.withdraw()
            else:
                self._conversation.answered(answer)

    def _rendered(self, *, drops: bool) -> Rendered:
        max_len = self._max_model_len
        if not drops:
            return self._conversation.rendered(self._encode, max_len)
        max_tokens = self._settings.params.max_tokens
        rendered, num_dropped = self._conversation.shortened(self._encode, max_len, max_tokens)
        if num_dropped:
            self._screen.note(f"the oldest {_turns(num_dropped)} forgotten, to make room")
        return rendered

    def _encode(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        return self._pair.encode_chat(messages, self._settings.arguments)

    @property
    def _longer(self) -> str:
        """Return advice on how to allow longer texts, after ", or"; "": the model takes no more."""
        more = self._pair.how_longer()
        return f", or {more}" if more else ""

    @property
    def _for_good(self) -> str:
        return FOR_GOOD + self._longer

    @property
    def _max_model_len(self) -> int:
        return self._pair.hello(Role.TARGET).max_model_len

    def _answered(self, rendered: Rendered) -> str | None:
        """Write the answer and return it; None if it was stopped before its first token."""
        screen, settings = self._screen, self._settings
        self._pair.check(rendered.ids)
        request = Request(
            self._pair, settings.speculation, rendered.prompt, rendered.ids, settings.params
        )
        answer = Answer(self._pair, request)
        text = ""
        with screen.answering(answer.stop), ExitStack() as until_text:
            words = f"reading {len(rendered.ids):,} tokens"
            say = until_text.enter_context(screen.waiting(words))
            request.on_read = lambda read: say(how_far(read))
            try:
                for piece in _pieces(answer):
                    until_text.close()
                    screen.write(piece)
                    text += piece
            except OutputError:
                raise
            except (SlipstreamError, KeyboardInterrupt):
                if text and screen.is_person:
                    screen.end_answer(is_empty=False)  # so that the error gets a line of its own
                raise
        screen.end_answer(is_empty=not text)
        if not answer.is_complete:
            screen.note("stopped before the first token; the message is not part of what was said")
            return None
        self._tell(answer, request, len(rendered.ids))
        return text

    def _tell(self, answer: Answer, request: Request, num_prompt: int) -> None:
        """Show how an answer ended, and its figures."""
        made = request.whole().outputs[0]
        length = num_prompt + answer.num_tokens
        if answer.was_stopped:
            self._screen.note("stopped; what was written stays part of the conversation")
        elif made.finish_reason == FinishReason.LENGTH.value:
            if length >= self._max_model_len:
                self._screen.note(FULL + self._for_good)
            else:
                self._screen.note("the answer ends at --max-tokens; ask it to go on")
        if self._screen.is_person and made.metrics is not None:
            fill = f"{length} of {self._max_model_len} tokens"
            self._screen.note(f"{figures(made.metrics)}; {fill}")


def _pieces(answer: Answer) -> Iterator[str]:
    """Yield the text as it comes. A character that was stopped in its middle is left out."""
    with closing(answer.steps()) as steps:
        for step in steps:
            piece = step.part.outputs[0].text
            if step.is_last and answer.was_stopped:
                piece = piece.rstrip(REPLACEMENT)
            if piece:
                yield piece


def _turns(number: int) -> str:
    return f"{number} turn{'' if number == 1 else 's'}"


def figures(metrics: Metrics) -> str:
    """Return the figures of one answer, in a line."""
    words = [f"{metrics.tokens_per_second:.1f} tokens/s"]
    if metrics.num_draft_tokens:
        words += [
            f"{metrics.tokens_per_pass:.2f} a pass",
            f"{metrics.acceptance_rate:.0%} accepted",
        ]
    return ", ".join([*words, f"first after {metrics.time_to_first_token_s * 1e3:.0f} ms"])


# -- command ---------------------------------------------------------------------------------------

# `python -m coordinator chat`: a conversation with the target; the nodes are started once.

MAX_TOKENS = 4096
# A model without a chat template would go on with the next question of the transcript: stop there.
NEXT_QUESTION = "\nUser:"
OF_THE_CONVERSATION = ("messages", "add_generation_prompt")

System = Annotated[str, typer.Option("--system", metavar="TEXT", help="The system message.")]
TemplateArguments = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Arguments of the chat template. For example '{\"enable_thinking\": false}'.",
    ),
]
DropOldest = Annotated[
    bool,
    typer.Option(
        "--drop-oldest",
        help="Forget the oldest turns of a conversation that is too long.",
    ),
]


@with_settings
def chat(
    *,
    context: typer.Context,
    system: System = "",
    chat_template_kwargs: TemplateArguments = None,
    drop_oldest: DropOldest = False,
    # One text at a time, whose part of the cache (lane) keeps the conversation so far.
    pair: Annotated[PairConfig, Flags(but=("max_num_seqs",), argument=True, max_num_seqs=1)],
    speculation: SpeculationConfig,
    params: Annotated[
        SamplingParams,
        Flags(
            but=(
                *("speculate", "n", "logprobs", "prompt_logprobs", "structured_outputs"),
                "output_kind",
            ),
            max_tokens=MAX_TOKENS,
        ),
    ],
    launch: LaunchConfig,
) -> None:
    """Talk to the target.

    At a terminal, or in a pipe: then each line of standard input is a turn.
    """
    speculation.check(pair)
    arguments = template_arguments(chat_template_kwargs)
    template = _template(pair, system, arguments)
    if template.is_plain:
        params = params.model_copy(update={"stop": (*params.stop, NEXT_QUESTION)})
    settings = ChatSettings(speculation, params, drop_oldest, arguments)
    console = Console(stderr=True)
    with Progress(console, models_of(pair)) as progress:
        with_drafter = speculation.drafts and pair.has_draft_process
        launcher = launcher_for(
            launch, pair, context.obj, with_drafter=with_drafter, invite=progress.invite
        )
        started = Pair(
            pair, with_drafter=speculation.drafts, say=progress.say, make_launcher=launcher
        )
    with started as running, ExitStack() as stack:
        screen: Screen = Pipe()
        if sys.stdin.isatty():
            interrupts = Interrupts(running.service.check_alive, typed)
            screen = Terminal(stack.enter_context(interrupts), console)
            for line in (*running.whereabouts(), engines(running.service.registry.nodes)):
                screen.note(line)
            screen.note("/help lists what can be typed; Ctrl-C stops an answer, Ctrl-D ends")
        if template.is_plain:
            screen.note("the target has no chat template; it continues a plain transcript")
        unheeded = without_effect(pair, speculation, params, is_remote=launch.nodes == "remote")
        if params.max_tokens != MAX_TOKENS:
            unheeded += cut_answers(params, running.max_len, [1])
        unheeded += _unused(arguments, template)
        for line in (*running.notices(params), *unheeded):
            screen.note(line)
        Chat(running, Conversation(system, is_script=template.is_plain), settings, screen).run()


def _unused(arguments: Mapping[str, Any], template: ChatTemplate) -> list[str]:
    """Return a line if the chat template does not use some of its arguments, else []."""
    words = " ".join(template.sources.values())
    unused = [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", words)]
    if not unused:
        return []
    has = "has" if len(unused) == 1 else "have"
    names = ", ".join(map(harmless, unused))
    return [f"{names} of --chat-template-kwargs {has} no effect: the chat template does not use it"]


def template_arguments(text: str | None) -> dict[str, Any]:
    """Return the variables for the chat template, read from JSON. Raises ConfigurationError."""
    flag = "--chat-template-kwargs"
    try:
        arguments = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ConfigurationError(
            f'{flag}: expected a JSON object like {{"enable_thinking": false}}, got {shown(text)}'
        )
    if taken := [name for name in OF_THE_CONVERSATION if name in arguments]:
        raise ConfigurationError(f"{flag}: {taken[0]} is the conversation's own; leave it out")
    return arguments


def _template(pair: PairConfig, system: str, arguments: dict[str, Any]) -> ChatTemplate:
    """Return the target's chat template, after trying it out.

    Done before anything is started. Raises ModelError, ConfigurationError.
    """
    refuse_head(pair.target, kind_of(pair.target, pair.target_revision))
    find(pair.target, pair.target_revision)  # raises the better error if there is no such model
    if find_file(pair.target, pair.target_revision, TOKENIZER) is None:
        raise ConfigurationError(
            f"{pair.target} has no {TOKENIZER}, and a conversation is text; give a target that "
            "has one"
        )
    template = ChatTemplate.of_model(pair.target, pair.target_revision)
    conversation = Conversation(system)
    conversation.ask("?")
    template.render(conversation.messages, arguments)
    return template
