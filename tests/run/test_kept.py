"""Commands that use a run name it as the shell needs it where it stands."""

from pathlib import Path

from unpad.recipes.file import find_recipe
from unpad.run.kept import what_next


def test_a_run_under_runs_is_called_by_its_name_however_its_path_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (Path("runs/mine"), Path("elsewhere/mine")):
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_bytes(find_recipe("zh_chat").read_bytes())
    for folder in (Path("runs/mine"), tmp_path / "runs" / "mine"):
        assert what_next(folder) == ["next:  unpad chat mine", "       unpad eval mine", "       unpad runs mine"]
    assert what_next(Path("elsewhere/mine"))[0] == "next:  unpad chat elsewhere/mine"
