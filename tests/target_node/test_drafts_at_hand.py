"""What of a tree a pass verifies, where the target's choices lead, and what drafts were worth."""

import itertools
import random
from dataclasses import replace
from math import exp

from proto.messages import Draft, Hit
from proto.policies import POLICIES
from proto.tree import Graft, Node, SpeculationTree
from target_node.accepting import accepted_path, rest_of
from target_node.drafts_at_hand import laid_out, likeliest, likeliest_chain
from tests.target_node.target import Target, part_of, ready, said
from tests.texts import KEY, draft, name, opening

TREE = POLICIES["tree"].make(4, 16)


def chance(node: Node) -> float:
    """As its score says."""
    return exp(node.score)


def some_tree(draw: random.Random, num_nodes: int) -> SpeculationTree:
    """Nodes below the text 1 2, anywhere."""
    tree = SpeculationTree(KEY, (1, 2), max_nodes=64)
    parents = [draw.randint(-1, index - 1) for index in range(num_nodes)]
    scores = [-draw.choice((0.1, 0.5, 1.0, 2.0)) for _ in range(num_nodes)]
    tree.attach(
        Graft(0, tree.root, 2, tuple(range(10, 10 + num_nodes)), tuple(parents), tuple(scores))
    )
    return tree


def test_no_other_subtree_of_that_size_is_likelier() -> None:
    draw = random.Random(1)
    for _ in range(40):
        tree = some_tree(draw, 7)
        chances = {tree.root: 1.0}
        for node in tree.below(tree.root):
            chances[node.key] = chances[node.parent] * chance(node)
        for limit in (1, 3, 5):
            found = likeliest(tree, limit, chance)
            assert all(abs(found[key] - chances[key]) < 1e-9 for key in found)
            assert list(found.values()) == sorted(found.values(), reverse=True)
            hanging = [
                keys
                for keys in itertools.combinations(tree.nodes, limit)
                if all(tree.nodes[key].parent in (tree.root, *keys) for key in keys)
            ]
            best = max(sum(chances[key] for key in keys) for keys in hanging)
            assert sum(found.values()) >= best - 1e-9


def test_the_chain_is_the_best_one_with_the_chances_of_its_paths() -> None:
    tree = some_tree(random.Random(3), 9)
    found = likeliest_chain(tree, 4, chance)
    assert list(found) == [node.key for node in tree.best_chain(4)]
    assert list(likeliest_chain(tree, 0, chance)) == []


def test_rows_follow_their_parents_and_the_likeliest_path_comes_first() -> None:
    draw = random.Random(5)
    for _ in range(40):
        tree = some_tree(draw, 8)
        chosen = likeliest(tree, 6, chance)
        nodes, parents = laid_out(tree, chosen)
        assert {node.key for node in nodes} == set(chosen)
        keys = [tree.root, *(node.key for node in nodes)]
        for row, (node, parent) in enumerate(zip(nodes, parents, strict=True), 1):
            assert parent < row
            assert keys[parent] == node.parent
        first = rest_of(nodes, parents, 0)
        key = tree.root
        for node in first:
            siblings = [other for other in chosen if tree.nodes[other].parent == key]
            assert node.key == siblings[0], "the likeliest child is the next row"
            key = node.key


def test_the_walk_ends_where_no_row_carries_the_choice() -> None:
    #        root(0): 5 (1), 6 (2);  5: 7 (3), 8 (4);  6: 7 (5)
    drafted, parents = (5, 6, 7, 8, 7), (0, 0, 1, 1, 2)
    assert accepted_path(drafted, parents, (5, 8, 0, 0, 9, 0)) == [0, 1, 4]
    assert accepted_path(drafted, parents, (6, 0, 7, 0, 0, 1)) == [0, 2, 5]
    assert accepted_path(drafted, parents, (9, 7, 7, 0, 0, 0)) == [0]
    assert accepted_path((), (), (4,)) == [0]


def branching(*, number: int = 1) -> Draft:
    """Below 1 2 3: 5 and 6; below 5: 7 and 8."""
    return Draft(
        session=1,
        incarnation=1,
        source=0,
        first_number=number,
        number=number,
        parent_hash=name(1, 2, 3),
        parent_len=3,
        tokens=(5, 6, 7, 8),
        parents=(-1, -1, 0, 0),
        scores=(-0.3, -1.5, -0.4, -1.4),
        done=True,
        model_us=0,
    )


def test_a_pass_verifies_a_subtree_and_commits_the_path_through_it() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=TREE))
    target.computes(part_of(target.ticks()).number, 3)
    target.hears(branching())
    part = part_of(target.ticks())
    assert part.feed.tokens == (3, 5, 7, 8, 6)
    assert part.parents == (0, 1, 1, 0)
    assert part.positions == (3, 4, 5, 5, 4)
    assert part.paths() == [(), (5,), (5, 7), (5, 8), (6,)]
    send, move = target.computes(part.number, 5, 8, 0, 9, 0)
    assert target.machine.tree.text.tokens == [1, 2, 3, 5, 8, 9]
    assert send.message.num_accepted == 2  # type: ignore[union-attr]
    (moved,) = move.moves  # type: ignore[union-attr]
    assert (moved.sources, moved.targets) == ((5,), (4,)), "8 lay behind 7"


def test_the_first_path_is_accepted_without_a_move() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=TREE))
    target.computes(part_of(target.ticks()).number, 3)
    target.hears(branching())
    part = part_of(target.ticks())
    assert len(target.computes(part.number, 5, 7, 4, 0, 0)) == 1


def test_a_reproducible_pass_has_one_path_only() -> None:
    target = Target(fixed_rows=8)
    target.hears(opening(1, 2, policy=TREE))
    while not (part := part_of(target.ticks())).num_asked:
        target.computes(part.number)
    target.computes(part.number, 3)
    target.hears(branching())
    assert part_of(target.ticks()).parents == (0, 1)


# -- what became of the first token of a pass ------------------------------------------------------


def test_a_first_token_that_was_verified_is_a_hit() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    assert said(target.computes(2, 4, 7, 8)).hit is Hit.HIT


def test_a_first_token_that_nobody_drafted_is_a_miss_of_content() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    assert said(target.computes(2, 9, 7, 8)).hit is Hit.CONTENT


def test_a_first_token_that_came_during_the_pass_is_a_miss_of_timing() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    target.hears(draft((1, 2, 3), 9, number=2))
    assert said(target.computes(2, 9, 7, 8)).hit is Hit.TIMING


def test_a_first_token_that_was_there_and_not_verified_is_a_miss_of_width() -> None:
    target = Target()
    tree = replace(POLICIES["tree"].make(1, 16), launch_min=1, launch_accepted=1)
    target.hears(opening(1, 2, policy=tree))
    target.ticks()
    target.computes(1, 3)
    target.hears(draft((1, 2, 3), 4), draft((1, 2, 3), 9, number=2))
    target.ticks()
    assert said(target.computes(2, 9, 7)).hit is Hit.WIDTH


def test_a_pass_without_drafts_whose_drafts_came_too_late_is_a_miss_of_timing() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    target.hears(draft((1, 2), 9))
    assert said(target.computes(1, 3)).hit is Hit.TIMING


def test_a_pass_that_had_nothing_at_hand_is_a_miss_of_timing() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    assert said(target.computes(1, 3)).hit is Hit.TIMING
