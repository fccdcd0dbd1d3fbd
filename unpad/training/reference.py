"""Log-probabilities of pairs under the weights that a stage starts from, computed once before its first step."""

from dataclasses import replace

import numpy as np

from unpad.data.family import Data
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split
from unpad.data.tokens.cache import make_key
from unpad.errors import ResumeError
from unpad.evaluation.preferences import log_probabilities, whole_pairs
from unpad.run.base import fingerprint
from unpad.run.kept import REFERENCE, Named, find_reference, read_reference, write_reference
from unpad.storage import cache_folder
from unpad.terminal.table import number_of
from unpad.training.progress import DECIDE_BITS
from unpad.training.setup import Setup
from unpad.training.stage import StageSetup


def put_reference(setup: Setup, stage: StageSetup, *, begins: bool) -> str:
    """Set the log-probabilities of a stage's pairs under the weights that it starts from.

    Training pairs are computed in the precision of training, all others as in evaluation, in the same flat batches. The
    run saves the values, so that it resumes with equal ones; the cache keeps them for other runs from the same weights.

    Args:
        begins: whether the model holds the weights that the stage starts from; otherwise the run's file is read.

    Returns:
        A message for the log.

    Raises:
        CheckpointError, ResumeError: the file of the run is missing, damaged, or of another stage.
        DiskError: a file cannot be written.
    """
    data = setup.data
    assert data.replies is not None, "the stage is of pairs"
    path, group = setup.folder / REFERENCE, setup.group
    if not begins:
        with group.together():
            named, values = read_reference(setup.folder)
            if (named.stage, named.data) != (stage.name, data.fingerprint()) or len(values) != len(data.table):
                fix = "start a new run with train.init_from"
                raise ResumeError(f"{REFERENCE} is not of stage {stage.name} and its data", where=str(path), fix=fix)
        data.replies.reference[:] = values
        return f"{stage.name}: log-probabilities under the weights it started from, as the run keeps them"
    base = setup.base if stage is setup.stages[0] else None  # adapters change nothing before the first step
    weights = fingerprint(setup.model.state_dict()) if base is None else base.sha256
    named = Named(weights, data.fingerprint(), stage.name)
    bits = {key: setup.environment[key] for key in ("version", *DECIDE_BITS)}
    # Equal runs need equal bits: neither batch sizes nor the base's rounding may come from another run.
    sizes, lowered = stage.recipe.plan.tokens_per_micro, setup.base.lowered if setup.base is not None else []
    cached = cache_folder() / "references" / f"{make_key('reference', weights, named.data, bits, sizes, lowered)}.bin"
    # The caches of hosts may differ: all processes take the leader's values.
    cached_reference = find_reference(cached) if group.leads else None
    arrays = dict[str, np.ndarray]()
    if cached_reference is not None and len(cached_reference[1]) == len(data.table):
        arrays["reference"] = cached_reference[1]
    if agreed := group.exchange_arrays(arrays)[0]:
        values, how = agreed["reference"], "from the cache"
    else:
        values, how = log_probabilities_of_pairs(setup, stage, data), "computed once"
    with group.together():
        if group.leads:
            if not arrays:
                write_reference(cached, named, values)
            write_reference(path, named, values)
    data.replies.reference[:] = values
    num = int((data.replies.pair >= 0).sum())
    return f"{stage.name}: log-probabilities of {number_of(num, 'replies')} under the weights it starts from, {how}"


def log_probabilities_of_pairs(setup: Setup, stage: StageSetup, data: Data) -> np.ndarray:
    """Log-probabilities of all replies of pairs, (num_sequences,) float64; 0 for other sequences and beyond the
    context."""
    replies = whole_pairs(setup.model, data, np.arange(len(data.table)))
    is_trained = data.table.split[replies] == Split.TRAIN
    values = np.zeros(len(data.table))
    trained, others = replies[is_trained], replies[~is_trained]
    over = Measuring(setup.model, data, trained, stage.recipe.plan, setup.group)
    values[trained] = log_probabilities(over, setup.precision)
    values[others] = log_probabilities(replace(over, seq_ids=others))
    return values
