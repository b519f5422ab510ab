"""Mistakes that only a tree shows: branches, survivors, scattered paths, ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from drafter_node.compute import Children
from drafter_node.drafting import Drafting
from drafter_node.frontier import Frontier
from engine.layout.slots import Feed, Move, SlotMap
from target_node import accepting
from tests.simulation.faults import BAD_CACHE, NO_SPEED, NOT_THE_TEXT, Fault, Patch


def a_sibling_is_seen_by_a_row(patch: Patch) -> None:
    feed = SlotMap.feed

    def wide(
        self: SlotMap[int], missing: Sequence[int], nodes: Sequence[tuple] = (), **more: int
    ) -> Feed:
        fed = feed(self, missing, nodes, **more)
        assert fed.masks is not None
        if len(nodes) < 2:
            return fed
        own = 1 << (fed.slots[-2] - fed.prefix_len)
        return replace(fed, masks=(*fed.masks[:-1], fed.masks[-1] | own))

    patch.setattr(SlotMap, "feed", wide)


def the_rows_of_a_survivor_are_given_away(patch: Patch) -> None:
    advance = SlotMap.advance

    def forgetful(self: SlotMap[int], path: Sequence[int], survivors: Iterable[int]) -> Move | None:
        move = advance(self, path, survivors)
        for place in self._places.values():
            place.mask <<= 1
            place.slot += 1
        self._taken <<= 1
        return move

    patch.setattr(SlotMap, "advance", forgetful)


def survivors_are_not_moved_out_of_the_way(patch: Patch) -> None:
    advance = SlotMap.advance

    def stay(self: SlotMap[int], path: Sequence[int], survivors: Iterable[int]) -> Move | None:
        move = advance(self, path, survivors)
        if move is None or not self._places:
            return move
        kept = [
            pair
            for pair in zip(move.sources, move.targets, strict=True)
            if pair[1] < self.prefix_len
        ]
        sources, targets = zip(*kept, strict=True) if kept else ((), ())
        return Move(sources, targets, move.lane)

    patch.setattr(SlotMap, "advance", stay)


def a_scattered_path_is_committed_in_the_wrong_order(patch: Patch) -> None:
    advance = SlotMap.advance

    def turned(self: SlotMap[int], path: Sequence[int], survivors: Iterable[int]) -> Move | None:
        move = advance(self, path, survivors)
        return move and Move(move.sources[::-1], move.targets, move.lane)

    patch.setattr(SlotMap, "advance", turned)


def the_target_walks_to_a_row_that_hangs_elsewhere(patch: Patch) -> None:
    def anywhere(
        drafted: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
    ) -> list[int]:
        path = [0]
        for row, token in enumerate(drafted, 1):
            if token == chosen[path[-1]] and parents[row - 1] <= path[-1]:
                path.append(row)
        return path

    patch.setattr(accepting, "accepted_path", anywhere)


def a_rank_is_counted_from_one(patch: Patch) -> None:
    attach = Drafting._attach

    def later(self: Drafting, parent: int, chosen: Children) -> int | None:
        if len(chosen.tokens) > 1:
            chosen = Children(chosen.tokens[1:], chosen.scores[1:])
        return attach(self, parent, chosen)

    patch.setattr(Drafting, "_attach", later)


def what_was_expanded_is_forgotten(patch: Patch) -> None:
    moved = Frontier.moved

    def forget(self: Frontier) -> None:
        moved(self)
        self._expanded &= {self._tree.root}
        self._open.update(
            (key, (node.position, *self._paths[key])) for key, node in self._tree.nodes.items()
        )

    patch.setattr(Frontier, "moved", forget)


def steps_that_followed_at_once_get_the_names_of_others(patch: Patch) -> None:
    rename = SlotMap.rename

    def backwards(self: SlotMap[int], key: int, to: int | None) -> None:
        rename(self, min((name for name in self._places if name < 0), default=key), to)

    patch.setattr(SlotMap, "rename", backwards)


def a_step_that_was_not_made_keeps_its_place(patch: Patch) -> None:
    rename = SlotMap.rename

    def keep(self: SlotMap[int], key: int, to: int | None) -> None:
        if to is not None:
            rename(self, key, to)

    patch.setattr(SlotMap, "rename", keep)


TREE_FAULTS = (
    Fault(a_sibling_is_seen_by_a_row, BAD_CACHE),
    Fault(the_rows_of_a_survivor_are_given_away, f"{BAD_CACHE}|a node sees itself"),
    Fault(survivors_are_not_moved_out_of_the_way, BAD_CACHE),
    Fault(a_scattered_path_is_committed_in_the_wrong_order, BAD_CACHE),
    Fault(the_target_walks_to_a_row_that_hangs_elsewhere, NOT_THE_TEXT),
    Fault(a_rank_is_counted_from_one, f"{NO_SPEED}|an oracle is contradicted", oracle=True),
    Fault(steps_that_followed_at_once_get_the_names_of_others, BAD_CACHE),
    Fault(a_step_that_was_not_made_keeps_its_place, "a node is fed once"),
    Fault(what_was_expanded_is_forgotten, "a node is fed once|was not expanded"),
)
