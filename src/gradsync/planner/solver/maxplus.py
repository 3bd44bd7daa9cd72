"""(max,+) matrices, and a tree that keeps the product of many of them while single ones change.

In this algebra the sum of two numbers is their maximum, and their product is the usual sum. A recurrence that only adds
constants and takes maxima is then a matrix: `apply(matrix, rows)` is the state after one step, and the product of all
steps' matrices does all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]

NEVER = float("-inf")  # neutral element of max


def identity(size: int) -> Matrix:
    """Returns the (max,+) identity matrix: 0 on the diagonal, minus infinity elsewhere.

    In this algebra max stands for the sum of numbers, and + for their product.
    """
    return tuple(tuple(0.0 if row == column else NEVER for column in range(size)) for row in range(size))


def apply(matrix: Matrix, rows: Sequence[float]) -> Vector:
    """Returns the (max,+) product of matrix and vector: entry i is the largest of matrix[i][j] + rows[j]."""
    return tuple([max([entry + row for entry, row in zip(line, rows, strict=True)]) for line in matrix])


def multiply(later: Matrix, earlier: Matrix) -> Matrix:
    """Returns the (max,+) product of two matrices: entry i, j is the largest of later[i][k] + earlier[k][j].

    Applied to a vector, it does what `earlier` does and then what `later` does.
    """
    columns = tuple(zip(*earlier, strict=True))
    return tuple([apply(columns, line) for line in later])


def matrix_of(step: Callable[[list[float]], Sequence[float]], size: int) -> Matrix:
    """Returns the matrix of a function of vectors that only adds constants and takes maxima, a recurrence's step.

    Such a function is (max,+) linear, so it is applied to unit vectors: one 0, else minus infinity. `size`: the length
    of vectors.
    """
    columns = [step([0.0 if row == column else NEVER for row in range(size)]) for column in range(size)]
    return tuple(zip(*columns, strict=True))


class Product:
    """The (max,+) product of a sequence of matrices, the first applied first, updated when single ones change.

    In this algebra max stands for the sum of numbers, and + for their product. The matrices are steps of a recurrence.
    All operations take O(log n) matrix products: changing one step, merging neighbouring steps into one, and applying
    the whole sequence, changed or not, to a state.
    """

    def __init__(self, steps: Sequence[Matrix]) -> None:
        if not steps:
            raise ValueError("Product needs at least one step")
        self._count = len(steps)
        self._identity = identity(len(steps[0]))
        self._leaves = 1 << (self._count - 1).bit_length()
        self._nodes = [self._identity] * (2 * self._leaves)
        self._idle = [False] * (2 * self._leaves)  # True: all steps below are the identity, though nodes are stale
        self._nodes[self._leaves : self._leaves + self._count] = steps
        for node in reversed(range(1, self._leaves)):
            self._join(node)

    def __len__(self) -> int:
        return self._count

    def after(self, rows: Sequence[float], start: int = 0, stop: int | None = None) -> Vector:
        """Returns what the matrices [start, stop) of the sequence make of the vector `rows`, one after the other.

        That is their (max,+) product with it: the state after these steps of a recurrence. `stop`: None for all.
        """
        reached = tuple(rows)
        for node in self._cover(start, self._count if stop is None else stop):
            self._wake(node)
            reached = apply(self._nodes[node], reached)
        return reached

    def replace(self, start: int, stop: int, step: Matrix) -> None:
        """Replaces the matrices [start, stop) of the sequence by one, `step`, without changing other matrices' indices.

        It stands at index `start`; the others of the range become identities.
        """
        self._check(start, stop)
        changed = [self._leaves + start, *self._cover(start + 1, stop)]
        for node in changed:
            self._wake(node)
        self._nodes[changed[0]] = step
        for node in changed[1:]:
            self._nodes[node] = self._identity
            self._idle[node] = True
        above = {node >> height for node in changed for height in range(1, node.bit_length())}
        for node in sorted(above, reverse=True):
            self._join(node)

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start < stop <= self._count:
            raise ValueError(f"[{start}, {stop}) must be some of the {self._count} steps")

    def _join(self, node: int) -> None:
        self._nodes[node] = multiply(self._nodes[2 * node + 1], self._nodes[2 * node])

    def _wake(self, node: int) -> None:
        """Passes marks of idle subtrees (all steps the identity) from the ancestors of this tree node down to it."""
        for height in reversed(range(1, node.bit_length())):
            above = node >> height
            if self._idle[above]:
                self._idle[above] = False
                for below in (2 * above, 2 * above + 1):
                    self._idle[below] = True
                    self._nodes[below] = self._identity

    def _cover(self, start: int, stop: int) -> list[int]:
        """Returns the fewest nodes of the tree that together hold the steps [start, stop), in order."""
        first: list[int] = []
        last: list[int] = []
        low, high = start + self._leaves, stop + self._leaves
        while low < high:
            if low & 1:
                first.append(low)
                low += 1
            if high & 1:
                high -= 1
                last.append(high)
            low >>= 1
            high >>= 1
        return [*first, *reversed(last)]
