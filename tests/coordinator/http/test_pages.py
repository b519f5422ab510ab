"""The page's files, the headers they come with, and the state that it shows."""

import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from starlette.testclient import TestClient

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.http.bodies import CompletionBody
from coordinator.http.figures import Figures
from coordinator.http.guard import Guard, Rules
from coordinator.http.pages import FILES, FOLDER
from coordinator.http.routes import make_app
from coordinator.http.work import Work
from proto.errors import ConfigurationError
from proto.policies import PolicyName

KEY = "a-key-of-enough-letters"
NODE = {"name": "target-1", "host": "desk", "pid": 8, "model": "/home/x/models/large", "texts": 1}
STATE = {"pid": 7, "host": "desk", "listens": "tcp://10.0.0.1:5", "logs": "/home/x", "hung": False}
CODE = "\n".join(path.read_text("utf-8") for path in FOLDER.iterdir() if path.suffix == ".js")


@pytest.fixture
def client() -> TestClient:
    """A server that wants a key."""
    pair = SimpleNamespace(
        config=SimpleNamespace(target="t"),
        tokenization=None,
        service=SimpleNamespace(status=lambda: {**STATE, "nodes": [NODE]}),
    )
    llm: Any = SimpleNamespace(pair=pair)
    rules = Rules(checks_host=True, keys=(KEY,))
    app = Guard(make_app(llm, "t", Figures("t")), rules, Work(8))
    return TestClient(app, base_url="http://localhost")


@pytest.mark.parametrize("path", FILES)
def test_every_file_of_the_page_needs_no_key_and_loads_from_this_server_alone(
    client: TestClient, path: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / FILES[path]).read_bytes()
    rules = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert set(rules.values()) == {"'self'", "'none'"}
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_host_and_origin_are_checked_for_the_page_too(client: TestClient) -> None:
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert (
        client.get("/page/other.js", headers={"authorization": f"Bearer {KEY}"}).status_code == 404
    )


def test_the_state_wants_the_key_and_names_no_process_no_address_and_no_path(
    client: TestClient,
) -> None:
    assert client.get("/status").status_code == 401
    answer = client.get("/status", headers={"authorization": f"Bearer {KEY}"})
    node = {"name": "target-1", "model": "large", "texts": 1}
    assert answer.json() == {"hung": False, "nodes": [node]}


def test_every_file_in_the_folder_is_served() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES.values())


def test_the_page_names_only_its_own_files_and_has_nothing_inline() -> None:
    page = (FOLDER / "index.html").read_text("utf-8")
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page))
    named |= set(re.findall(r'from "([^"]+)"', CODE))
    assert named == set(FILES) - {"/"}
    assert not re.search(r'<script(?![^>]* src=)|<style| style=| on[a-z]+="', page)


def test_the_code_never_makes_html_of_a_text_and_stores_nothing() -> None:
    wrong = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|localStorage|sessionStorage"
    assert not re.search(rf"\b(?:{wrong})\b|\.cookie\b", CODE)


def brightness(colour: str) -> float:
    """The relative luminance of `#rrggbb`, as the Web Content Accessibility Guidelines have it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21."""
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_texts_are_readable_in_every_colour(scheme: int) -> None:
    style = (FOLDER / "style.css").read_text("utf-8")
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    grounds = {name: ("panel", f"{name}-tint") for name in ("model", "ngram", "earlier", "heads")}
    grounds |= dict.fromkeys(("ink", "quiet"), ("panel", "ground"))
    grounds |= {"own": ("panel",), "rejected": ("panel",), "on-accent": ("accent",)}
    pairs = [(name, ground) for name, many in grounds.items() for ground in many]
    poor = [pair for pair in pairs if contrast(*(colours[one] for one in pair)) < 4.5]
    assert poor == []
    shapes = ("model", "own", "both", "rejected", "edge")  # of the timeline, and edges of fields
    assert [one for one in shapes if contrast(colours[one], colours["panel"]) < 3] == []


def test_the_page_offers_every_policy_that_drafts() -> None:
    page = (FOLDER / "index.html").read_text("utf-8")
    offered = re.findall(r"<option>(\w+)</option>", page)
    assert sorted(offered) == sorted(name for name in get_args(PolicyName) if name != "ar")


def test_events_go_with_a_stream_and_change_nothing_of_how_drafts_are_made() -> None:
    asked = {"prompt": "p", "speculative": {"enabled": False, "events": True}}
    streamed = CompletionBody(**asked, stream=True)
    assert streamed.wants_events
    assert not CompletionBody(prompt="p", stream=True).wants_events
    asking: Any = SimpleNamespace(speculation=None)
    plain = CompletionBody(prompt="p", speculative={"enabled": False})
    assert streamed.speculation(asking) == plain.speculation(asking)
    with pytest.raises(ConfigurationError, match="stream: true"):
        assert CompletionBody(**asked).wants_events


def test_settings_of_drafts_beside_plain_decoding_are_refused() -> None:
    pair = SimpleNamespace(config=PairConfig())
    asking: Any = SimpleNamespace(speculation=SpeculationConfig(), pair=pair)

    def read(**speculative: Any) -> SpeculationConfig:
        return CompletionBody(prompt="p", speculative=speculative).speculation(asking)

    assert read(policy="ar") == read(enabled=False)
    for wanted, line in (
        ({"enabled": False, "policy": "tree"}, "enabled is false, so policy would do nothing"),
        ({"policy": "ar", "num_speculative_tokens": 4}, "so num_speculative_tokens would do noth"),
    ):
        with pytest.raises(ConfigurationError, match=line):
            read(**wanted)
