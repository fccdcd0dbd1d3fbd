"""Runs of images, of questions about images and of patients: answers are those of `unpad infer` and `unpad embed`."""

import base64
import io
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers.families import SHORT, Finished, merged
from tests.helpers.families import questions as recipe_of
from tests.helpers.questions import SMALL
from tests.helpers.serving import Running, heard, instances, running, wait_for
from tests.helpers.toy import run
from unpad.inference.embed import embed_file
from unpad.inference.images import ask, classify
from unpad.inference.loaded import load
from unpad.recipes.data import EventSource
from unpad.run.report.samples import keep_samples
from unpad.serving import patients as module
from unpad.serving import pictures as reading
from unpad.serving import routes, served

KIND = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def images(finished: Finished) -> Iterator[Running]:
    with running(finished("images").run, name="pictures") as made:
        yield made


@pytest.fixture(scope="module")
def questions(finished: Finished) -> Iterator[Running]:
    with running(finished("questions").run, name="asks") as made:
        yield made


@pytest.fixture(scope="module")
def patients(finished: Finished) -> Iterator[Running]:
    with running(finished("patients").run, name="events") as made:
        yield made


def pictures(finished: Finished, family: str) -> list[Path]:
    folder = finished(family).recipe.parent / "pictures"
    return sorted(path for path in folder.rglob("*") if path.suffix == ".png")[:12]


def refused(answer: Any, status: int, code: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    assert found["code"] == code
    assert "/proc" not in found["message"]
    assert "/tmp" not in found["message"]
    return found


# --------------------------------------------------------------------------- images


@pytest.mark.promise("serving.alone")
def test_classes_are_those_of_infer_together_and_alone_bit_for_bit(images, finished):
    paths = pictures(finished, "images")
    told = classify(load(finished("images").run), paths)
    expected = [[{"label": name, "score": p} for name, p in answer.top] for answer in told]

    def ask(path: Path) -> Any:
        return images.client.post("/v1/classify", content=path.read_bytes(), headers=KIND).json()

    assert [ask(path) for path in paths] == expected
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ask, path) for path in paths]
        assert [one.result() for one in waiting] == expected
    inputs = [base64.b64encode(path.read_bytes()).decode() for path in paths]
    assert images.post("/v1/classify", {"inputs": inputs}).json() == expected
    top = {"inputs": inputs[0], "parameters": {"top_k": 1}}
    assert images.post("/v1/classify", top).json() == expected[0][:1]


def test_images_that_wait_join_in_one_pass(images, finished, monkeypatch):
    passes: list[int] = []
    inner = routes.classes_of
    monkeypatch.setattr(routes, "classes_of", lambda run, given: (passes.append(len(given)), inner(run, given))[1])
    paths = pictures(finished, "images")[:6]
    with ThreadPoolExecutor(6) as pool:
        with images.held():
            asked = [
                pool.submit(images.client.post, "/v1/classify", content=path.read_bytes(), headers=KIND)
                for path in paths
            ]
            wait_for(lambda: images.service.num_open == 6)
        assert {one.result().status_code for one in asked} == {200}
        assert passes == [6]
        inputs = [base64.b64encode(paths[0].read_bytes()).decode()] * 20
        assert len(images.post("/v1/classify", {"inputs": inputs}).json()) == 20
    assert passes == [6, 8, 8, 4], "so that a request of many leaves room between its passes"


def test_large_pictures_wait_for_each_other_alone(images, finished, monkeypatch):
    content, go_on = pictures(finished, "images")[0].read_bytes(), threading.Event()
    with Image.open(io.BytesIO(content)) as small:
        monkeypatch.setattr(reading, "LARGE", small.width * small.height)
        small.resize((small.width + 8, small.height)).save(larger := io.BytesIO(), "png")
    images.service._large.submit(go_on.wait, 60)
    with ThreadPoolExecutor(3) as pool:
        post = partial(pool.submit, images.client.post, "/v1/classify", headers=KIND)
        large = [post(content=larger.getvalue()) for _ in range(3)]
        wait_for(lambda: images.service._large._work_queue.qsize() == 3)
        assert images.client.post("/v1/classify", content=content, headers=KIND).status_code == 200
        go_on.set()
        assert {one.result().status_code for one in large} == {200}


