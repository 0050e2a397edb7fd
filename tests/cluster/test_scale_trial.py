"""The trial of `make bench-scale` with a handful of jobs: every step of it runs, and what must hold without regard to
time does.
"""

from __future__ import annotations

from pathlib import Path

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.fixtures import loudly
from testcluster.simulation import SimulatedCluster
from testoperator.running import run_to_end
from testscale.report import STRETCHES, describe
from testscale.trial import Size, Trial


def test_handful_of_jobs_goes_through_every_step_and_nothing_is_written_when_nothing_changes(tmp_path: Path) -> None:
    with loudly():
        cluster = SimulatedCluster(Claim.take(), Binaries.find_with_kwok())
    size = Size(jobs=4, pods=2, nodes=8, large=6, seconds=5.0, failures=2)
    try:
        cluster.up()
        findings = run_to_end(Trial(cluster, tmp_path, size, print).run())
    finally:
        cluster.down()
    stretches = findings.stretches
    assert list(stretches) == list(STRETCHES)
    assert stretches["quiet"].changes == []
    assert stretches["create"].requests["create pods"] == size.jobs * size.pods, "each pod is made once"
    assert stretches["fail"].requests["create pods"] == size.failures * size.pods
    assert stretches["large restart"].requests["create pods"] == size.large
    assert stretches["train"].requests.keys() & {"create pods", "delete pods", "create services"} == set()
    assert all(code == "409 create services" for stretch in stretches.values() for code in stretch.refused)
    assert "| goal | wanted | measured | met |" in describe(findings, "a machine", "2026-01-01")
