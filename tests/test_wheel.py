"""The wheel: what is in it, and the command installed from it in a fresh environment outside the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.helpers.paths import needs_kernels
from tests.helpers.toy import write_toy

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
KERNELS = "unpad/nn/native/_kernels" + sysconfig.get_config_var("EXT_SUFFIX")
PLATFORM = sysconfig.get_platform()


def run(folder: Path, *command: str | Path, **environment: str) -> str:
    """Standard output of a command that must succeed, without this checkout on its path."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "UNPAD_NATIVE")}
    variables |= {"OMP_NUM_THREADS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project with a library of another platform in its sources, and an older build."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "unpad", folder / "unpad", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "unpad/nn/native/_kernels.cpython-310-riscv64-linux-gnu.so").write_text("of another platform")
    for kind in ("lib", f"lib.{PLATFORM}-{sys.implementation.cache_tag}"):
        old = folder / "build" / kind / "unpad/models/of_an_earlier_version.py"
        old.parent.mkdir(parents=True)
        old.touch()
    return folder


def make_wheel(project: Path, **environment: str) -> Path:
    environments = project / ".venv"  # a name that make can hold: it takes a path with a blank for two
    environments.symlink_to(sys.prefix)
    run(project, "make", "wheel", **environment)
    (wheel,) = (project / "dist").iterdir()
    return wheel


def contents(wheel: Path) -> set[str]:
    """Files of a wheel, without those that describe it."""
    with ZipFile(wheel) as file:
        names = set(file.namelist())
    described = {name for name in names if ".dist-info/" in name}
    assert {"LICENSE", "METADATA", "RECORD"} <= {Path(name).name for name in described}
    return names - described


def package_files() -> set[str]:
    """Files of the package in this checkout."""
    files = (path for path in (ROOT / "unpad").rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc"))
    return {path.relative_to(ROOT).as_posix() for path in files}


def install(wheel: Path, folder: Path, extras: str = "") -> Path:
    """Install a wheel into a fresh environment that sees the libraries of this one; return its folder of commands."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shared = folder / "shared"
    shared.mkdir()
    for library_folder in (Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")):
        for entry in library_folder.iterdir():
            if "unpad" not in entry.name and entry.suffix != ".pth" and not (shared / entry.name).exists():
                (shared / entry.name).symlink_to(entry)
    (site / "shared.pth").write_text(f"{shared}\n")
    python = folder / "bin/python"
    options = ("install", "--quiet", "--no-compile")
    run(folder, sys.executable, "-m", "pip", "--python", python, *options, f"{wheel}{extras}")
    return folder / "bin"


@pytest.mark.nightly
@pytest.mark.promise("install.wheel")
@needs_kernels
def test_the_wheel_of_this_platform_has_the_whole_package_and_its_own_kernels_and_trains_by_them(project, tmp_path):
    # The library of this checkout, newer than its sources, so that it is not compiled again.
    built = project / "build" / f"lib.{PLATFORM}-{sys.implementation.cache_tag}" / KERNELS
    built.parent.mkdir(parents=True)
    shutil.copy(ROOT / KERNELS, built)
    wheel = make_wheel(project)
    assert wheel.name.endswith(f"-{PLATFORM.replace('-', '_')}.whl")
    assert contents(wheel) == package_files() | {KERNELS}

    commands = install(wheel, tmp_path / "fresh", extras="[hf]")
    assert run(tmp_path, commands / "unpad", "--version") == f"unpad {VERSION}\n"
    where = run(tmp_path, commands / "python", "-c", "import unpad; print(unpad.__file__)")
    assert Path(where).is_relative_to(tmp_path / "fresh")
    assert "zh_chat" in run(tmp_path, commands / "unpad", "recipes")
    few = ["train.max_steps=2", "model.blocks=1", "model.width=32", "model.heads=2", "precision=fp32"]
    trained = run(tmp_path, commands / "unpad", "train", "zh_chat", "--out", "run", *few, UNPAD_CACHE=str(tmp_path))
    assert "native kernels (" in trained
    assert (tmp_path / "run/checkpoints/best/model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.promise("install.wheel")
def test_without_a_compiler_the_wheel_is_for_every_platform_and_its_runs_say_what_computes_them(project, tmp_path):
    wheel = make_wheel(project, CC="/no/compiler", CXX="/no/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert contents(wheel) == package_files()
    commands = install(wheel, tmp_path / "fresh")
    recipe = write_toy(tmp_path / "toy")
    trained = run(tmp_path, commands / "unpad", "train", recipe, "--out", "run", "train.max_steps=2")
    assert trained.count("torch kernels (not compiled: ") == 1
