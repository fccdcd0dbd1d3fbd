"""What those who change unpad are given: hooks that run the linters, and templates that ask for what a report needs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.promise("versions.hooks")
def test_hooks_before_a_commit_run_the_commands_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    lines = [line.strip().removeprefix("@").replace("$(VENV)", ".venv") for line in recipe[1].splitlines()]
    commands = [line.partition(" || ")[0] for line in lines]  # what follows is for a machine that is too busy
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == commands
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in repository["hooks"])


@pytest.mark.promise("versions.hooks")
def test_a_report_is_asked_for_version_recipe_and_error():
    for name in ("fault", "wish"):
        _, head, text = read(f".github/ISSUE_TEMPLATE/{name}.md").split("---\n", 2)
        assert yaml.safe_load(head).keys() == {"name", "about"}
        assert "`unpad --version`" in text
    fault = read(".github/ISSUE_TEMPLATE/fault.md")
    assert all(word in fault for word in ("recipe", "Error", "exit code", "SECURITY.md"))