def test_the_client_of_hugging_face_reads_the_classes(images, finished):
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(model=f"{images.url}/v1/classify", token="none")
    path = pictures(finished, "images")[0]
    assert [one.label for one in client.image_classification(str(path))] == [
        one["label"] for one in images.client.post("/v1/classify", content=path.read_bytes(), headers=KIND).json()
    ]
    assert len(client.image_classification(path.read_bytes(), top_k=1)) == 1


def test_details_say_what_is_doubtful(images, finished):
    content = pictures(finished, "images")[0].read_bytes()
    answer = images.client.post("/v1/classify?details=1", content=content + b"rest", headers=KIND).json()
    assert set(answer) == {"top", "notes", "mark", "fault"}
    assert answer["notes"] == ["bytes after the end of the image are ignored"]
    broken = images.client.post("/v1/classify?details=1", content=b"no image", headers=KIND).json()
    assert (broken["top"], broken["fault"].partition(" ")[0]) == ([], "E_FORMAT")
    facts = images.get("/v1/models").json()["data"][0]["unpad"]
    assert (facts["kind"], facts["classes"]) == ("images", ["dark", "light"])


def test_an_image_that_cannot_be_used_is_refused_with_the_code_of_infer(images, finished):
    content = pictures(finished, "images")[0].read_bytes()
    good = base64.b64encode(content).decode()
    for bad, code in ((b"no image", "E_FORMAT"), (content[:-20], "E_TRUNCATED"), (b"", "E_EMPTY")):
        refused(images.client.post("/v1/classify", content=bad, headers=KIND), 400, code)
        found = refused(images.post("/v1/classify", {"inputs": [good, base64.b64encode(bad).decode()]}), 400, code)
        assert found["param"] == "inputs[1]"
    blank = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(blank, "PNG")
    refused(images.client.post("/v1/classify", content=blank.getvalue(), headers=KIND), 400, "E_BLANK")
    refused(images.post("/v1/classify", {"inputs": "!"}), 400, "invalid_base64")
    url = refused(images.post("/v1/classify", {"inputs": f"data:image/png;base64,{good}"}), 400, "invalid_base64")
    assert "without data:" in url["message"]
    refused(images.post("/v1/classify", {"inputs": 5}), 400, None)
    refused(images.post("/v1/classify", {}), 400, None)
    refused(images.client.post("/v1/classify", content=content, headers={"Content-Type": "text/plain"}), 415,
            "unsupported_media_type")  # fmt: skip
    refused(images.chat(), 404, "wrong_route")


# --------------------------------------------------------------------------- questions about images


def question(path: Path, text: str, **fields: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], **fields}


@pytest.mark.promise("serving.alone")
def test_answers_about_images_are_those_of_infer_together_and_alone(questions, finished):
    paths = pictures(finished, "questions")[:6]
    told = [answer.text for answer in ask(load(finished("questions").run), paths, "什么颜色？")]

    def served(path: Path) -> str:
        answer = questions.post("/v1/chat/completions", question(path, "什么颜色？"))
        return answer.json()["choices"][0]["message"]["content"]

    assert [served(path) for path in paths] == told
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(served, paths)) == told


def test_a_served_question_has_the_marks_of_infer(questions, finished, tmp_path):
    with Image.open(pictures(finished, "questions")[0]) as known:
        known.convert("RGBA").resize((200, 90)).save(tmp_path / "unlike.png")
    [told] = ask(load(finished("questions").run), [tmp_path / "unlike.png"], "什么颜色？")
    answer = questions.post("/v1/chat/completions", question(tmp_path / "unlike.png", "什么颜色？")).json()
    assert told.mark
    assert told.mark in answer["unpad"]["warnings"]


