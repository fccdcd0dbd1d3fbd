"""Histories of patients: the outcome within a year from events of any number and time, without padding.

python examples/patients.py

It needs unpad alone: the 800 patients are simulated once, into ~/.cache/unpad. Under a minute on two cores. For
your own tables, `unpad recipes copy events my.yaml`, and name their columns there.
"""

import tempfile
from pathlib import Path

import pyarrow.parquet as pq

import unpad
from unpad.evaluation.run import evaluate_run
from unpad.inference.embed import embed_file

with tempfile.TemporaryDirectory() as folder:
    run = unpad.train("events", "train.max_epochs=10", out=Path(folder) / "outcomes", quiet=True)
    metrics, _ = evaluate_run(str(run.folder))
    area = metrics["auroc"]
    print(f"{area.num} held-out patients")
    print(f"area under the ROC curve: {area.value:.2f}, 95 % interval {area.low:.2f} to {area.high:.2f}")
    print(f"better than chance: {'yes' if area.low > 0.5 else 'not shown'}")

    vectors = Path(folder) / "vectors.parquet"
    embed_file(run, None, "patient", vectors)
    table = pq.read_table(vectors)
    print(f"vectors: {table.num_rows} patients, {len(table['embedding'][0])} numbers each")
