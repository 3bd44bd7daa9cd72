"""The base classes of schemes, and of schemes in two halves (push and pull); a registry of schemes for plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from ..comm import Group
from ..compressors import CompressorState, expressions
from ..compressors.expressions import Nameable
from ..compressors.expressions import register as register  # noqa: PLC0414 (for the stub beside)
from ..compressors.expressions import to_expression as to_expression  # noqa: PLC0414 (likewise)
from ..costs.cluster import Placement
from ..costs.steps import Step
from ..tensors.bucket import Bucket, Layout, TensorSpec
from ..tensors.density import DensityProfile

State = Mapping[str, Tensor | tuple[CompressorState, ...]]
"""A scheme's state by compress point: a tensor like the flat bucket, (numel,), or states of compressors, one a part."""

X = TypeVar("X")  # a bucket: Tensor for flat ones, tuple[SparseRows, ...] for tables
S = TypeVar("S")  # what a rank owns between push and pull


@dataclass(frozen=True)
class Traits:
    """The properties of a scheme that plans, planners and the engine read before the scheme runs.

    A scheme that wraps another one derives its traits from the inner ones: `replace(inner.traits, lossy=True)`.

    Attributes:
        layout: the kind of bucket that the scheme synchronises: one flat tensor, or tables with sparse rows.
        lossy: what is sent lacks something of the ranks' gradients, more than the rounding of a sum takes away.
        mixes: each rank gets a result of its own, nearer to the mean; only averages of parameters use such a scheme.
        carries_flags: the flags behind a flat bucket's elements (did any rank use a parameter?) are summed too, or at
            least show whether the sum is zero. By default true for exact schemes.
        depends_on_shapes: `steps` depend on the shapes of a bucket's tensors, not on its size alone.
        prepares: `synchronize` first awaits a computation (`Work`), which begins as soon as the bucket is complete; it
            is no stage, as plans do not order it.
        offloads: some of the scheme's computations run on another core, or on the host of an accelerator.
        shows_infinity: a flat result is not finite if a rank's gradients, or next state, are not. Exact schemes without
            state need not set it.
        freezes: optimisers change weights and their own state only in the ranges of `CompressorState.arrived`.
        scales_first: `synchronize` multiplies a flat bucket by `scale` before all else, so the engine may do so itself
            as it fills the bucket, and pass a scale of 1. It does not where there is state, which is not scaled, and
            only an exact scheme has this trait.
        waits_for_device: on an accelerator the thread that issues operations waits for its stream, because the host
            reads numbers that follow from data, such as sizes of messages, or computes what is offloaded.
        follows_scale: whether multiples of all ranks' gradients give the same multiple of the result. Votes do not, nor
            does a result that depends on a setting in units of the gradient; plans of such schemes are refused under a
            loss scale.
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
    scales_first: bool = False
    waits_for_device: bool = False
    follows_scale: bool = True

    def __post_init__(self) -> None:
        if self.carries_flags is None:
            object.__setattr__(self, "carries_flags", self.exact)
        if not self.exact:  # also where it was taken over from an inner scheme
            object.__setattr__(self, "scales_first", False)

    @property
    def exact(self) -> bool:
        """Whether the result is `scale` times the sum over all ranks of the group, up to rounding."""
        return not (self.lossy or self.mixes)


class Scheme(Nameable, ABC, Generic[X]):
    """A scheme turns one bucket of gradients into `scale` times its sum over a group of ranks.

    All ranks get the same bits, unless the scheme has the trait `mixes`. It is a frozen dataclass of settings. A
    subclass defines `traits`, `stages`, `synchronize` and `steps`. The state is passed in, and the next state is
    returned. A scheme keeps no state itself and overwrites none, so that a training step can be undone.
    """

    kind: ClassVar[str] = "scheme"

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The scheme's properties, as planners and the engine read them before it runs, such as whether it is lossy.

        Subclasses have a class attribute or, where settings decide, a `cached_property`.
        """

    @property
    def title(self) -> str:
        """The scheme's name in printed tables of results: short, but different from the names of other schemes."""
        return self.name

    @abstractmethod
    def stages(self, size: int) -> tuple[str, ...]:
        """Returns the names of the stages: the exchanges for which `synchronize` awaits on `size` ranks.

        There is one name for each await, mostly of a collective. A plan orders the stages of all buckets, so that all
        ranks issue collectives in one order. The first await of a scheme with the trait `prepares` has no name.
        """

    @abstractmethod
    async def synchronize(self, x: X, state: State, group: Group, scale: float) -> tuple[X, State]:
        """Returns `scale` times the sum of `x` over the group's ranks, and the next state; may overwrite `x`.

        Args:
            x: a flat tensor, (numel + flags,), or a tuple of `SparseRows`, one for each table. The flags, behind the
                gradients, are a few numbers to be summed too: from the sums the engine reads which parameters any rank
                used, and whether all ranks are in the same training step.
            state: what `init` or the last training step returned.
            group: the ranks that synchronise the bucket.
            scale: 1 / ranks for the mean.

        Returns:
            The sum, with shapes and dtypes of `x`, and the next state.
        """

    async def mix(self, x: X, numel: int, state: State, group: Group, scale: float) -> tuple[X, State]:
        """Returns what `synchronize` does, for averages of parameters: a rank keeps what it did not send of its values.

        A lossy scheme adds, on each rank, ranks times `scale` times what was left out of its own values to its result.
        So the mean over all ranks loses nothing. Only schemes that `Shuffled` takes need it.

        Args:
            x, state, group, scale: as in `synchronize`.
            numel: the elements of `x`; the rest of it are flags.
        """
        return await self.synchronize(x, state, group, scale)

    @abstractmethod
    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the computations and transfers of `synchronize`, in order, with their bytes; cost models read them.

        Args:
            specs: shape and dtype of each table, or of one flat bucket, (numel + flags,). Flags are numbers behind the
                gradients that say, among other things, which parameters this rank used.
            profiles: the density of each of `specs`; none for a flat bucket of which no density is known.
            placement: the ranks on their nodes.
            step: the number of the training step, on which few schemes depend.
        """

    def unchanged_since(self, step: int) -> int:
        """Returns the first training step for which `steps` returns the same as for training step `step`.

        It is 0 unless the scheme sends other amounts in its first training steps, as with a warm-up.
        """
        return 0

    def rests(self, rank: int, step: int) -> bool:
        """Whether a rank exchanges nothing in training step `step`, and its values stay as they are.

        `synchronize` then need not be called on this rank.
        """
        return False

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Checks that the scheme's settings fit a bucket of tensors with these shapes and dtypes.

        Raises:
            ValueError: if the settings are for other tensors than `specs`.
        """

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the scheme's state before the first training step, such as residuals of zeros; {} for most schemes.

        It is empty on all ranks or on none.
        """
        return {}

    def planned_for(self, profiles: Sequence[DensityProfile]) -> Scheme[X]:
        """Returns the scheme with the settings that follow from measured densities, such as the room in messages.

        `profiles`: the density of each of the bucket's tensors. With none these settings are left out, so that schemes
        which differ only in them compare equal.
        """
        return self

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        """Whether messages, as `planned_for` planned them, have room for the rank with the most rows to send.

        `profiles`: the densities measured now; of a flat bucket, elements count as rows.
        """
        return True


class Partitioned(Scheme[X], Generic[X, S]):
    """A scheme in two halves: each rank sums one part of the bucket (push), then sends its sums to all ranks (pull).

    The rank that sums a part is its owner. Between the halves another scheme may sum a part over more ranks, as `part`
    makes a bucket of it.
    """

    @property
    def owns_alike(self) -> bool:
        """Whether each rank sums the same part of the bucket at every step, whatever the gradients are.

        If so, the nodes of a hierarchy need not tell each other which rank sums what.
        """
        return True

    @abstractmethod
    async def push(self, x: X, state: State, group: Group, scale: float, *, keep_fp32: bool = False) -> tuple[S, State]:
        """Returns `scale` times the sum of the part that this rank sums, and the next state; may overwrite `x`.

        Args:
            x, state, group, scale: as in `synchronize`.
            keep_fp32: keeps sums of 16-bit floats in float32, so that further sums can be added.
        """

    @abstractmethod
    async def pull(self, shard: S, state: State, group: Group) -> X:
        """Returns the whole summed bucket, shaped as `x` of `push`, gathered from all ranks.

        `shard` is what `push` returned on this rank: its part of the sums.
        """

    @abstractmethod
    def part(self, shard: S) -> X:
        """Returns the sums in `shard`, the result of `push`, as a bucket that another scheme can sum further.

        The caller may overwrite it.
        """

    @abstractmethod
    def with_part(self, shard: S, part: X) -> S:
        """Returns `shard`, the result of `push`, with its sums replaced by those in `part`.

        `part` is what another scheme made of `part(shard)`; it is rounded to the bucket's dtype.
        """

    @abstractmethod
    def push_stages(self, size: int) -> tuple[str, ...]:
        """Returns the names of the exchanges of `push`, the first half: one for each await on `size` ranks."""

    @abstractmethod
    def pull_stages(self, size: int) -> tuple[str, ...]:
        """Returns the names of the exchanges of `pull`, the second half: one for each await on `size` ranks."""

    @abstractmethod
    def push_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int
    ) -> tuple[Step, ...]:
        """Returns what each of `size` ranks is expected to compute and send in `push`, the first half, in order.

        In push each rank gets the sums of one part of the bucket. Cost models read the result.

        Args:
            specs: shape and dtype of each tensor of the bucket.
            profiles: the density of each; none for a flat bucket of which no density is known.
            size: the number of ranks.
        """

    @abstractmethod
    def pull_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, summed: int
    ) -> tuple[Step, ...]:
        """Returns what each of `size` ranks is expected to compute and send in `pull`, the second half, in order.

        In pull each rank sends its sums to all others. Cost models read the result.

        Args:
            specs: shape and dtype of each tensor of the bucket.
            profiles: the density of each on one rank; none for a flat bucket of which no density is known.
            size: the number of ranks.
            summed: the number of ranks whose gradients the sums hold; in a hierarchy more than `size`.
        """

    @abstractmethod
    def part_of(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, owner: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[DensityProfile, ...]]:
        """Returns the shapes, dtypes and expected densities of the sums of rank `owner`, after `push` with `keep_fp32`.

        Args:
            specs: shape and dtype of each tensor of the bucket.
            profiles: the density of each on one rank; none for a flat bucket of which no density is known.
            size: the number of ranks that push.
            owner: the rank whose part of the bucket is meant.
        """

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
    """Returns the classes of all registered schemes, which plans can name, by name."""
    known: dict[str, type[Scheme[Any]]] = expressions.registered(Scheme)
    return known


def from_expression(expression: Any) -> Scheme[Any]:
    """Returns the scheme that an expression, `{"name": {"setting": value}}`, describes.

    Raises:
        ValueError: for an unknown name or an illegal setting; the message lists the known ones.
    """
    scheme: Scheme[Any] = expressions.from_expression(expression, Scheme)
    return scheme
