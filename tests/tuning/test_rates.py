"""Rates between nodes are measured with all nodes busy, and tell slow links and racks from noise."""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.comm import Group, GroupError, run_local
from gradsync.comm.links import Exchange
from gradsync.costs.cluster import Cluster, Link, Placement
from gradsync.costs.transport import DEFAULT_TRANSPORT
from gradsync.tuning.rates import SIZES, Rates, cluster_of, measured_rates, tournament

LINK = Link(125e6)  # 1 Gbit/s
NOISE = 0.1


@given(st.integers(0, 40))
def test_each_two_meet_once_and_nobody_meets_two_at_a_time(size: int) -> None:
    rounds = tournament(size)
    assert sorted(tuple(sorted(pair)) for pair in chain.from_iterable(rounds)) == list(combinations(range(size), 2))
    for pairs in rounds:
        assert len(set(chain.from_iterable(pairs))) == 2 * (size // 2), "all busy, but one where they are odd"


def racks(number: int, per_rack: int, share: float, slow: dict[int, Link] | None = None) -> Cluster:
    """Returns racks whose uplinks carry this share of the rate of all nodes in a rack."""
    trunk = Link(share * per_rack * LINK.bandwidth_bytes_per_s)
    return Cluster(number * per_rack, LINK, slow=slow or {}, rack_size=per_rack, trunk=trunk)


def rates_on(cluster: Cluster, noise: float = 0.0, seed: int = 0) -> Rates:
    """Returns the rates measured on the cluster: pairs that cross an uplink in the same round share it."""
    rng, rates = np.random.default_rng(seed), np.zeros((cluster.nodes, cluster.nodes))
    rack_of = [node // (cluster.rack_size or cluster.nodes) for node in range(cluster.nodes)]
    for pairs in tournament(cluster.nodes):
        crossing = [pair for pair in pairs if rack_of[pair[0]] != rack_of[pair[1]]]
        over = Counter(rack_of[node] for node in chain.from_iterable(crossing))
        for pair in pairs:
            limits = [cluster.link_of(node).bandwidth_bytes_per_s for node in pair]
            if pair in crossing and cluster.trunk is not None:
                limits += [cluster.trunk.bandwidth_bytes_per_s / over[rack_of[node]] for node in pair]
            rates[pair] = rates[pair[::-1]] = min(limits) * (1 + noise * rng.uniform(-1, 1))
    return rates


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 7, 8, 12, 16])
def test_noise_invents_neither_racks_nor_slow_nodes(nodes: int, seed: int) -> None:
    found = cluster_of(rates_on(Cluster(nodes, LINK), NOISE, seed), ranks_per_node=2)
    assert (found.nodes, found.ranks_per_node, found.rack_size, found.slow) == (nodes, 2, None, {})
    assert found.link.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s, rel=NOISE)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 13])
