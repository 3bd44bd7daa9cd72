"""Gossip on a graph mixes the round's neighbours, keeps the mean, and moves the promised bytes."""

from __future__ import annotations

import pytest
import torch

from gradsync.comm import LocalGroup
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import transfers
from gradsync.engine.engine import Engine
from gradsync.plans.plan import Plan, What
from gradsync.schemes import from_expression, to_expression
from gradsync.tensors.bucket import TensorSpec
from gradsync_lab.rivals.gossip import Gossip
from tests.schemes.family import run_scheme
from tests.schemes.stateful import bucket, gradient

SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["ring", "one_peer_exponential"])
def test_rounds_mix_as_their_matrices_say_and_move_what_steps_say(kind: str, size: int) -> None:
    scheme = Gossip.ring() if kind == "ring" else Gossip.one_peer_exponential(size)
    assert from_expression(to_expression(scheme)) == scheme
    like = bucket(torch.float32)
    states = [scheme.init(like, group) for group in LocalGroup.world(size)]
    values = [gradient(rank, like) for rank in range(size)]
    for step in range(len(scheme.distances) + 1):
        before = torch.stack(values)[:, : like.numel].double()
        outcome = run_scheme(scheme, values, 1 / size, states)
        states, values = outcome.states, outcome.results
        w = torch.from_numpy(scheme.mixing(size, step))
        torch.testing.assert_close(w.sum(dim=0), torch.ones(size, dtype=torch.float64))
        after = torch.stack(values)[:, : like.numel].double()
        torch.testing.assert_close(after, w @ before, atol=1e-5, rtol=1e-5)
        expected = scheme.steps(like.specs, (), Placement.one_per_node(size), step)
        for rank, ledger in enumerate(outcome.ledgers):
            assert ledger.sent_bytes == sum(transfer.sent_bytes(rank) for transfer in transfers(expected))


def test_one_peer_at_doubling_distances_agrees_after_a_cycle_of_powers_of_two() -> None:
    scheme, like = Gossip.one_peer_exponential(8), bucket(torch.float32)
    assert scheme.distances == ((1,), (2,), (4,))
    states = [scheme.init(like, group) for group in LocalGroup.world(8)]
    values = [gradient(rank, like) for rank in range(8)]
    mean = torch.stack(values).mean(dim=0)
    for _ in scheme.distances:
        outcome = run_scheme(scheme, values, 1 / 8, states)
        states, values = outcome.states, outcome.results
    for value in values:
        torch.testing.assert_close(value[: like.numel], mean[: like.numel])


def test_a_rank_alone_keeps_its_parameters() -> None:
    """Runs a plan of one rank: a bucket without a turn would never begin."""
    parameters = {"w": torch.arange(3.0)}
    specs = {"w": TensorSpec.of(parameters["w"])}
    plan = Plan.make(specs, 1, [(["w"], Gossip.ring())], what=What.PARAMETER)
    engine = Engine(parameters, LocalGroup.world(1)[0], plan, timeout_s=5)
    engine.begin()
    engine.load("w", parameters["w"])
    engine.finish()
    assert torch.equal(engine.unload("w", None, sparse=False), parameters["w"])
    engine.close()


@pytest.mark.parametrize("distances", [(), ((),), ((1,), ())])
def test_rounds_without_neighbours_are_refused(distances: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="one or more for each round"):
        Gossip(distances)
