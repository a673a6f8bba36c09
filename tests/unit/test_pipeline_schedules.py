"""Pipeline schedules: names, what each can run, and tables that no pair of ranks can get stuck on."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from titanplug.errors import ConfigError
from titanplug.schedules.actions import COMPUTE
from titanplug.schedules.catalogue import (
    SCHEDULES,
    Action,
    ScheduleTable,
    Work,
    build_table,
    chunks_per_rank,
    default_microbatches,
    resolve_schedule,
    schedule_problems,
    stage_to_rank,
    write_csv,
)
from titanplug.schedules.evaluation import forward_table
from titanplug.schedules.lowering import add_messages
from titanplug.schedules.orders import compute_order

LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
RECEIVES = {Work.RECV_F: Work.SEND_F, Work.RECV_B: Work.SEND_B}


def layouts() -> list[tuple[str, int, int, int]]:
    """(schedule, ranks, microbatches, chunks) of everything that runs here."""
    found = []
    for name in SCHEDULES:
        for num_ranks in (1, 2, 3, 4, 8):
            for num_chunks in (1, 2, 3) if name in LOOPED else (chunks_per_rank(name, None),):
                for num_microbatches in (1, 2, 3, 4, 5, 6, 8, 12, 16):
                    if not schedule_problems(name, num_ranks, num_chunks, num_microbatches):
                        found.append((name, num_ranks, num_microbatches, num_chunks))
    return found


def peers(table: ScheduleTable, action: Action) -> tuple[Action, int, int]:
    """A message by its SEND, with the ranks of its sender and its receiver."""
    stage, work, microbatch = action
    if work in RECEIVES:
        sender = stage - 1 if work is Work.RECV_F else stage + 1
        return peers(table, Action(sender, RECEIVES[work], microbatch))
    receiver = stage + 1 if work is Work.SEND_F else stage - 1
    return action, table.stage_to_rank[stage], table.stage_to_rank[receiver]


def run_blocking(table: ScheduleTable, *, rendezvous: bool) -> list[tuple[int, str, int]]:
    """Run the rows with receives that block, and check each input; returns the computations in order.

    A channel of two ranks delivers in the order of its sends. With ``rendezvous`` a send blocks, too, until
    its receiver is there.
    """
    position = [0] * table.num_ranks
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    arrived: list[set[Action]] = [set() for _ in range(table.num_ranks)]
    done: dict[tuple[int, str, int], None] = {}

    def current(rank: int) -> Action | None:
        row = table.rows[rank]
        return row[position[rank]] if position[rank] < len(row) else None

    def step(rank: int) -> bool:
        action = current(rank)
        if action is None:
            return False
        if action.work in COMPUTE:
            compute(rank, action)
        elif action.work in RECEIVES:
            message, sender, receiver = peers(table, action)
            assert receiver == rank
            if not channels[sender, rank]:
                return False
            assert channels[sender, rank].popleft() == message
            arrived[rank].add(message)
        else:
            message, sender, receiver = peers(table, action)
            assert sender == rank != receiver
            other = current(receiver)
            if rendezvous and (other is None or other.work not in RECEIVES):
                return False
            if rendezvous and other is not None and peers(table, other)[0] != message:
                return False
            produced = {Work.SEND_F: "F", Work.SEND_B: "BI"}[action.work]
            assert any((action.stage, work, action.microbatch) in done for work in produced)
            channels[rank, receiver].append(message)
        position[rank] += 1
        return True

    def compute(rank: int, action: Action) -> None:
        stage, work, microbatch = action
        assert table.stage_to_rank[stage] == rank

        def there(other: int, send: Work, works: str) -> bool:
            if table.stage_to_rank[other] == rank:
                return any((other, made, microbatch) in done for made in works)
            return Action(other, send, microbatch) in arrived[rank]

        if work is Work.FORWARD:
            assert stage == 0 or there(stage - 1, Work.SEND_F, "F")
        elif work is Work.BACKWARD_WEIGHT:
            assert (stage, "I", microbatch) in done
        else:
            assert (stage, "F", microbatch) in done
            assert stage == table.num_stages - 1 or there(stage + 1, Work.SEND_B, "BI")
        assert action not in done
        done[action] = None

    while any([step(rank) for rank in range(table.num_ranks)]):
        pass
    stuck = [str(action) for rank in range(table.num_ranks) if (action := current(rank)) is not None]
    assert not stuck, f"stuck at {stuck}"
    assert not any(channels.values())
    return [*done]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_runs_with_receives_that_block(name: str) -> None:
    ran = 0
    for schedule, *numbers in layouts():
        if schedule != name:
            continue
        num_ranks, num_microbatches, num_chunks = numbers
        table = build_table(name, num_ranks, num_microbatches, num_chunks)
        assert (table.num_ranks, table.num_microbatches) == (num_ranks, num_microbatches)
        assert table.num_stages == num_ranks * num_chunks
        for rendezvous in (False, True):
            done = set(run_blocking(table, rendezvous=rendezvous))
            for stage in range(table.num_stages):
                for item in range(num_microbatches):
                    assert (stage, "F", item) in done
                    whole = (stage, "B", item) in done
                    split = [(stage, letter, item) in done for letter in "IW"]
                    assert split == [not whole, not whole]
            evaluation = forward_table(table.stage_to_rank, table.num_microbatches)
            forwards = run_blocking(evaluation, rendezvous=rendezvous)
            assert sorted(forwards) == sorted(action for action in done if action[1] == "F")
        ran += 1
    assert ran >= 15


def test_the_blocking_run_notices_a_wrong_order() -> None:
    table = build_table("1F1B", 2, 4)
    first, second = table.rows
    place = first.index(Action(0, Work.RECV_B, 0))
    late = first[:place] + first[place + 1 : place + 3] + first[place : place + 1] + first[place + 3 :]
    with pytest.raises(AssertionError):
        run_blocking(replace(table, rows=(late, second)), rendezvous=False)
    early = (first[place], *first[:place], *first[place + 1 :])
    with pytest.raises(AssertionError, match="stuck at"):
        run_blocking(replace(table, rows=(early, second)), rendezvous=False)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_gradient_is_received_after_the_forward_that_it_belongs_to(name: str) -> None:
    # The runtime takes the shape of the gradient from its own output.
    for row in build_table(name, 4, 8).rows:
        for place, (stage, work, item) in enumerate(row):
            if work is Work.RECV_B:
                assert Action(stage, Work.FORWARD, item) in row[:place]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_number_of_messages(num_ranks: int, num_microbatches: int) -> None:
    for name in ("GPipe", "1F1B"):
        table = build_table(name, num_ranks, num_microbatches)
        assert table.num_messages == 2 * num_microbatches * (num_ranks - 1)
        evaluation = forward_table(table.stage_to_rank, num_microbatches)
        assert evaluation.num_messages == num_microbatches * (num_ranks - 1)
    for name in LOOPED:
        for chunks in (2, 3):
            table = build_table(name, num_ranks, num_microbatches, chunks)
            assert table.num_messages == 2 * num_microbatches * (num_ranks * chunks - 1)
    for name in V_SHAPED:  # the two stages in the middle are on one rank
        table = build_table(name, num_ranks, num_microbatches)
        assert table.num_messages == 2 * num_microbatches * (2 * num_ranks - 2)
    assert build_table("LoopedBFS", 1, 3, 4).num_messages == 0


def test_a_small_table_in_full() -> None:
    table = build_table("1F1B", 2, 2)
    assert [" ".join(map(str, row)) for row in table.rows] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert [" ".join(map(str, row)) for row in table.compute_rows] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    evaluation = forward_table(table.stage_to_rank, 2)
    assert evaluation.compute_rows[1] == (Action(1, Work.FORWARD, 0), Action(1, Work.FORWARD, 1))


def test_a_gradient_is_sent_before_the_weights_are_done() -> None:
    table = build_table("ZBVZeroBubble", 2, 4)
    sends = 0
    for row in table.rows:
        for place, (stage, work, item) in enumerate(row):
            if work is Work.SEND_B:
                sends += 1
                assert Action(stage, Work.BACKWARD_INPUT, item) in row[:place]
                assert Action(stage, Work.BACKWARD_WEIGHT, item) in row[place:]
    assert sends == table.num_messages // 2


def test_where_stages_are() -> None:
    assert stage_to_rank("1F1B", 4, 1) == (0, 1, 2, 3)
    assert stage_to_rank("interleaved_1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    for name in V_SHAPED:
        assert stage_to_rank(name, 3, 2) == (0, 1, 2, 2, 1, 0)
        assert build_table(name, 4, 8).stages_of(1) == [1, 6]
    assert build_table("LoopedBFS", 4, 8).stages_of(1) == [1, 5]


def test_tables_are_built_once() -> None:
    table = build_table("1F1B", 2, 4)
    assert build_table("one_f_one_b", 2, 4, 1) is table
    assert build_table("1F1B", 2, 5) is not table
    assert hash(table) == hash(replace(table))


# ------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((name, name) for name in SCHEDULES),
        *((f"Schedule{name}", name) for name in SCHEDULES),
        *((name.lower(), name) for name in SCHEDULES),
        ("g-pipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("one_f_one_b", "1F1B"),
        ("interleaved_1f1b", "Interleaved1F1B"),
        ("Interleaved 1F1B", "Interleaved1F1B"),
        ("looped_bfs", "LoopedBFS"),
        ("interleaved-zero-bubble", "InterleavedZeroBubble"),
        ("zbv", "ZBVZeroBubble"),
        ("zb-v", "ZBVZeroBubble"),
        ("zbv_zero_bubble", "ZBVZeroBubble"),
        ("dualpipe_v", "DualPipeV"),
        ("dual-pipe-v", "DualPipeV"),
        ("tables/own.csv", "tables/own.csv"),
        ("Own.CSV", "Own.CSV"),
    ],
)
def test_spellings(given: str, name: str) -> None:
    assert resolve_schedule(given) == name


@pytest.mark.parametrize("given", ["", "1f2b", "pipedream", "Schedule", "own.txt", None, 3])
def test_an_unknown_name_lists_the_names(given: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_schedule(given)
    assert repr(given) in str(error.value)
    for name in (*SCHEDULES, ".csv"):
        assert name in str(error.value)
    assert schedule_problems(given, 2, None, 4) == list(error.value.problems)


def test_chunks() -> None:
    assert [chunks_per_rank(name, None) for name in SCHEDULES] == [1, 1, 2, 2, 2, 2, 2]
    assert chunks_per_rank("Interleaved1F1B", 4) == 4
    assert chunks_per_rank("LoopedBFS", 1) == 1
    assert chunks_per_rank("zbv", 2) == 2
    with pytest.raises(ConfigError, match=r"pp_chunks=2 with 1F1B: .*exactly 1 stage on .*Interleaved1F1B"):
        chunks_per_rank("1F1B", 2)
    with pytest.raises(ConfigError, match=r"pp_chunks=3 with DualPipeV: .*exactly 2 stages"):
        chunks_per_rank("DualPipeV", 3)
    given: Any
    for given in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="pp_chunks=.*at least 1"):
            chunks_per_rank("Interleaved1F1B", given)


# ---------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    ("name", "num_ranks", "allowed", "refused"),
    [
        ("GPipe", 4, [1, 3, 7], [0, -1]),
        ("LoopedBFS", 4, [1, 3, 7], [0]),
        ("1F1B", 4, [4, 5, 7], [1, 3]),
        ("Interleaved1F1B", 4, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20], [9, 11, 13, 14, 17, 18]),
        ("InterleavedZeroBubble", 2, [1, 2, 3, 4, 6, 8], [5, 7, 9, 11]),
        ("ZBVZeroBubble", 4, [1, 2, 5, 9], [0]),
        ("DualPipeV", 4, [8, 9, 11], [1, 7]),
    ],
)
def test_numbers_of_microbatches(name: str, num_ranks: int, allowed: list[int], refused: list[int]) -> None:
    for number in allowed:
        assert schedule_problems(name, num_ranks, None, number) == []
        run_blocking(build_table(name, num_ranks, number), rendezvous=True)
    for number in refused:
        (problem,) = schedule_problems(name, num_ranks, None, number)
        assert problem.startswith(f"pp_microbatches={number} with {name} and pp={num_ranks}: ")
        with pytest.raises(ConfigError, match="pp_microbatches="):
            build_table(name, num_ranks, number)
    assert schedule_problems(name, num_ranks, None, default_microbatches(name, num_ranks)) == []


def test_refused_numbers_are_those_that_torch_refuses() -> None:
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        for num_ranks in (2, 3, 4):
            for number in range(1, 4 * num_ranks + 2):
                if schedule_problems(name, num_ranks, 2, number):
                    with pytest.raises(ValueError, match="microbatches"):
                        compute_order(name, num_ranks, number, 2)
                else:
                    compute_order(name, num_ranks, number, 2)


def test_problems_name_numbers_that_run() -> None:
    (problem,) = schedule_problems("Interleaved1F1B", 4, None, 13)
    assert problem.endswith("Allowed near 13: 10, 12, 15, 16.")
    (problem,) = schedule_problems("dualpipev", 4, None, 5)
    assert "here 8. Use 8 or more" in problem
    # Sizes that no table could be built for.
    (problem,) = schedule_problems("Interleaved1F1B", 1024, None, 10**9 + 1)
    near = problem.split(": ")[-1].rstrip(".").split(", ")
    assert all(not schedule_problems("Interleaved1F1B", 1024, None, int(number)) for number in near)


def test_several_problems_at_once() -> None:
    problems = schedule_problems("DualPipeV", 4, 3, 2)
    assert [problem.split("=")[0] for problem in problems] == ["pp_chunks", "pp_microbatches"]
    with pytest.raises(ConfigError, match="2 problems"):
        build_table("DualPipeV", 4, 2, 3)
    assert schedule_problems("1F1B", 0, None, None)[0].startswith("pp=0: ")
    assert schedule_problems("1F1B", 4, None, None) == []


# ------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_file_gives_the_table_back(name: str, tmp_path: Path) -> None:
    table = build_table(name, 2, 4)
    path = tmp_path / "own.csv"
    write_csv(table, path)
    read = build_table(str(path), 2, 4)
    assert read == replace(table, name=str(path))
    assert build_table(str(path), 2, 4, table.num_stages // 2) is read
    assert chunks_per_rank(str(path), None) == table.num_stages // 2
    assert stage_to_rank(str(path), 2, 0) == table.stage_to_rank
    assert default_microbatches(str(path), 2) == 4


@pytest.mark.parametrize("name", SCHEDULES[2:])
def test_files_are_those_of_torch(name: str, tmp_path: Path) -> None:
    stage = SimpleNamespace(num_stages=4, group_size=2, group_rank=0, submod=None)
    torchs = get_schedule_class(name)([stage, stage], 4)
    path = tmp_path / "own.csv"
    torchs._dump_csv(path, format="compute_only")
    table = build_table(str(path), 2, 4)
    assert table.rows == build_table(name, 2, 4).rows
    write_csv(table, path)
    torchs.pipeline_order = {}
    torchs._load_csv(path, format="compute_only")  # which checks it, too
    rows = [[str(cell) for cell in row] for row in torchs.pipeline_order.values()]
    assert rows == [[str(action) for action in row] for row in table.compute_rows]


def test_a_changed_file_is_another_table(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert build_table(str(path), 2, 1).num_microbatches == 1
    path.write_text("\ufeff0F0, 0F1,,0B0,0B1\n1F0,,1B0,1F1,1B1\n\n,,\n", encoding="utf-8")
    table = build_table(str(path), 2, 2)
    assert table.compute_rows == build_table("1F1B", 2, 2).compute_rows


def test_a_file_says_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    write_csv(build_table("1F1B", 2, 4), path)
    problems = schedule_problems(str(path), 4, 2, 8)
    assert [problem.split(" with")[0] for problem in problems] == [
        "pp_chunks=2",
        "pp=4",
        "pp_microbatches=8",
    ]
    with pytest.raises(ConfigError, match="3 problems"):
        build_table(str(path), 4, 8, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n1F0,1B0\n", r"line 1, cell 2 \('0X0'\) isn't a computation"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", r"line 1, cell 2 \('0SEND_F0'\) isn't a computation"),
        ("0F0,0B0\n1F0,1B\n", r"line 2, cell 2 \('1B'\) isn't a computation"),
        ("0F0,0B0\n1F0,1B0,0F0\n", r"line 2, cell 3 \(0F0\): stage 0 is already on rank 0"),
        ("0F0,0B0,0F0\n1F0,1B0\n", r"line 1, cell 3 \(0F0\) does again what line 1, cell 1 \(0F0\) does"),
        ("0F0,0B0\n1F0,1I0,1B0\n", r"line 2, cell 3 \(1B0\) does again what line 2, cell 2 \(1I0\) does"),
        ("0F0,0B0\n1F0\n", r"1B0 is missing"),
        ("0F0,0B0\n1F0,1I0\n", r"1W0 is missing"),
        ("0F0,0B0\n1B0\n", r"1F0 is missing"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0\n", r"1F1 is missing; 1B1 is missing"),
        ("0F0,0B0\n2F0,2B0\n", r"stage 1 is missing, stage 2 is there"),
        ("0F1,0B1\n1F1,1B1\n", r"microbatch 0 is missing, microbatch 1 is there"),
        ("0F999999999,0B999999999\n", r"microbatch 0 is missing"),
        ("0F0,0B0\n\n1F0,1B0\n", r"different numbers of stages"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", r"different numbers of stages"),
        ("", r"it has no cells"),
        ("0B0,0F0\n1F0,1B0\n", r"rank 0 waits at 0B0 for 0F0, which comes later in its row"),
        ("0F0,0W0,0I0\n", r"rank 0 waits at 0W0 for 0I0, which comes later"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            r"rank 0 waits at 0B0 for 1B0, which is further on in the row of rank 1; "
            r"rank 1 waits at 1F1 for 0F1, which is further on in the row of rank 0",
        ),
    ],
)
def test_files_that_are_no_schedule(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        build_table(str(path), 2, 1)
    assert str(error.value).startswith(str(path))
    assert schedule_problems(str(path), 2, None, None) == list(error.value.problems)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe0F0")
    for path in (tmp_path / "absent.csv", tmp_path / "binary.csv"):
        with pytest.raises(ConfigError, match="can't be read"):
            build_table(str(path), 2, 4)
        assert "can't be read" in schedule_problems(str(path), 2, None, 4)[0]


def test_only_some_of_many_problems_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(",".join(f"0F{item}" for item in range(100)))
    with pytest.raises(ConfigError, match="0B7 is missing; and 92 more"):
        build_table(str(path), 1, 100)


def test_a_deadlock_names_both_sides() -> None:
    backward_first = ((Action(0, Work.BACKWARD, 0), Action(0, Work.FORWARD, 0)),)
    with pytest.raises(ConfigError, match=r"mine can't run .*waits at 0B0 for 0F0"):
        add_messages(backward_first, (0,), "mine")
