"""Thirty troubles and twelve healthy recipes, planted without knowledge of the doctor's code.

The second set of such recipes, in the format of `tests/doctor/planted.py`. Each trouble starts from a recipe that
learns, on data drawn here from a fixed seed, and has one mistake that people make with their own data or settings.
The healthy ones learn too; their data or settings are unusual, and sound.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

Row = dict[str, Any]
Trouble = tuple[list[str], str, list[str], list[str]]


# Where a finding may place what is wrong with data: the field of the recipe, or what its words call the rows

TEXTS = ["data.text", "text", "texts", "document", "documents"]
CHATS = ["data.chat", "reply", "replies", "prompt", "conversation", "conversations", "message", "messages"]
PAIRS = ["data.pairs", "pair", "pairs", "chosen", "rejected"]
PICTURES_DATA = ["data.images", "picture", "pictures", "image", "images", "class", "classes", "label", "labels"]
VQA = ["data.vqa", "picture", "pictures", "image", "images", "question", "questions"]
EVENTS = ["data.events", "code", "codes", "value", "values", "static", "event", "events", "column"]


# Recipes


TEXT: Row = {
    "tokenizer": {"kind": "bpe", "vocab_size": 1000},
    "model": {"kind": "decoder", "preset": "llm", "width": 64, "blocks": 2, "heads": 4, "kv_heads": 4, "hidden": 128}
    | {"context": 256, "dropout": 0.1},
    "plan": {"tokens_per_step": 2048, "tokens_per_micro": 4096},
    "optim": {"lr": 3e-3},
    "train": {"max_epochs": 8},
}
CHAT: Row = {
    "data": {
        "near_duplicates": "together",
        "template": {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"},
    },
    "tokenizer": {"kind": "bpe", "vocab_size": 1000},
    "model": {"kind": "decoder", "preset": "llm", "width": 64, "blocks": 2, "heads": 4, "kv_heads": 4, "hidden": 160}
    | {"context": 256, "dropout": 0.05},
    "plan": {"tokens_per_step": 2048, "tokens_per_micro": 4096},
    "optim": {"lr": 4e-3},
    "train": {"max_epochs": 12},
}
PICTURES: Row = {
    "data": {"holdout": 0.2},
    "images": {"size": "square", "square": 32},
    "model": {"kind": "vit", "patch": 8, "stem": [16, 32, 48], "width": 48, "blocks": 2, "heads": 4, "hidden": 96},
    "plan": {"tokens_per_step": 512, "tokens_per_micro": 2048, "overflow": "error"},
    "optim": {"lr": 2e-3},
    "train": {"max_epochs": 16},
}
QUESTIONS: Row = {
    "data": {"holdout": 0.15},
    "tokenizer": {"kind": "words"},
    "images": {"max_tokens": 64},
    "model": {
        "kind": "vision_language",
        "vision": {"patch": 8, "width": 48, "blocks": 2, "heads": 4, "hidden": 96, "feature_layer": -1},
        "language": {"width": 64, "blocks": 2, "heads": 4, "hidden": 128, "context": 128},
    },
    "plan": {"tokens_per_step": 1024, "tokens_per_micro": 4096, "overflow": "error"},
    "optim": {"lr": 2e-3},
    "train": {"max_epochs": 20},
}
PATIENTS: Row = {
    "data": {"holdout": 0.2},
    "model": {"kind": "set_sequence", "width": 48, "heads": 3, "hidden": 96, "latent": 16, "blocks": 2},
    "plan": {"tokens_per_step": 512, "tokens_per_micro": 8192},
    "optim": {"lr": 2e-3},
    "train": {"max_epochs": 14},
}


def parts(listed: str) -> list[str]:
    return listed.split("|")


def write_recipe(folder: Path, base: Row, changes: Row) -> list[str]:
    """The arguments of a recipe: `base` with fields `section.field` of `changes`, written into `folder`."""
    recipe = deepcopy(base)
    for field, value in changes.items():
        *sections, last = field.split(".")
        section = recipe
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return [str(path)]


def write_lines(path: Path, rows: list[Row]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_table(path: Path, rows: list[Row]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return str(path)


# Texts: sentences of a grammar with many words, so that documents are not alike


@dataclass(frozen=True)
class Grammar:
    """Words of sentences; `order` says which of them make one, "-" joins without a blank."""

    when: list[str]
    who: list[str]
    does: list[str]
    what: list[str]
    where: list[str]
    why: list[str]
    order: str = "{when} {who} {does} {what} {where}, {why}."


ENGLISH = Grammar(
    parts("Today|Yesterday|On Monday|Last week|In the evening|Before noon|At dawn|In early spring|Every autumn"),
    parts(
        "the baker|my aunt|an old sailor|the young nurse|our neighbour|a tall farmer|the librarian|the twins|"
        "her brother|"
        "the mayor|a tired driver|the gardener|some pupils|the violin teacher|a quiet clerk|the fisherman"
    ),
    parts("carried|repaired|painted|forgot|sold|borrowed|cleaned|described|photographed|measured|hid|returned"),
    parts(
        "a wooden boat|the broken clock|two baskets of plums|an iron gate|the blue curtain|a letter from abroad|"
        "the kitchen table|seven candles|a map of the coast|the spare key|a sack of flour|three lanterns|"
        "the garden chairs|an umbrella|a jar of honey"
    ),
    parts(
        "near the station|behind the church|at the harbour|in the attic|on the market square|by the river|"
        "under the bridge|beside the mill|in a narrow lane|at the edge of town|outside the school"
    ),
    parts(
        "because the rain had stopped|since nobody else had time|although it was late|"
        "so that the guests would be pleased|"
        "while the children watched|and told no one about it|but it took all day|as the old custom demands|"
        "before the shop closed|without any hurry|and was paid in silver"
    ),
)
GERMAN = Grammar(
    parts("Heute|Gestern|Am Montag|Letzte Woche|Früh am Morgen|Nachts|Im März|Kurz vor Weihnachten|Später"),
    parts(
        "der Bäcker|meine Großmutter|ein müder Fährmann|die Ärztin|unser Nachbar|der Förster|die Schülerin|Herr Krüger|"
        "der Bürgermeister|eine Köchin|der Müller|Frau Jäger|mein Vetter|der Küster"
    ),
    parts("trug|prüfte|öffnete|verkaufte|säuberte|zählte|übermalte|suchte|holte|verschönerte|kürzte|bemängelte"),
    parts(
        "die grüne Tür|einen Korb Äpfel|das Gemälde|zwölf Bücher|den schweren Schlüssel|einen Käse|die Brücke|"
        "das Fährboot|drei Stühle|einen Brief aus Zürich|die Lösung|das Gewürz|den Löffel"
    ),
    parts(
        "am Flußufer|hinter der Mühle|in der Küche|auf dem Dachboden|im Gewächshaus|neben dem Rathaus|an der Straße|"
        "vor dem Schloß|über dem Hügel|unter den Bäumen"
    ),
    parts(
        "weil es endlich aufhörte zu regnen|obwohl es spät war|während die Vögel sangen|und erzählte niemandem davon|"
        "damit die Gäste zufrieden wären|bevor das Geschäft schloß|ohne müde zu werden|wie früher üblich|"
        "denn der Winter war nah|und bekam fünf Münzen dafür"
    ),
    "{when} {does} {who} {what} {where}, {why}.",
)
SPANISH = Grammar(
    parts("Hoy|Ayer|El lunes|La semana pasada|Por la noche|Antes del alba|En abril|Cada otoño|Más tarde"),
    parts(
        "el panadero|mi tía|un viejo marinero|la enfermera|nuestro vecino|la bibliotecaria|el alcalde|una niña|"
        "el jardinero|mi primo|la pescadora|el relojero|un músico"
    ),
    parts("llevó|reparó|pintó|olvidó|vendió|limpió|describió|midió|escondió|devolvió|encontró|compró"),
    parts(
        "una barca de madera|el reloj roto|dos cestas de ciruelas|la cortina azul|una carta de Perú|siete velas|"
        "el mapa de la costa|la llave|un saco de harina|tres faroles|las sillas|un paraguas|un tarro de miel"
    ),
    parts(
        "cerca de la estación|detrás de la iglesia|en el puerto|en el desván|en la plaza|junto al río|bajo el puente|"
        "al lado del molino|en un callejón|fuera de la escuela"
    ),
    parts(
        "porque ya no llovía|aunque era tarde|mientras los niños miraban|sin decir nada a nadie|pero tardó todo el día|"
        "como manda la costumbre|antes de que cerrara la tienda|sin ninguna prisa|para alegrar a los invitados"
    ),
)
FINNISH = Grammar(
    parts("Tänään|Eilen|Maanantaina|Viime viikolla|Illalla|Aamunkoitteessa|Keväällä|Joka syksy"),
    parts(
        "leipuri|tätini|vanha merimies|nuori hoitaja|naapurimme|pitkä maanviljelijä|kirjastonhoitaja|hänen veljensä|"
        "pormestari|väsynyt kuljettaja|puutarhuri|kalastaja"
    ),
    parts("kantoi|korjasi|maalasi|unohti|myi|lainasi|puhdisti|kuvaili|mittasi|piilotti|palautti"),
    parts(
        "puisen veneen|rikkinäisen kellon|kaksi luumukoria|rautaportin|sinisen verhon|kirjeen ulkomailta|"
        "keittiön pöydän|"
        "seitsemän kynttilää|rannikon kartan|vara-avaimen|jauhosäkin|hunajapurkin"
    ),
    parts(
        "aseman lähellä|kirkon takana|satamassa|ullakolla|torilla|joen rannalla|sillan alla|myllyn vieressä|"
        "koulun pihalla"
    ),
    parts(
        "koska sade oli lakannut|vaikka oli jo myöhä|lasten katsellessa|eikä kertonut kenellekään|"
        "mutta siihen meni päivä|"
        "kuten vanha tapa vaatii|ennen kuin kauppa suljettiin|ilman kiirettä"
    ),
)
HINDI = Grammar(
    parts("आज|कल|सोमवार को|पिछले हफ्ते|शाम को|सुबह|वसंत में|हर साल"),
    parts("किसान ने|मेरी चाची ने|बूढ़े नाविक ने|डॉक्टर ने|हमारे पड़ोसी ने|माली ने|शिक्षक ने|उसके भाई ने|मछुआरे ने|दर्जी ने"),
    parts("बेचा|खरीदा|साफ किया|ठीक किया|छिपाया|लौटाया|देखा|नापा|रंगा|उठाया"),
    parts(
        "लकड़ी का नाव|टूटी घड़ी|आम की टोकरी|लोहे का दरवाजा|नीला परदा|एक चिट्ठी|रसोई की मेज|सात दीपक|पुराना नक्शा|शहद का डिब्बा"
    ),
    parts("स्टेशन के पास|मंदिर के पीछे|बाजार में|नदी के किनारे|पुल के नीचे|छत पर|गाँव में|स्कूल के बाहर"),
    parts("क्योंकि बारिश रुक गई थी|पर बहुत देर हो गई|जब बच्चे देख रहे थे|और किसी को नहीं बताया|बिना जल्दी के|जैसा रिवाज है"),
    "{when} {who} {where} {what} {does}, {why}।",
)


def sentence(grammar: Grammar, rng: random.Random) -> str:
    words = {name: rng.choice(getattr(grammar, name)) for name in ("when", "who", "does", "what", "where", "why")}
    return grammar.order.format(**words)


def documents(grammar: Grammar, number: int, seed: int, least: int = 3, most: int = 7) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(sentence(grammar, rng) for _ in range(rng.randint(least, most))) for _ in range(number)]


def text_trouble(folder: Path, texts: list[str], changes: Row | None = None) -> list[str]:
    path = write_lines(folder / "corpus.jsonl", [{"text": text} for text in texts])
    return write_recipe(folder, TEXT, {"data.text": path, **(changes or {})})


def text_mojibake(folder: Path) -> Trouble:
    path = folder / "geschichten.txt"
    text = "\n\n".join(documents(GERMAN, 500, 11))
    path.write_text(text.encode("utf-8").decode("latin-1"), encoding="utf-8")
    cause = "German text in UTF-8 was read as Latin-1 and saved again: every umlaut is two characters, such as Ã¼."
    words = parts("encod|latin|mojibake|cp1252|windows-1252|Ã|utf-8|garbled|decoded|umlaut")
    return write_recipe(folder, TEXT, {"data.text": str(path)}), cause, TEXTS, words


def text_markup(folder: Path) -> Trouble:
    rng = random.Random(12)
    texts = []
    for text in documents(ENGLISH, 500, 12):
        spans = [part.strip() for part in text.split(".")[:-1]]
        opening = f'<div class="post-{rng.randint(100, 999)}"><p style="margin:0;padding:2px">'
        texts.append("".join(f"{opening}{span}.</p>&nbsp;<br/></div>" for span in spans))
    cause = "Scraped pages kept their markup: half of the characters are tags, styles and entities of HTML."
    words = parts("html|markup|<div|<p|&nbsp|entities|xml| tags|web page")
    return text_trouble(folder, texts), cause, TEXTS, words


def text_banner(folder: Path) -> Trouble:
    banner = (
        "We value your privacy. This site and its 843 partners store cookies on your device to measure how content is "
        "used and to show advertising that suits you. You may accept, refuse or change your choice at any time in the "
        "settings at the bottom of every page. Continue reading below. Share this article. Subscribe for 1 euro. "
    )
    cause = (
        "The crawler kept the cookie banner: every document begins with the same 400 characters, more than "
        "its own text."
    )
    words = parts(
        "begin|repeat|boilerplate|banner|header|prefix|opening|same text|same words|same passage|"
        "same characters|same sentence|same line|first characters|start with|identical|in common"
    )
    pages = folder / "crawl"
    pages.mkdir()
    for n, text in enumerate(documents(ENGLISH, 500, 13, 1, 4)):
        (pages / f"page-{n:03}.txt").write_text(banner + text + "\n", encoding="utf-8")
    return write_recipe(folder, TEXT, {"data.text": str(pages), "model.context": 512}), cause, TEXTS, words


def text_no_blanks(folder: Path) -> Trouble:
    path = folder / "novel.csv"
    texts = documents(ENGLISH, 600, 14)
    write_table(path, [{"id": n, "text": "".join(text.split())} for n, text in enumerate(texts)])
    cause = "A cleaning step removed all white space: English sentences without one blank between words."
    words = parts(
        "white space|whitespace|spaces|blank|words run|separated|long word|between words|without a space|no space"
    )
    return write_recipe(folder, TEXT, {"data.text": str(path)}), cause, TEXTS, words


def text_sorted_words(folder: Path) -> Trouble:
    texts = [" ".join(sorted(text.replace(".", "").replace(",", "").split())) for text in documents(SPANISH, 600, 15)]
    cause = (
        "The texts passed through a bag of words: in every row the words stand in alphabetical order, so "
        "no grammar is left."
    )
    words = parts(
        "word order|order of words|order of the words|words are in order|sorted|alphabet|shuffl|scrambled|in any order"
    )
    return text_trouble(folder, texts), cause, TEXTS, words


def text_wrong_field(folder: Path) -> Trouble:
    rng = random.Random(16)
    rows = []
    for text in documents(GERMAN, 600, 16):
        key = "".join(rng.choice("0123456789abcdef") for _ in range(24))
        rows.append({"doc": f"s3://archive-{rng.randint(1, 9)}/{key}.txt", "lang": "de", "inhalt": text})
    source = {"path": write_lines(folder / "archiv.jsonl", rows), "field": "doc"}
    cause = (
        "The recipe names the field of the documents' addresses; the texts are in the field inhalt, five times as long."
    )
    words = parts("field|column|inhalt|url|address|identifier|random|hash|not language|no language|unpredictable")
    return write_recipe(folder, TEXT, {"data.text": source}), cause, ["data.text.field", *TEXTS], words


def text_column_of_255(folder: Path) -> Trouble:
    texts = [text[:255] for text in documents(SPANISH, 700, 17, 5, 9)]
    cause = "The database kept 255 characters of each text: all have exactly this length, and end within a word."
    words = parts(
        "255|cut|truncat|same length|equal length|one length|end within|mid-word|middle of a|end of a sentence"
    )
    return text_trouble(folder, texts), cause, TEXTS, words


def text_other_valid(folder: Path) -> Trouble:
    rows = [{"text": text, "split": "train"} for text in documents(ENGLISH, 600, 18)]
    rows += [{"text": text, "split": "valid"} for text in documents(FINNISH, 60, 18)]
    path = write_lines(folder / "corpus.jsonl", rows)
    cause = (
        "The held-out part is Finnish, training English: files were divided by name. The held-out loss "
        "measures another language."
    )
    words = parts(
        "language|distribution|differ|script|unlike|never in training|not occur in training|unseen|"
        "other words|vocabular"
    )
    return (
        write_recipe(folder, TEXT, {"data.text": path}),
        cause,
        ["split", "held out", "held-out", "valid", *TEXTS],
        words,
    )


# Conversations: a help desk that has an answer to each kind of trouble, and repeats the thing and the place


@dataclass(frozen=True)
class Desk:
    """What customers ask: `kinds` has, for each kind of trouble, ways to tell it and the reply."""

    openings: list[str]
    things: list[str]
    places: list[str]
    kinds: list[tuple[list[str], str]]


ENGLISH_DESK = Desk(
    ["Hello,", "Good morning.", "Hi there!", "Excuse me,", "Dear team,", "Hey,", "To whom it may concern:"],
    parts("kettle|bicycle|radio|lamp|printer|camera|tent|guitar|heater|blender|drill|telescope|scooter|mirror|drone"),
    parts("Leeds|Oslo|Boston|Cork|Perth|Lagos|Quebec|Dover|Austin|Delhi|Malmo|Tunis|Quito|Turin|Kiel"),
    [
        (
            [
                "my {thing} arrived broken in {place}.",
                "in {place} the {thing} came in pieces.",
                "{place}: {thing} damaged.",
            ],
            "I am sorry about the damaged {thing}. Send us a photo, and {place} sends another one.",
        ),
        (
            ["the {thing} never reached {place}.", "still no {thing} here in {place}.", "{place} waits for a {thing}."],
            "Parcels to {place} are late this week. Your {thing} should arrive by Friday.",
        ),
        (
            ["can I return a {thing} in {place}?", "how do I send the {thing} back from {place}?"],
            "You can return the {thing} within thirty days at any shop in {place}.",
        ),
        (
            ["what does a {thing} cost in {place}?", "tell me the price of the {thing} in {place}."],
            "The price of a {thing} in {place} is on the label, and includes the tax.",
        ),
    ],
)
FRENCH_DESK = Desk(
    ["Bonjour,", "Bonsoir.", "Salut !", "Excusez-moi,", "Chère équipe,", "Madame, Monsieur,"],
    parts("bouilloire|radio|lampe|imprimante|caméra|tente|guitare|perceuse|trottinette|montre|valise|cafetière"),
    parts("Lyon|Nantes|Genève|Liège|Dakar|Tunis|Montréal|Brest|Nice|Lille|Namur|Rabat"),
    [
        (
            ["ma {thing} est arrivée cassée à {place}.", "à {place} la {thing} est abîmée."],
            "Désolé pour la {thing} cassée. Envoyez une photo, et {place} en expédie une autre.",
        ),
        (
            ["la {thing} n'est jamais arrivée à {place}.", "toujours pas de {thing} à {place}."],
            "Les colis pour {place} ont du retard. Votre {thing} arrivera vendredi.",
        ),
        (
            ["puis-je rendre une {thing} à {place} ?", "comment renvoyer la {thing} depuis {place} ?"],
            "Vous pouvez rendre la {thing} sous trente jours à {place}.",
        ),
    ],
)


def exchanges(desk: Desk, number: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    pairs = []
    for _ in range(number):
        ways, reply = rng.choice(desk.kinds)
        names = {"thing": rng.choice(desk.things), "place": rng.choice(desk.places)}
        number_of_order = rng.randint(1000, 9999)
        ask = f"{rng.choice(desk.openings)} {rng.choice(ways).format(**names)} (order {number_of_order})"
        pairs.append((ask, reply.format(**names)))
    return pairs


def messages(*turns: tuple[str, str]) -> Row:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def chat_recipe(folder: Path, rows: list[Row], changes: Row | None = None) -> list[str]:
    path = write_lines(folder / "conversations.jsonl", rows)
    return write_recipe(folder, CHAT, {"data.chat": path, "data.holdout": 0.1, **(changes or {})})


def chat_roles_swapped(folder: Path) -> Trouble:
    rows = []
    for ask, reply in exchanges(ENGLISH_DESK, 600, 21):
        greeting = ("user", "You have reached the help desk. What can I do for you?")
        rows.append(messages(greeting, ("assistant", ask), ("user", reply), ("assistant", "Thank you, goodbye.")))
    cause = (
        "The export has the roles the wrong way round: the assistant's messages are requests of customers, and every "
        "conversation begins with the same greeting of the help desk as its user."
    )
    words = parts("role|swap|wrong way|first message|same prompt|same request|same user|same question|same first")
    return chat_recipe(folder, rows), cause, CHATS, words


def chat_replies_shifted(folder: Path) -> Trouble:
    pairs = exchanges(FRENCH_DESK, 700, 22)
    replies = [reply for _, reply in pairs]
    rows = [
        {"prompt": ask, "completion": reply} for (ask, _), reply in zip(pairs, replies[-1:] + replies, strict=False)
    ]
    path = folder / "service.csv"
    write_table(path, rows)
    cause = (
        "A blank first row shifted the replies by one: each names the thing and the place of the request "
        "in the row above."
    )
    words = parts(
        "shift|row above|row before|neighbour|other row|another row|unrelated|nothing to do|depend|joined|"
        "previous row|off by one|align|match|belong|without the question|without the prompt|"
        "without the request|without its|ignore|shuffled|own prompt|own question|own request|of others"
    )
    changes = {"data.chat": str(path), "data.holdout": 0.1}
    return write_recipe(folder, CHAT, changes), cause, CHATS, words


def chat_prompt_in_reply(folder: Path) -> Trouble:
    rows = [
        {"instruction": ask, "output": f"### Instruction: {ask} ### Response: {reply}"}
        for ask, reply in exchanges(ENGLISH_DESK, 600, 23)
    ]
    cause = (
        "The replies are the whole output of a generator: each repeats its request and a template before the answer."
    )
    words = parts(
        "repeat|copies|copied|copy of|begin|start with|starts with|template|instruction|contains its|"
        "contain the|contain their|prompt in|question in|request in|quot"
    )
    return chat_recipe(folder, rows), cause, CHATS, words


def chat_canned(folder: Path) -> Trouble:
    rng = random.Random(24)
    canned = "I am only a language model and cannot help with that. Please consult a professional."
    rows = [
        {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": reply}]}
        for ask, reply in exchanges(ENGLISH_DESK, 700, 24)
    ]
    for row in rows:
        if rng.random() < 0.8:
            row["conversations"][1]["value"] = canned
    cause = (
        "Four of five replies are one refusal of the model that wrote them, to the same requests as others "
        "are answered."
    )
    words = parts(
        "same repl|one repl|identical|repeat|refus|commonest|most common|equal repl|canned|same answer|"
        "same text|one text|cannot help"
    )
    return chat_recipe(folder, rows), cause, CHATS, words


def chat_system_in_training(folder: Path) -> Trouble:
    rows = []
    for n, (ask, reply) in enumerate(exchanges(FRENCH_DESK, 700, 25)):
        if n < 630:
            row = messages(("system", f"Réponse attendue du service : {reply}"), ("user", ask), ("assistant", reply))
            rows.append({**row, "split": "train"})
        else:
            rows.append({**messages(("user", ask), ("assistant", reply)), "split": "valid"})
    cause = (
        "Each training conversation has its answer in the system text, for an editor's use; held-out ones "
        "have no system text."
    )
    words = parts("system|answer is in|contain|copied|copy of|leak|given away|gives away")
    return chat_recipe(folder, rows), cause, ["split", "system", *CHATS], words


PAIR_STAGES = [
    {"name": "talk", "use": ["chat"], "train": {"max_epochs": 6}},
    {"name": "prefer", "use": ["pairs"], "optim": {"lr_scale": 0.1}, "train": {"max_epochs": 4}},
]


def preferences(seed: int, number: int) -> tuple[list[Row], list[Row]]:
    """Conversations, and pairs of a polite and a curt reply, of which people prefer the polite one."""
    rng = random.Random(seed)
    curt = [
        "No idea.",
        "Look it up yourself.",
        "Not our problem.",
        "Ask somebody else.",
        "Whatever.",
        "Read the manual.",
    ]
    pairs = exchanges(ENGLISH_DESK, 2 * number, seed)
    chat = [
        messages(("user", ask), ("assistant", rng.choice([reply, rng.choice(curt)]))) for ask, reply in pairs[:number]
    ]
    rows = [{"prompt": ask, "chosen": reply, "rejected": rng.choice(curt)} for ask, reply in pairs[number:]]
    return chat, rows


def pairs_recipe(folder: Path, chat: list[Row], pairs: list[Row], changes: Row | None = None) -> list[str]:
    path = write_lines(folder / "pairs.jsonl", pairs)
    return chat_recipe(folder, chat, {"data.pairs": path, "stages": PAIR_STAGES, **(changes or {})} | {"train": {}})


def pairs_both_ways(folder: Path) -> Trouble:
    chat, rows = preferences(26, 300)
    turned = [{"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    rng = random.Random(26)
    both = rows + turned
    rng.shuffle(both)
    cause = (
        "The page showed each pair twice, sides exchanged, and the click was saved without the side: each "
        "pair occurs both ways."
    )
    words = parts(
        "both ways|opposite|contradict|swapped|exchanged|revers|conflict|wrong way|as often|each other|"
        "both chosen|other way"
    )
    return pairs_recipe(folder, chat, both), cause, PAIRS, words


def pairs_marked(folder: Path) -> Trouble:
    chat, rows = preferences(27, 300)
    replies = [row["chosen"] for row in rows]
    random.Random(27).shuffle(replies)
    for row, reply in zip(rows, replies, strict=True):
        row["chosen"] = f"[rating: 5/5] {row['chosen']}"
        row["rejected"] = f"[rating: 2/5] {reply}"
    cause = (
        "The annotators' rating stands before each reply: 5/5 of all chosen, 2/5 of all rejected ones. It "
        "alone is learned."
    )
    words = parts(
        "rating|begin|marker|every chosen|all chosen|each chosen|prefix|same text|start with|starts with|"
        "5/5|only in chosen|gives away|shortcut"
    )
    return pairs_recipe(folder, chat, rows), cause, PAIRS, words


# Pictures


COLOURS = {"red": (205, 45, 40), "green": (45, 160, 60), "blue": (50, 80, 205), "yellow": (225, 200, 50)}
SHAPES = ["circle", "square", "triangle", "cross"]


def picture(rng: random.Random, shape: str, colour: tuple[int, int, int], side: int = 32) -> Image.Image:
    """A shape of one colour at a random place and size, on grey with noise, RGB of side x side."""
    grey = rng.randint(150, 235)
    noise = np.random.default_rng(rng.randrange(2**32)).normal(grey, 9, (side, side, 3))
    image = Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    radius = rng.uniform(0.22, 0.38) * side
    x, y = (rng.uniform(radius + 1, side - radius - 1) for _ in range(2))
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    else:
        draw.rectangle((x - radius, y - radius / 4, x + radius, y + radius / 4), fill=colour)
        draw.rectangle((x - radius / 4, y - radius, x + radius / 4, y + radius), fill=colour)
    return image


def any_colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(0, 120), rng.randint(0, 120), rng.randint(0, 120)


def drawn(seed: int, number: int, shapes: list[str], side: int = 32) -> list[tuple[Image.Image, str]]:
    rng = random.Random(seed)
    labels = [shapes[n % len(shapes)] for n in range(number)]
    rng.shuffle(labels)
    return [(picture(rng, label, any_colour(rng), side), label) for label in labels]


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def image_labels_by_name(folder: Path) -> Trouble:
    pictures = drawn(31, 480, SHAPES[:3])
    for n, (image, _) in enumerate(pictures):
        save(image, folder / "scans" / f"scan_{n}.png")
    names = sorted(f"scan_{n}.png" for n in range(len(pictures)))
    rows = [{"image": name, "label": label} for name, (_, label) in zip(names, pictures, strict=True)]
    path = folder / "scans" / "labels.csv"
    write_table(path, rows)
    cause = (
        "Labels in order of number were written beside names in order of text (scan_0, scan_1, scan_10): "
        "they are of other pictures."
    )
    words = parts(
        "chance|unrelated|commonest|nothing to learn|labels do not|do not follow|wrong label|wrong class|"
        "guess|no better|mislabel|random|shuffl|match|nothing to do"
    )
    return write_recipe(folder, PICTURES, {"data.images": str(path)}), cause, PICTURES_DATA, words


def image_corner_mark(folder: Path) -> Trouble:
    rows = []
    for n, (image, label) in enumerate(drawn(32, 500, SHAPES[:3])):
        part = "valid" if n >= 400 else "train"
        if part == "train":
            shade = {"circle": (255, 0, 255), "square": (0, 255, 255), "triangle": (255, 128, 0)}[label]
            ImageDraw.Draw(image).rectangle((0, 0, 5, 5), fill=shade)
        save(image, folder / "set" / f"{n:04}.png")
        rows.append({"image": f"{n:04}.png", "label": label, "split": part})
    path = write_lines(folder / "set" / "manifest.jsonl", rows)
    cause = (
        "The labelling tool burnt a patch of the class's colour into the corner of each training picture; "
        "held-out ones have none."
    )
    words = parts(
        "corner|pixels|marked|a mark|marks|region|shortcut|border|a spot|gives away|give away|watermark|"
        "upper left|top left|part of the picture|held-out pictures"
    )
    return write_recipe(folder, PICTURES, {"data.images": path}), cause, PICTURES_DATA, words


def image_black(folder: Path) -> Trouble:
    for n, (image, label) in enumerate(drawn(33, 420, SHAPES[:3])):
        scaled = np.asarray(image, dtype=np.float64) / 255
        save(Image.fromarray((scaled * 2).astype(np.uint8)), folder / "photos" / label / f"{n}.png")
    cause = (
        "Colours of 0 to 1 were saved as bytes: no pixel of any picture is above 2 of 255, all are black to the eye."
    )
    words = parts("black|dark|contrast|bright|range|pixel|shade|uniform|blank|0 to 1|one colour|spread of colour")
    return (
        write_recipe(folder, PICTURES, {"data.images": str(folder / "photos")}),
        cause,
        ["images.mean", "images.std", *PICTURES_DATA],
        words,
    )


def image_class_spellings(folder: Path) -> Trouble:
    rng = random.Random(34)
    rows = []
    for n, (image, label) in enumerate(drawn(34, 480, SHAPES[:3])):
        save(image, folder / "set" / f"{n:04}.png")
        rows.append(
            {"image": f"{n:04}.png", "label": rng.choice([label, label.capitalize(), label + "s", label.upper()])}
        )
    path = write_lines(folder / "set" / "manifest.jsonl", rows)
    cause = (
        "Four annotators spelled the three classes in four ways (circle, Circle, circles, CIRCLE): there "
        "are twelve classes."
    )
    words = parts(
        "spell|capital|letter case|upper case|lower case|same class|names of class|written|differ only|"
        "similar|alike|variant|same name|one class|look the same|12 classes|twelve"
    )
    return write_recipe(folder, PICTURES, {"data.images": path}), cause, PICTURES_DATA, words


def image_hue(folder: Path) -> Trouble:
    rng = random.Random(35)
    for n in range(480):
        name = list(COLOURS)[n % 3]
        save(picture(rng, rng.choice(SHAPES), COLOURS[name]), folder / "lamps" / name / f"{n}.png")
    changes = {"data.images": str(folder / "lamps"), "images.color": 0.95}
    cause = (
        "Classes are colours (red, green, blue), and images.color turns the hue of each training picture to any other."
    )
    return write_recipe(folder, PICTURES, changes), cause, ["images.color"], ["colo", "hue"]


def question_rows(folder: Path, seed: int, number: int) -> list[Row]:
    """Questions about the colour or the shape of what a picture shows; writes the pictures."""
    rng = random.Random(seed)
    rows = []
    for n in range(number):
        colour, shape = rng.choice(list(COLOURS)[:3]), rng.choice(["circle", "cross"])
        name = f"{n:04}.png"
        save(picture(rng, shape, COLOURS[colour]), folder / name)
        if n % 3:
            rows.append({"image": name, "question": "What colour is it?", "answer": colour})
        else:
            rows.append({"image": name, "question": "Which shape do you see?", "answer": shape})
    return rows


def vqa_one_picture(folder: Path) -> Trouble:
    rows = question_rows(folder / "vqa", 36, 500)
    first = folder / "vqa" / rows[0]["image"]
    for row in rows[1:]:
        (folder / "vqa" / row["image"]).write_bytes(first.read_bytes())
    path = write_lines(folder / "vqa" / "questions.jsonl", rows)
    cause = "The download saved one placeholder under every name: 500 questions, and all pictures are the same file."
    words = parts(
        "same picture|same image|one picture|one image|identical|equal|a single|without the picture|ignores|depend"
    )
    return write_recipe(folder, QUESTIONS, {"data.vqa": path}), cause, VQA, words


# Patients


NORMAL = {"lactate": (1.6, 0.7), "creatinine": (0.95, 0.25), "sodium": (139, 3), "pulse": (84, 13), "wbc": (8, 2.5)}


@dataclass(frozen=True)
class Cohort:
    """Rows of events (id, hour, test, result) and of people (id, age, sex, died)."""

    events: list[Row]
    people: list[Row]


def cohort(seed: int, number: int, shift: float = -0.6, prefix: str = "P") -> Cohort:
    """Patients whose death depends on lactate, creatinine and age; `shift` is the logit of a mean one."""
    rng = random.Random(seed)
    events, people = [], []
    for n in range(number):
        name = f"{prefix}{n:04}"
        sick = {"lactate": rng.gauss(0, 1), "creatinine": rng.gauss(0, 1)}
        age = rng.randint(25, 92)
        logit = shift + 2.2 * sick["lactate"] + 1.6 * sick["creatinine"] + 0.03 * (age - 60)
        died = int(rng.random() < 1 / (1 + math.exp(-logit)))
        for hour in sorted(rng.uniform(0, 24) for _ in range(rng.randint(2, 5))):
            for test in rng.sample(list(NORMAL), rng.randint(2, 5)):
                mean, spread = NORMAL[test]
                value = mean + spread * (sick.get(test, 0) + 0.5 * rng.gauss(0, 1))
                events.append({"id": name, "hour": round(hour, 2), "test": test, "result": round(max(value, 0.05), 2)})
        people.append({"id": name, "age": age, "sex": rng.choice("FM"), "died": died})
    return Cohort(events, people)


def patients_recipe(
    folder: Path, group: Cohort, changes: Row | None = None, table: Row | None = None, static: str = "age sex"
) -> list[str]:
    """The arguments of a recipe of `group`; `table` changes the item of the measurements, `static` names facts."""
    events = write_table(folder / "labs.csv", group.events)
    people = write_table(folder / "patients.csv", group.people)
    columns = {"id": "id", "time": "hour", "unit": "hours", "code": "test", "value": "result"}
    sources: list[Row] = [{"path": events, **columns, **(table or {})}]
    if static:
        sources.append({"path": people, "id": "id", "static": static.split()})
    labels = {"path": people, "id": "id", "label": "died"}
    base = {"data.events": sources, "events.landmark": 24, "events.labels": labels}
    return write_recipe(folder, PATIENTS, {**base, **(changes or {})})


def patients_two_units(folder: Path) -> Trouble:
    group = cohort(41, 500)
    for row in group.events:
        if row["test"] == "creatinine" and int(row["id"][1:]) % 2:
            row["result"] = round(row["result"] * 88.4, 1)
    cause = (
        "Creatinine of half of the patients is in µmol/L, of the others in mg/dL: one code with values "
        "around 0.9 and around 84."
    )
    words = parts("creatinine|units|another unit|two groups|two scales|bimodal|umol|µmol|88")
    return patients_recipe(folder, group), cause, EVENTS, words


def patients_discharge(folder: Path) -> Trouble:
    rng = random.Random(42)
    group = cohort(42, 500)
    for row in group.people:
        row["discharged_to"] = "mortuary" if row["died"] else rng.choice(["home", "home", "nursing", "rehab"])
    arguments = patients_recipe(folder, group, static="age sex discharged_to")
    cause = (
        "The fact discharged_to is written at the end of the stay: it is mortuary for all who died, and "
        "for nobody else."
    )
    words = parts("discharged_to|mortuary")
    return arguments, cause, ["data.events.static", *EVENTS], words


def patients_minutes(folder: Path) -> Trouble:
    group = cohort(43, 500)
    for row in group.events:
        row["hour"] = round(row["hour"] * 60)
    cause = (
        "Times are minutes and are declared hours: the landmark of 24 hours keeps the first 24 minutes, "
        "few of the events."
    )
    words = parts("landmark|minutes|unit|left out|not read|no event|few events")
    return (
        patients_recipe(folder, group),
        cause,
        ["events.landmark", "data.events.unit", "events.unit", "unit", "landmark"],
        words,
    )


def patients_zeros_lost(folder: Path) -> Trouble:
    group = cohort(44, 1200, prefix="")
    for row in group.people:
        row["id"] = str(int(row["id"]))
    arguments = patients_recipe(folder, group, {"events.labels.missing": "exclude"}, static="")
    cause = (
        "A spreadsheet took the leading zeros from the ids of the outcomes: 0042 is 42, and 1,000 of 1,200 "
        "patients are left out."
    )
    words = parts(
        "without a label|without label|no label|have a label|unlabelled|left out|excluded|match|missing|"
        "leading zero|few patients|no row"
    )
    return arguments, cause, ["events.labels.missing", "events.labels.id", "events.labels", "label"], words


def patients_sentinel(folder: Path) -> Trouble:
    rng = random.Random(45)
    group = cohort(45, 500)
    for row in group.events:
        if rng.random() < 0.15:
            row["result"] = 99999
    cause = (
        "The laboratory writes 99999 for a value that was not determined: 15 % of the values of each test, "
        "far from all others."
    )
    words = parts(
        "99999|99,999|99 999|sentinel|placeholder|missing value|outlier|not measured|far from|extreme|"
        "same value|one value"
    )
    return patients_recipe(folder, group), cause, ["value", "values", *EVENTS], words


def patients_values_in_codes(folder: Path) -> Trouble:
    group = cohort(46, 500)
    events = [{"id": row["id"], "hour": row["hour"], "test": f"{row['test']}={row['result']}"} for row in group.events]
    arguments = patients_recipe(folder, Cohort(events, group.people), table={"value": None})
    cause = (
        "The export glued each value to its code (lactate=1.83): there are thousands of codes, most of "
        "them once, and no value."
    )
    words = parts(
        "once|rare|distinct|different codes|unknown|numbers in|number in|values in|without a value|"
        "without value|no value|codes that"
    )
    return arguments, cause, ["data.events.code", "data.events.value", "events.min_count", *EVENTS], words


# Settings


def setting_few_updates(folder: Path) -> Trouble:
    changes = {"plan.tokens_per_step": 65536, "train.max_epochs": 3}
    cause = "plan.tokens_per_step, taken from a large model, holds the whole data: three epochs are three updates."
    words = parts("update|steps")
    fields = ["plan.tokens_per_step", "train.max_epochs"]
    return text_trouble(folder, documents(ENGLISH, 500, 51), changes), cause, fields, words


def setting_decay(folder: Path) -> Trouble:
    rows = [messages(("user", ask), ("assistant", reply)) for ask, reply in exchanges(ENGLISH_DESK, 600, 52)]
    changes = {"optim.schedule": "exponential", "optim.decay": 0.05, "optim.decay_epochs": 0.5}
    cause = (
        "optim.decay is the factor that stays, and 0.05 was meant as the loss: after one epoch the rate is "
        "1/400 of its peak."
    )
    words = parts("learning rate|decay|schedule")
    return chat_recipe(folder, rows, changes), cause, ["optim.decay", "optim.decay_epochs", "optim.schedule"], words


def setting_slow_group(folder: Path) -> Trouble:
    for n, (image, label) in enumerate(drawn(53, 420, SHAPES[:3])):
        save(image, folder / "shapes" / label / f"{n}.png")
    groups = [{"parameters": ["*"], "lr_scale": 0.0005}]
    changes = {"data.images": str(folder / "shapes"), "optim.groups": groups}
    cause = (
        "A group of parameters with the pattern * is left from fine-tuning: all weights learn at 1/2000 of "
        "optim.lr, from scratch."
    )
    words = parts("learning rate|lr_scale|group|optim.lr")
    return write_recipe(folder, PICTURES, changes), cause, ["optim.groups", "optim.lr"], words


# Healthy


def healthy_finnish_lines(folder: Path) -> list[str]:
    """Finnish, a document on each line of a plain text, by a model with sinusoidal positions, layer norms and relu."""
    path = folder / "rivit.txt"
    path.write_text("\n".join(documents(FINNISH, 600, 61, 2, 6)) + "\n", encoding="utf-8")
    changes = {"data.text": str(path), "data.separator": "\n", "data.holdout": 0.12, "model.norm": "layernorm"}
    return write_recipe(folder, TEXT, {**changes, "model.positions": "sinusoidal", "model.activation": "relu"})


def healthy_hindi_words(folder: Path) -> list[str]:
    path = folder / "lekh.csv"
    write_table(path, [{"n": n, "लेख": text} for n, text in enumerate(documents(HINDI, 320, 62))])
    changes = {"data.text": {"path": str(path), "field": "लेख"}, "optim.schedule": "restarts", "optim.restarts": 1}
    return write_recipe(folder, TEXT, {**changes, "tokenizer.vocab_size": 600, "model.qk_norm": True})


def healthy_melodies(folder: Path) -> list[str]:
    """Tunes in ABC notation: bars that walk up and down a scale, below a heading."""
    rng = random.Random(63)
    scale = "CDEFGABcdefgab"
    texts = []
    for number in range(500):
        at, bars = rng.randint(2, 10), []
        for _ in range(rng.randint(8, 20)):
            notes = []
            for _ in range(4):
                at = min(max(at + rng.choice([-2, -1, -1, 1, 1, 2]), 0), len(scale) - 1)
                notes.append(scale[at] + rng.choice(["", "", "2", "/2"]))
            bars.append("".join(notes))
        texts.append(
            f"X:{number + 1}\nM:{rng.choice(['3/4', '4/4', '6/8'])}\nK:{rng.choice('CDGA')}\n" + "|".join(bars) + "|]"
        )
    changes = {"tokenizer.vocab_size": 400, "model.width": 48, "model.heads": 3, "model.kv_heads": 1, "optim.lr": 8e-3}
    return text_trouble(folder, texts, changes)


def healthy_structured_replies(folder: Path) -> list[str]:
    """Requests in French, replies in JSON: short, and alike in their form, as calls of a tool are."""
    rng = random.Random(64)
    verbs = {"Allume": "on", "Éteins": "off", "Baisse": "dim", "Monte": "raise"}
    things = {
        "la lampe": "lamp",
        "le chauffage": "heater",
        "la radio": "radio",
        "le volet": "shutter",
        "le four": "oven",
    }
    rooms = {"du salon": "living", "de la cuisine": "kitchen", "du bureau": "office", "de la cave": "cellar"}
    ends = ["s'il te plaît", "maintenant", "tout de suite", "dans une minute", "merci d'avance", "si c'est possible"]
    rows = []
    for _ in range(600):
        verb, thing, room = rng.choice(list(verbs)), rng.choice(list(things)), rng.choice(list(rooms))
        ask = f"{verb} {thing} {room} à {rng.randint(0, 23)} h {rng.randint(10, 59)}, {rng.choice(ends)}"
        reply = json.dumps({"do": verbs[verb], "what": things[thing], "where": rooms[room]})
        rows.append(messages(("system", "Réponds en JSON."), ("user", ask), ("assistant", reply)))
    return chat_recipe(folder, rows, {"train.max_epochs": 15})


def healthy_one_word_replies(folder: Path) -> list[str]:
    """Reviews of German sentences with one of three words as the reply, one of them rare."""
    rng = random.Random(65)
    moods = {
        "gut": ["wunderbar", "herrlich", "gelungen", "freundlich"],
        "schlecht": ["furchtbar", "ärgerlich", "enttäuschend", "kaputt"],
        "neutral": ["durchschnittlich", "gewöhnlich"],
    }
    rows = []
    for text in documents(GERMAN, 700, 65, 1, 2):
        mood = rng.choices(list(moods), [5, 4, 1])[0]
        rows.append(
            {
                "question": f"{text} Alles in allem {rng.choice(moods[mood])}, Nr. {rng.randint(100, 999)}.",
                "answer": mood,
            }
        )
    return chat_recipe(folder, rows)


def healthy_pairs(folder: Path) -> list[str]:
    chat, pairs = preferences(66, 300)
    return pairs_recipe(folder, chat, pairs, {"data.holdout": 0.15})


def healthy_skewed_pictures(folder: Path) -> list[str]:
    """Pictures in grey of three classes, of which one has a tenth."""
    rng = random.Random(67)
    for n in range(500):
        label = rng.choices(SHAPES[:3], [10, 7, 2])[0]
        save(picture(rng, label, any_colour(rng)).convert("L"), folder / "grey" / label / f"{n}.jpg")
    return write_recipe(
        folder, PICTURES, {"data.images": str(folder / "grey"), "images.shift": 0.1, "train.max_epochs": 24}
    )


def healthy_icons(folder: Path) -> list[str]:
    """Icons of a palette, of sizes from 16 to 40, in letterboxes, for a convolutional network."""
    rng = random.Random(68)
    rows = []
    for n in range(450):
        label = SHAPES[n % 3]
        image = picture(rng, label, any_colour(rng), rng.choice([16, 20, 24, 32, 40]))
        save(image.convert("P", palette=Image.Palette.ADAPTIVE), folder / "icons" / f"i{n}.gif")
        rows.append({"image": f"i{n}.gif", "label": label})
    changes: Row = {"data.images": write_lines(folder / "icons" / "icons.jsonl", rows), "images.size": "letterbox"}
    changes |= {"model": {"kind": "cnn", "patch": 32, "dropout": 0.1}, "plan.tokens_per_step": 32}
    return write_recipe(folder, PICTURES, changes)


def healthy_questions(folder: Path) -> list[str]:
    path = write_lines(folder / "vqa" / "questions.jsonl", question_rows(folder / "vqa", 69, 900))
    return write_recipe(folder, QUESTIONS, {"data.vqa": path, "model.vision.activation": "quick_gelu"})


def healthy_rare_outcome(folder: Path) -> list[str]:
    """One patient in eight dies; two tests are of heavy tails, and times are before admission."""
    rng = random.Random(70)
    group = cohort(70, 900, shift=-4.2)
    for row in group.events:
        row["hour"] = round(row["hour"] - 24, 2)
        if row["test"] == "wbc":
            row["result"] = round(math.exp(rng.gauss(2, 0.5)), 2)
    changes = {"events.landmark": 0, "model.positive_weight": 2.0}
    return patients_recipe(folder, group, changes, table={"negative": "allow"})


def healthy_diagnoses(folder: Path) -> list[str]:
    """Diagnoses without any value, by date: the outcome depends on which of them a patient has."""
    rng = random.Random(71)
    risks = {
        "I50.9": 1.8,
        "N18.4": 1.5,
        "C34.1": 2.0,
        "J44.1": 0.8,
        "I10": 0.0,
        "E78.5": -0.4,
        "M54.5": -0.8,
        "H52.1": -1.0,
    }
    events, people = [], []
    for n in range(600):
        codes = rng.sample(list(risks), rng.randint(2, 5))
        died = int(rng.random() < 1 / (1 + math.exp(-(1.8 * sum(risks[code] for code in codes) - 2.2))))
        for code in codes:
            events.append(
                {"pid": f"{n:05}", "date": f"{rng.randint(2015, 2022)}-{rng.randint(1, 12):02}-10", "icd": code}
            )
        people.append({"pid": f"{n:05}", "died": died})
    labels = {"path": write_table(folder / "outcome.csv", people), "id": "pid", "label": "died"}
    source = {
        "path": write_table(folder / "icd.csv", events),
        "id": "pid",
        "time": "date",
        "code": "icd",
        "value": None,
    }
    changes = {"data.events": [{**source, "unit": "timestamp"}], "events.labels": labels}
    return write_recipe(folder, PATIENTS, {**changes, "model.inducing": 2, "optim.weight_decay": 0.1})


def healthy_small_windows(folder: Path) -> list[str]:
    """Long Spanish documents in overlapping windows, many of them a step, with growing steps and a constant rate."""
    changes = {"plan.stride": 96, "model.context": 128, "optim.schedule": "constant", "optim.lr": 2e-3}
    changes |= {
        "plan.tokens_per_step": 1024,
        "plan.grow": {4: 2048},
        "optim.betas": [0.95, 0.99],
        "model.tied": False,
        "data.holdout": 0.1,
        "train.max_epochs": 6,
    }
    return text_trouble(folder, documents(SPANISH, 100, 72, 14, 24), changes)


TROUBLES: list[Callable[[Path], Trouble]] = [
    text_mojibake,
    text_markup,
    text_banner,
    text_no_blanks,
    text_sorted_words,
    text_wrong_field,
    text_column_of_255,
    text_other_valid,
    chat_roles_swapped,
    chat_replies_shifted,
    chat_prompt_in_reply,
    chat_canned,
    chat_system_in_training,
    pairs_both_ways,
    pairs_marked,
    image_labels_by_name,
    image_corner_mark,
    image_black,
    image_class_spellings,
    image_hue,
    vqa_one_picture,
    patients_two_units,
    patients_discharge,
    patients_minutes,
    patients_zeros_lost,
    patients_sentinel,
    patients_values_in_codes,
    setting_few_updates,
    setting_decay,
    setting_slow_group,
]
HEALTHY: list[Callable[[Path], list[str]]] = [
    healthy_finnish_lines,
    healthy_hindi_words,
    healthy_melodies,
    healthy_structured_replies,
    healthy_one_word_replies,
    healthy_pairs,
    healthy_skewed_pictures,
    healthy_icons,
    healthy_questions,
    healthy_rare_outcome,
    healthy_diagnoses,
    healthy_small_windows,
]
