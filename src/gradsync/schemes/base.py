"""Base classes of schemes, and of schemes in two halves; a registry of the schemes that a plan can name."""

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

# By compress point: a tensor with one element for each element of the bucket, or the states of compressors, one for
# each part of the bucket.
State = Mapping[str, Tensor | tuple[CompressorState, ...]]

X = TypeVar("X")  # a bucket: Tensor for flat ones, tuple[SparseRows, ...] for tables
S = TypeVar("S")  # what a rank owns between push and pull


@dataclass(frozen=True)
class Traits:
    """Traits tell plans, planners and the engine what a scheme is like, before it runs.

    A scheme around another one derives its own: `replace(inner.traits, lossy=True)`.

    Attributes:
        layout: the kind of bucket that the scheme synchronises.
        lossy: the payloads lack something of the ranks' gradients, more than the rounding of a sum takes away.
        mixes: each rank gets a result of its own, nearer to the mean; only averages of parameters use such a scheme.
        carries_flags: the numbers behind a flat bucket's elements are summed too, or at least show whether the sum is
            zero. By default true for exact schemes.
        depends_on_shapes: `steps` follow from the shapes of a bucket's tensors, not from its size alone.
        prepares: `synchronize` first awaits `Work`, which begins when the bucket is complete and has no stage.
        offloads: some of the scheme's `Work` runs on another core.
        shows_infinity: a flat result is not finite if a rank's gradients, or next state, are not. Exact schemes without
            state need not set it.
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
        """Whether the result is `scale` times the sum over the group, up to rounding."""
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
        """The scheme's traits: a class attribute in subclasses, or a `cached_property` where settings decide."""

    @property
    def title(self) -> str:
        """The scheme's name in printed tables: short, but different from the names of other schemes there."""
        return self.name

    @abstractmethod
    def stages(self, size: int) -> tuple[str, ...]:
        """Returns one name for each await of `synchronize` on one of `size` ranks; a plan orders these stages as turns.

        The first await of a scheme with the trait `prepares` has no name.
        """

    @abstractmethod
    async def synchronize(self, x: X, state: State, group: Group, scale: float) -> tuple[X, State]:
        """Returns `scale` times the sum of `x` over the group, and the next state; may overwrite `x`.

        Args:
            x: a flat tensor, (numel + flags,), the flags last, or a tuple of `SparseRows`, one for each table.
            state: what `init` or the last step returned.
            group: the ranks that synchronise the bucket.
            scale: 1 / ranks for the mean.

        Returns:
            The sum, with shapes and dtypes of `x`, and the next state.
        """

    @abstractmethod
    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the work and transfers of `synchronize`, in order, for a bucket of `specs` with these `profiles`.

        Args:
            specs: one for each table, or one of (numel + flags,) for a flat bucket.
            profiles: one for each of `specs`; none for a flat bucket of which no density is known.
            placement: the ranks on their nodes.
            step: the number of the training step, on which few schemes depend.
        """

    def unchanged_since(self, step: int) -> int:
        """Returns the first training step since which `steps` are the same as in `step`."""
        return 0

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Checks that the settings fit the bucket that a plan gives the scheme.

        Raises:
            ValueError: if the settings are for other tensors than `specs`.
        """

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the state before the first step: empty on all ranks or on none; most schemes keep none."""
        return {}

    def planned_for(self, profiles: Sequence[DensityProfile]) -> Scheme[X]:
        """Returns the scheme with the settings that follow from `profiles`, such as the room that messages need.

        Without profiles the result has no such settings, so that schemes which differ only in them compare equal.
        """
        return self

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        """Whether messages as `planned_for` sized them have room for the rank with the most rows of these profiles."""
        return True


class Partitioned(Scheme[X], Generic[X, S]):
    """A scheme in two halves: `push` gives each owner the sum of one part, `pull` hands all parts to all ranks.

    A part is a bucket as well (`part`), which another scheme may sum over more ranks between the halves.
    """

    @property
    def owns_alike(self) -> bool:
        """Whether a rank owns the same part whatever the data, so that groups agree on owners without communication."""
        return True

    @abstractmethod
    async def push(self, x: X, state: State, group: Group, scale: float, *, keep_fp32: bool = False) -> tuple[S, State]:
        """Returns `scale` times the sum of this rank's part, and the next state; may overwrite `x`.

        With `keep_fp32` sums of 16-bit floats stay in float32, so that further sums can be added. See `synchronize`.
        """

    @abstractmethod
    async def pull(self, shard: S, state: State, group: Group) -> X:
        """Returns the whole bucket, joined from what `push` returned on each rank (`shard` on this one)."""

    @abstractmethod
    def part(self, shard: S) -> X:
        """Returns the sums in `shard` as a bucket, which the caller may overwrite."""

    @abstractmethod
    def with_part(self, shard: S, part: X) -> S:
        """Returns `shard` with the sums of `part` in place of the former ones, rounded to the bucket's dtype."""

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
        """Returns the work and transfers of `pull` among `size` ranks, for sums over `summed` ranks, in order."""

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
        step: int = 0,
    ) -> tuple[Step, ...]:
        n = placement.size
        return (*self.push_steps(specs, profiles, n), *self.pull_steps(specs, profiles, n, n))


def registered() -> dict[str, type[Scheme[Any]]]:
    """Returns the classes of all schemes that a plan can name, by name."""
    known: dict[str, type[Scheme[Any]]] = expressions.registered(Scheme)
    return known


def from_expression(expression: Any) -> Scheme[Any]:
    """Returns the scheme that an expression, `{"name": {"setting": value}}`, describes.

    Raises:
        ValueError: for an unknown name or an illegal setting; the message lists the known ones.
    """
    scheme: Scheme[Any] = expressions.from_expression(expression, Scheme)
    return scheme
