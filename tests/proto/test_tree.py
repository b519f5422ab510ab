"""The speculation tree against a dumb model: the set of all paths, spelt out."""

from dataclasses import dataclass, field
from random import Random

import pytest

from proto.tree import (
    EMPTY_HASH,
    MAX_ORPHANS,
    CommittedText,
    Diverged,
    Graft,
    SpeculationTree,
    path_hash,
)

KEY = bytes(range(16))
Path = tuple[int, ...]


def name(path: Path) -> int:
    """The hash of a path, folded from its first token."""
    key = EMPTY_HASH
    for token in path:
        key = path_hash(key, token, KEY)
    return key


def chain(parent: Path, *tokens: int, source: int = 0) -> Graft:
    """A graft of one path."""
    parents = tuple(range(-1, len(tokens) - 1))
    return Graft(source, name(parent), len(parent), tokens, parents, (-1.0,) * len(tokens))


def tree_of(committed: Path, *, max_nodes: int = 64) -> SpeculationTree:
    """An empty tree on a text."""
    return SpeculationTree(KEY, committed, max_nodes=max_nodes)


def paths(tree: SpeculationTree) -> set[Path]:
    """The whole path of every live node."""
    found: dict[int, Path] = {tree.root: tuple(tree.text.tokens)}
    for node in tree.below(tree.root):
        found[node.key] = (*found[node.parent], node.token)
    return set(found.values()) - {tuple(tree.text.tokens)}


@dataclass
class Model:
    """Live paths as a plain set; drafts whose parent is unknown wait in a list."""

    text: Path
    live: set[Path] = field(default_factory=set)
    waiting: list[tuple[Path, Path]] = field(default_factory=list)

    def attach(self, parent: Path, tokens: Path) -> None:
        """Add parent + tokens[:1], parent + tokens[:2] and so on, where they fit."""
        known = parent in self.live or parent == self.text[: len(parent)]
        if not known:
            if len(parent) > len(self.text):
                self.waiting.append((parent, tokens))
            return
        before = len(self.live)
        for end in range(1, len(tokens) + 1):
            path = parent + tokens[:end]
            if len(path) <= len(self.text):
                if path != self.text[: len(path)]:
                    return
            else:
                self.live.add(path)
        if len(self.live) > before:
            self._retry()

    def advance(self, tokens: Path) -> None:
        """Commit; what does not begin with the new text dies."""
        self.text += tokens
        length = len(self.text)
        self.live = {p for p in self.live if len(p) > length and p[:length] == self.text}
        self._retry()

    def _retry(self) -> None:
        waiting, self.waiting = self.waiting, []
        for parent, tokens in waiting:
            self.attach(parent, tokens)


@pytest.mark.parametrize("seed", range(200))
def test_the_tree_holds_exactly_the_paths_of_the_model(seed: int) -> None:
    random = Random(seed)
    model = Model(tuple(random.randrange(3) for _ in range(random.randint(1, 4))))
    tree = tree_of(model.text, max_nodes=10_000)
    for _ in range(60):
        if random.random() < 0.25:
            tokens = tuple(random.randrange(3) for _ in range(random.randint(0, 3)))
            alive = sum(path[: len(model.text)] == model.text for path in model.live)
            assert alive == len(model.live)
            num_before, path_nodes = len(tree.nodes), paths(tree)
            path, num_dead = tree.advance(tokens)
            assert path == [name(model.text + tokens[: end + 1]) for end in range(len(tokens))]
            model.advance(tokens)
            committed = sum(p == model.text[: len(p)] for p in path_nodes)
            survived = sum(p in model.live for p in path_nodes)
            assert num_dead == num_before - committed - survived
        else:
            parent = _some_path(random, model)
            tokens = tuple(random.randrange(3) for _ in range(random.randint(1, 4)))
            if len(model.waiting) < MAX_ORPHANS:
                before = len(tree.nodes)
                assert tree.attach(chain(parent, *tokens)) == len(tree.nodes) - before
                model.attach(parent, tokens)
        tree.check()
        assert tuple(tree.text.tokens) == model.text
        assert paths(tree) == model.live


