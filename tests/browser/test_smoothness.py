"""2,000 tokens at 400 a second: the page changes once in a frame, and frames keep coming."""

from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.fake_server import faking

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.browser]

NUM_TOKENS, PER_PASS, PER_SECOND = 2000, 4, 400
WORDS = (
    "def ",
    "read",
    "(path):\n",
    "    return",
    " [line",
    " for",
    " line",
    " in",
    " file]\n",
    "",
)
MOST_MS = 1000 / 24  # of a frame, on two busy cores without a GPU; films have as many
LATE = 0.1  # share of the frames that may take longer: others use the cores too
COUNT = """() => {
  const seen = window.seen = { frames: [], changes: 0 };
  let last = performance.now();
  new MutationObserver(() => { seen.changes += 1; })
    .observe(document.getElementById("answer"), { childList: true, subtree: true });
  const frame = (now) => {
    seen.frames.push(now - last);
    last = now;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""


def token(number: int) -> dict[str, Any]:
    """Three drafts and a token of the target's, in words of code."""
    made = {"id": number, "text": WORDS[number % len(WORDS)], "origin": "draft:model"}
    if number % PER_PASS == PER_PASS - 1:
        made |= {"origin": "recovered", "rejected": " no"}
    return made


@pytest.mark.timed
@pytest.mark.parametrize("width", [1280, 400])
def test_a_long_and_fast_answer_changes_the_page_once_a_frame(open_page: Open, width: int) -> None:
    tokens = [token(number) for number in range(NUM_TOKENS)]
    passes = [tokens[at : at + PER_PASS] for at in range(0, NUM_TOKENS, PER_PASS)]
    with faking(passes, pass_ms=1000 * PER_PASS / PER_SECOND) as url:
        page = open_page(url, width)
        page.evaluate(COUNT)
        page.click("#go")
        page.locator("#state", has_text="Done: 2000 tokens").wait_for()
        seen = page.evaluate("seen")
    frames = sorted(seen["frames"])
    late = sum(ms > MOST_MS for ms in frames)
    figures = {"frames": len(frames), "changes": seen["changes"], "late": late}
    figures |= {"median_ms": frames[len(frames) // 2], "longest_ms": frames[-1]}
    print({name: round(value, 1) for name, value in figures.items()})  # noqa: T201
    assert "".join(one["text"] for one in tokens) == "\n".join(
        page.locator("#answer .line").all_text_contents()
    )
    assert 100 < seen["changes"] <= len(frames)
    assert late < LATE * len(frames)
