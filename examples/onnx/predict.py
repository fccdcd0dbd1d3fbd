"""Use an ONNX file of `unpad export RUN FILE.onnx` without unpad: onnxruntime, numpy and Pillow.

python examples/onnx/predict.py shapes.onnx picture.png
python examples/onnx/predict.py events.onnx patient.csv

The CSV has the columns days, code and value: the events of one patient until the landmark, by days from it in rising
order; facts without a time, such as an age, have no days and stand first.
"""

import csv
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image


def read_picture(path, about):
    """A picture as the model reads it. Of the sizes, square and native; of native, one close to that of `unpad`."""
    image, read = Image.open(path).convert("RGBA"), about["images"]
    counts = np.array([image.height, image.width]) / read["patch"]  # rows and columns of patches
    share = np.clip(counts.prod(), read["min_tokens"], read["max_tokens"]) / counts.prod()
    nearest = np.floor if share < 1 else np.ceil if share > 1 else np.round
    grid = [read["square"] / read["patch"]] * 2 if read["size"] == "square" else nearest(counts * share**0.5)
    height, width = (max(1, int(count)) * read["patch"] for count in grid)
    on_white = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    parts = [(on_white, read["mean"], read["std"]), (image.getchannel("A"), 0.5, 0.5)][: read["channels"] - 2]
    pixels = [(np.asarray(part.resize((width, height), Image.LANCZOS)) / 255 - mean) / std for part, mean, std in parts]
    return {
        "pixels": np.dstack(pixels).transpose(2, 0, 1).astype(np.float32),
        "size": np.array([image.height, image.width]),
    }


def scaled(code, value, events):
    """A value as the model reads it; NaN for none, or if none was known of its code."""
    if value == "" or events["std"][code] == 0:
        return np.nan
    if "rank" in events:
        return np.interp(float(value), events["rank"]["values"][code], events["rank"]["scores"][code])
    if "log" in events and events["log"]["std"][code] > 0:
        log = {name: column[code] for name, column in events["log"].items()}
        return (np.log(max(float(value), log["least"])) - log["mean"]) / log["std"]
    return (float(value) - events["mean"][code]) / events["std"][code]


def read_patient(path, about):
    """The events of a patient as the model reads them: facts are a set, and so are events of one time."""
    with open(path, newline="", encoding="utf-8") as file:
        rows, events = list(csv.DictReader(file)), about["events"]
    number = {name: code for code, name in enumerate(events["codes"])}
    codes = [number.get(row["code"], 0) for row in rows]  # 0: a code that training did not have
    values = [scaled(code, row["value"], events) for code, row in zip(codes, rows, strict=True)]
    days, sizes = np.unique([float(row["days"]) for row in rows if row["days"]], return_counts=True)
    if num_facts := sum(not row["days"] for row in rows):
        days, sizes = np.append(days[:1] if len(days) else 0, days), np.append(num_facts, sizes)
    return {
        "codes": np.array(codes, np.int64),
        "values": np.array(values, np.float32),
        "sizes": sizes.astype(np.int64),
        "days": days.astype(np.float32),
    }


def predict(file, path):
    """Probabilities of the classes by name, and what else the file says of an example."""
    session = onnxruntime.InferenceSession(file)
    about = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    read = (read_picture if about["family"] == "images" else read_patient)(path, about)
    names = [output.name for output in session.get_outputs()]
    numbers = session.run(names, {given.name: read[given.name] for given in session.get_inputs()})
    found = dict(zip(names, numbers, strict=True))
    p = np.exp(found.pop("log_p", [])).tolist()
    return dict(zip(about["classes"], p, strict=False)) | found


if __name__ == "__main__":
    print(predict(*sys.argv[1:]))