def test_a_question_has_one_image_that_can_be_used(questions, finished):
    path = pictures(finished, "questions")[0]
    chat = "/v1/chat/completions"
    refused(questions.chat("什么颜色？"), 400, None)
    body = question(path, "什么颜色？")
    body["messages"][0]["content"][1]["image_url"]["url"] = "https://a.org/cat.png"
    assert "data URL" in refused(questions.post(chat, body), 400, "invalid_image_url")["message"]
    body["messages"][0]["content"][1]["image_url"]["url"] = "data:image/png;base64,AAAA"
    assert refused(questions.post(chat, body), 400, "E_FORMAT")["param"] == "messages[0].content"
    refused(questions.post("/v1/completions", {"prompt": "x"}), 404, "wrong_route")
    facts = questions.get("/v1/models").json()["data"][0]["unpad"]
    assert facts["kind"] == "vqa"
    if not facts["kept_patches"]:
        refused(questions.post(chat, question(path, "什么颜色？", kept_patches=True)), 400, None)


def test_the_patches_that_entered_each_block_are_those_that_infer_shows(finished, tmp_path):
    prune = {"model": {**SMALL, "prune": {"layers": [0], "keep": 0.5}}}
    run(recipe_of(tmp_path, **merged(dict(SHORT), prune)), tmp_path / "run", "train.max_steps=2")
    path = pictures(finished, "questions")[2]
    told = ask(load(tmp_path / "run"), [path], "什么颜色？", show=True)[0]
    with running(tmp_path / "run", name="asks") as served:
        assert served.get("/v1/models").json()["data"][0]["unpad"]["kept_patches"]
        body = question(path, "什么颜色？", kept_patches=True)
        answer = served.post("/v1/chat/completions", body).json()
        last = served.events("/v1/chat/completions", body)[-1]
    assert answer["choices"][0]["message"]["content"] == told.text
    found = answer["unpad"]["kept_patches"]
    assert last["unpad"]["kept_patches"] == found
    rows, columns = found["grid"]
    assert (rows, columns) == told.shown.grid
    everything, kept = ([row * columns + column for row, column in block] for block in found["blocks"])
    assert everything == list(range(rows * columns))
    assert kept == np.flatnonzero(told.shown.stays[0]).tolist()


# --------------------------------------------------------------------------- patients


def patients_of(finished: Finished, number: int = 9) -> list[dict[str, Any]]:
    """Patients of the tables, as a client sends them, with other names."""
    asked = instances(finished("patients").recipe.parent / "tables", number)
    return [{**patient, "id": f"p{patient['id']}"} for patient in asked]


@pytest.mark.promise("serving.alone")
def test_predictions_are_those_of_embed_together_and_alone_number_by_number(patients, finished, tmp_path):
    out = tmp_path / "vectors.parquet"
    embed_file(load(finished("patients").run), finished("patients").recipe.parent / "tables", "patient", out)
    rows = {f"p{row['id']}": row for row in pq.read_table(out).to_pylist()}
    asked = patients_of(finished)
    path = "/v1/models/events:predict"
    whole = patients.post(path, {"instances": asked, "outputs": ["vector"]}).json()["predictions"]
    assert [one["id"] for one in whole] == [one["id"] for one in asked]
    for one in whole:
        row = rows[one["id"]]
        assert one["vector"] == row["embedding"]
        for name in ("probability", "risk", "events", "unknown_codes", "outside_range", "mark"):
            assert one.get(name) == row.get(name), name
    assert {"probability", "events", "unknown_codes", "outside_range", "mark"} <= set(whole[0])

    def alone(instance: dict[str, Any]) -> Any:
        return patients.post(path, {"instances": [instance], "outputs": ["vector"]}).json()["predictions"][0]

    readable = [(one, told) for one, told in zip(asked, whole, strict=True) if len(one["events"]) > 2]
    assert [alone(one) for one, _ in readable] == [told for _, told in readable]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(alone, [one for one, _ in readable])) == [told for _, told in readable]


