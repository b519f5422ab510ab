"""Replaces control characters in text from others by visible signs, for a terminal (pure).

Prompts, answers, names and the output of nodes may contain control characters. A terminal that gets
them changes its colours, its title or earlier text. In a pipe a text stays as it is.
"""

KEPT = "\n\t"
PICTURES, DELETE, DELETE_PICTURE = 0x2400, 0x7F, 0x2421
OTHERS = range(0x80, 0xA0)
SIGNS = {
    **{code: PICTURES + code for code in range(0x20) if chr(code) not in KEPT},
    DELETE: DELETE_PICTURE,
    **dict.fromkeys(OTHERS, ord("\N{MIDDLE DOT}")),
}


def harmless(text: str) -> str:
    """Return the text with a sign for each control character; newlines and tabs stay."""
    return text.translate(SIGNS)
