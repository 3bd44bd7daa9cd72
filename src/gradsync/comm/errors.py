"""`GroupError`, the error of a collective that did not complete, with the ranks that are the cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class GroupError(RuntimeError):
    """Raised for a collective that did not complete: a rank died, stopped answering, or announced a failure.

    Attributes:
        ranks: the global ranks that are the cause, ascending; empty where it is not known.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(sorted(ranks))

    def at(self, place: str) -> GroupError:
        """Returns this error with `place`, such as a bucket and a step, put or moved to the front of its text."""
        return GroupError(f"{place}: {str(self).replace(f'{place}: ', '', 1)}", self.ranks)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Returns the ranks in words: `rank 3`, or `ranks 0, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
