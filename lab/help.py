"""`--help` of the programs of the lab that argparse reads: a docstring as paragraphs."""

import argparse
import textwrap

from coordinator.cli.wrapping import continued


class Paragraphs(argparse.HelpFormatter):
    """Fills each paragraph to the width of the terminal; an indented one is commands, a line each.

    A command that is too long goes on behind a backslash, so that it can be copied.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.strip().split("\n\n"):
            lines = paragraph.split("\n")
            if paragraph.startswith(" "):
                lines = [part for line in lines for part in continued(line[2:], width)]
            else:
                lines = textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
            filled.append("\n".join(indent + line for line in lines))
        return "\n\n".join(filled) + "\n"
