"""The lab keeps its promises on this machine; needs network namespaces, as root or as an ordinary user."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from gradsync_lab.cluster import Lab, LabUnavailableError, Scenario, keeper
from gradsync_lab.cluster import cluster as module
from lab.tests.cluster import programs
from lab.tests.cluster.programs import python

pytestmark = pytest.mark.usefixtures("namespaces")

SLEEPS_WITH_CHILD = ["sh", "-c", "sleep 1000 & sleep 1000; true"]
PATIENCE_S = 20.0  # how long a test waits for an event before it fails
SHAPER_SLACK = 1.05  # a token bucket exceeds its rate by its burst in a window of a second


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(Scenario(nodes=2)) as built:
        yield built


def start(lab: Lab, rank: int, argv: list[str]) -> subprocess.Popen[str]:
    return lab.spawn(rank, argv, stdout=subprocess.PIPE, text=True)


def printed(lab: Lab, code: str, env: dict[str, str] | None = None) -> list[list[str]]:
    """Returns the words that each rank printed; all ranks run at once and must end well."""
    ranks = [
        lab.spawn(rank, python(code), env, stdout=subprocess.PIPE, text=True) for rank in range(lab.scenario.world_size)
    ]
    words = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return words


def await_line(process: subprocess.Popen[str], wanted: str) -> None:
    """Reads until the process prints this line; the test's time limit ends a wait in vain."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"the process ended without saying {wanted!r}")


def spaces_of(lab: Lab) -> set[str]:
    """Returns the network namespaces of the nodes and of the keeper."""
    assert lab._keeper is not None
    return {keeper.network_namespace(pid) for pid in (*lab._pids, lab._keeper.pid)}


def becomes(count: int, spaces: set[str]) -> bool:
    """Waits until `count` processes are in these network namespaces; returns whether they came to be."""
    deadline = time.monotonic() + PATIENCE_S
    while len(keeper.processes_inside(spaces)) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(keeper.processes_inside(spaces)) == count


def interfaces() -> list[str]:
    return sorted(line.partition(":")[0] for line in Path("/proc/self/net/dev").read_text().splitlines())


# Building and leaving.


@pytest.mark.parametrize("user_namespace", [None, True], ids=["default", "user_namespace"])
def test_exit_leaves_no_process_and_no_interface(user_namespace: bool | None, request: pytest.FixtureRequest) -> None:
    if user_namespace:
        request.getfixturevalue("user_namespaces")
    before = interfaces()
    with Lab(Scenario(nodes=2), user_namespace=user_namespace) as lab:
        for rank in range(2):
            lab.spawn(rank, SLEEPS_WITH_CHILD)
        lab.start_background(0, 1, "1mbit")
        spaces = spaces_of(lab)
        assert len(spaces) == 2 + 1
        assert becomes(
            1 + 2 + 2 * 3 + 2, spaces
        )  # keeper; holders; a shell and its two children each; two ends of the flow
        assert interfaces() == before
    assert keeper.processes_inside(spaces) == []
    assert interfaces() == before


@pytest.mark.parametrize("user_namespace", [None, True], ids=["default", "user_namespace"])
def test_killed_starter_takes_everything_along(user_namespace: bool | None, request: pytest.FixtureRequest) -> None:
    if user_namespace:
        request.getfixturevalue("user_namespaces")
    code = f"""
import time
from gradsync_lab.cluster import Lab, Scenario, keeper
with Lab(Scenario(nodes=2), user_namespace={user_namespace}) as lab:
    for rank in range(2):
        lab.spawn(rank, {SLEEPS_WITH_CHILD})
    print(*(keeper.network_namespace(pid) for pid in (*lab._pids, lab._keeper.pid)), flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        spaces = set(starter.stdout.readline().split())
        assert len(spaces) == 2 + 1
        assert becomes(1 + 2 + 2 * 3, spaces)  # keeper; holders; a shell and its two children each
        starter.kill()
    assert becomes(0, spaces)


def test_a_holder_that_was_killed_leaves_nothing_behind() -> None:
    with Lab(Scenario(nodes=2)) as lab:
        for rank in range(2):
            lab.spawn(rank, SLEEPS_WITH_CHILD)
        spaces = spaces_of(lab)
        assert becomes(1 + 2 + 2 * 3, spaces)
        os.kill(lab._pids[0], signal.SIGKILL)
    assert becomes(0, spaces)


def test_two_labs_share_nothing(lab: Lab) -> None:
    answer = "import socket\nwith socket.create_server(('', 6000)) as s:\n print('up', flush=True)\n s.accept()"
    call = "import socket\nsocket.create_connection(('10.77.0.1', 6000))"
    with Lab(Scenario(nodes=2)) as other:
        server = start(lab, 0, python(answer))
        await_line(server, "up")
        stranger = other.spawn(1, python(call), stderr=subprocess.PIPE, text=True)
        assert "ConnectionRefusedError" in stranger.communicate(timeout=PATIENCE_S)[1]
        assert lab.spawn(1, python(call)).wait(PATIENCE_S) == 0
        server.communicate(timeout=PATIENCE_S)


def test_lab_that_is_not_entered_says_so() -> None:
    with pytest.raises(RuntimeError, match="use it in a with statement"):
        Lab(Scenario(nodes=2)).spawn(0, ["true"])


def test_forbidden_namespaces_are_an_error_that_says_what_to_allow(user_namespaces: None) -> None:
    code = """
