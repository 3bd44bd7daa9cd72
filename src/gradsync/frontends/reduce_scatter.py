"""A reduce-scatter for torch's `fully_shard` in 16 or 8 bits: ranks of one replica send compressed gradients.

torch calls it with the gradients of one module, in place of its own reduce-scatter. A residual of what rounding left
would be as large as the whole gradient on each rank, which is what sharding saves: so there is none, and only
compressors are taken whose error is small without one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compressors import BlockInt, Cast, Compressor, CompressorState, Float8
from ..inputs.settings import shown
from ..tensors.bucket import FlatSpec
from ..tensors.index_formats import ALIGNMENT_BYTES

TAKEN: tuple[type[Compressor[Any]], ...] = (Cast, BlockInt, Float8)
MEANS, SUMS = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class CompressedReduceScatter:
    """Reduces gradients to shards with fewer bits on the wire, and sums in float32: torch's `ReduceScatter` interface.

    Each rank compresses its gradient for each shard and sends it to the rank with that shard, which decodes all ranks'
    parts and adds them. It works for any model in shards, with `attach` and without it:

        for module in model.modules():
            if isinstance(module, FSDPModule):
                reduce_scatter = gradsync.CompressedReduceScatter(gradsync.compressors.BlockInt(8))
                module.set_custom_reduce_scatter(reduce_scatter)

    With n ranks in a replica each sends (n - 1) / n of the gradient's elements, in 2 bytes each with `Cast`, 1.02 with
    `BlockInt(8)`. torch's own reduce-scatter sends as many, in `reduce_dtype`, and may round each partial sum to it.

    Args:
        compressor: `Cast`, `BlockInt` or `Float8`. Rounding is the only error: nothing is kept back from step to step.
            Random rounding (`stochastic`) begins anew in a job that goes on from a checkpoint.

    Raises:
        TypeError: for another compressor, whose error needs a residual.
    """

    def __init__(self, compressor: Compressor[Any]) -> None:
        if not isinstance(compressor, TAKEN):
            raise TypeError(
                f"expected one of {', '.join(kind.__name__ for kind in TAKEN)}, got {shown(compressor)}: a "
                "reduce-scatter keeps no residual, which other compressors need"
            )
        self.compressor = compressor
        self._calls = 0  # by which random rounding differs from call to call

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an unfilled tensor of this shape, dtype and device for gradients; torch calls it before each call."""
        return torch.empty(size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fills `output_tensor` with the sum, or mean, over `group` of this rank's part of `input_tensor`. Collective.

        Args:
            output_tensor: (elements,) of any floating dtype.
            input_tensor: (elements times the group's size,) of the same dtype: the parts of the ranks, by rank.
            group: the ranks of one replica.
            op: `ReduceOp.SUM` or `ReduceOp.AVG`.
            async_op: must be False, as torch calls it: the current stream waits for the exchange.

        Raises:
            ValueError: for another operation, or `async_op`.
        """
        if async_op or op not in (MEANS, SUMS):
            raise ValueError(
                f"{self.compressor.title}: a reduce-scatter with op={op} and async_op={async_op} is not supported, "
                "only sums and means that are waited for: leave out set_gradient_divide_factor()"
            )
        size = group.size()
        parts = input_tensor.float().view(size, -1)
        spec = FlatSpec.of(parts[0])
        state = CompressorState(spec, stream=dist.get_rank(), step=self._calls)
        self._calls += 1
        made = [self.compressor.compress(part, state)[0] for part in parts]
        nbytes, kind = made[0].nbytes, made[0].data.dtype
        outgoing = parts.new_zeros((size, -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES), dtype=torch.uint8)
        for row, payload in zip(outgoing, made, strict=True):
            row[:nbytes] = payload.data.view(torch.uint8)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        received = [type(made[0])(self.compressor, spec, state.step, row[:nbytes].view(kind)) for row in incoming]
        total = torch.empty_like(parts[0])
        self.compressor.sum_into(total, received, 1 / size if op == MEANS else 1.0)
        output_tensor.copy_(total)
