"""A lost and a gained agent of torchrun: seconds until the run goes on, and its bytes against those of a calm run.

    python benchmarks/elastic.py                  # all cases, some two minutes of two cores
    python benchmarks/elastic.py lost --write     # also writes the table of docs/internals/several_processes.md

Every agent has one process, as if it were a host of its own. Exit code 1 if the bytes differ or an agent fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from equal_processes import digests, write_table

from tests.helpers.toy import write_toy

RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
LIMIT_S = 240.0


class Agents:
    """Agents of torchrun that train one run.

    Args:
        folder: of the run; its parent has the recipe.
    """

    def __init__(self, folder: Path, nodes: str, processes: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder, self.running = folder, list[subprocess.Popen[bytes]]()
        self._options = [
            *("--nnodes", nodes, "--nproc-per-node", str(processes), "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", folder.name),
            *("--rdzv-conf", RENDEZVOUS, "--monitor-interval", "0.1"),
        ]

    def start(self) -> None:
        """Start one more agent; every attempt resumes the run, or begins it."""
        command = [sys.executable, "-m", "torch.distributed.run", *self._options, "-m", "unpad", "train"]
        recipe = [str(self.folder.parent / "toy.yaml"), "--out", str(self.folder), "--resume"]
        log = self.folder.with_suffix(f".{len(self.running)}.txt").open("wb")
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.running.append(subprocess.Popen([*command, *recipe], env=environment, stdout=log, stderr=log))

    def kill(self) -> None:
        """Kill the last agent and its processes, as a host that is switched off."""
        agent = self.running.pop()
        for pid in [*children(agent.pid), agent.pid]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def steps(self) -> int:
        """Updates so far."""
        try:
            rows = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return 0
        return sum('"kind": "train"' in row for row in rows)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something holds."""
        latest = time.monotonic() + LIMIT_S
        while not ready():
            if time.monotonic() > latest:
                raise TimeoutError(f"{self.folder.name}: nothing happens at update {self.steps()}")
            time.sleep(0.05)

    def events(self, kind: str) -> list[dict[str, object]]:
        """Entries of a kind in the log of the run."""
        rows = (self.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return [row for row in map(json.loads, rows) if row["kind"] == kind]


def children(pid: int) -> list[int]:
    """Ids of the processes that a process has started."""
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in out.split()]


def restarted(agents: Agents) -> None:
    """One agent with two processes loses one of them."""
    agents.start()
    agents.wait(lambda: agents.steps() > 40)
    os.kill(children(agents.running[0].pid)[-1], signal.SIGKILL)


def lost(agents: Agents) -> None:
    """The second of two agents is killed with its process."""
    agents.start()
    time.sleep(1.0)
    agents.start()
    agents.wait(lambda: agents.steps() > 40)
    agents.kill()


def gained(agents: Agents) -> None:
    """A second agent joins the first."""
    agents.start()
    agents.wait(lambda: agents.steps() > 40)
    agents.start()


CASES = {
    "restarted": (restarted, "1", 2, "one of two processes killed, both restarted"),
    "lost": (lost, "1:2", 1, "one of two agents lost, one process goes on"),
    "gained": (gained, "1:2", 1, "an agent gained, two processes go on"),
}


def measure(name: str, folder: Path, expected: dict[str, str]) -> str:
    """Run a case to its end, and return its row of the table."""
    act, nodes, processes, words = CASES[name]
    agents = Agents(folder / name, nodes, processes)
    try:
        act(agents)
        at, known = time.time(), len(agents.events("resumed"))
        agents.wait(lambda: len(agents.events("resumed")) > known)
        event = agents.events("resumed")[-1]
        seconds = datetime.fromisoformat(str(event["time"])).timestamp() - at
        agents.wait(lambda: all(agent.poll() is not None for agent in agents.running))
        codes = [agent.returncode for agent in agents.running]
    finally:
        for agent in agents.running:
            for pid in [*children(agent.pid), agent.pid] if agent.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
    if any(codes) or digests(folder / name) != expected:
        raise SystemExit(f"FAILED: {name} ended with {codes}" + (" and other bytes" if not any(codes) else ""))
    row = f"| {words} | {seconds:.0f} s | equal |"
    print(row, flush=True)
    return row


def main() -> None:
    """Measure the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="cases; default all", default=list(CASES))
    parser.add_argument("--write", action="store_true", help="write the table into docs/internals/several_processes.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        root = str(Path(__file__).parents[1])
        os.environ |= {"UNPAD_CACHE": str(folder / "cache"), "PYTHONPATH": root}
        stages = [{"name": "pretrain", "use": ["text"], "train": {"max_epochs": 60}}]
        write_toy(
            folder,
            plan={"tokens_per_step": 80, "tokens_per_micro": 40},
            checkpoint={"every": 10**6, "every_seconds": 1},
            stages=stages,
            train={"threads": 1, "eval_every": 200},
        )
        calm = [sys.executable, "-m", "unpad", "train", "toy.yaml", "--out", str(folder / "calm")]
        subprocess.run(calm, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = [measure(case, folder, digests(folder / "calm")) for case in options.cases]
    if options.write:
        write_table("elastic", ["| event | until the run goes on | bytes |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