def test_explanations_are_the_course_of_the_probability_and_end_with_it(patients, finished):
    asked = [one for one in patients_of(finished) if len(one["events"]) > 2]
    whole = patients.post("/v1/models/events:explain", {"instances": asked}).json()["explanations"]
    probabilities = patients.post("/v1/models/events:predict", {"instances": asked}).json()["predictions"]
    for one, told, instance in zip(whole, probabilities, asked, strict=True):
        assert one["id"] == told["id"]
        days = sorted({event["days"] for event in instance["events"] if "days" in event})
        assert one["days"] == [None, *days]
        assert len(one["probability"]) == len(one["attention"]) == len(one["days"])
        assert 0 < np.sum(one["attention"]) <= 1 + 1e-6  # the rest is the readout's own
        assert one["probability"][-1] == pytest.approx(told["probability"], abs=1e-6)
    again = [
        patients.post("/v1/models/events:explain", {"instances": [one]}).json()["explanations"][0] for one in asked
    ]
    assert again == whole


@pytest.mark.parametrize(
    ("events", "said", "at"),
    [
        ([{"days": -3, "test": "zzz", "value": 1.0}], "E_CODE", "instances"), ([], "no event", "instances"),
        ([{"value": 1.0}], "of no table", "instances[1].events[0]"),
        ([{"days": -3, "test": "a", "valeu": 1}], "did you mean value", "instances[1].events[0].valeu"),
        ([{"days": -3, "test": "a", "value": []}], "expected a", "instances[1].events[0]"),
        ([{"days": 5, "test": "a", "value": 1.0}], "after the landmark", "instances"),
        ([{"age": 5}, {"age": 6}], "differ in age", "instances[1].events"),
        ([{"days": "soon", "test": "a", "value": 1.0}], "E_", "instances[1].events[0].days"),
        ([{"age": 5}, {"days": -3, "test": "a", "value": "much"}],
         'E_TYPE "value" is a text of 4 characters, expected a number', "instances[1].events[1].value"),
        ("x", "should be a valid list", "instances[1].events"),
        ([5], "should be a valid dict", "instances[1].events[0]"),
        ([{"days": True, "test": "a"}], "expected a text, a number", "instances[1].events[0]"),
    ],
)  # fmt: skip
def test_patients_are_refused_where_embed_refuses_them(patients, events, said, at):
    asked = [{"id": 0, "events": [{"age": 50}]}, {"id": "secret-7", "events": events}]
    answer = patients.post("/v1/models/events:predict", {"instances": asked})
    found = refused(answer, 400, None)
    assert said in found["message"], found
    assert found["param"] == at
    assert "secret-7" not in answer.text


@pytest.mark.promise("serving.private")
def test_nothing_of_a_patient_is_written_to_a_disk_or_the_log(patients, finished, tmp_path, monkeypatch, capfd):
    seen: list[tuple[str, bool]] = []
    inner = module.open_data

    def watched(recipe: Any, *rest: Any) -> Any:
        seen.extend((path.name, path.is_symlink()) for path in tmp_path.rglob("*") if not path.is_dir())
        return inner(recipe, *rest)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "open_data", watched)
    asked = patients_of(finished, 3)
    assert patients.post("/v1/models/events:predict", {"instances": asked}).status_code == 200
    assert seen
    assert all(is_link for _, is_link in seen)
    assert list(tmp_path.iterdir()) == []
    log = heard(capfd, "POST /v1/models/{id}:predict 200")
    assert not any(one["id"] in log for one in asked)


@pytest.mark.parametrize("kind", ["images", "questions", "patients"])
def test_the_routes_of_a_run_answer_and_errors_of_others_name_them(kind, images, questions, patients):
    server = {"images": images, "questions": questions, "patients": patients}[kind]
    routes = server.get("/v1/models").json()["data"][0]["unpad"]["routes"]
    assert {server.post(route, {}).status_code for route in routes} == {400}
    known = ("chat/completions", "completions", "classify", "responses", "embeddings", "models/events:predict")
    for path in (f"/v1/{name}" for name in known):
        if path not in routes:
            told = server.post(path, {}).json()["error"]
            assert told["message"].endswith(f": use {' or '.join(routes)}"), told


