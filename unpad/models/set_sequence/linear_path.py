"""Linear path from the last values of a patient to the outcome, beside the network.

It begins as ridge regression on the training patients (Hoerl and Kennard 1970; of hazards as in discrete-time survival
analysis, Singer and Willett 1993), and the network begins near zero: a cohort too small for the network is left with
what the regression knows, and a larger one begins there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.history import records
from unpad.nn.precision import widened
from unpad.nn.segments import sum_runs

FARTHEST = 4.0  # largest value that the path reads, in units of the values' scale
# Changes tell less than values do, and are noisier: the smaller a column, the more a penalty shrinks its effect.
CHANGE_UNIT = 2.0
PENALTIES = tuple(10.0 ** (power / 2) for power in range(6, -1, -1))  # strongest first; halved, per squared weight
TOLERANCE = 1e-4  # nats per patient, of a gradient: a difference that no cohort could tell
FOLDS = 5
WORSE = 0.02  # nats per patient above the best, at which no weaker penalty is tried
COLUMNS = 3  # of every code: last value, its distance from the mean of those before, whether there is one


@dataclass(frozen=True)
class SetValues:
    """The codes of every set, each once, by set and code.

    Args:
        code: (num_entries,) int64.
        value: (num_entries,) mean of the code's values in the set, 0 if it has none there.
        has_value: (num_entries,) bool.
        per_set: (num_sets,) int64, entries of each set.
    """

    code: Tensor
    value: Tensor
    has_value: Tensor
    per_set: Tensor


def set_values(codes: Tensor, events: EventSets, dtype: torch.dtype) -> SetValues:
    """Find the codes of every set.

    Args:
        codes: (num_events,) int64.
        dtype: of the values found.
    """
    set_of = events.members.seq_of_token()
    key = _pairs(set_of, codes)
    order = key.argsort(stable=True)
    sizes = key.index_select(0, order).unique_consecutive(return_counts=True)[1]
    first = order.index_select(0, sizes.cumsum(0) - sizes)
    value = events.values.to(dtype).clamp(-FARTHEST, FARTHEST) * events.has_value
    both = torch.stack([value, events.has_value.to(dtype)], 1).index_select(0, order)
    total, num = sum_runs(both, sizes).unbind(1)
    per_set = torch.bincount(set_of.index_select(0, first), minlength=events.num_sets)
    return SetValues(codes.index_select(0, first), total / num.clamp_min(1), num > 0, per_set)


@dataclass(frozen=True)
class LastValues:
    """The end of records: every known code of every record once, by record and code.

    Args:
        record, code: (num_last,) int64.
        columns: (num_last, COLUMNS) in the dtype of the values.
    """

    record: Tensor
    code: Tensor
    columns: Tensor


def last_values(code: Tensor, value: Tensor, has_value: Tensor, lengths: Tensor) -> LastValues:
    """Find the last values of records; a code without any value in a record is present there, and nothing else.

    Args:
        code, value, has_value: (num_entries,) of `SetValues`, those of a record in order of time.
        lengths: (num_records,) entries of each record.
    """
    record = torch.repeat_interleave(lengths.long(), output_size=len(code))
    run = _pairs(record, code)
    order = (2 * run + has_value).argsort(stable=True)  # by record and code, those with a value last, then by time
    sizes = run.index_select(0, order).unique_consecutive(return_counts=True)[1]
    ends = order.index_select(0, sizes.cumsum(0) - 1)
    both = torch.stack([value, has_value.to(value.dtype)], 1).index_select(0, order)
    total, num = sum_runs(both, sizes).unbind(1)
    last = value.index_select(0, ends)
    change = torch.where(num > 1, last - (total - last) / (num - 1).clamp_min(1), 0) / CHANGE_UNIT
    found = record[ends], code[ends], torch.stack([last, change, torch.ones_like(last)], 1)
    known = (found[1] > 0).nonzero().flatten()
    return LastValues(*(part.index_select(0, known) for part in found))


def _pairs(owner: Tensor, code: Tensor) -> Tensor:
    """A number for every pair of an owner and a code, both (num,) int64, in the order of owners and then of codes."""
    return owner * (code.max() + 1 if len(code) else 1) + code


class LinearPath(nn.Module):
    """Sum over the codes of a patient of weighted columns of `LastValues`.

    Args:
        num_codes: number of different codes.
        causes: number of sums, each of weights of its own.
    """

    def __init__(self, num_codes: int, causes: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_codes, causes * COLUMNS))

    def forward(self, codes: Tensor, events: EventSets) -> Tensor:
        """Sums of every patient, (num_seqs, causes) fp32 or wider.

        Args:
            codes: (num_events,) int64.
        """
        weight = widened(self.weight)
        return _sum(weight, values_of_patients(codes, events, weight.dtype), events.history.num_seqs)

    def at_every_set(self, codes: Tensor, events: EventSets) -> Tensor:
        """The same of a record that ends with a set, for every set, (num_sets, causes)."""
        weight = widened(self.weight)
        found = set_values(codes, events, weight.dtype)
        stops = F.pad(found.per_set.cumsum(0), (1, 0))
        first_set = events.history.cu_seqlens[:-1].long().repeat_interleave(events.history.lengths())
        begins = stops.index_select(0, first_set)
        parts = [weight[:0, ::COLUMNS]]
        for layout, index in records(begins, stops[1:] - begins):
            code, value, has_value = (part[index] for part in (found.code, found.value, found.has_value))
            parts.append(_sum(weight, last_values(code, value, has_value, layout.lengths()), layout.num_seqs))
        return torch.cat(parts[1:] or parts)


def values_of_patients(codes: Tensor, events: EventSets, dtype: torch.dtype) -> LastValues:
    """Last values of the patients of a batch; arguments as of `set_values`."""
    found = set_values(codes, events, dtype)
    starts = F.pad(found.per_set.cumsum(0), (1, 0)).index_select(0, events.history.cu_seqlens.long())
    return last_values(found.code, found.value, found.has_value, starts.diff())


def _sum(weight: Tensor, last: LastValues, num_records: int) -> Tensor:
    """Weighted columns of every record, added up for every cause, (num_records, causes)."""
    shares = (F.embedding(last.code, weight).unflatten(1, (-1, COLUMNS)) * last.columns[:, None]).sum(2)
    return sum_runs(shares, torch.bincount(last.record, minlength=num_records))


# --------------------------------------------------------------------------- its beginning


@dataclass(frozen=True)
class Regression:
    """A problem of logistic ridge regression, with several trials per patient: the bins of time, or the label alone.

    The logit of a trial is the sum of the patient's weighted columns and a bias of the trial, which has no penalty.

    Args:
        last: last values of the patients.
        num_codes: number of different codes.
        tried: (num_patients, num_trials) float64, weight of each trial, 0 for one of which nothing is known.
        came: (num_patients, num_trials) float64, the same weight where the outcome came in it, else 0.
        patient: (num_patients,) int64 from 0, equal for the examples of one patient at several landmarks: each counts,
            and folds leave them out together. None: each is another patient.
    """

    last: LastValues
    num_codes: int
    tried: Tensor
    came: Tensor
    patient: Tensor | None = None

    def losses(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood of every patient, (num_patients,) nats, and the logits, (num_patients, num_trials).

        Args:
            found: (num_codes * COLUMNS + num_trials,) float64, weights and biases.
        """
        weight, biases = self.parts(found)
        logits = _sum(weight, self.last, len(self.tried)) + biases
        return (self.tried * F.softplus(logits) - self.came * logits).sum(1), logits

    def solve(self, penalty: float, chosen: Tensor, start: Tensor) -> Tensor:
        """Minimise the sum over patients where `chosen`, (num_patients,) 0 or 1, plus penalty / 2 times squared
        weights, from weights and biases to begin with."""
        found = start.clone()
        optimizer = torch.optim.LBFGS([found], max_iter=100, tolerance_grad=TOLERANCE, line_search_fn="strong_wolfe")
        num = chosen.sum()

        def loss() -> Tensor:
            losses, logits = self.losses(found)
            slopes = (self.tried * logits.sigmoid() - self.came) * chosen[:, None]  # of the loss over the logits
            shares = slopes.sum(1).index_select(0, self.last.record)[:, None] * self.last.columns
            weight, _ = self.parts(found)
            gradient = (penalty * weight).index_add(0, self.last.code, shares)
            found.grad = torch.cat([gradient.flatten(), slopes.sum(0)]) / num
            return ((losses * chosen).sum() + penalty / 2 * weight.square().sum()) / num

        optimizer.step(loss)
        return found

    def parts(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (num_codes, COLUMNS) and biases (num_trials,) of a solution."""
        weight, biases = found.split([self.num_codes * COLUMNS, self.tried.shape[1]])
        return weight.view(self.num_codes, COLUMNS), biases


@torch.no_grad()
def fit(problem: Regression) -> tuple[Tensor, Tensor]:
    """Weights (num_codes, COLUMNS) and biases (num_trials,), float64, with the penalty of the best likelihood over
    patients that a part of the folds left out. It computes on one thread: sums of several have other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fold = (torch.arange(len(problem.tried)) if problem.patient is None else problem.patient) % FOLDS
        everyone = torch.ones(len(problem.tried), dtype=torch.float64)
        begin = torch.zeros(problem.num_codes * COLUMNS + problem.tried.shape[1], dtype=torch.float64)
        starts, scores = [begin] * FOLDS, list[float]()
        for penalty in PENALTIES:
            starts = [problem.solve(penalty, everyone * (fold != one), starts[one]) for one in range(FOLDS)]
            left_out = (problem.losses(found)[0][fold == one].sum() for one, found in enumerate(starts))
            scores.append(float(sum(left_out)))
            if scores[-1] > min(scores) + len(fold) * WORSE:
                break  # a weaker penalty only fits more noise
        return problem.parts(problem.solve(PENALTIES[scores.index(min(scores))], everyone, begin))
    finally:
        torch.set_num_threads(threads)
