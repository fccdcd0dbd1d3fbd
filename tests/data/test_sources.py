"""Every file of a recipe is listed, and the package's own are marked."""

from unpad.data.family import source_lines
from unpad.recipes.file import load_recipe, parse_recipe


def test_packaged_files_are_marked_and_given_ones_are_not():
    assert source_lines(load_recipe("zh_chat")) == [
        "reads data.text: unpad:examples/zh/facts.jsonl (comes with unpad)",
        "reads data.chat: unpad:examples/zh/chat.jsonl (comes with unpad)",
    ]
    assert source_lines(load_recipe("images", ["data.images=mine"])) == ["reads data.images: mine"]
    events = source_lines(load_recipe("events", ["data.events=mine.csv", "events.labels.path=unpad:deaths.csv"]))
    assert events == ["reads data.events: mine.csv", "reads events.labels.path: unpad:deaths.csv (comes with unpad)"]


def test_names_of_patients_files_stay_off_the_screen(tmp_path):
    (tmp_path / "4711.csv").write_text("minute,variable,value\n")
    assert source_lines(parse_recipe({"data": {"events": str(tmp_path)}})) == [f"reads data.events: {tmp_path}"]
