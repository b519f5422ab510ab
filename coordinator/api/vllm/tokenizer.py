"""What `LLM.get_tokenizer` gives: the target's tokenizer, by the method names of transformers.

transformers' own would load torch into the process that owns the text. Its `from_pretrained` on the
same model makes one, for whoever needs more of it than is here.
"""

from collections.abc import Sequence
from typing import Any

from coordinator.api.chat import Messages
from coordinator.api.pair import Pair
from proto.errors import ConfigurationError
from proto.messages import Role


class TargetTokenizer:
    """Text to token ids and back, exactly as prompts and answers of the pair are.

    Raises ConfigurationError when it is made, if the target has no tokenizer.
    """

    def __init__(self, pair: Pair) -> None:
        if pair.tokenization is None:
            raise ConfigurationError(f"{pair.config.target} has no tokenizer.json")
        self._pair = pair
        self._tokenization = pair.tokenization
        self._raw = self._tokenization.raw

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises ConfigurationError for what is no Unicode."""
        return list(self._tokenization.encode(text, special_tokens=add_special_tokens))

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`input_ids` and `attention_mask` of one text."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of one token or of several."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._raw.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Tokens as the vocabulary has them; None for an id that stands for nothing."""
        return [self._raw.id_to_token(token) for token in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """The other way round."""
        return [self._raw.token_to_id(token) for token in tokens]

    def apply_chat_template(
        self, conversation: Messages, *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> str | list[int]:
        """A conversation as the target is asked it: token ids, or the text.

        add_generation_prompt  up to where the answer begins, as `LLM.chat` does

        Raises ConfigurationError, ModelError.
        """
        template = self._pair.chat_template
        text = template.render(conversation, add_generation_prompt=add_generation_prompt)
        if not tokenize:
            return text
        return self.encode(text, add_special_tokens=template.is_plain)

    @property
    def eos_token_id(self) -> int | None:
        """The first of the tokens at which a text ends by itself."""
        ids: Sequence[int] = self._pair.hello(Role.TARGET).fingerprint.eos_ids
        return next(iter(ids), None)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, those that were added to it not counted."""
        return int(self._raw.get_vocab_size(with_added_tokens=False))

    def get_vocab(self) -> dict[str, Any]:
        """Ids by token, those that were added included."""
        return dict(self._raw.get_vocab())

    def __len__(self) -> int:
        return int(self._raw.get_vocab_size())
