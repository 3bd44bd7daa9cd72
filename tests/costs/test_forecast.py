"""The forecast of a step keeps the order of the engine: one issuing thread and one link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync.costs.cost_model import CostModel
from gradsync.costs.forecast import forecast, greedy_turns
from gradsync.costs.steps import FINISH, Compute, Pattern, Transfer
from gradsync.costs.timeline import Task
from gradsync.costs.transport import DIRECT_BYTES

COST = CostModel(alpha_s=0.0, bandwidth_bytes_per_s=float(DIRECT_BYTES), memory_bytes_per_s=10.0)


def transfer(stage: str, seconds: float) -> Transfer:
    """Returns an all-gather of two ranks that occupies the link for `seconds`."""
    return Transfer(stage, Pattern.ALL_GATHER, (seconds * DIRECT_BYTES,) * 2)


def spans(tasks: list[Task]) -> dict[tuple[str, str], tuple[float, float]]:
    return {(t.stream, t.name): (pytest.approx(t.start_s), pytest.approx(t.end_s)) for t in tasks}


def test_transfers_share_the_link_while_the_thread_goes_on() -> None:
    steps = {"a": [Compute("pack", 10), transfer("push", 5.0)], "b": [Compute("pack", 10), transfer("push", 2.0)]}
    tasks = forecast([("a", "push"), ("b", "push")], steps, {"a": 0.0, "b": 0.0}, COST)
    assert spans(tasks) == {
        ("kernel", "a:push"): (0.0, 1.0),
        ("link", "a:push"): (1.0, 8.0),
        ("kernel", "b:push"): (1.0, 2.0),
        ("link", "b:push"): (2.0, 6.0),
    }


def test_of_other_transfers_two_share_the_link_and_messages_in_rounds_take_turns() -> None:
    def messages(stage: str, seconds: float) -> Transfer:
        return Transfer(stage, Pattern.ALL_TO_ALL, (seconds * DIRECT_BYTES,) * 2)

    ready_s = dict.fromkeys("abcde", 0.0)
    gathers = {bucket: [transfer("gather", 3.0)] for bucket in "abc"}
    found = spans(forecast([(b, "gather") for b in "abc"], gathers, ready_s, COST))
    assert found == {
        ("link", "a:gather"): (0.0, 6.0),
        ("link", "b:gather"): (0.0, 6.0),
        ("link", "c:gather"): (0.0, 9.0),
    }
    pushes = {bucket: [messages("push", 3.0)] for bucket in "de"}
    found = spans(forecast([(b, "push") for b in "de"], pushes, ready_s, COST))
    assert found == {("link", "d:push"): (0.0, 3.0), ("link", "e:push"): (0.0, 6.0)}
    both = forecast([("a", "gather"), ("d", "push")], gathers | pushes, ready_s, COST)
    assert spans(both)["link", "d:push"] == (0.0, 6.0)


def test_latencies_of_one_transfer_leave_the_link_to_others() -> None:
    """Transfers whose time is half latency overlap without loss; otherwise the bytes of both share the link."""
    for alpha_s, ended_s in ((1.0, 2.0), (0.25, 2.0)):
        cost = replace(COST, alpha_s=alpha_s)
        steps = {bucket: [transfer("gather", 1.0)] for bucket in "ab"}
        found = spans(forecast([(b, "gather") for b in "ab"], steps, {"a": 0.0, "b": 0.0}, cost))
        assert found == {("link", "a:gather"): (0.0, ended_s), ("link", "b:gather"): (0.0, ended_s)}


def test_a_stage_waits_for_the_bucket_and_for_its_last_transfer() -> None:
    steps = {"a": [transfer("push", 1.0), Compute("sum", 20), transfer("pull", 1.0), Compute("join", 30)]}
    tasks = forecast([("a", "push"), ("a", "pull")], steps, {"a": 4.0}, COST)
    assert spans(tasks) == {
        ("link", "a:push"): (4.0, 5.0),
        ("kernel", "a:pull"): (5.0, 7.0),
        ("link", "a:pull"): (7.0, 8.0),
        ("kernel", "a:finish"): (8.0, 11.0),
    }


def test_a_bucket_that_is_late_holds_those_after_it_in_the_order() -> None:
    steps = {"a": [transfer("push", 1.0)], "b": [transfer("push", 1.0)]}
    tasks = forecast([("a", "push"), ("b", "push")], steps, {"a": 3.0, "b": 0.0}, COST)
    assert spans(tasks) == {("link", "a:push"): (3.0, 5.0), ("link", "b:push"): (3.0, 5.0)}


def test_what_is_in_flight_at_the_end_is_waited_for_in_the_order_of_first_turns() -> None:
    steps = {name: [transfer("push", 1.0), Compute("sum", 10)] for name in "ab"}
    tasks = forecast([("b", "push"), ("a", "push")], steps, {"a": 0.0, "b": 0.0}, COST)
    assert [t.name for t in tasks if t.stream == "kernel"] == ["b:finish", "a:finish"]


def test_awaited_work_runs_on_its_device_while_the_thread_goes_on_with_other_turns() -> None:
    def work(kernel: str, device: str) -> Compute:
        return Compute(kernel, 20, device, awaited=True)

    steps = {
        "a": [work("compress_x", "offload"), transfer("gather", 1.0), work("decompress_x", "compute")],
        "b": [work("compress_x", "offload"), transfer("gather", 1.0), work("decompress_x", "offload")],
    }
    order = [(bucket, stage) for stage in ("gather", "decode") for bucket in "ab"]
    assert spans(forecast(order, steps, {"a": 1.0, "b": 4.0}, COST)) == {
        ("offload", "a:compress@offload"): (1.0, 3.0),
        ("offload", "b:compress@offload"): (4.0, 6.0),
        ("link", "a:gather"): (3.0, 4.0),
        ("link", "b:gather"): (6.0, 7.0),
        ("offload", "b:decode"): (7.0, 9.0),
        ("compute", "a:decode"): (7.0, 9.0),  # backward's thread issues now, and waited for b's gather meanwhile
    }


def test_a_device_does_what_was_given_to_it_first_first() -> None:
    """The first bucket's decompression comes before the compression of a bucket that is ready later."""
    kernels = {"compress_x": 10, "decompress_x": 5}
    steps = {
        bucket: [
            Compute("compress_x", 10, "offload", awaited=True),
            transfer("push", 1.0),
            Compute("decompress_x", kernels["decompress_x"], "offload", awaited=True),
            transfer("pull", 1.0),
        ]
        for bucket in "abc"
    }
    ready_s = {"a": 0.0, "b": 10.0, "c": 20.0}
    order = [(bucket, stage) for bucket in "abc" for stage in ("push", "sum", "pull")]
    tasks = spans(forecast(order, steps, ready_s, COST))
    assert tasks["offload", "a:sum"] == (2.0, 2.5)
    assert tasks["offload", "b:compress@offload"] == (10.0, 11.0)
    assert tasks["link", "c:pull"] == (22.5, 23.5)
    stages = dict.fromkeys("abc", ("push", "sum", "pull"))
    assert greedy_turns(stages, steps, ready_s, COST, finish_last=True) == order


