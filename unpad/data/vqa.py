"""Questions about images, as sequences of tokens and patches.

    BOS prefix images question prefix answer EOS        loss on the answer and its EOS

An image takes one position per patch; the model reads its embedding of the patch there instead of a token. Images are
never cut, and a row may have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from unpad.batching.batch import RaggedBatch, from_prompts, from_sequences, required
from unpad.batching.plan import Micro
from unpad.data.family import Data, NearDuplicates, check_near_duplicates, digest_of, sequence_table
from unpad.data.images import refuse_image_cuts
from unpad.data.pictures.album import Album, PixelCache, image_batch, open_album, with_images
from unpad.data.pictures.alike import Pictures, tie_alike
from unpad.data.rows import ChosenRows, ListedRows, RowData, choose_rows, list_rows
from unpad.data.show import Shown, TextSpan, spans_of
from unpad.data.sources.bad_rows import fault_lines
from unpad.data.sources.example import BadRow, Example, Turn
from unpad.data.sources.files import SourceFile, resolve_path
from unpad.data.sources.images import ImageExample, group_names
from unpad.data.sources.split import Split, Wanted, numbered, text_key
from unpad.data.sources.vqa import VqaExample, read_all
from unpad.data.tokens.encode import encode_examples, encode_prompt, reserved_texts
from unpad.data.tokens.lost import LostCharacters, commonest
from unpad.data.tokens.tokenizer import TOKENIZER, Tokenizer, kept_tokenizer, open_tokenizer_file, train_tokenizer
from unpad.errors import RecipeError
from unpad.models import model_config
from unpad.models.contract import MarksImages
from unpad.recipes.data import DataSettings
from unpad.recipes.recipe import Recipe
from unpad.terminal.table import number_of

KINDS = ("vqa",)
UNITS = ("questions", "positions")
FILES = (TOKENIZER,)
NO_TEXT = None


@dataclass(frozen=True, eq=False)
class QuestionRows:
    """Token sequences without their images.

    Args:
        tokens: (num_tokens,) ids, BOS and EOS included.
        counts: (num_tokens,) bool, True where predicting this token counts.
        offsets: (num_rows + 1,) int64.
        place: tokens before the images of a row.
        lost: characters of questions and answers that the tokenizer lost.
        lost_targets: (num_rows,) int32, how many of them each answer had.
    """

    tokens: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    place: int
    lost: LostCharacters
    lost_targets: np.ndarray

    def lengths(self) -> np.ndarray:
        """Tokens per row, (num_rows,) int64."""
        return np.diff(self.offsets)

    def num_targets(self) -> np.ndarray:
        """Tokens that carry loss per row, (num_rows,) int64."""
        before = np.concatenate([[0], np.cumsum(self.counts)])
        return np.diff(before[self.offsets])

    def take(self, rows: np.ndarray) -> "QuestionRows":
        """Some rows in this order, (num_taken,) int64; a row may be taken several times."""
        lengths = self.lengths()[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        taken = {"tokens": self.tokens[places], "counts": self.counts[places], "offsets": offsets}
        return replace(self, **taken, lost_targets=self.lost_targets[rows])


def count_patches(examples: Sequence[VqaExample], grids: np.ndarray) -> np.ndarray:
    """Patches of all images of each row, (num_rows,) int64, given the rows and columns of every image."""
    patches = grids.prod(1)
    return np.array([int(patches[list(example.images)].sum()) for example in examples], np.int64)


@dataclass(frozen=True, eq=False)
class VqaData(RowData[VqaExample]):
    """Questions of a run.

    Args:
        album: the images of all questions, those of other parts included.
        placeholder: id in the place of every patch.
    """

    examples: list[VqaExample]
    album: Album
    rows: QuestionRows
    tokenizer: Tokenizer
    placeholder: int
    compares: ClassVar[bool] = True
    augmentation: ClassVar[str] = "images"
    family: ClassVar[str] = "vqa"
    kinds: ClassVar[tuple[str, ...]] = KINDS

    @cached_property
    def num_patches(self) -> np.ndarray:
        """Positions of all images of a row, (num_sequences,) int64."""
        return count_patches(self.examples, self.album.grids)

    @property
    def num_outputs(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def files(self) -> dict[str, bytes]:
        shown = self.shown(np.flatnonzero(self.table.split == Split.TRAIN))
        return {TOKENIZER: self.tokenizer.to_bytes()} | self.album.files(shown)

    def shown(self, seq_ids: np.ndarray) -> np.ndarray:
        """Pictures of the album that some sequences show, (num_images,) bool."""
        return shown_by(self.examples, self.album.images, seq_ids)

    def tokens_of(self, seq_id: int) -> np.ndarray:
        """Tokens of a sequence without the places of patches, those that are labels only included, (length,) int64."""
        start, stop = self.rows.offsets[seq_id : seq_id + 2].tolist()
        return self.rows.tokens[start:stop].astype(np.int64)

    def load(self, micro: Micro) -> RaggedBatch:
        ids = micro.seq_ids
        assert np.array_equal(micro.stops - micro.starts, self.table.positions[ids]), "a row with images is never cut"
        batch = self._batch(ids.tolist(), self._patches(ids.tolist(), micro.epoch_seed), answered=True)
        return batch.pad(pad_to=micro.pad_to, pad_id=self.tokenizer.pad_id) if micro.pad_to else batch

    def show(self, micro: Micro) -> Shown:
        seq_id, batch, marks = int(micro.seq_ids[0]), self.load(micro), list[TextSpan]()
        media, ids = required(batch.media), [*required(batch.input_ids).tolist(), *batch.labels[-1:].tolist()]
        learnt = [False, *batch.loss_mask.tolist()]
        read = [self.album.as_read(image, media, at) for at, image in enumerate(self.examples[seq_id].images)]
        for number, (rows, columns) in enumerate([] if media.grid is None else media.grid.tolist(), 1):
            marks.append(TextSpan(f"<picture {number}: {columns} x {rows} patches>", special=True))
        begin, end = self.rows.place, self.rows.place + int(self.num_patches[seq_id])
        before, after = (spans_of(self.tokenizer, ids[part], learnt[part]) for part in (slice(begin), slice(end, None)))
        counts = f"{len(ids):,} tokens, {end - begin:,} of them patches, {sum(learnt):,} learnt"
        facts, pictures = (counts, *(sizes for _, sizes in read)), tuple(picture for picture, _ in read)
        return Shown(self.where(seq_id), facts, (*before, *marks, *after), pictures)

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        patches = [self.album.decode(image) for image in self.examples[seq_id].images]
        return self._batch([seq_id], patches, answered=True)

    def prompts(self, seq_ids: Sequence[int]) -> RaggedBatch:
        """Build a batch of rows up to their answers, for generation."""
        return self._batch(seq_ids, self._patches(seq_ids), answered=False)

    def retold(self, shown: np.ndarray, told: np.ndarray) -> "VqaData":
        """Rows that show the images of some captions and tell the texts of others, to measure a model on; not one of
        them is a training row.

        Args:
            shown, told: (num_rows,) int64, captions.
        """
        assert all(self.examples[seq].caption for seq in {*shown.tolist(), *told.tolist()}), "all ask the same"
        rows, patches = self.rows.take(told), self.num_patches[shown]
        examples = [
            replace(self.examples[picture], answers=self.examples[text].answers)
            for picture, text in zip(shown.tolist(), told.tolist(), strict=True)
        ]
        split = np.full(len(shown), Split.HOLDOUT, np.uint8)
        table = sequence_table(rows.lengths() - 1 + patches, split, num_targets=rows.num_targets())
        chosen = replace(self.chosen, index=self.chosen.index[shown])
        return replace(self, table=table, chosen=chosen, examples=examples, rows=rows)

    def fingerprint(self) -> str:
        arrays = (self.rows.tokens, self.rows.offsets, self.rows.counts, self.table.split, self.album.grids)
        images = [*(repr(one.images) for one in self.examples), *(image.sha256 for image in self.album.images)]
        return digest_of(self.album.settings.identity(), *arrays, *images)

    def lines(self) -> list[str]:
        captions, patches = sum(example.caption for example in self.examples), self.album.grids.prod(1)
        asked = f"{number_of(len(self.examples) - captions, 'questions')} and {number_of(captions, 'captions')}"
        lines = [
            *self.chosen.lines("rows", f"{asked} about {number_of(len(self.album.images), 'images')}"),
            *self.album.pictures.lines(),
            f"{number_of(int(self.table.positions.sum()), 'positions')}, "
            f"{int(self.num_patches.sum()):,} of them patches of "
            f"{self.album.patch} x {self.album.patch} pixels"
            + (f", {patches.min()} to {patches.max()} per image" if len(patches) else ""),
            *(self.album.remarks() if self.chosen.wanted is Wanted.LEARNING else []),
            *(self.rows.lost.lines() if self.rows.lost.lost or self.tokenizer.kind == "file" else []),
        ]
        return lines + fault_lines(self.bad_rows, "  quarantined: ")

    def describe_outputs(self) -> str:
        return f"vocabulary {self.num_outputs:,}"

    def check_trainable(self) -> None:
        self.rows.lost.refuse("tokenizer")

    def compare(self) -> list[str]:
        self.album.pictures.refuse()
        return []  # `lines` has them

    def near_training(self, run: Data, seq_ids: np.ndarray) -> NearDuplicates:
        assert isinstance(run, VqaData), "data of one family"
        return run.album.pictures.compare_new(self.album.pictures, self.shown(seq_ids))

    # ----------------------------------------------------------------------- batches

    def _batch(self, seq_ids: Sequence[int], patches: Sequence[np.ndarray], answered: bool) -> RaggedBatch:
        """Build a flat batch of rows with the patches of their images, in order, with or without the answers."""
        rows = [self._row(seq, answered) for seq in seq_ids]
        ids, counts, numbers = [ids for ids, _ in rows], [mask for _, mask in rows], np.array(seq_ids, np.int64)
        batch = from_sequences(ids, counts, numbers) if answered else from_prompts(ids, numbers)
        lengths = batch.layout.lengths().numpy()
        first = np.cumsum(lengths) - lengths + self.rows.place
        places = [start + np.arange(self.num_patches[seq]) for start, seq in zip(first, seq_ids, strict=True)]
        media = image_batch(patches, self.album.grids[self._images(seq_ids)], self.album.num_values)
        shown = [len(self.examples[seq].images) for seq in seq_ids]
        return with_images(batch, media, np.concatenate([np.zeros(0, np.int64), *places]), shown)

    def _images(self, seq_ids: Sequence[int]) -> list[int]:
        return [image for seq in seq_ids for image in self.examples[seq].images]

    def _patches(self, seq_ids: Sequence[int], epoch_seed: tuple[int, int] | None = None) -> list[np.ndarray]:
        """Patches of the images of rows; those of a training row are changed as an epoch draws."""
        images, split = self._images(seq_ids), self.table.split
        keys = [
            None if epoch_seed is None or split[seq] != Split.TRAIN else (*epoch_seed, seq, image)
            for seq in seq_ids
            for image in self.examples[seq].images
        ]
        return self.album.load(images, self.album.grids[images], keys)

    def _row(self, seq: int, answered: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a row with placeholders for its patches, and True for the tokens that count in the loss."""
        ids, counts = self.tokens_of(seq), self.rows.counts[slice(*self.rows.offsets[seq : seq + 2].tolist())]
        if not answered:
            begin = int(np.argmax(counts))  # of the answer
            ids, counts = ids[:begin], counts[:begin]
        places = np.full(int(self.num_patches[seq]), self.rows.place)
        return np.insert(ids, places, self.placeholder), np.insert(counts, places, False)


