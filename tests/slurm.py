"""A SLURM of this machine alone: munged, slurmctld and three slurmd on loopback, all in one folder and stopped with the test.

`cpu1` is in the partition `cpu`; `gpu1` and `gpu2` are in `gpu`, each with one GPU that is no GPU (`/dev/zero`). Needs root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NODES = ("cpu1", "gpu1", "gpu2")
LIMIT_S = 20
CONF = """\
ClusterName=rungs
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed
MpiDefault=none
PlugStackConfig={folder}/plugstack.conf
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
GresTypes=gpu
NodeName=cpu1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[0]} CPUs={cpus} RealMemory={memory}
NodeName=gpu1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs={cpus} RealMemory={memory} Gres=gpu:1
NodeName=gpu2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs={cpus} RealMemory={memory} Gres=gpu:1
PartitionName=cpu Nodes=cpu1 MaxTime=60 State=UP
PartitionName=gpu Nodes=gpu1,gpu2 MaxTime=600 State=UP
"""
# The executor plugin calls srun without any SLURM_ variable, and then it would look for /etc/slurm/slurm.conf.
SRUN = """\
#!/bin/sh
SLURM_CONF={conf} exec {real} "$@"
"""
# The plugin asks whether a job has ended after 1 s, 11 s, 21 s, ...: it is answered when one has.
SQUEUE = """\
#!/bin/sh
for _ in $(seq 150); do
  answer=$({real} "$@")
  case "$answer" in *"|PENDING"* | *"|RUNNING"* | *"|COMPLETING"* | *"|CONFIGURING"*) sleep 0.2 ;; *) break ;; esac
done
echo "$answer"
"""
GRES = "NodeName=gpu1 Name=gpu Count=1 File=/dev/zero\nNodeName=gpu2 Name=gpu Count=1 File=/dev/zero\n"


def missing() -> str:
    """Why SLURM cannot be started here; empty where it can."""
    if absent := [name for name in PROGRAMS if not shutil.which(name, path=SEARCH)]:
        return f"{', '.join(absent)} missing: as root, `apt-get install slurmctld slurmd slurm-client munge`"
    return "" if os.geteuid() == 0 else "SLURM's daemons start jobs for users, which only root may"


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch finds this SLURM. Every daemon is ended on leaving, also after a failure."""
    folder.mkdir(mode=0o755)
    with ExitStack() as daemons:
        _start_munge(folder, daemons)
        _write_config(folder)
        environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folder}/bin{os.pathsep}{SEARCH}"}
        _start(daemons, folder, "slurmctld", ["-D", "-c", "-f", str(folder / "slurm.conf")])
        for node in NODES:
            _start(
                daemons, folder, "slurmd", ["-D", "-N", node, "-f", str(folder / "slurm.conf")], log=f"slurmd-{node}"
            )
        states = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        _wait(folder, "the nodes", lambda: _asked(states, environment).count(" idle") == len(NODES))
        yield environment


def _start_munge(folder: Path, daemons: ExitStack) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "seed")]
    socket_file = folder / "munge.socket"
    arguments = ["--foreground", "--force", f"--key-file={key}", f"--socket={socket_file}", *files]
    _start(daemons, folder, "munged", [*arguments, f"--log-file={folder}/munged.log"])
    _wait(folder, "munged", socket_file.exists)


def _write_config(folder: Path) -> None:
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20) * 9 // 10
    known = {"host": host, "controller": controller, "ports": ports, "folder": folder, "memory": memory}
    (folder / "slurm.conf").write_text(CONF.format(**known, cpus=os.cpu_count()))
    (folder / "gres.conf").write_text(GRES)
    (folder / "plugstack.conf").write_text("")
    for name, script in (("srun", SRUN), ("squeue", SQUEUE)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script.format(conf=folder / "slurm.conf", real=shutil.which(name, path=SEARCH)))
        path.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def _start(daemons: ExitStack, folder: Path, name: str, arguments: list[str], log: str = "") -> None:
    program = shutil.which(name, path=SEARCH)
    assert program
    with (folder / f"{log or name}.out").open("wb") as output:
        started = subprocess.Popen([program, *arguments], stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    daemons.callback(_stop, started)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=1)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _asked(argv: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(argv, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S)
    return done.stdout


def _wait(folder: Path, what: str, there) -> None:
    end = time.monotonic() + LIMIT_S
    while not there():
        if time.monotonic() > end:
            said = "".join(path.read_text(errors="replace")[-800:] for path in sorted(folder.glob("*.out")))
            raise TimeoutError(f"{what} did not come up within {LIMIT_S} s: {said}")
        time.sleep(0.1)
