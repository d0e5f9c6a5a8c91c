"""A real SLURM cluster of two virtual nodes on this machine, without a service manager, keys, cgroups or accounting."""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.stores.seaweed import free_ports

READY_WITHIN_SECS = 60.0

_CONF = """
ClusterName=ft
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
JobRequeue=1
KillWait=30
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=low  Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1  PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL Default=NO  MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """Runs within a ``with``; then no daemon, job or step of it is left.

    Args:
        place: A directory of its own, made if need be.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}

    def __enter__(self) -> Cluster:
        for name in ("state", "spool"):
            (self.place / name).mkdir(parents=True, exist_ok=True)
        conf = self.place / "slurm.conf"
        conf.write_text(_CONF.format(place=self.place, ports=free_ports(3)))
        try:
            self.call("slurmctld", "-c", "-f", str(conf))
            for node in ("n1", "n2"):
                self.call("slurmd", "-N", node, "-f", str(conf))
            self._await(lambda: self.call("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle", "idle"])
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        with suppress(subprocess.SubprocessError):
            self.call("scancel", "-f", "-u", "root")
            self._await(lambda: not self.call("squeue", "-h", "-t", "R,CG").strip())
        for name in ("slurmd-n1", "slurmd-n2", "slurmctld"):
            pid = self.place / f"{name}.pid"
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                os.kill(int(pid.read_text()), 15)
        self._await(lambda: not list(self.place.glob("*.pid")))

    def _await(self, condition: object) -> None:
        deadline = time.monotonic() + READY_WITHIN_SECS
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, (self.place / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.05)

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", "-o", number)))

    def lift_hold(self, number: str) -> None:
        """A job that was queued again may start; SLURM would hold it back for two minutes."""
        with suppress(subprocess.CalledProcessError):  # it is running by now
            self.call("scontrol", "update", f"JobId={number}", "StartTime=now")
