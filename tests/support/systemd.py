"""Our own systemd, as the first process of a small machine: separate namespaces on top of this machine's files.

Its writes stay in memory and vanish with it. It has the network of this machine, so it reaches
the servers of tests/support. It runs no unit of this machine, only the units of a test.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import psutil

from tests.support import processes
from tests.support.processes import Family

PATHS: Final = ("/opt/checkout", "/opt/packages")
"""The places of this checkout and of its Python's packages inside the machine."""
SYSTEMD: Final = Path("/usr/lib/systemd/systemd")
UNITS: Final = "/etc/systemd/system"
_CHECKOUT: Final = Path(__file__).parents[2]
_PACKAGES: Final = next(path for path in sys.path if path.endswith("site-packages"))
_ENVIRON: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "SYSTEMD_UNIT_PATH": f"{UNITS}:/run/targets",
    "SYSTEMD_PAGER": "",
    "container": "delayer-test",
}
_APART: Final = ("--mount", "--pid", "--fork", "--uts", "--ipc", "--cgroup")
# Runs in separate namespaces. $1 is an empty directory, $2 the checkout, $3 the packages of its Python: a hardened
# service may not see those two at their usual paths. The only thing on the host that the machine can write to is its
# control groups, below the group that started this.
_MACHINE: Final = r"""
set -e
cd "$1"
mount -t tmpfs -o mode=755 machine .
cd "$1" && mkdir written work root
mount -t overlay -o "lowerdir=/,upperdir=written,workdir=work" machine root
mount -t proc proc root/proc
mount --bind root/proc/sys root/proc/sys && mount -o remount,bind,ro root/proc/sys
mount -t sysfs -o ro sysfs root/sys
mount -t cgroup2 cgroup2 root/sys/fs/cgroup
mount -t tmpfs -o mode=755 dev root/dev
mkdir root/dev/pts root/dev/shm
for device in null zero full random urandom tty; do
    touch "root/dev/$device" && mount --bind "/dev/$device" "root/dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts root/dev/pts && ln -s pts/ptmx root/dev/ptmx
for place in dev/shm tmp; do mount -t tmpfs -o mode=1777 "$place" "root/$place"; done
for place in run etc/systemd/system usr/lib/systemd/system-generators; do
    mount -t tmpfs -o mode=755 "$place" "root/$place"
done
mkdir -p root/run/targets root/run/host root/opt/checkout root/opt/packages
mount --bind "$2" root/opt/checkout && mount --bind "$3" root/opt/packages
for target in sysinit basic shutdown multi-user; do
    cp "/usr/lib/systemd/system/$target.target" root/run/targets/
done
pivot_root root root/run/host
cd / && umount -l /run/host
# Like a container manager: systemd mounts credentials in a namespace of their own, and they must come here.
mount --make-rshared /
exec /usr/lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=no
"""


def missing() -> str:
    """The reason why this machine can run no systemd of our own; empty if it can."""
    if os.geteuid() != 0:
        return "only root can have a systemd of its own"
    if not SYSTEMD.is_file() or any(shutil.which(program) is None for program in ("unshare", "nsenter", "systemctl")):
        return "systemd is not installed"
    try:
        place = _control_group()
        place.mkdir()
        place.rmdir()
    except (OSError, StopIteration) as error:
        return f"no control groups for a systemd of our own: {error!r}"
    tried = subprocess.run(["unshare", *_APART, "true"], capture_output=True, text=True, timeout=20, check=False)
    return tried.stderr.strip()


def _control_group() -> Path:
    """The path for a new control group below ours."""
    ours = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    root = next(Path(place) for _, place, kind, *_ in mounts if kind == "cgroup2")
    return root / ours.removeprefix("0::/") / f"delayer-test-{os.getpid()}"


class Machine:
    """A machine that runs inside its ``with`` block; the end of the block removes all of it."""

    def __enter__(self) -> Self:
        self._group = _control_group()
        self._group.mkdir()
        self._directory = processes.make_directory()
        (self._directory / "machine").mkdir()
        enter = f'echo $$ > {shlex.quote(str(self._group / "cgroup.procs"))} && exec "$@"'
        self._family = Family(
            ["sh", "-c", enter, "sh", "unshare", *_APART, "--kill-child", "--propagation", "private",
             "bash", "-c", _MACHINE, "machine", self._directory / "machine", _CHECKOUT, _PACKAGES],
            env=_ENVIRON, cwd=self._directory, log=self._directory / "systemd.log",
        )  # fmt: skip
        try:
            self._family.wait_ready(self._up, "systemd", timeout=30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._family.kill()
        for place in sorted(self._group.rglob("*/"), reverse=True):
            if place.is_dir():
                place.rmdir()
        with suppress(FileNotFoundError):
            self._group.rmdir()
        processes.remove_directory(self._directory)

    @property
    def log(self) -> str:
        return processes.tail(self._family.log)

    def _pid(self) -> int:
        return psutil.Process(self._family.pid).children()[0].pid

    def _up(self) -> bool:
        try:
            name = psutil.Process(self._pid()).name()
        except (IndexError, psutil.NoSuchProcess):
            return False
        return name == "systemd" and self.run("systemctl", "is-active", "basic.target", check=False).returncode == 0

    def file(self, inside: str) -> Path:
        """The path of a machine's file from outside."""
        return Path(f"/proc/{self._pid()}/root") / inside.lstrip("/")

    def run(self, *argv: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program in it. With ``check``, a failure raises AssertionError with the output and the log."""
        done = subprocess.run(
            ["nsenter", f"--target={self._pid()}", "--all", *argv],
            env=_ENVIRON, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{shlex.join(argv)}: {done.stdout}{done.stderr}\n{self.log}"
        return done

    def shown(self, unit: str, *properties: str) -> dict[str, str]:
        """The properties of a unit by `systemctl show`."""
        told = self.run("systemctl", "show", "--property", ",".join(properties), unit).stdout
        return dict(line.partition("=")[::2] for line in told.splitlines())

    def signal(self, unit: str, number: signal.Signals) -> None:
        """Send a signal to the main process of a unit."""
        self.run("systemctl", "kill", "--kill-who=main", f"--signal={number.name}", unit)

    def install(self, program: str, lines: Sequence[str]) -> None:
        """Write an executable file."""
        place = self.file(program)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("\n".join(lines) + "\n")
        place.chmod(0o755)

    def __repr__(self) -> str:
        return f"Machine({self._directory})"
