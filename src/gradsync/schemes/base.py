"""The protocol of schemes, and of schemes in two halves, and the schemes that a plan can name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from ..comm import Group
from ..compressors import CompressorState, expressions
from ..compressors.expressions import Nameable
from ..costs.cluster import Placement
from ..costs.steps import Step
from ..tensors.bucket import Bucket, Layout, TensorSpec
from ..tensors.density import DensityProfile

# By compress point: a tensor with one element for each of the bucket's, or the compressors' states of its parts.
State = Mapping[str, Tensor | tuple[CompressorState, ...]]

X = TypeVar("X")  # Tensor for flat buckets, tuple[SparseRows, ...] for tables
S = TypeVar("S")  # what a rank owns between push and pull


@dataclass(frozen=True)
class Traits:
    """Traits tell plans, planners and the engine what a scheme is like, before it runs.

    A scheme around another one derives its own: `replace(inner.traits, lossy=True)`.

    Attributes:
        layout: the kind of bucket that the scheme synchronises.
        lossy: less travels than the ranks brought, by more than the rounding of a sum.
        mixes: each rank gets a result of its own, nearer to the mean; only plans of parameters take such a scheme.
        carries_flags: the numbers behind a flat bucket's elements arrive, at least as whether their sum is zero. By
            default those of an exact scheme do.
        depends_on_shapes: `steps` follow from the shapes of a bucket's tensors, not from its size alone.
        prepares: `synchronize` first awaits `Work`, which begins when the bucket is complete and has no stage.
        offloads: some of the scheme's `Work` runs on another core.
        shows_infinity: a flat result is not finite if a rank's gradients, or its next state, are not. Exact schemes
            without state need not say it.
        freezes: optimisers leave alone what `CompressorState.arrived` says did not arrive.
    """

    layout: Layout
    lossy: bool = False
    mixes: bool = False
    carries_flags: bool = None  # type: ignore[assignment]  # `__post_init__` fills it in
    depends_on_shapes: bool = False
    prepares: bool = False
    offloads: bool = False
    shows_infinity: bool = False
    freezes: bool = False

    def __post_init__(self) -> None:
        if self.carries_flags is None:
            object.__setattr__(self, "carries_flags", self.exact)

    @property
    def exact(self) -> bool:
        """Whether the result is the sum over the group, up to rounding."""
        return not (self.lossy or self.mixes)


class Scheme(Nameable, ABC, Generic[X]):
    """A scheme turns one bucket into `scale` times its sum over the group, the same bits on every rank.

    It is a frozen dataclass of settings. A subclass says what its `traits` are, and defines `stages`, `synchronize` and
    `steps`. State is passed in, and the next state comes back: the scheme keeps nothing, and overwrites nothing of the
    state that it gets, so that a step can be taken back.
    """

    kind: ClassVar[str] = "scheme"

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The scheme's traits: an attribute of the class, or a `cached_property` where settings decide."""

    @property
    def title(self) -> str:
        """The scheme's name in tables, which tells it from other schemes without all its settings."""
        return self.name

    @abstractmethod
    def stages(self, size: int) -> tuple[str, ...]:
        """Returns one name for each await of `synchronize` by one of `size` ranks; a plan orders these turns.

        The first await of a scheme that `prepares` has no name.
        """

    @abstractmethod
    async def synchronize(self, x: X, state: State, group: Group, scale: float) -> tuple[X, State]:
        """Returns `scale` times the sum of `x` over the group, and the next state. It may overwrite `x`.

        `x` is a flat tensor, (numel,) and flags behind it, or a tuple of `SparseRows`, one for each table.
        """

    @abstractmethod
    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the work and transfers of `synchronize`, in order, for a bucket of `specs` with such `profiles`.

        `round` is the number of the training step, on which few schemes depend.
        """

    def unchanged_since(self, round: int) -> int:
        """Returns the first round since which `steps` are the same as in this one."""
        return 0

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Compares the settings with the bucket that a plan gives the scheme.

        Raises:
            ValueError: if the settings are for other tensors than `specs`.
        """

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the state before the first step. All ranks have one, or none has; most schemes have none."""
        return {}

    def planned_for(self, profiles: Sequence[DensityProfile]) -> Scheme[X]:
        """Returns the scheme with settings that follow from such data, as the room that messages need.

        Without profiles it returns the scheme without such settings: two plans of one scheme give equal ones.
        """
        return self

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        """Returns whether the room that `planned_for` made is enough for the busiest rank of these profiles."""
        return True


class Partitioned(Scheme[X], Generic[X, S]):
    """A scheme in two halves: `push` gives each rank the sum of the part that it owns, `pull` gives all parts to all.

    A rank's part is a bucket as well (`part`), which another scheme may sum further between the halves.
    """

    @property
    def owns_alike(self) -> bool:
        """Whether a rank owns the same part whatever the data, so that groups agree on owners without a word."""
        return True

    @abstractmethod
    async def push(self, x: X, state: State, group: Group, scale: float, *, keep_fp32: bool = False) -> tuple[S, State]:
        """Returns `scale` times the sum of this rank's part, and the next state.

        With `keep_fp32` sums of 16-bit floats stay in float32, so that further sums can be added to them.
        """

    @abstractmethod
    async def pull(self, shard: S, state: State, group: Group) -> X:
        """Returns the whole bucket, made of the shards of all ranks."""

    @abstractmethod
    def part(self, shard: S) -> X:
        """Returns the sums that the rank owns, as a bucket, which the caller may overwrite."""

    @abstractmethod
    def with_part(self, shard: S, part: X) -> S:
        """Returns the shard with other sums in place of its own, rounded to the bucket's dtype."""

    @abstractmethod
    def push_stages(self, size: int) -> tuple[str, ...]:
        """Returns one name for each await of `push`."""

    @abstractmethod
    def pull_stages(self, size: int) -> tuple[str, ...]:
        """Returns one name for each await of `pull`."""

    @abstractmethod
    def push_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int
    ) -> tuple[Step, ...]:
        """Returns the work and transfers of `push` among `size` ranks, in order."""

    @abstractmethod
    def pull_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, summed: int
    ) -> tuple[Step, ...]:
        """Returns the work and transfers of `pull` among `size` ranks, of sums over `summed` ranks."""

    @abstractmethod
    def part_of(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, owner: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[DensityProfile, ...]]:
        """Returns specs and profiles of the `part` that `push` with `keep_fp32` gives one owner among `size` ranks."""

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
    """Returns all schemes that a plan can name, by name."""
    known: dict[str, type[Scheme[Any]]] = expressions.registered(Scheme)
    return known


def from_expression(expression: Any) -> Scheme[Any]:
    """Returns the scheme that an expression names.

    Raises:
        ValueError: for an unknown name or an illegal setting; the message lists the known ones.
    """
    scheme: Scheme[Any] = expressions.from_expression(expression, Scheme)
    return scheme
