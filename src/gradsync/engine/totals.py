"""The sums of what one rank has exchanged, over all plans that were in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .bucket_run import BucketStatistics


@dataclass(frozen=True)
class Totals:
    """The sums of bytes and seconds of one rank since `attach`, over all plans, and the comparisons of parameters.

    If parameters are averaged instead of gradients from some step on, or ranks are lost, all counts begin anew.

    Attributes:
        steps: synchronised training steps.
        sent_bytes: bytes of payload that this rank handed to the transport.
        communication_s: seconds in which a bucket had an operation in flight, summed over the buckets.
        exposed_s: the part of `communication_s` after the end of backward, in seconds.
        plan_changes: how often another plan came into force.
        comparisons: how often the ranks' parameters were compared, see `verify_every` of `attach`.
        differences: comparisons that found the ranks' parameters apart.
    """

    steps: int = 0
    sent_bytes: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    plan_changes: int = 0
    comparisons: int = 0
    differences: int = 0

    def plus(self, buckets: Sequence[BucketStatistics]) -> Totals:
        """Returns these sums with the statistics of one plan's buckets added to them."""
        return replace(
            self,
            steps=self.steps + max((bucket.steps for bucket in buckets), default=0),
            sent_bytes=self.sent_bytes + sum(bucket.sent_bytes for bucket in buckets),
            communication_s=self.communication_s + sum(bucket.communication_s for bucket in buckets),
            exposed_s=self.exposed_s + sum(bucket.exposed_s for bucket in buckets),
        )
