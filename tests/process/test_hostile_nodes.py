"""A hostile drafter, and a hostile target: nobody ends, and no text changes."""

import json
from collections import Counter
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.cluster.service import Service
from coordinator.launching import launcher
from proto.messages import Role
from tests.process.reference import generate
from tests.tiny_models import make_model

pytestmark = pytest.mark.process

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
BUSY = SpeculationConfig(policy="pipelined", adaptive=False)  # the drafter never rests
MODULES = {
    Role.DRAFTER: "tests.process.hostile_drafter",
    Role.TARGET: "tests.process.hostile_target",
}
ENOUGH, MANY = 2, 100  # messages for each field
MOST_TEXTS = 2_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    """A random model drafted by itself."""
    folder = str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))
    return PairConfig(target=folder, drafter=folder, dtype="float32", simulate_target_ms=3.0)


@pytest.fixture(scope="module")
def whole(tiny: PairConfig) -> list[int]:
    """The text as the target alone writes it."""
    with Pair(tiny, with_drafter=False) as pair:
        return generate(pair, PROMPT, SpeculationConfig(policy="ar"), GREEDY).tokens


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Frames that came to the coordinator, by the node that sent them."""
    found: Counter[bytes] = Counter()
    handle = Service._on_frame

    def counted(self: Service, node: bytes, frame: bytes) -> None:
        found[node] += 1
        handle(self, node, frame)

    monkeypatch.setattr(Service, "_on_frame", counted)
    return found


def attack(
    tiny: PairConfig,
    whole: list[int],
    role: Role,
    least: int,
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> Counter[str]:
    """Write texts beside a hostile node until each field was changed so often; what it sent."""
    patch.setitem(launcher.MODULES, role, MODULES[role])
    sent: Counter[str] = Counter()
    num_texts = 0
    while min(sent.values(), default=0) < least:
        file = folder / f"{role} {num_texts}"
        patch.setenv("SLIPSTREAM_TEST_HOSTILE", f"outside 24 {file}")
        here: dict[str, int] = {}
        with Pair(tiny) as pair:
            while min((here | sent).values(), default=0) < least and num_texts < MOST_TEXTS:
                num_texts += 1
                assert generate(pair, PROMPT, BUSY, GREEDY).tokens == whole
                here = json.loads(file.read_text()) if file.exists() else {}
                if not pair.service.registry.ready(Role.DRAFTER):
                    break  # it was cut off
        sent += Counter(here)
        assert num_texts < MOST_TEXTS, sent
    return sent


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    "least",
    [
        pytest.param(ENOUGH, marks=pytest.mark.slow),
        pytest.param(MANY, marks=pytest.mark.slow),
    ],
)
def test_messages_outside_of_their_text_end_nobody_and_change_no_text(
    tiny: PairConfig,
    whole: list[int],
    role: Role,
    least: int,
    arrived: Counter[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = attack(tiny, whole, role, least, tmp_path, monkeypatch)
    assert sum(arrived.values()) >= sum(sent.values())