from gradsync_lab.cluster import Lab, LabUnavailableError, Scenario, keeper
keeper.become_root_of_own_namespace()
open("/proc/sys/user/max_user_namespaces", "w").write("0")
try:
    Lab(Scenario(nodes=2), user_namespace=True).__enter__()
except LabUnavailableError as error:
    print(error)
"""
    said = subprocess.run(python(code), check=True, capture_output=True, text=True).stdout
    assert "run as root, or allow user namespaces: user.max_user_namespaces above 0" in said


def test_refused_network_names_the_kernels_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rate_bytes_per_s", lambda text: None)
    monkeypatch.setattr(Scenario, "rate_of", lambda self, node: "no number")
    with pytest.raises(LabUnavailableError, match="cannot be built here .* bridge, veth and sch_tbf"):
        Lab(Scenario(nodes=2)).__enter__()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have its rights taken away; others have none anyway")
def test_root_without_rights_over_networks_gets_a_lab_in_a_user_namespace(user_namespaces: None) -> None:
    code = """
import ctypes, os, sys
for capability in (12, 21):
    assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP: gone after the next exec
os.execv(sys.executable, [sys.executable, "-c", '''
from gradsync_lab.cluster import Lab, Scenario
with Lab(Scenario(nodes=2, link="100mbit")) as lab:
    print(lab.describe()["lab"], lab.run(["true"]))
'''])
"""
    said = subprocess.run(python(code), check=True, capture_output=True, text=True).stdout
    assert said.split("\n")[0] == "user namespace [0, 0]"


# Ranks.


def test_ranks_get_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Lab(Scenario(nodes=2, ranks_per_node=2)) as lab:
        words = printed(lab, programs.ENVIRONMENT)
    port = str(module.MASTER_PORT)
    assert words == [
        [rank, "4", local, "2", node, "10.77.0.1", port, "1"]
        for rank, local, node in [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")]
    ]


@pytest.mark.parametrize(("user_namespace", "nodes"), [(None, 4), (True, 2)], ids=["default", "user_namespace"])
def test_links_count_what_the_ledger_says(
    user_namespace: bool | None, nodes: int, request: pytest.FixtureRequest
) -> None:
    if user_namespace:
        request.getfixturevalue("user_namespaces")
    with Lab(Scenario(nodes=nodes), user_namespace=user_namespace) as lab:
        words = printed(lab, programs.COLLECTIVES)
    for rank, said in enumerate(words):
        names, ledger, link, right = said[::4], [*map(int, said[1::4])], [*map(int, said[2::4])], said[3::4]
        assert names == ["all_reduce", "all_gather", "all_to_all"]
        assert right == ["True"] * 3
        assert ledger == [  # of 4 MiB: ring; its own part to all others; all parts but its own
            int(2 * (nodes - 1) / nodes * 4 * (1 << 20)),
            (nodes - 1) * (rank + 1) * (1 << 20),
            int((nodes - 1) / nodes * 4 * (1 << 20)),
        ]
        assert all(said <= counted <= 1.06 * said for said, counted in zip(ledger, link, strict=True))


def test_counters_match_what_was_sent(lab: Lab) -> None:
    payload = 5_000_000
    words = printed(lab, programs.TRANSFER, {"PAYLOAD": str(payload)})
    sent, received = int(words[0][0]), int(words[1][1])
    assert payload <= sent <= 1.05 * payload  # headers are 66 of 1514 bytes
    assert payload <= received <= 1.05 * payload
    assert int(words[0][1]) < 0.05 * payload
    assert int(words[1][0]) < 0.05 * payload


def test_first_failure_ends_the_others_and_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    codes = lab.run(["sh", "-c", '[ "$RANK" = 1 ] && exit 3; exec sleep 1000'])
    assert codes == [-signal.SIGKILL, 3]
    assert lab.first_failed == 1
    assert lab.run(["true"]) == [0, 0]
    assert lab.first_failed is None


def test_time_limit_ends_all_ranks(lab: Lab) -> None:
    assert lab.run(["sleep", "1000"], timeout_s=0.3) == [-signal.SIGKILL] * 2
    assert lab.first_failed is None


def test_output_of_what_a_rank_left_running_goes_where_stdout_was(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ECHO_PATIENCE_S", 0.0)
    said = io.TextIOWrapper(io.BytesIO())
    with redirect_stdout(said):
        lab.run(["sh", "-c", "(sleep 0.3; echo late) &"])
    deadline = time.monotonic() + PATIENCE_S
    while said.buffer.getvalue().count(b"late\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said.buffer.getvalue().count(b"late\n") == 2


def test_output_is_told_apart_by_rank(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.run(["sh", "-c", "echo hello; echo from $RANK >&2"])
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] from 0", "[0] hello", "[1] from 1", "[1] hello"]


def test_missing_command_is_named(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    assert lab.run(["no-such-command"]) == [127, 127]
    assert "[0] no-such-command: No such file or directory\n" in capfd.readouterr().out


def test_nodes_and_ranks_that_do_not_exist_are_refused(lab: Lab) -> None:
    with pytest.raises(ValueError, match=r"no rank 2: the ranks are 0\.\.1"):
        lab.spawn(2, ["true"])
    for fault in (
        lab.link_down,
        lab.link_up,
        lambda node: lab.set_loss(node, 0.1),
        lambda node: lab.set_rate(node, "1mbit"),
    ):
        with pytest.raises(ValueError, match=r"no node -1: the nodes are 0\.\.1"):
            fault(-1)
    with pytest.raises(ValueError, match="no background traffic 0->1 to stop"):
        lab.stop_background(0, 1)


# The network.


def test_links_and_trunks_carry_no_more_than_configured() -> None:
    with Lab(Scenario(nodes=4, link="400mbit", rack_size=2, trunk="80mbit", slow={1: "200mbit"})) as lab:
        rates = lab.check(1.0)
    configured = [rate.configured_bytes_per_s for rate in rates]
    assert [(rate.source, rate.target) for rate in rates] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert configured == [25e6, 10e6, 50e6, 10e6]
    for rate, limit in zip(rates, configured, strict=True):
        assert 0 < rate.measured_bytes_per_s <= SHAPER_SLACK * limit
        assert rate.round_trip_s > 0
    assert rates[2].measured_bytes_per_s > rates[1].measured_bytes_per_s  # within a rack, across racks


def test_background_traffic_takes_its_share_of_the_link() -> None:
    """All traffic from node 0 to node 1 passes one shaper: the measured flow gets the rest of the rate."""
    with Lab(Scenario(nodes=2, link="40mbit", background=((0, 1, "20mbit"),))) as lab:
        listener = start(lab, 1, python(programs.LISTEN))
        await_line(listener, "traffic")
        shared, free = (rate.measured_bytes_per_s for rate in lab.check(2.0))
        listener.kill()
        listener.communicate()
    assert shared < 0.9 * free  # relative to each other, as a busy machine slows both


def test_changed_rate_holds_in_both_directions(lab: Lab) -> None:
    lab.set_rate(1, "50mbit")
    assert all(rate.measured_bytes_per_s <= SHAPER_SLACK * 50e6 / 8 for rate in lab.check(1.0))
    lab.set_rate(1, "unshaped")
    assert all(rate.measured_bytes_per_s > SHAPER_SLACK * 50e6 / 8 for rate in lab.check(1.0))


def test_a_lossy_link_loses_its_share_and_other_links_nothing() -> None:
    send = "import os, socket, time; s = socket.socket(2, 2); r = int(os.environ['RANK']); "
    send += "[(s.sendto(b'x', (f'10.77.0.{(r + 1) % 3 + 1}', 99)), time.sleep(5e-4)) for _ in range(1000)]"
    receive = "import os, socket; s = socket.socket(2, 2); s.setsockopt(1, 33, 1 << 24)\n"  # SO_RCVBUFFORCE
    receive += "s.bind(('', 99)); print('ready', flush=True)\n"
    receive += "s.recv(9); s.settimeout(2); n = 1\ntry:\n    while s.recv(9): n += 1\nexcept TimeoutError: print(n)"
    with Lab(Scenario(nodes=3, link="unshaped")) as lab:
        for loss in (0.0, 0.3, 0.0):  # at first without, so that the nodes learn each other's addresses
            try:
                lab.set_loss(1, loss)
            except RuntimeError as error:
                pytest.skip(f"no nftables for bridges in this kernel: {error}")
            receivers = [start(lab, rank, python(receive)) for rank in range(3)]
            assert [receiver.stdout.readline() for receiver in receivers if receiver.stdout] == ["ready\n"] * 3
            for sender in [lab.spawn(rank, python(send)) for rank in range(3)]:
                assert sender.wait(30) == 0
            into = [int(receiver.communicate(timeout=30)[0]) for receiver in receivers]
            if loss:  # node 0 receives from node 2; node 1's link carries what it gets from 0 and sends to 2
                assert into[0] == 1000 and all(600 < count < 800 for count in into[1:]), into
            else:
                assert into == [1000] * 3
        with pytest.raises(ValueError, match=r"share of its packets in \[0, 1\), got 1"):
            lab.set_loss(1, 1.0)


def test_recorded_congestion_control_is_what_ranks_use(lab: Lab) -> None:
    recorded = lab.describe()["congestion_control"]
    assert printed(lab, programs.CONGESTION_CONTROL) == [[recorded], [recorded]]
    if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text():
        assert recorded == "cubic"


def test_missing_congestion_control_is_recorded_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Path(keeper.__file__).read_text().replace('CONTROL = "cubic"', 'CONTROL = "nonesuch"')
    (tmp_path / "keeper.py").write_text(changed)
    monkeypatch.setattr(module, "HERE", tmp_path)
    with Lab(Scenario(nodes=2)) as lab:
        recorded = lab.describe()["congestion_control"]
        assert "nonesuch" in changed
        assert recorded == Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        assert printed(lab, programs.CONGESTION_CONTROL) == [[recorded], [recorded]]


def test_description_holds_what_a_record_needs() -> None:
    with Lab(Scenario(nodes=2, link="200mbit", slow={1: "100mbit"})) as lab:
        description = lab.describe()
    assert description["links"] == {"nodes": 2, "link": "200mbit", "ranks_per_node": 1, "slow": {1: "100mbit"}}
    assert description["shaping"]["200mbit"]["rate"] == 25_000_000
    assert {"rate", "burst", "limit"} <= set(description["shaping"]["100mbit"])
    assert set(description["segmentation_offload"]) == {"tso", "gso", "gro"}
    assert description["lab"] in ("root", "user namespace")


# Faults.


def test_link_down_stalls_connections_and_link_up_lets_them_go_on(lab: Lab) -> None:
    lab.spawn(1, python(programs.PING))
    caller = start(lab, 0, python(programs.PING))
    await_line(caller, "ok")
    lab.link_down(1)
    await_line(caller, "lost")
    lab.link_up(1)
    await_line(caller, "ok")
    caller.kill()
    caller.communicate()


def test_background_traffic_flows_until_stopped() -> None:
    with Lab(Scenario(nodes=3, background=((0, 2, "20mbit"),))) as lab:
        listener = start(lab, 2, python(programs.LISTEN))
        await_line(listener, "traffic")
        lab.start_background(1, 2, "20mbit")
        with pytest.raises(ValueError, match="1->2 runs already"):
            lab.start_background(1, 2, "5mbit")
        lab.stop_background(0, 2)
        lab.start_background(0, 2, "20mbit")  # in addition to 1->2, which is the younger flow
        again = start(lab, 2, python(programs.LISTEN))
        await_line(again, "traffic")
        assert all(process.poll() is None for flow in lab._flows.values() for process in flow)
        lab.stop_background(0, 2)
        lab.stop_background(1, 2)
        for process in (listener, again):
            await_line(process, "quiet")
            process.communicate()


def test_pause_resume_and_kill_reach_the_rank(lab: Lab) -> None:
    rank = lab.spawn(0, ["sleep", "1000"])

    def state() -> str:
        return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def reaches(wanted: str) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while state() != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return state() == wanted

    assert reaches("S")
    lab.pause(0)
    assert reaches("T")
    lab.resume(0)
    assert reaches("S")
    lab.kill(0)
    assert rank.wait(PATIENCE_S) == -signal.SIGKILL