def num_outputs(files: dict[str, bytes]) -> int:
    """Size of the vocabulary of a run."""
    return kept_tokenizer(files).vocab_size


def next_command(recipe: Recipe, run: str) -> str:
    """Command that uses a trained run."""
    return f"unpad infer {run} --image FILE --question TEXT"


def open_data(recipe: Recipe, kept: dict[str, bytes] | None, wanted: Wanted = Wanted.LEARNING) -> VqaData:
    """Read the questions of a recipe that `wanted` asks for and list their images.

    Rows with a common picture, whatever the names of its files, and rows of one group are in one part of the split.

    Raises:
        SourceError: a file is missing or unusable, bad rows are refused, or there is no row to train on.
        RecipeError: a row does not fit the model's context and would be cut.
    """
    listed, images = _read(recipe)
    chosen = choose_questions(listed, images, wanted)
    chosen.refuse_empty()
    training = chosen.only(chosen.split == Split.TRAIN).rows
    data = _lay_out(chosen, images, _tokenizer(recipe, kept, training), kept)
    refuse_image_cuts(recipe, int(data.table.positions.max()), "a question with its images")
    return data


def near_duplicates(recipe: Recipe) -> list[str]:
    """Lines on images of held-out questions that are near-duplicates of training ones; see `Family`."""
    check_near_duplicates(recipe, VqaData)
    listed, images = _read(recipe)
    pictures = pictures_of(choose_questions(listed, images, Wanted.LEARNING), images)
    pictures.refuse()
    return pictures.lines()


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files that a run keeps, from a Hugging Face folder; its chat template is not for questions and is left out.

    Raises:
        SourceError: as `folder_tokenizer`.
    """
    from unpad.data.tokens.folder_tokenizer import folder_tokenizer

    return {TOKENIZER: folder_tokenizer(folder, chat=False)}


def questions_about(
    recipe: Recipe, tokenizer: Tokenizer, images: list[ImageExample], question: str, *, together: bool = False
) -> VqaData:
    """One question about each of several images, or about all of them or none, for `VqaData.prompts`: without answers
    to train on."""
    every = tuple(range(len(images)))
    asked = [(question, every)] if together else [(question, (image,)) for image in every]
    examples = [VqaExample("", shown, question, ("?",), None, False) for question, shown in asked]
    listed = ListedRows(recipe, "vqa", [], examples, [0] * len(examples), [])
    data = _lay_out(choose_questions(listed, images, Wanted.NEW), images, tokenizer, None)
    return replace(data, album=replace(data.album, cache=PixelCache(0)))  # every image is read once


def _read(recipe: Recipe) -> tuple[ListedRows[VqaExample], list[ImageExample]]:
    images: list[ImageExample] = []

    def read_file(file: SourceFile, data: DataSettings) -> tuple[list[VqaExample], list[BadRow]]:
        rows, pictures, faults = read_all(file, data)
        shifted = [replace(row, images=tuple(image + len(images) for image in row.images)) for row in rows]
        images.extend(pictures)
        return shifted, faults

    return list_rows(recipe, "vqa", read_file), images


def _lay_out(
    chosen: ChosenRows[VqaExample], images: list[ImageExample], tokenizer: Tokenizer, kept: dict[str, bytes] | None
) -> VqaData:
    recipe, examples = chosen.listed.recipe, chosen.rows
    rows, album = _encode(examples, tokenizer, recipe), open_album(recipe, images, pictures_of(chosen, images), kept)
    positions = rows.lengths() - 1 + count_patches(examples, album.grids)
    hashes = [*chosen.file_hashes(), *((image.where, image.sha256) for image in images)]
    table = chosen.table(positions, hashes, rows.num_targets())
    return VqaData(table, chosen, examples, album, rows, tokenizer, _placeholder(recipe, tokenizer))


def _placeholder(recipe: Recipe, tokenizer: Tokenizer) -> int:
    """Id in the place of every patch: that of the model if it has one, such as an imported model."""
    config = model_config(recipe.model)
    image_id = config.image_id if isinstance(config, MarksImages) else None
    return tokenizer.pad_id if image_id is None else image_id


def _turns(example: VqaExample) -> tuple[Turn, ...]:
    return Turn("user", example.question), Turn("assistant", example.answer)


def _tokenizer(recipe: Recipe, kept: dict[str, bytes] | None, training: list[VqaExample]) -> Tokenizer:
    if kept is not None:
        return kept_tokenizer(kept)
    if recipe.tokenizer.path is not None:
        return open_tokenizer_file(resolve_path(recipe.data, recipe.tokenizer.path))
    texts = (turn.content for example in training for turn in _turns(example))
    return train_tokenizer(recipe.tokenizer, texts, reserved_texts(recipe.data.template))


def _encode(examples: list[VqaExample], tokenizer: Tokenizer, recipe: Recipe) -> QuestionRows:
    template = recipe.data.template
    texts = [Example(example.where, _turns(example)) for example in examples]
    tokens, counts, offsets, lost = encode_examples(texts, tokenizer, template)
    if template.system == template.user:
        raise RecipeError("the template's roles are alike", where="data.template", fix="give each a prefix of its own")
    prefix = encode_prompt([], tokenizer, template.model_copy(update={"assistant": template.user}))
    total = sum(len(turn.content) for text in texts for turn in text.turns)
    lost_characters = LostCharacters(int(lost.num[0].sum()), total, commonest(lost.counts))
    return QuestionRows(tokens, counts, offsets, len(prefix), lost_characters, lost.num[1])


def choose_questions(
    listed: ListedRows[VqaExample], images: list[ImageExample], wanted: Wanted
) -> ChosenRows[VqaExample]:
    """Choose rows by content and group; rows with a picture in common, or with pictures of one thing, are together."""
    examples = listed.rows
    things, same = numbered(group_names(images)), numbered([image.sha256 for image in images])
    rows = np.repeat(np.arange(len(examples)), [len(example.images) for example in examples])
    shown = np.array([image for example in examples for image in example.images], np.int64)
    links = [(rows, same[shown]), (rows, things[shown])]
    if listed.recipe.data.near_duplicates == "together" and wanted is not Wanted.NEW:
        links.append((rows, tie_alike(images, listed.recipe.images.grey_bits)[shown]))
    pictures = ["\0".join(images[image].sha256 for image in example.images) for example in examples]
    keys = [text_key(shown or example.question) for shown, example in zip(pictures, examples, strict=True)]
    return choose_rows(listed, wanted, keys, groups=[example.group for example in examples], links=links)


def pictures_of(chosen: ChosenRows[VqaExample], images: list[ImageExample]) -> Pictures:
    """Images with the first row that shows each, and the parts of these rows."""
    examples = chosen.listed.rows
    first = {image: example.where for example in reversed(examples) for image in example.images}
    places = [f"{first[index]}: {image.where}" if index in first else image.where for index, image in enumerate(images)]
    parts = {part: shown_by(examples, images, np.flatnonzero(rows)) for part, rows in chosen.sides().items()}
    recipe = chosen.listed.recipe
    return Pictures(images, places, parts, recipe.data.near_duplicates, recipe.images.grey_bits)


def shown_by(examples: list[VqaExample], images: list[ImageExample], rows: np.ndarray) -> np.ndarray:
    """Images that some rows show, (num_images,) bool."""
    shown = np.zeros(len(images), np.bool_)
    shown[[image for row in rows.tolist() for image in examples[row].images]] = True
    return shown
