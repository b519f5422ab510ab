"""`python -m coordinator chat`: a conversation with the target; the nodes are started once."""

import json
import sys
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console

from coordinator.api.chat import ChatTemplate
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.launch import LaunchConfig
from coordinator.api.models.folders import TOKENIZER, find
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.tokenization import find_file
from coordinator.cli.chat.conversation import Conversation
from coordinator.cli.chat.interrupts import Interrupts
from coordinator.cli.chat.loop import Chat, Settings
from coordinator.cli.chat.screen import Pipe, Screen, Terminal, typed
from coordinator.cli.display import Progress, engines
from coordinator.cli.flags import Flags, with_settings
from coordinator.cli.generate import launcher_for
from proto.errors import ConfigurationError, shown

MAX_TOKENS = 4096
# A model without a template goes on writing both parts of a plain transcript.
NEXT_QUESTION = "\nUser:"
OF_THE_CONVERSATION = ("messages", "add_generation_prompt")

System = Annotated[str, typer.Option("--system", help="The system message.")]
TemplateArguments = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Arguments of the chat template: '{\"enable_thinking\": false}'.",
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
    # One text at a time: its lane keeps what was said.
    pair: Annotated[PairConfig, Flags(but=("max_num_seqs",), max_num_seqs=1)],
    speculation: SpeculationConfig,
    request: Annotated[
        SamplingParams,
        Flags(but=("speculate", "n", "logprobs", "prompt_logprobs"), max_tokens=MAX_TOKENS),
    ],
    launch: LaunchConfig,
) -> None:
    """Talk to the target: at a terminal, or with a turn on each line of standard input."""
    speculation.check(pair)
    arguments = template_arguments(chat_template_kwargs)
    template = _template(pair, system, arguments)
    if template.is_plain:
        request = request.model_copy(update={"stop": (*request.stop, NEXT_QUESTION)})
    settings = Settings(speculation, request, drop_oldest, arguments)
    console = Console(stderr=True)
    with Progress(console) as progress:
        with_drafter = speculation.drafts and pair.has_draft_model
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
        Chat(running, Conversation(system, is_script=template.is_plain), settings, screen).run()


def template_arguments(text: str | None) -> dict[str, Any]:
    """What is given to the chat template besides the conversation. Raises ConfigurationError."""
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
    """The target's, tried before anything is started. Raises ModelError, ConfigurationError."""
    find(pair.target, pair.target_revision)  # what is no model's folder has no files either
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
