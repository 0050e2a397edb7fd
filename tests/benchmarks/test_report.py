"""The page says of every goal and every peer what was measured, or why it was not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.report import asked, blobs, controls, headlines, loads, markdown, peers, recoveries, slowstores, trials
from benchmarks.report.__main__ import write_report
from benchmarks.report.goals import Goal, goals_of
from benchmarks.report.layouts import Layouts
from benchmarks.report.plan import Expected, expected
from benchmarks.report.selection import select, told
from benchmarks.results import Record
from benchmarks.simulation import goodput, scale
from benchmarks.simulation.job import Costs, System
from benchmarks.simulation.traces import all_traces

LAYOUT, SMALL = "gpt:1", "small:20000"
LAYOUTS = Layouts(large=[LAYOUT], small=[SMALL])
PLAN = Expected(
    cells={("save", peer, LAYOUT) for peer in ("stepfast", "torch_save", "dcp_save", "nvrx")},
    layouts=LAYOUTS,
    titles={"stepfast": "Stepfast", "torch_save": "torch.save", "dcp_save": "DCP save", "nvrx": "NVRx"},
)
MACHINE: Record = {"kind": "machine", "time": 1_700_000_000.0, "processor": "2 × some", "memory": "24 GiB"}


def a_save(stall: float, plain: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "is_saved": True, "stall_seconds": stall, "plain_seconds": plain, "persist_seconds": 10.0,
        "persist_after_return_seconds": 8.0, "stamping_seconds": 0.0, "lost_seconds": stall + 0.2,
        "worst_step_seconds": 0.01, **more,
    }  # fmt: skip


def saves(peer: str, *stalls: float, kind: str = "save", status: str = "done", error: str = "", **more: Any) -> Record:
    return {
        "kind": kind, "time": 1_700_000_001.0, "peer": peer, "layout": LAYOUT, "size_bytes": 2**30, "slots": 3,
        "status": status, "error": error, "saves": [a_save(stall, **more) for stall in stalls],
    }  # fmt: skip


def goal_named(start: str) -> Goal:
    return next(goal for goal in goals_of(LAYOUTS) if goal.name.startswith(start))


def row_of(start: str, *records: Record) -> list[str]:
    return asked.row_of(goal_named(start), select([MACHINE, *records]))


@pytest.mark.parametrize(
    ("stalls", "measured", "verdict"),
    [
        pytest.param((9.0, 1.1, 1.1, 1.1), "1.10 × (1.10 s, n=3)", "reached", id="reached"),
        pytest.param((1.0, 1.3, 1.3, 1.3), "1.30 × (1.30 s, n=3)", "**not reached**", id="missed"),
    ],
)
def test_steady_stall_is_held_against_the_plain_copy(stalls: Sequence[float], measured: str, verdict: str) -> None:
    name, limit, _, words, said = row_of("Stall, steady", saves("stepfast", *stalls))
    assert (name, limit) == ("Stall, steady, 1 GiB", "plain copy 1.00 s")
    assert (words, said) == (measured, verdict)


def test_goal_without_records_is_not_measured_and_says_which_are_missing() -> None:
    for goal in goals_of(LAYOUTS):
        row = asked.row_of(goal, select([MACHINE]))
        assert row[3:] == [f"not measured: no record of the kind `{goal.kind}`", "not measured"]


def test_failed_cell_keeps_its_goal_from_being_reached() -> None:
    broken = saves("stepfast", status="hung", error="not done in the cell's time")
    assert row_of("Stall, steady", broken)[3] == "not measured: hung: not done in the cell's time"
    _, _, _, measured, verdict = row_of("Stall, steady", saves("stepfast", 1.0, 1.0), broken)
    assert verdict == "**not reached**"
    assert measured.endswith("one cell hung: not done in the cell's time")


def test_busy_saves_that_were_skipped_miss_the_goal() -> None:
    name = "Stall while the save before is being persisted, 1 GiB"
    busy = saves("stepfast", 1.0, 1.1, kind="back_to_back", is_busy=True)
    given_up = "given up for newer ones before they were persisted"
    row = row_of(name, {**busy, "skipped": 0, "dropped": 2})
    assert row[3:] == [f"1.05 × (1.05 s, n=2); 0 skipped, 2 {given_up}", "reached"]
    row = row_of(name, {**busy, "skipped": 1})
    assert row[3:] == [f"1.05 × (1.05 s, n=2); 1 skipped, ? {given_up}", "**not reached**"]
    idle = saves("stepfast", 1.0, kind="back_to_back", is_busy=False)
    assert row_of(name, idle)[3] == "not measured: every save was persisted before the next one came"


@pytest.mark.parametrize(("direct", "verdict"), [(6.4, "reached"), (6.3, "**not reached**"), (None, "not measured")])
def test_disk_rate_is_held_against_direct_writes(direct: float | None, verdict: str) -> None:
    record = saves("stepfast", 1.0, 1.0, direct_write_seconds=direct)
    assert row_of("Persisted to local disk", record)[4] == verdict


@pytest.mark.parametrize(("lost", "verdict"), [(1.23, "reached"), (1.25, "**not reached**")])
def test_lost_time_may_be_the_stall_and_a_little_of_the_persist_time(lost: float, verdict: str) -> None:
    assert row_of("Training time lost per save, 1 GiB", saves("stepfast", 1.0, 1.0, lost_seconds=lost))[4] == verdict


def test_lost_time_is_unknown_where_no_training_was_disturbed() -> None:
    idle = saves("stepfast", 1.0, 1.0, steps_while_persisting=0)
    words = "not measured: every save was persisted before training went on"
    assert row_of("Training time lost per save, 1 GiB", idle)[3] == words
    assert "0.200" not in "".join(peers.peer_table(select([idle]), PLAN, LAYOUT))


@pytest.mark.parametrize(
    ("largest", "planning", "verdict"),
    [
        pytest.param(2**28, 0.05, "reached", id="reached"),
        pytest.param(2**30, 0.05, "**not reached**", id="one-rank-saves-all"),
        pytest.param(2**28, 0.06, "**not reached**", id="plans"),
    ],
)
def test_gang_divides_the_state_without_planning(largest: int, planning: float, verdict: str) -> None:
    def gang(peer: str, seconds: float) -> Record:
        saves = [{"planning_seconds": [9.0, 9.0]}, {"planning_seconds": [0.0, seconds]}]
        size, shares = 2**30, [largest, 0, 0, 0]
        return {"kind": "ddp", "peer": peer, "ranks": 4, "size_bytes": size, "bytes_by_rank": shares, "saves": saves}

    row = row_of("Replicated", gang("stepfast", planning), gang("dcp_save", 1.0))
    assert (row[1], row[4]) == ("DCP plans 1.00 s a save", verdict)
    assert row_of("Replicated", gang("stepfast", planning))[4] == "not measured"


@pytest.mark.parametrize(
    ("start", "record", "verdict"),
    [
        ("Restored from memory", {"kind": "restore", "tier": "memory", "seconds": 1.1, "limit_seconds": [1.0]}, True),
        ("Restored from memory", {"kind": "restore", "tier": "memory", "seconds": 1.2, "limit_seconds": [1.0]}, False),
        (
            "Restored from disk",
            {"kind": "restore", "tier": "disk-cold", "seconds": 1.0, "limit_seconds": [1.0], "wrong_tensors": 0},
            True,
        ),
        ("One flipped byte", {"kind": "corrupt", "is_detected": True, "names_file": True}, True),
        ("One flipped byte", {"kind": "corrupt", "is_detected": True, "names_file": False}, False),
        (
            "Memory of the agent",
            {"kind": "memory", "shared_growth_bytes": 3 * 2**30, "helpers_peak_bytes": 2**20},
            True,
        ),
        ("Memory in the trainer", {"kind": "memory", "trainer_before_bytes": 0, "trainer_peak_bytes": 2**30}, False),
    ],
)  # fmt: skip
def test_goals_judge_their_records(start: str, record: Record, verdict: bool) -> None:
    whole = {"peer": "stepfast", "layout": LAYOUT, "size_bytes": 2**30, "slots": 3, "status": "done", **record}
    assert row_of(start, whole)[4] == ("reached" if verdict else "**not reached**")


def test_kill_goal_asks_for_both_tiers() -> None:
    def kill(tier: str, is_restorable: bool) -> Record:
        return {
            "kind": "kill", "peer": "stepfast", "layout": LAYOUT, "helper_killed": False, "tier": tier,
            "status": "done", "is_restorable": is_restorable,
        }  # fmt: skip

    assert row_of("SIGKILL", kill("memory", True), kill("disk", True))[4] == "reached"
    assert row_of("SIGKILL", kill("memory", True), kill("disk", False))[3:] == [
        "memory: restored, disk: lost",
        "**not reached**",
    ]
    assert row_of("SIGKILL", kill("memory", True))[4] == "**not reached**"


def a_headline(peer: str, lost: float, *, bytes_: int = 2**30, ranks: int = 1, **more: Any) -> Record:
    """As `benchmarks.stores.headline` adds it: the saves of all ranks, in the order in which they came."""
    told = [
        {"step": step, "rank": rank, **a_save(lost * (1 + 9 * (step == 1)), lost_seconds=lost * (1 + rank))}
        for step in (1, 2, 3)
        for rank in range(ranks)
    ]
    return {
        "kind": "headline", "peer": peer, "layout": f"gpt:{bytes_ / 2**30:g}", "size_bytes": bytes_, "ranks": ranks,
        "status": "done", "error": "", "saves": told, **more,
    }  # fmt: skip


@pytest.mark.parametrize(("ours", "verdict"), [(0.5, "reached"), (0.51, "**not reached**")])
def test_headline_holds_for_every_size_and_number_of_ranks(ours: float, verdict: str) -> None:
    records = [
        a_headline("torch_save_blob", 100.0), a_headline("stepfast_blob", 0.5),
        a_headline("torch_save_blob", 50.0, ranks=2), a_headline("stepfast_blob", ours, ranks=2),
    ]  # fmt: skip
    row = row_of("Training time lost, saving", *records)
    assert row[4] == verdict
    assert row[3].startswith("1.00 GiB × 1 rank: 99.50 % less (0.500 s; stall 99.50 % less); 1.00 GiB × 2 ranks: ")
    assert row[1] == "torch.save 100 s; torch.save 100 s"  # of two ranks the slower one


def test_headline_table_says_how_flat_it_is() -> None:
    records = [a_headline("stepfast_blob", lost, bytes_=bytes_) for lost, bytes_ in ((0.1, 2**29), (0.3, 2**30))]
    table = headlines.table(select(records))
    assert table[2].split(" | ")[2:] == ["not measured", "0.100", "—", "not measured", "0.100", "—", "0.200", "0.200 |"]
    assert table[-1] == (
        "Ours over sizes, on one rank: lost 0.200 to 0.300 s per GiB (1.50 ×), stall 0.200 to 0.300 s per GiB (1.50 ×)."
    )
    lines = headlines.lines_of(headlines.costs_of(select(records)), by_ranks=False)
    assert lines == {"stepfast": [(0.5, 0.1), (1.0, 0.3)]}


def test_headline_counts_no_less_than_the_stall() -> None:
    record = a_headline("stepfast_blob", 0.5)
    disturbed = {**record, "saves": [{**save, "lost_seconds": -30.0} for save in record["saves"]]}
    (cost,) = (by_peer["stepfast_blob"] for by_peer in headlines.costs_of(select([disturbed])).values())
    assert (cost.lost_seconds, cost.raised, cost.count) == (0.5, 2, 2)
    assert headlines.table(select([disturbed]))[-1].startswith("In 2 of 2 saves of ours training went faster")


def a_recovery(way: str, seconds: float, *, ranks: int = 1, **more: Any) -> Record:
    moments = {"rank: forked": 0.1, "rank: the first step is done": seconds}
    return {"kind": "recovery", "way": way, "ranks": ranks, "seconds": seconds, "moments": moments, **more}


@pytest.mark.parametrize(("taken", "verdict"), [(4.9, "reached"), (5.1, "**not reached**")])
def test_recovery_is_held_against_the_bare_script_of_as_many_ranks(taken: float, verdict: str) -> None:
    records = [
        *(a_recovery("stepfast", one) for one in (1.0, taken, 9.0)), a_recovery("python", 4.0),
        a_recovery("torchrun", 8.0), a_recovery("python", 100.0, ranks=2),
    ]  # fmt: skip
    row = row_of("Recovery on one machine, 1 rank", *records)
    assert row[1:2] + row[4:] == ["bare python 4.00 s, torchrun 8.00 s", verdict]
    failed = {"kind": "recovery", "ranks": 2, "status": "failed", "error": "never: it trains again"}
    assert row_of("Recovery on one machine, 2 ranks", failed)[3] == "not measured: failed: never: it trains again"


def test_recovery_table_has_the_moments_in_their_order_and_what_waits() -> None:
    records = [a_recovery("stepfast", 2.0, standby_pss_bytes=2**28), a_recovery("python", 1.5)]
    table = recoveries.tables(select(records))
    assert "| rank: the first step is done | 2.00 | 1.90 | 1.50 | — |" in table
    assert "not measured: no record." in table  # of two ranks
    assert table[-1].startswith("The launcher that waits beside the training takes 256 MiB of memory")


@pytest.mark.parametrize(("hanging", "verdict"), [(1.09, "reached"), (1.11, "**not reached**")])
def test_load_is_judged_by_measure(hanging: float, verdict: str) -> None:
    record = {
        "kind": "load", "status": "done", "stall_seconds": {"healthy": [1.0, 1.0], "hanging": [1.0]},
        "persist_seconds": {"healthy": [1.0], "hanging": [hanging]},
        "hung_job_stall_seconds": {"healthy": [1.0], "hanging": []}, "lost_saves": {"healthy": 0, "hanging": 0},
    }  # fmt: skip
    assert row_of("Stall of other jobs", record)[4] == "reached"
    assert row_of("Persist time of other jobs", record)[4] == verdict
    row = row_of("Stall of other jobs", {**record, "lost_saves": {"healthy": 0, "hanging": 1}})
    assert row[3:] == ["+0.0 % (1.00 s, n=1); 1 saves skipped or never committed", "**not reached**"]
    table = loads.table(select([record]))
    assert table[2] == "| stall of the other jobs | 1.00 | 1.00 | +0.0 % | 2 / 1 |"
    assert table[4] == "| stall of the job whose storage hangs | 1.00 | not measured | — | 1 / 0 |"


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        pytest.param({}, "reached", id="reached"),
        pytest.param({"skipped": 1}, "**not reached**", id="skipped"),
        pytest.param({"dropped": 1}, "**not reached**", id="dropped"),
        pytest.param({"waited": 1}, "**not reached**", id="waited"),
        pytest.param({"dropped": None}, "**not reached**", id="agent-never-heard"),
        pytest.param({"is_newest_committed": False}, "**not reached**", id="newest-lost"),
    ],
)
def test_slow_storage_may_cost_no_save(more: Record, verdict: str) -> None:
    record = saves("stepfast_blob", 1.0, 1.0, kind="slow_store", is_busy=True)
    counts = {"store": "azurite", "skipped": 0, "dropped": 0, "waited": 0, "is_newest_committed": True, **more}
    assert row_of("Stall while the save before is being persisted, slow Azurite", {**record, **counts})[4] == verdict


def test_slow_disk_shows_the_peers_beside_ours() -> None:
    counts = {"skipped": 0, "dropped": 0, "waited": 0, "is_newest_committed": True}
    records = [
        {**saves(peer, stall, kind="slow_store", is_busy=True), "store": "disk", **more}
        for peer, stall, more in (("stepfast", 1.1, counts), ("nvrx", 7.0, {}))
    ]
    name = "Stall while the save before is being persisted, slow disk"
    row = row_of(name, *records)
    assert row[1] == "plain copy 1.00 s; nvrx 7.00 s (7.00 ×)"
    words = "1.10 × (1.10 s, n=1); 0 skipped; 0 dropped; 0 waited; 0 not saved; newest committed"
    assert row[3:] == [words, "reached"]
    lost = {**records[0], "is_newest_committed": False}
    assert row_of(name, lost)[4] == "**not reached**"
    table = slowstores.table(select(records), PLAN.titles)
    assert "| NVRx | disk | 7.00 (7.00 ×) | 7.00 | 1 of 1 | 0 | — | — |" in table
    missing = {"kind": "slow_store", "peer": "stepfast", "store": "disk", "status": "missing", "error": "not root"}
    assert row_of(name, missing)[3] == "not measured: missing: not root"


def test_uploads_are_held_against_the_fastest_of_others() -> None:
    record = {
        "kind": "blob", "size_bytes": 2**30, "missing": {"obstore": "no wheel"},
        "samples": {
            "stepfast_store": [{"seconds": 1.0}, {"seconds": 9.0}, {"seconds": 2.0}],
            "stepfast_agent": [{"seconds": 4.0}], "adlfs": [{"seconds": 5.0}], "adlfs_8": [{"seconds": 3.0}],
        },
    }  # fmt: skip
    medians = blobs.medians_of(select([record]))
    assert medians == {2**30: {"stepfast_store": 2.0, "stepfast_agent": 4.0, "adlfs": 5.0, "adlfs_8": 3.0}}
    assert "1. obstore: no wheel" in trials.blob_table(select([record]))
    assert row_of("Uploaded to Azurite", record)[4] == "reached"
    row = row_of("Persisted to Azurite", record)
    assert (row[1], row[4]) == ("adlfs_8 341 MiB/s", "**not reached**")


def test_uploads_say_whose_processor_time_they_took() -> None:
    sample = {"seconds": 1.0, "client_processor_seconds": 0.25, "server_processor_seconds": 1.5}
    record = {"kind": "blob", "size_bytes": 2**30, "samples": {"adlfs": [sample], "stepfast_store": [{"seconds": 1.0}]}}
    table = trials.blob_table(select([record]))
    assert "| processor time: the sender's + Azurite's | 1.00 GiB, s |" in table
    assert "| adlfs | 0.250 + 1.50 |" in table
    assert "| stepfast_store | — + — |" in table


def test_machine_alone_shows_how_much_slower_a_first_read_is() -> None:
    reads = [[[0.001] * 19 + [0.081], [0.002] * 20, [0.001] * 20]] * 3
    writes = [{"seconds": 2.0, "lost_seconds": lost} for lost in (-0.1, 0.1, 0.2)]
    records = [
        {"kind": "control", "what": "read", "size_bytes": 2**30, "reads": reads},
        {"kind": "control", "what": "write", "size_bytes": 2**30, "writes": writes},
    ]
    lines = controls.lines(select(records))
    assert lines[2] == "| 1.00 GiB | 0.100 | 0.0200 | 5.00 × | 1.00 | 81.0 | 81.0 % |"
    assert "takes 2.00 s, of which the training loop beside it loses 5.0 % (from -5.0 % to 10.0 %, n=3)." in lines[-1]
    assert controls.lines(select([])) == ["not measured: no record of the kind `control`."]


@pytest.mark.parametrize(("peer", "persist"), [("stepfast", "10.0"), ("nvrx", "10.0"), ("torch_save", "1.50")])
def test_persist_is_from_the_return_of_a_save_that_returns_earlier(peer: str, persist: str) -> None:
    record = saves(peer, 1.0, 1.5, stamping_seconds=2.0)
    row = next(line for line in peers.peer_table(select([record]), PLAN, LAYOUT) if "1.50 (1.50 ×)" in line)
    assert row.split(" | ")[3].strip("*") == persist


def test_failure_before_a_cell_was_known_counts_until_the_kind_is_measured_again() -> None:
    broken = {"kind": "recovery", "peer": "stepfast", "status": "failed", "error": "no torch"}
    name = "Recovery on one machine, 1 rank"
    assert row_of(name, broken)[3] == "not measured: failed: no torch"
    done = [a_recovery("stepfast", 1.0), a_recovery("python", 1.0)]
    assert row_of(name, broken, MACHINE, *done)[4] == "reached"


def test_newest_run_counts_and_its_samples_are_pooled() -> None:
    records = [
        MACHINE, saves("stepfast", 5.0, 5.0), saves("torch_save", 7.0, 7.0),
        MACHINE, saves("stepfast", 1.0, 1.0), saves("stepfast", 1.0, 2.0),
    ]  # fmt: skip
    found = select(records)
    assert [len(found.of("save", peer=peer)) for peer in ("stepfast", "torch_save")] == [2, 1]
    assert len(found.machines) == 2
    assert asked.row_of(goal_named("Stall, steady"), found)[3] == "1.50 × (1.50 s, n=2)"


def test_failed_peer_shows_its_reason_and_an_absent_one_that_it_is() -> None:
    failing = saves("nvrx", status="missing", error="not installed")
    table = peers.peer_table(select([MACHINE, saves("stepfast", 1.0, 1.0), failing]), PLAN, LAYOUT)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table}
    assert "missing [1]" in lines["NVRx"]
    assert "1. nvrx: missing: not installed" in table
    assert lines["DCP save"].count("not measured") == 5
    assert lines["DCP save"].count("—") == 4  # nobody meant to measure its memory or its restores


def test_best_of_each_column_is_bold_and_the_limit_takes_no_part() -> None:
    found = select([saves("stepfast", 1.5, 1.1), saves("torch_save", 1.4, 9.0), saves("plain_copy", 1.0, 1.0)])
    lines = [line for line in peers.peer_table(found, PLAN, LAYOUT) if line.startswith("| ")]
    bold = [[cell for cell in line.strip("| ").split(" | ") if cell.startswith("**")] for line in lines]
    ours, theirs, limit = bold[2], bold[-2], bold[-1]
    assert "**1.10 (1.10 ×)**" in ours
    assert "**1.40 (1.40 ×)**" in theirs
    assert limit == []


def test_values_that_read_alike_share_the_best() -> None:
    assert markdown.bold_best([1.0, 1.0001, None, 2.0], ["1.00", "1.00", "—", "2.00"]) == [
        "**1.00**", "**1.00**", "—", "2.00",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.01234, "0.0123"), (1.2345, "1.23"), (123.4, "123"), (12345.6, "12,346")]
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert markdown.number(value) == text


def test_plan_holds_what_the_suite_measures() -> None:
    plan = expected(is_quick=False)
    assert plan.layouts == Layouts(large=["gpt:1", "gpt:4"], small=["small:20000"])
    assert {("save", "plain_copy", "gpt:4"), ("kill", "stepfast", "gpt:0.5"), ("ddp", "dcp_save", "gpt:0.25")} <= (
        plan.cells
    )


def test_page_and_plots_are_written_and_are_the_same_again(tmp_path: Path) -> None:
    results, out = tmp_path / "results.jsonl", tmp_path / "pages" / "performance.md"
    simulated = [
        {"kind": "goodput", **goodput.measure(trace, system, policy, node_lost=0.21, seeds=1, costs=Costs())}
        for trace in all_traces()[:1]
        for system in System
        for policy in ("1 h", "auto")
    ]
    records = [MACHINE, saves("stepfast", 1.0, 1.0), saves("nvrx", status="hung", error="a | b"), *simulated]
    results.write_text("".join(json.dumps(record) + "\n" for record in records))
    scale.add_all(results, nodes=(4,))
    out.parent.mkdir()
    out.with_suffix(".notes.md").write_text("The disk was slow.\n")

    write_report(results, out)

    page = out.read_text()
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles[0] == "## Asked and measured"
    assert page.endswith("## Where a goal is not reached\n\nThe disk was slow.\n")
    assert "1. nvrx: hung: a | b" in page
    assert "2023-11-14: 2 × some, 24 GiB" in page
    plots = {path: path.read_bytes() for path in out.with_suffix("").glob("*.svg")}
    assert {path.name for path in plots} >= {"stall-gpt-1.svg", "lost.svg", "goodput.svg"}
    assert all(f"performance/{path.name}" in page for path in plots)

    write_report(results, out)
    assert {path: path.read_bytes() for path in plots} == plots
    assert out.read_text() == page


def test_page_of_no_records_says_that_nothing_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "performance.md"
    write_report(tmp_path / "none.jsonl", out)
    page = out.read_text()
    assert "not measured: there is nothing to plot." in page
    assert "Nothing was written about them yet." in page


def test_error_names_a_file_and_not_where_it_lay() -> None:
    error = """[rank0]: File "/home/me/.venv/lib/torch/storage.py", line 4
        '/tmp/cell-1/step-2/.metadata': 1/2 of </torch_22_33>"""
    assert told(error) == "[rank0]: File \"…/storage.py\", line 4 '…/.metadata': 1/2 of </torch_22_33>"
