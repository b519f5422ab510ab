"""Fields of a chat request that say how its prompt begins and ends."""

from pydantic import BaseModel

from coordinator.api.chat import PromptForm


class Prompting(BaseModel):
    """How the prompt of a conversation begins and ends, in vLLM's names.

    add_generation_prompt   it ends where the answer begins; null: unless the last message is
                            continued
    continue_final_message  it ends where the content of the last message ends
    add_special_tokens      the tokenizer puts its own tokens around it; null: only where the target
                            has no chat template
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    def prompt_form(self) -> PromptForm:
        """Return how the prompt is made."""
        return PromptForm(
            self.add_generation_prompt,
            bool(self.continue_final_message),
            add_special_tokens=self.add_special_tokens,
        )
