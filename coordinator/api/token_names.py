"""What single tokens are called, which bytes they are, and where those of a prompt begin."""

from collections.abc import Sequence

from tokenizers import Encoding

from coordinator.api.prompts import HERE, Tokenization
from coordinator.text.detokenization import IdStream, Piece, TextStream


class TokenNames:
    """Names the tokens of a target, as OpenAI's API does.

    tokenization  the target's; None: it has none, so that its tokens are named by their ids
    """

    def __init__(self, tokenization: Tokenization | None) -> None:
        self._tokenization = tokenization
        self._decoder = IdStream() if tokenization is None else tokenization.stream(())

    def said(self, token: int) -> bytes:
        """Return the bytes of a token; of a special token those of its name."""
        known = None if self._tokenization is None else self._tokenization.bytes_of(token)
        return self._decoder.single(token).encode() if known is None else known

    def name(self, token: int) -> str:
        """Return the token's text; `bytes:` and its bytes where these are no whole characters."""
        said = self.said(token)
        try:
            return said.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)

    def echo(self, prompt: str | None, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of a prompt, and where each of its tokens begins in it.

        Long texts are read by a process of their own. Raises BusyError, ConfigurationError.

        prompt  the text as it was given; None: the prompt was given as token ids, and its text has
                the special tokens by name
        """
        if prompt is not None and self._tokenization is not None and len(prompt) > HERE:
            return prompt, self._tokenization.long_texts.echo(prompt, ids)
        return self.echo_here(prompt, ids)

    def echo_here(self, prompt: str | None, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the same, made in this process, however long the text is."""
        if self._tokenization is None:
            stream = IdStream()
            begins = [piece.begin for piece in stream.placed(ids)]
            return "".join(f"{token}," for token in ids), begins
        decoder = self._tokenization.stream((), skip_special_tokens=False)
        if prompt is None:
            return _decoded(decoder, ids, [False] * len(ids))
        encoding = self._encoding(prompt, ids)
        are_added = [bool(is_added) for is_added in encoding.special_tokens_mask]
        text, begins = _decoded(decoder, ids, are_added)
        return prompt, begins if text == prompt else _begins(encoding)

    def _encoding(self, prompt: str, ids: Sequence[int]) -> Encoding:
        """Return the encoding of a prompt by which it has these ids."""
        assert self._tokenization is not None
        for adds_special in (True, False):
            encoding = self._tokenization.raw.encode(prompt, add_special_tokens=adds_special)
            if encoding.ids == list(ids):
                break
        return encoding


def _decoded(
    decoder: TextStream, ids: Sequence[int], are_added: Sequence[bool]
) -> tuple[str, list[int]]:
    """Return the text of token ids, and where each begins; those that were added are no text."""
    placed = [
        Piece("", decoder.end) if is_added else decoder.placed([token])[0]
        for token, is_added in zip(ids, are_added, strict=True)
    ]
    text = "".join(piece.text for piece in placed) + decoder.finish()
    return text, [piece.begin for piece in placed]


def _begins(encoding: Encoding) -> list[int]:
    """Return where tokens begin in a text that decoding does not give back (of lower case, say).

    Post-processors leave spaces out of a token's range: it begins where the token before it ends,
    or within that one.
    """
    begins: list[int] = []
    begin = end = 0
    for (first, last), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
        begin = max(begin, end if is_added else min(first, end))
        end = end if is_added else max(end, last)
        begins.append(begin)
    return begins
