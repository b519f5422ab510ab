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
EACH, ALL = 100, 20_000  # messages for each field, and together
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
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> Counter[str]:
    """Write texts beside a hostile node until each field was changed often enough; what it sent.

    A drafter is cut off in the end, and then another one goes on.
    """
    patch.setitem(launcher.MODULES, role, MODULES[role])
    patch.setenv("SLIPSTREAM_TEST_HOSTILE", f"outside 24 {folder}")
    num_texts = 0
    while not is_enough(told(folder)):
        with Pair(tiny) as pair:
            while pair.service.registry.ready(role) and not is_enough(told(folder)):
                num_texts += 1
                assert num_texts < MOST_TEXTS, told(folder)
                assert generate(pair, PROMPT, BUSY, GREEDY).tokens == whole
    return told(folder)


def told(folder: Path) -> Counter[str]:
    """How often each field was changed, as all hostile nodes together wrote it down."""
    sent: Counter[str] = Counter()
    for file in folder.glob("*.json"):
        sent.update(json.loads(file.read_text()))
    return sent


def is_enough(sent: Counter[str]) -> bool:
    """Whether each field was changed so often, and so many messages were sent."""
    return min(sent.values(), default=0) >= EACH and sent.total() >= ALL


@pytest.mark.long
@pytest.mark.parametrize("role", list(Role))
def test_messages_outside_of_their_text_end_nobody_and_change_no_text(
    tiny: PairConfig,
    whole: list[int],
    role: Role,
    arrived: Counter[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = attack(tiny, whole, role, tmp_path, monkeypatch)
    assert sum(arrived.values()) >= sum(sent.values())
