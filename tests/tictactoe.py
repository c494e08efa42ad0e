"""The rules of TicTacToe, and every game that a policy can get into: does any opponent, even a perfect one, beat it?

python -m tests.tictactoe RUN
"""

import sys
from typing import NamedTuple

import numpy as np

from seedrl.specs import MASK
from seedrl.trained.load import Trained, load_trained

LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
EMPTY, OWN, OTHER = -1, 0, 1
Board = tuple[int, ...]  # nine squares from the side of the policy


class Results(NamedTuple):
    """Positions at the end of games of the policy against every reply."""

    won: int
    drawn: int
    lost: int


def winner(board: Board) -> int | None:
    for line in LINES:
        owners = {board[square] for square in line}
        if len(owners) == 1 and owners != {EMPTY}:
            return owners.pop()
    return None


def after(board: Board, square: int, player: int) -> Board:
    return (*board[:square], player, *board[square + 1 :])


def moves(trained: Trained, boards: list[Board]) -> list[int]:
    """Return the most likely move of the policy in each position; it has no memory."""
    seen = np.array(boards)
    observation = np.stack([seen == OWN, seen == OTHER], axis=-1).reshape(-1, 3, 3, 2).astype(np.int8)
    rows = {MASK: (seen == EMPTY).astype(np.int8), "observation": observation}
    nothing, begins = np.zeros(len(boards), np.float32), np.ones(len(boards), np.bool_)
    action = trained.player(len(boards)).act(rows, nothing, begins)
    assert not isinstance(action, dict)
    return [int(square) for square in action]


def play_all(trained: Trained, begins: bool) -> Results:
    """Play against all replies at once: every position that the policy can get into, move by move."""
    start: Board = (EMPTY,) * 9
    turn = {start} if begins else {after(start, square, OTHER) for square in range(9)}
    ends: dict[Board, int | None] = {}
    while turn:
        boards = sorted(turn)
        replied: set[Board] = set()
        for board, square in zip(boards, moves(trained, boards), strict=True):
            assert board[square] == EMPTY
            replied |= _next(after(board, square, OWN), ends)
        turn = replied
    scores = list(ends.values())
    return Results(scores.count(OWN), scores.count(None), scores.count(OTHER))


def _next(board: Board, ends: dict[Board, int | None]) -> set[Board]:
    """Return the positions after every reply of the opponent; note those in which the game is over."""
    if winner(board) is not None or EMPTY not in board:
        ends[board] = winner(board)
        return set()
    following = {after(board, square, OTHER) for square in range(9) if board[square] == EMPTY}
    over = {each for each in following if winner(each) is not None or EMPTY not in each}
    ends.update({each: winner(each) for each in over})
    return following - over


if __name__ == "__main__":
    policy = load_trained(sys.argv[1])
    for begins in (True, False):
        print("moves first: " if begins else "moves second:", play_all(policy, begins))