def test_a_run_of_conversations_offers_questions_of_its_own_data(finished, tmp_path):
    run = shutil.copytree(finished("conversations").run, tmp_path / "run")
    template = (loaded := load(run)).recipe.data.template
    user, assistant = template.user, template.assistant
    asked = [f"{user}one?{assistant}", f"{user}{'long ' * 40}{assistant}", f"{user}a{assistant}b{user}c{assistant}"]
    keep_samples(run, 10**6, [(text, "no") for text in [*asked, asked[0], f"{user}two?{assistant}"]])
    assert served.opened(loaded, "chat", 0).facts["examples"][:2] == ["two?", "one?"]


def test_a_run_without_outcomes_offers_no_explanation(patients, finished, monkeypatch):
    monkeypatch.setattr(served, "predicts", lambda run: (False, True))
    one = served.opened(load(finished("patients").run), "events", 0)
    assert one.facts["routes"] == ["/v1/models/events:predict"]
    with pytest.raises(served.RequestError, match="use /v1/models/events:predict") as refused:
        one.check_route(served.EXPLAIN)
    assert refused.value.code == "no_probability"


def test_models_say_the_columns_of_patients(patients):
    facts = patients.get("/v1/models/events").json()["unpad"]
    columns = ["id", "days", "test", "value", "age"]
    routes = ["/v1/models/events:predict", "/v1/models/events:explain"]
    predicted = {"predictions": ["probability"], "horizon_days": None}
    assert facts == {"kind": "patients", "routes": routes, "columns": columns, **predicted}
    refused(patients.post("/v1/models/other:predict", {"instances": []}), 404, "model_not_found")
    refused(patients.post("/v1/models/events:predict", {"instances": []}), 400, None)
    refused(patients.post("/v1/models/events:predict", {"instances": [{"id": 1}]}), 400, None)


def test_patients_with_more_sets_or_events_than_a_pass_may_take_are_refused(patients, finished):
    [patient] = instances(finished("patients").recipe.parent / "tables", 1)
    first = patient["events"][1]
    for verb, most in (("explain", routes.MOST_EXPLAINED), ("predict", routes.MOST_SETS)):
        # with the facts, which are a set, and the patient's own
        for more, status in ((most - 40, 200), (most, 400)):
            events = [patient["events"][0], *({**first, "days": -1 - day} for day in range(more))]
            answer = patients.post(f"/v1/models/events:{verb}", {"instances": [{"id": 1, "events": events}]})
            assert answer.status_code == status, answer.text
        assert refused(answer, 400, None)["param"] == "instances[0].events"
    many = {"id": 1, "events": [first] * (module.MOST_EVENTS + 1)}
    assert "events" in refused(patients.post("/v1/models/events:predict", {"instances": [many]}), 400, None)["message"]
    assert json.loads(patients.get("/health").text) == {"status": "ready"}


@pytest.mark.parametrize(("verb", "work", "least"), [("explain", "explained", 7), ("predict", "computed", 3)])
def test_patients_are_computed_in_parts_with_the_bits_of_the_whole(patients, finished, verb, work, least, monkeypatch):
    asked, parts = {"instances": instances(finished("patients").recipe.parent / "tables", 3)}, []
    whole, own = patients.post(f"/v1/models/events:{verb}", asked).json(), getattr(routes, work)
    monkeypatch.setattr(routes, work, lambda *of: (parts.append(len(of[-1])), own(*of))[1])
    monkeypatch.setattr("unpad.inference.patients.PART_PLACES", 3)
    monkeypatch.setattr(routes, "PLACES_TOGETHER", 1)
    assert patients.post(f"/v1/models/events:{verb}", asked).json() == whole
    assert len(parts) >= least
    assert set(parts) == {1}  # others are answered between them


def test_a_unit_that_is_a_part_of_the_code_is_a_column_of_requests(finished):
    run = load(finished("patients").run)
    for unit, columns in (("auto", ("value",)), ("uom", ("value", "uom"))):
        assert module._form(run, 0, EventSource(path="e.csv", layout="table", value_unit=unit)).others == columns
