"""Turns a conversation into a prompt and its token ids, here or in a process of its own."""

from coordinator.api.chat import Arguments, ChatTemplate, PromptForm
from coordinator.api.conversations import Messages, plain, size_of
from coordinator.api.prompts import HERE, Tokenization, ids_of
from proto.errors import ConfigurationError


def prompt_of(
    tokenization: Tokenization,
    template: ChatTemplate,
    conversation: tuple[Messages, Arguments],
    form: PromptForm,
    *,
    most: int | None,
) -> tuple[str, tuple[int, ...]]:
    """Return the prompt that a template makes of a conversation, and its token ids.

    conversation  messages, and variables of the template
    most          as for `Tokenization.encode`

    Raises ConfigurationError, and for a long conversation BusyError.
    """
    messages, arguments = conversation
    special_tokens = form.add_special_tokens
    if special_tokens is None:
        special_tokens = template.is_plain and form.template is None
    if size_of(conversation, HERE) < HERE:
        prompt = template.render(
            messages,
            arguments,
            add_generation_prompt=form.add_generation_prompt,
            continue_final_message=form.continue_final_message,
            template=form.template,
        )
        return prompt, tokenization.encode(prompt, special_tokens=special_tokens, most=most)
    try:
        given = {"messages": plain(messages), "arguments": plain(arguments)}
    except RecursionError as error:
        raise ConfigurationError("the conversation is nested too deeply") from error
    read = tokenization.long_texts.chat(
        template, given, form, special_tokens=special_tokens, most=most
    )
    return read.text, ids_of(read, most)
