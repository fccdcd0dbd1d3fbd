"""Commands that several processes must not run as one does."""

import pytest
import torch

from unpad.errors import RecipeError
from unpad.processes.group import joined
from unpad.processes.worker import started_by_torchrun


@pytest.fixture(autouse=True)
def _by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")


def test_processes_that_would_each_choose_a_run_directory_are_refused(unpad):
    done = unpad("train", "zh_chat")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[1:] == ["  at: --out", "  do: name one with --out, which all of them can reach"]


def test_fewer_gpus_than_processes_are_refused(unpad, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = unpad("train", "zh_chat", "--out", "run", code=2)
    assert "2 processes of this machine need a GPU each, and it has 1" in done.err


def test_a_number_of_processes_without_a_rank_is_of_another_program(monkeypatch):
    assert started_by_torchrun()
    monkeypatch.delenv("RANK")
    assert not started_by_torchrun()


def test_a_process_of_torchrun_starts_no_processes(unpad):
    done = unpad("train", "zh_chat", "--out", "run", "--processes", "2", code=2)
    assert "at: --processes" in done.err


@pytest.mark.promise("processes.joins")
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"},
            "srun --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "host: torchrun --nnodes 1 --nproc-per-node 3 --rdzv"),
        ({"PMI_SIZE": "3"}, "host: torchrun --nnodes 1 --nproc-per-node 3 --rdzv"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ""),  # the script of a job
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, ""),  # srun --pty
        ({"SLURM_STEP_NUM_TASKS": "8", "RANK": "0"}, ""),  # a run by each
    ],
)
def test_processes_of_srun_and_mpirun_do_not_train_a_run_each(unpad, monkeypatch, variables, line):
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not line:
        with joined() as group:
            assert group.size == 1
        return
    for more in ([], ["--processes", "2"]):
        assert line in unpad("train", "zh_chat", "--out", "run", *more, code=2).err
    with pytest.raises(RecipeError), joined():
        pass
