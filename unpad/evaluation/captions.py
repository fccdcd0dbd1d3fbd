"""Measures of captions: bits per character, and the right caption among others by likelihood."""

import math
from dataclasses import dataclass, replace

import numpy as np

from unpad.data.measuring import Measuring
from unpad.data.tokens.lost import LostCharacters
from unpad.data.vqa import VqaData
from unpad.evaluation.family import token_sums
from unpad.evaluation.metrics import Metric, mean_of, ratio_of, refused
from unpad.evaluation.rows import Columns, Measures, Ratio

NUM_CHOICES = 20
SEED = 0  # of the draw of candidates, the same in every run: runs with equal held-out captions have equal candidates
BITS, CHOICE, CHANCE = "caption_bits_per_char", "caption_choice_of_20", "caption_choice_chance"
BITS_IN_NAT = 1 / math.log(2)


@dataclass(frozen=True)
class CaptionScores:
    """Scores of captions, arrays (num_captions,).

    Args:
        nll: nats of the text and its end.
        chars: characters of the text that the tokenizer did not lose.
        choice: score of the choice among candidates, see `choose_captions`; nan without candidates.
        group: as in `resample`.
        lost: characters of the texts that became unknown tokens, and are not in `chars`.
    """

    nll: np.ndarray
    chars: np.ndarray
    choice: np.ndarray
    group: np.ndarray
    lost: LostCharacters

    def metrics(self) -> dict[str, Metric]:
        """`caption_choice_of_20` of the captions that have candidates, beside the chance of a guess, and
        `caption_bits_per_char`; refused where no caption has candidates, or where the tokenizer loses characters."""
        chosen, num = np.isfinite(self.choice), len(self.nll)
        metrics: dict[str, Metric] = {}
        if chosen.any():
            metrics[CHOICE] = mean_of(self.choice[chosen], self.group[chosen], share=True)
            guess = replace(metrics[CHOICE], value=1 / NUM_CHOICES, low=math.nan, high=math.nan)
            metrics[CHANCE] = replace(guess, note=f"a guess among {NUM_CHOICES}")
        else:
            metrics[CHOICE] = refused(num, f"fewer than {NUM_CHOICES} different captions of unlike pictures")
        if why := self.lost.why_no_bits():
            metrics[BITS] = refused(num, why)
        else:
            metrics[BITS] = ratio_of(self.nll, self.chars, self.group, scale=BITS_IN_NAT)
        return metrics

    def columns(self) -> Columns:
        """Columns of the captions' rows."""
        return {"num_chars": self.chars.astype(np.float64), CHOICE: self.choice}

    def measures(self, kind: str) -> Measures:
        """Metrics that can be compared row by row, of rows of this kind."""
        measures: Measures = {CHOICE: Ratio(CHOICE, None, kind, share=True)}
        return measures if self.lost.why_no_bits() else measures | {BITS: Ratio("loss", "num_chars", kind, BITS_IN_NAT)}


def score_captions(over: Measuring[VqaData], nll: np.ndarray) -> CaptionScores:
    """Score captions.

    Args:
        over: captions alone.
        nll: (num_seqs,) nats of each.
    """
    data, ids = over.data, over.seq_ids
    chars, lost = np.array([len(data.examples[i].answer) for i in ids]), data.rows.lost_targets[ids]
    count = LostCharacters(int(lost.sum()), int(chars.sum()))
    return CaptionScores(nll, chars - lost, choose_captions(over), data.table.group[ids], count)


# --------------------------------------------------------------------------- the choice among candidates


@dataclass(frozen=True, eq=False)
class Candidates:
    """Captions to choose from.

    Args:
        shown: (num,) int64, captions with images; each is to be found.
        told: (num, NUM_CHOICES) int64, captions with the texts to choose from; the right one is the first.
    """

    shown: np.ndarray
    told: np.ndarray


def draw_candidates(data: VqaData, seq_ids: np.ndarray, longest: int) -> Candidates:
    """Draw the candidates of captions: to each its own text, and 19 different texts of others, every text as likely as
    any other however often it is told.

    No candidate is a text that its own group tells: another caption of the picture, of a copy or of another size of it
    may be as right. Texts are equal if the tokenizer makes them so. A text that with the images would be longer than
    `longest` is no candidate. Captions without images, and those to which fewer than 19 texts are left, have none.

    Args:
        seq_ids: (num_captions,) int64.
    """
    captions = seq_ids[data.num_patches[seq_ids] > 0]
    numbers = dict[bytes, int]()
    tokens = [data.tokens_of(i).tobytes() for i in captions.tolist()]
    text = np.array([numbers.setdefault(one, len(numbers)) for one in tokens], np.int64)
    _, first = np.unique(text, return_index=True)  # (num_texts,) a caption with each
    positions, group = data.rows.lengths()[captions[first]] - 1, data.table.group[captions]
    rng = np.random.default_rng(SEED)
    shown, told = list[int](), [np.zeros((0, NUM_CHOICES), np.int64)]
    for caption, mine in zip(captions.tolist(), group.tolist(), strict=True):
        texts = rng.permutation(len(first))
        usable = ~np.isin(texts, text[group == mine]) & (positions[texts] + data.num_patches[caption] <= longest)
        others = texts[usable][: NUM_CHOICES - 1]
        if len(others) == NUM_CHOICES - 1:
            shown.append(caption)
            told.append(np.array([[caption, *captions[first[others]]]]))
    return Candidates(np.array(shown, np.int64), np.concatenate(told))


def candidate_losses(over: Measuring[VqaData], candidates: Candidates) -> np.ndarray:
    """Negative log-likelihood of every candidate, in nats per token of its text and end, (num, NUM_CHOICES) float64.

    They are measured as other rows are: packed without padding, in batches of the run's size, each as alone.
    """
    data = over.data.retold(np.repeat(candidates.shown, NUM_CHOICES), candidates.told.flatten())
    settings = over.settings.model_copy(update={"max_tokens": None})  # a limit of training, not of the model
    nll, targets = token_sums(replace(over, data=data, seq_ids=np.arange(len(data.table)), settings=settings))
    losses: np.ndarray = nll / targets
    return losses.reshape(-1, NUM_CHOICES)


def choice_scores(losses: np.ndarray) -> np.ndarray:
    """1 where the first of several candidates, (num, candidates), is the likeliest, and 0 where it is not; of a tie
    between several likeliest ones, it has its share, so that a model which tells none apart is at chance."""
    likeliest = losses == losses.min(1, keepdims=True)
    return likeliest[:, 0] / np.maximum(likeliest.sum(1), 1)


def choose_captions(over: Measuring[VqaData]) -> np.ndarray:
    """Score of the choice of every caption among its candidates, (num_seqs,); nan for rows without candidates.

    Candidates are compared by likelihood per token, not by that of the whole text: of texts of different lengths the
    shortest would be the likeliest, whatever the picture shows.
    """
    candidates = draw_candidates(over.data, over.seq_ids, over.model.config.longest)
    scores = np.full(len(over.seq_ids), np.nan)
    if len(candidates.shown):
        scores[over.places()[candidates.shown]] = choice_scores(candidate_losses(over, candidates))
    return scores