def _some_path(random: Random, model: Model) -> Path:
    """Where a draft may hang: on the text, on a live node, or on something not yet there."""
    kind = random.random()
    if kind < 0.3:
        return model.text[: random.randint(0, len(model.text))]
    base = random.choice(sorted(model.live)) if model.live and kind < 0.8 else model.text
    more = random.randint(0, 2) if kind > 0.6 else 0
    return base + tuple(random.randrange(3) for _ in range(more))


def test_a_draft_on_a_committed_position_is_walked_along_the_text() -> None:
    tree = tree_of((1, 2))
    tree.advance((7,))  # the target wrote 7 itself while the draft was on its way
    assert tree.attach(chain((1, 2), 7, 8, 9)) == 2
    assert paths(tree) == {(1, 2, 7, 8), (1, 2, 7, 8, 9)}
    assert tree.num_stale == 0


def test_a_draft_that_contradicts_the_text_is_stale() -> None:
    tree = tree_of((1, 2, 7))
    assert tree.attach(chain((1, 2), 6, 8, 9)) == 0
    assert paths(tree) == set()
    assert tree.num_stale == 3


def test_a_draft_of_the_right_length_on_another_text_is_stale() -> None:
    tree = tree_of((1, 2, 3))
    assert tree.attach(chain((1, 2, 4), 5)) == 0
    assert tree.num_stale == 1
    assert paths(tree) == set()


def test_a_parent_is_known_by_hash_and_length() -> None:
    tree = tree_of((1, 2))
    tree.attach(chain((1, 2), 3))
    lying = Graft(0, name((1, 2, 3)), 2, (4,), (-1,), (-1.0,))
    assert tree.attach(lying) == 0
    assert paths(tree) == {(1, 2, 3)}
    assert tree.num_stale == 1


def test_an_orphan_waits_for_its_parent() -> None:
    tree = tree_of((1,))
    assert tree.attach(chain((1, 2, 3), 4)) == 0
    assert tree.attach(chain((1, 2), 3)) == 0
    assert tree.attach(chain((1,), 2)) == 3
    assert paths(tree) == {(1, 2), (1, 2, 3), (1, 2, 3, 4)}


def test_an_orphan_is_adopted_when_the_text_reaches_its_parent() -> None:
    tree = tree_of((1,))
    tree.attach(chain((1, 2, 3), 4))
    tree.advance((2, 3))
    assert paths(tree) == {(1, 2, 3, 4)}


def test_an_orphan_that_the_text_has_passed_is_stale() -> None:
    tree = tree_of((1,))
    tree.attach(chain((1, 2, 3), 4, 5))
    tree.advance((2, 9))
    assert paths(tree) == set()
    assert tree.num_stale == 2
    tree.check()


def test_the_oldest_orphan_gives_way() -> None:
    tree = tree_of((1,))
    for token in range(MAX_ORPHANS + 1):
        tree.attach(chain((1, 2, token), 3))
    assert tree.num_stale == 1
    tree.attach(chain((1,), 2, 0))
    assert (1, 2, 0, 3) not in paths(tree)
    tree.attach(chain((1, 2), MAX_ORPHANS))
    assert (1, 2, MAX_ORPHANS, 3) in paths(tree)


def test_an_orphan_that_comes_twice_takes_one_place() -> None:
    tree = tree_of((1,))
    for _ in range(MAX_ORPHANS + 1):
        tree.attach(chain((1, 2), 3))
    assert tree.num_stale == 0
    assert tree.attach(chain((1,), 2)) == 2


def test_a_whole_window_of_orphans_waits_for_one_late_draft() -> None:
    tree = tree_of((1,))
    path = (1, *range(10, 10 + MAX_ORPHANS + 1))
    for end in range(len(path) - 1, 1, -1):
        tree.attach(chain(path[:end], path[end]))
    assert tree.attach(chain((1,), path[1])) == MAX_ORPHANS
    assert len(tree.best_chain(100)) == MAX_ORPHANS


def test_a_draft_that_comes_twice_changes_nothing() -> None:
    tree = tree_of((1,))
    assert tree.attach(chain((1,), 2, 3)) == 2
    assert tree.attach(chain((1,), 2, 3)) == 0
    assert paths(tree) == {(1, 2), (1, 2, 3)}
    assert tree.num_stale == 0