def test_after_backward_work_for_its_thread_and_turns_do_not_overlap() -> None:
    decode = Compute("decompress_x", 20, "compute", awaited=True)
    steps = {"a": [transfer("gather", 1.0), decode], "b": [transfer("gather", 1.0), Compute("sum", 20)]}
    order = [("a", "gather"), ("b", "gather"), ("a", "decode"), ("b", FINISH)]
    for backward_s, decoded in ((0.0, (4.0, 6.0)), (7.0, (7.0, 9.0))):
        tasks = spans(forecast(order, steps, {"a": 0.0, "b": 0.0}, COST, backward_s=backward_s))
        assert tasks["kernel", f"b:{FINISH}"] == (2.0, 4.0)
        assert tasks["compute", "a:decode"] == decoded


def test_backward_s_thread_takes_work_when_the_next_bucket_is_ready() -> None:
    decode = Compute("decompress_x", 10, "compute", awaited=True)
    steps = {"a": [transfer("gather", 1.0), decode], "b": [transfer("gather", 1.0)]}
    tasks = spans(forecast([("a", "gather"), ("a", "decode"), ("b", "gather")], steps, {"a": 0.0, "b": 5.0}, COST))
    assert tasks["compute", "a:decode"] == (5.0, 6.0)


def test_turns_as_they_come_never_leave_the_thread_waiting_for_what_could_begin() -> None:
    steps = {
        "a": [Compute("pack", 10), transfer("push", 3.0), Compute("sum", 20)],
        "b": [Compute("pack", 10), transfer("push", 3.0), Compute("sum", 20)],
    }
    stages = {bucket: ("push", FINISH) for bucket in steps}
    order = greedy_turns(stages, steps, {"a": 0.0, "b": 2.0}, COST, finish_last=True)
    assert order == [("a", "push"), ("b", "push"), ("a", FINISH), ("b", FINISH)]
    late = greedy_turns(stages, steps, {"a": 0.0, "b": 5.0}, COST, finish_last=True)
    assert late == [("a", "push"), ("a", FINISH), ("b", "push"), ("b", FINISH)]
    assert forecast(late, steps, {"a": 0.0, "b": 5.0}, COST)[-1].end_s == pytest.approx(12.0)


def test_where_both_could_begin_finishing_comes_last_if_asked_for() -> None:
    steps = {
        "long": [Compute("pack", 50), transfer("push", 1.0)],
        "done": [transfer("push", 1.0), Compute("sum", 20)],
        "next": [transfer("push", 1.0)],
    }
    stages = {"long": ("push",), "done": ("push", FINISH), "next": ("push",)}
    ready_s = {"done": 0.0, "long": 0.5, "next": 4.0}
    orders = [greedy_turns(stages, steps, ready_s, COST, finish_last=last) for last in (True, False)]
    assert orders[0][2:] == [("next", "push"), ("done", FINISH)]
    assert orders[1][2:] == [("done", FINISH), ("next", "push")]
