"""Says where a target's files leave open which tokens end a text."""

from collections.abc import Collection

NO_END = (
    "the target's files name no token that ends a text, so a text ends at its most tokens; "
    "--stop-token-ids names such tokens"
)


def open_ends(
    eos_ids: Collection[int],
    token: str | None,
    token_id: int | None,
    given: Collection[int] = (),
    *,
    has_strings: bool = False,
) -> list[str]:
    """Return a line if the model's files name no end of a text, or not the tokenizer's own.

    eos_ids   tokens that end a text, by the model's files
    token     the tokenizer's `eos_token`, and its id; None: it has none that the target could write
    given     tokens that are to end a text, by the user
    has_strings  the user also gave strings that end a text
    """
    if token_id is not None and token_id not in {*eos_ids, *given}:
        return [
            f"the tokenizer's eos_token {token} (id {token_id}) ends no text by the target's "
            f"files; if it should, add --stop-token-ids {token_id}"
        ]
    return [] if eos_ids or given or has_strings else [NO_END]
