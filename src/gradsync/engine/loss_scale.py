"""`LossScale`: the factor by which a GradScaler multiplies the loss, read without waiting for an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices.streams import HostCopy, Streams
from ..schemes import SchemeOrCompressor


class LossScale:
    """The loss scale of a job (the factor of a GradScaler), which compression's residuals follow when it changes.

    `look` begins a copy to the host when a forward begins, so that it has arrived when backward asks for the value.

    Args:
        scaler: the scaler of the loss.
        streams: those of the device that the scale is on.
    """

    def __init__(self, scaler: torch.amp.GradScaler, streams: Streams) -> None:
        self._scaler, self._streams = scaler, streams
        self._looked: tuple[Tensor, int, HostCopy] | None = None  # the scale, its version, and its copy

    def look(self) -> None:
        """Begins to copy the present scale to the host, for `value`.

        Call it when a forward begins: the scaler's `update` usually comes before.
        """
        if (scale := self._scale) is not None:
            self._looked = scale, scale._version, self._streams.to_host(scale.view(1))

    def value(self) -> float:
        """Returns the scale; waits for the device only if it has changed since `look`, or nobody has looked."""
        scale, looked = self._scale, self._looked
        if looked is not None and looked[0] is scale and looked[1] == looked[0]._version:
            return float(looked[2].tolist()[0])
        return float(self._scaler.get_scale())

    @property
    def _scale(self) -> Tensor | None:
        """The scaler's tensor; None before the first use of the scaler, and where it is disabled."""
        found: Tensor | None = getattr(self._scaler, "_scale", None)
        return found


def why_not_scaled(way: SchemeOrCompressor) -> str:
    """Returns why a scheme or compressor cannot be used under a loss scale, or ""."""
    if way.traits.follows_scale:
        return ""
    return (
        f"{way!r} was given beside a GradScaler, but its result does not follow the loss scale, by which the scaler "
        "will divide (signs do not, nor what a clip or threshold in units of the gradient leaves): use another scheme "
        "or compressor, or no scaler, as in bfloat16"
    )