def test_the_first_child_with_a_token_stays() -> None:
    tree = tree_of((1,))
    tree.attach(chain((1,), 2, 3, source=0))
    tree.attach(Graft(1, name((1,)), 1, (2,), (-1,), (0.0,)))
    first = tree.child(tree.root, 2)
    assert first is not None
    assert (first.source, first.score) == (0, -1.0)
    assert paths(tree) == {(1, 2), (1, 2, 3)}


def test_a_full_tree_counts_what_it_cannot_take() -> None:
    tree = tree_of((1,), max_nodes=2)
    assert tree.attach(chain((1,), 2, 3, 4)) == 2
    assert paths(tree) == {(1, 2), (1, 2, 3)}
    assert tree.num_stale == 1


def test_advancing_keeps_what_hangs_below_the_new_root() -> None:
    tree = tree_of((1,))
    tree.attach(chain((1,), 2, 3, 4))
    tree.attach(chain((1,), 5, 6))
    path, num_dead = tree.advance((2, 3))
    assert path == [name((1, 2)), name((1, 2, 3))]
    assert num_dead == 2
    assert paths(tree) == {(1, 2, 3, 4)}


def test_the_best_chain_follows_the_highest_score() -> None:
    tree = tree_of((1,))
    tree.attach(Graft(0, name((1,)), 1, (2, 3, 4, 5), (-1, -1, 0, 1), (-2.0, -1.0, 0.0, -9.0)))
    assert [node.token for node in tree.best_chain(8)] == [3, 5]
    assert [node.token for node in tree.best_chain(1)] == [3]
    assert tree.best_chain(0) == []


def test_the_best_chain_prefers_one_that_goes_far_to_one_that_begins_well() -> None:
    tree = tree_of((1,))
    tree.attach(Graft(0, name((1,)), 1, (2,), (-1,), (-0.5,)))
    tree.attach(Graft(1, name((1,)), 1, (3, 4, 5), (-1, 0, 1), (-0.7, -0.1, -0.1)))
    assert [node.token for node in tree.best_chain(8)] == [3, 4, 5]
    assert [node.token for node in tree.best_chain(1)] == [2]


def test_a_verdict_on_a_live_node_commits_the_path_to_it() -> None:
    tree = tree_of((1,))
    tree.attach(chain((1,), 2, 3))
    assert tree.news(3, name((1, 2, 3)), (9,)) == (2, 3, 9)
    assert tree.news(2, name((1, 2, 3)), (9,)) is None  # the length says otherwise


def test_a_verdict_on_an_unknown_path_is_no_news() -> None:
    tree = tree_of((1, 2))
    assert tree.news(2, name((1, 3)), (9,)) is None
    assert tree.news(3, name((1, 2, 3)), (9,)) is None


def test_overlapping_verdicts_add_only_what_is_new() -> None:
    text = CommittedText(KEY, (1, 2, 3))
    assert text.continuation(1, name((1,)), (2, 3, 4)) == (4,)
    assert text.continuation(1, name((1,)), (2, 3)) == ()
    assert text.continuation(1, name((1,)), (2,)) == ()
    assert text.continuation(3, name((1, 2, 3)), (4, 5)) == (4, 5)


def test_contradicting_verdicts_diverge() -> None:
    text = CommittedText(KEY, (1, 2, 3))
    with pytest.raises(Diverged, match="between positions 1 and 3"):
        text.continuation(1, name((1,)), (2, 4))


def test_texts_are_compared_token_by_token() -> None:
    text = CommittedText(KEY, (1, 2, 3))
    assert text.common_len((1, 2, 3, 4)) == 3
    assert text.common_len((1, 2)) == 2
    assert text.common_len((1, 3, 3)) == 1
    assert text.common_len(()) == 0


def test_path_hashes_depend_on_the_order_and_on_the_key() -> None:
    assert name((1, 2)) != name((2, 1))
    assert name((1, 2)) != name((12,))
    other = path_hash(path_hash(EMPTY_HASH, 1, bytes(16)), 2, bytes(16))
    assert other != name((1, 2))
    assert CommittedText(KEY, (1, 2)).path_hashes == [EMPTY_HASH, name((1,)), name((1, 2))]
