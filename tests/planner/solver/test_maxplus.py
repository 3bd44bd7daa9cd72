"""(max,+) matrices give the times of the loop, also when a tree maintains their product under changes."""

from __future__ import annotations

import random

import pytest

from gradsync.planner.solver.maxplus import NEVER, Matrix, Product, apply, identity, matrix_of, multiply


def plain(backward: float, transfer: float) -> Matrix:
    return ((backward, NEVER, NEVER), (NEVER, 0.0, NEVER), (backward + transfer, NEVER, transfer))


def host(backward: float, encode: float, transfer: float) -> Matrix:
    both = encode + transfer
    return ((backward, NEVER, NEVER), (backward + encode, encode, NEVER), (backward + both, both, transfer))


def loop(steps: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Returns gpu, cpu and channel times by ByteComp's model; `encode` is 0 where nothing is encoded on the host."""
    gpu = cpu = channel = 0.0
    for backward, encode, transfer in steps:
        gpu += backward
        ready = gpu
        if encode:
            cpu = ready = max(cpu, gpu) + encode
        channel = max(channel, ready) + transfer
    return gpu, cpu, channel


def random_steps(random_: random.Random, count: int) -> list[tuple[float, float, float]]:
    return [(random_.randrange(5), random_.choice([0, 1, 4]), random_.randrange(6)) for _ in range(count)]


def as_matrix(step: tuple[float, float, float]) -> Matrix:
    backward, encode, transfer = step
    return host(*step) if encode else plain(backward, transfer)


def random_matrix(random_: random.Random, size: int = 3) -> Matrix:
    return tuple(tuple(random_.choice([NEVER, 0.0, 1.0, 3.0, 7.0]) for _ in range(size)) for _ in range(size))


def test_the_product_is_the_loop() -> None:
    for seed in range(100):
        steps = random_steps(random.Random(seed), 1 + seed % 9)
        together = identity(3)
        for step in steps:
            together = multiply(as_matrix(step), together)
        assert apply(together, (0.0, 0.0, 0.0)) == loop(steps), seed


def test_a_step_that_is_linear_has_a_matrix() -> None:
    found = matrix_of(lambda rows: [rows[0] + 2, max(rows[0] + 2, rows[1]) + 5], 2)
    assert found == ((2.0, NEVER), (7.0, 5.0))


def test_products_are_associative_and_the_identity_changes_nothing() -> None:
    a, b, c = (random_matrix(random.Random(seed)) for seed in range(3))
    assert multiply(multiply(a, b), c) == multiply(a, multiply(b, c))
    assert multiply(a, identity(3)) == multiply(identity(3), a) == a


def all_of(steps: list[Matrix], rows: tuple[float, ...]) -> tuple[float, ...]:
    for step in steps:
        rows = apply(step, rows)
    return rows


def test_after_changes_the_tree_says_what_a_full_evaluation_says() -> None:
    zero = (0.0, 0.0, 0.0)
    for seed in range(60):
        random_ = random.Random(seed)
        steps = [random_matrix(random_) for _ in range(random_.randrange(1, 20))]
        tree = Product(steps)
        for _ in range(12):
            start = random_.randrange(len(steps))
            stop = random_.choice([start + 1, random_.randrange(start, len(steps)) + 1])
            new = random_matrix(random_)
            changed = [*steps[:start], new, *[identity(3)] * (stop - start - 1), *steps[stop:]]
            assert tree.after(zero) == all_of(steps, zero), seed
            if random_.random() < 0.7:
                steps = changed
                tree.replace(start, stop, new)
            low = random_.randrange(len(steps) + 1)
            high = random_.randrange(low, len(steps) + 1)
            assert tree.after(zero, low, high) == all_of(steps[low:high], zero), seed


def test_a_change_costs_logarithmically_many_products(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [random_matrix(random.Random(seed)) for seed in range(1000)]
    tree = Product(steps)
    count = 0

    def counted(later: Matrix, earlier: Matrix) -> Matrix:
        nonlocal count
        count += 1
        return multiply(later, earlier)

    monkeypatch.setattr("gradsync.planner.solver.maxplus.multiply", counted)
    tree.replace(500, 501, steps[0])
    assert count == 10
    tree.replace(100, 900, steps[0])
    assert count < 50


def test_steps_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        Product([])
    with pytest.raises(ValueError, match=r"\[1, 3\) must be some of the 2 steps"):
        Product([identity(2)] * 2).replace(1, 3, identity(2))
