"""The scheme protocol, its two halves, and what of it a plan can name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from ..comm import Group
from ..compressors import CompressorState, expressions
from ..compressors.expressions import Nameable
from ..costs.cluster import Placement
from ..costs.steps import Step
from ..tensors.bucket import Bucket, Layout, TensorSpec
from ..tensors.density import DensityProfile

# By compress point: one element for each element of the bucket, or what compressors keep of parts of it.
State = Mapping[str, Tensor | tuple[CompressorState, ...]]

X = TypeVar("X")  # Tensor for flat buckets, tuple[SparseRows, ...] for tables
S = TypeVar("S")  # what a rank owns between push and pull


class Scheme(Nameable, ABC, Generic[X]):
    """How one bucket becomes `scale` times its sum over the group, the same bits on every rank.

    A frozen dataclass of settings. State is passed in and the next state comes back: nothing is kept here, and nothing
    passed in as state is overwritten, so that a step can be taken back.
    """

    kind: ClassVar[str] = "scheme"
    layout: Layout  # of the class, or of what the scheme is made of
    exact: bool = True  # the result is the sum up to rounding; as `layout`
    mixes: ClassVar[bool] = False  # ranks get results of their own, which brings them together: for parameters only
    depends_on_shapes: bool = False  # steps follow from the shapes of a bucket's tensors, not from its size alone

    @property
    def carries_flags(self) -> bool:
        """Whether numbers that lie behind a flat bucket's arrive: of their sum at least whether it is zero."""
        return self.exact

    @property
    def prepares(self) -> bool:
        """Whether `synchronize` first awaits `Work`, which begins once the bucket is complete: no stage of its own."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether some of its `Work` is for another core."""
        return False

    @property
    def title(self) -> str:
        """What tells it from other schemes in a table, without its settings."""
        return self.name

    @property
    def unplanned(self) -> Scheme[X]:
        """The scheme without what its settings say of one bucket's data: equal for two plans of the same scheme."""
        return self

    def planned_for(self, profiles: Sequence[DensityProfile]) -> Scheme[X]:
        """The scheme with what its settings can say of data like this, as the room that messages need."""
        return self

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        """Whether what `planned_for` has made room for is enough for the busiest rank of these profiles."""
        return True

    @abstractmethod
    def stages(self, size: int) -> tuple[str, ...]:
        """One name for each await of `synchronize` by one of `size` ranks: the turns that a plan's order is made of.

        But for the first await of a scheme that `prepares`.
        """

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Holds the settings against a bucket of `specs`.

        Raises:
            ValueError: when they are for other tensors.
        """

    def init(self, bucket: Bucket, group: Group) -> State:
        """The state before the first step, of all ranks or of none; most schemes have none."""
        return {}

    @abstractmethod
    async def synchronize(self, x: X, state: State, group: Group, scale: float) -> tuple[X, State]:
        """`scale` times the sum of `x` over the group, and the next state. May overwrite `x`."""

    @abstractmethod
    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        """What `synchronize` does to a bucket of `specs` whose data looks like `profiles`, in order.

        `round` is the number of the training step, on which few schemes depend.
        """

    @property
    def shows_infinity(self) -> bool:
        """Whether a flat bucket's result is not finite where any rank's gradients, or its next state, are not."""
        return False

    @property
    def is_lossy(self) -> bool:
        """Whether what travels is less than what ranks brought."""
        return not self.exact

    def own_part(self, x: Tensor, state: State, scale: float) -> Tensor | None:
        """Of a flat bucket's elements, what of this rank is in the scaled sum; None: all of it. `x` stays as it is."""
        return None

    @property
    def freezes(self) -> bool:
        """Whether optimisers must leave alone what `arrived` has not."""
        return False

    def arrived(self, state: State) -> list[tuple[int, int]] | None:
        """The sections [start, stop) of a flat bucket's elements that the step which led to this state brought.

        The result is 0 elsewhere. None: all of them.
        """
        return None

    def unused(self, state: State, names: Collection[str]) -> State:
        """`state` after a step in which no rank used these parameters: their result is given to nobody.

        What is kept of their elements stays what it was before, whatever this says.
        """
        return state

    def unchanged_since(self, round: int) -> int:
        """From which round on `steps` are what they are in this one."""
        return 0


class Partitioned(Scheme[X], Generic[X, S]):
    """A scheme of two halves: after `push` each rank holds the sum of what it owns, `pull` hands the parts to all.

    What a rank owns is a bucket as well (`part`), which another scheme may go on with between the halves.
    """

    @property
    def owns_alike(self) -> bool:
        """Whether who owns what depends on no data, so that groups which know nothing of each other agree on it."""
        return True

    @abstractmethod
    async def push(self, x: X, state: State, group: Group, scale: float, *, keep_fp32: bool = False) -> tuple[S, State]:
        """`keep_fp32`: sums of 16-bit floats stay in float32, for others to be added to them."""

    @abstractmethod
    async def pull(self, shard: S, state: State, group: Group) -> X: ...

    @abstractmethod
    def part(self, shard: S) -> X:
        """The sums that a rank owns, as a bucket; may be overwritten."""

    @abstractmethod
    def with_part(self, shard: S, part: X) -> S:
        """The shard with other sums in place of its own, rounded to the bucket's dtype."""

    @abstractmethod
    def push_stages(self, size: int) -> tuple[str, ...]: ...

    @abstractmethod
    def pull_stages(self, size: int) -> tuple[str, ...]: ...

    @abstractmethod
    def push_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int
    ) -> tuple[Step, ...]:
        """What `push` does among `size` ranks."""

    @abstractmethod
    def pull_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, summed: int
    ) -> tuple[Step, ...]:
        """What `pull` does among `size` ranks with sums over `summed` ranks."""

    @abstractmethod
    def part_of(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, owner: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[DensityProfile, ...]]:
        """What `part` of a push with `keep_fp32` gives to the `owner` among `size` ranks."""

    def stages(self, size: int) -> tuple[str, ...]:
        return (*self.push_stages(size), *self.pull_stages(size))

    async def synchronize(self, x: X, state: State, group: Group, scale: float) -> tuple[X, State]:
        shard, next_state = await self.push(x, state, group, scale)
        return await self.pull(shard, state, group), next_state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        n = placement.size
        return (*self.push_steps(specs, profiles, n), *self.pull_steps(specs, profiles, n, n))


def registered() -> dict[str, type[Scheme[Any]]]:
    """All schemes a plan can name."""
    known: dict[str, type[Scheme[Any]]] = expressions.registered(Scheme)
    return known


def from_expression(expression: Any) -> Scheme[Any]:
    """The scheme that an expression names.

    Raises:
        ValueError: naming what is unknown or illegal, and what there is.
    """
    scheme: Scheme[Any] = expressions.from_expression(expression, Scheme)
    return scheme