def test_slow_nodes_are_recovered(nodes: int, share: float) -> None:
    slow = {node: Link(share * LINK.bandwidth_bytes_per_s) for node in (1, nodes - 1)[: (nodes - 1) // 2]}
    assert cluster_of(rates_on(Cluster(nodes, LINK, slow=slow))) == Cluster(nodes, LINK, slow=slow)
    for seed in range(10):
        found = cluster_of(rates_on(Cluster(nodes, LINK, slow=slow), NOISE, seed))
        assert found.rack_size is None and set(found.slow) == set(slow)
        for node, link in slow.items():
            assert found.slow[node].bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=NOISE)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("per_rack", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_racks_and_their_uplinks_are_recovered(number: int, per_rack: int, share: float) -> None:
    cluster = racks(number, per_rack, share)
    assert cluster.trunk is not None
    exactly = cluster_of(rates_on(cluster))
    assert exactly.trunk is not None
    uplink_bytes_per_s = pytest.approx(cluster.trunk.bandwidth_bytes_per_s)
    assert (exactly.rack_size, exactly.slow, exactly.link) == (per_rack, {}, LINK)
    late = cluster_of(rates_on(cluster), latency_s=1e-3)
    assert late.trunk is not None and late.trunk.latency_s == late.link.latency_s == 1e-3
    assert exactly.trunk.bandwidth_bytes_per_s == uplink_bytes_per_s
    for seed in range(10):
        found = cluster_of(rates_on(cluster, NOISE, seed))
        assert (found.rack_size, found.slow) == (per_rack, {}) and found.trunk is not None
        noisy = pytest.approx(cluster.trunk.bandwidth_bytes_per_s, rel=1.05 * NOISE)
        assert found.trunk.bandwidth_bytes_per_s == noisy


@pytest.mark.parametrize("share", [0.1, 0.25])
@pytest.mark.parametrize(("number", "per_rack"), [(2, 3), (2, 4), (2, 8), (3, 4), (4, 4)])
def test_racks_are_recovered_with_a_slow_node_in_one(number: int, per_rack: int, share: float) -> None:
    cluster = racks(number, per_rack, share, slow={per_rack: Link(LINK.bandwidth_bytes_per_s / 4)})
    for seed in range(10):
        found = cluster_of(rates_on(cluster, NOISE, seed))
        assert (found.rack_size, set(found.slow)) == (per_rack, {per_rack})


def test_one_disturbed_pair_hides_no_racks() -> None:
    rates = rates_on(racks(2, 4, 0.25))
    rates[1, 2] = rates[2, 1] = rates[1, 2] / 3
    assert cluster_of(rates).rack_size == 4


@pytest.mark.parametrize("nodes", [0, 1])
def test_rates_of_fewer_than_two_nodes_are_refused(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"need two of them, got {nodes}"):
        cluster_of(np.zeros((nodes, nodes)))


def measured_on(placement: Placement) -> list[Rates]:
    """Returns the rates that each rank measures."""
    return run_local(placement.size, lambda group: measured_rates(group, 30.0), placement=placement)


@pytest.mark.parametrize("placement", [Placement.one_per_node(3), Placement.regular(2, 2), Placement((1, 0, 0, 1, 2))])
def test_all_ranks_know_the_same_rates_between_all_nodes(placement: Placement) -> None:
    everyone = measured_on(placement)
    for rates in everyone:
        assert np.array_equal(rates, everyone[0])
        assert rates.shape == (placement.num_nodes,) * 2 and np.array_equal(rates, rates.T)
        assert ((rates > 0) == ~np.eye(placement.num_nodes, dtype=bool)).all()


def test_one_node_has_no_rates() -> None:
    assert all(np.array_equal(rates, [[0.0]]) for rates in measured_on(Placement.regular(1, 2)))


@pytest.mark.parametrize(("link", "sizes"), [(Link(125e6), SIZES[:1]), (Link(1e9), SIZES)], ids=["slow", "fast"])
def test_a_rate_is_of_the_quickest_exchange_of_a_pair_and_large_enough_to_be_timed(
    link: Link, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, asked = Cluster(5, link, slow={3: Link(20e6)}), Counter[tuple[int, int]]()

    def seconds(exchange: Exchange, group: Group, timeout_s: float) -> float:
        traffic = exchange.transfer.carried_by(DEFAULT_TRANSPORT)
        messages = [(to, nbytes) for source, to, nbytes in traffic.messages() if source == group.rank]
        if not messages:
            return 0.0
        ((peer, sent),) = messages
        asked[group.rank, nbytes := int(sent)] += 1
        disturbed = 1 + asked[group.rank, nbytes] % 2
        return disturbed * nbytes / min(cluster.link_of(node).bandwidth_bytes_per_s for node in (group.rank, peer))

    monkeypatch.setattr(Exchange, "seconds", seconds)
    rates = measured_on(Placement.one_per_node(5))[4]
    np.testing.assert_allclose(rates, rates_on(cluster))
    assert {nbytes for _, nbytes in asked} == set(sizes)
    assert set(cluster_of(rates).slow) == {3}


def test_a_rank_that_does_not_come_ends_the_measurement() -> None:
    def measure(group: Group) -> Rates | None:
        return None if group.rank == 2 else measured_rates(group, 0.2)

    with pytest.raises(GroupError):
        run_local(3, measure)
