"""`python -m tests.theory`: print every number of the page, and draw its figure anew."""
# ruff: noqa: T201

from tests.theory.figure import PATH, figure
from tests.theory.numbers import facts

if __name__ == "__main__":
    print(*facts(), sep="\n")
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(figure(), encoding="utf-8")
    print(f"wrote {PATH}")
