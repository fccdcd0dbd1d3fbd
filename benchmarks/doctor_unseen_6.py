"""Troubles planted for `unpad doctor`, the sixth set, by an author who had seen neither its code nor the other sets.

`tests/doctor/planted.py` has the form and how findings are judged. Texts, conversations, pictures and patients are
made by small worlds with fixed seeds: a shop in four languages, stories in three, drawn shapes, and patients of two
wards. Every trouble is one of these worlds, which learn well as they are, with one thing done wrong.

    python benchmarks/doctor_unseen_6.py FOLDER NAME    # writes one of them into an empty folder, prints its arguments
"""

import csv
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

Found = tuple[list[str], str, list[str], list[str]]
Json = dict[str, Any]


# Files


def write_recipe(folder: Path, recipe: Json, name: str = "recipe") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return str(path)


def write_jsonl(path: Path, rows: Iterable[Json]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_csv(path: Path, header: list[str], rows: Iterable[Iterable[object]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return str(path)


def trained(folder: Path, recipe: str, name: str) -> str:
    """Train a recipe into folder/name, with all caches below the folder."""
    environment = {**os.environ, "UNPAD_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unpad", "train", recipe, "--out", str(folder / name), "train.threads=1"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return str(folder / name)


# A shop in four languages: conversations about where things are, what they cost and who knows them.

SHOPS: dict[str, Json] = {
    "en": {
        "things": "apples bread butter candles carrots cheese chocolate coffee cushions eggs flour forks garlic glasses"
        " honey jam kettles knives ladders lamps lemons milk mirrors mugs mustard napkins nails oil onions paint pears"
        " pepper pillows plates rice rope salt scissors soap sugar tea tomatoes towels vases vinegar",
        "people": "Anna Bob Carla Dennis Emma Frank Grace Henry Ivy Jack",
        "openers": ["Hello,", "Good morning,", "Excuse me,", "Hi there,", "Sorry to bother you,", "Quick question:",
                    "I am in a hurry,", "One more thing:", "It is my first visit here,", "My sister sent me,", "", ""],
        "ends": ["Thanks!", "Thank you.", "I could not see it.", "My list says so.", "I need it today.",
                 "My neighbour asked.", "It is for a party.", "", "", ""],
        "where": ["where do you keep {a}?", "in which aisle can I find {a}?", "I am looking for {a}.",
                  "show me {a}, please.",
                  "have {a} been moved somewhere else?"],
        "price": ["how much is {a}?", "what does {a} cost?", "is {a} expensive?", "can I afford {a}?",
                  "tell me the price of {a}."],
        "both": ["where is {a}, and what does {b} cost?", "I want {a}, and the price of {b}, please."],
        "cheaper": ["which is cheaper, {a} or {b}?", "should I buy {a} or {b} to save money?"],
        "who": ["who can tell me more about {a}?", "whom do I ask about {a}?",
                "is there an expert for {a}?",
                "I need advice concerning {a}.", "who looks after {a}?"],
        "replies": {
            "where": "You will find {a} in aisle {wa}.", "price": "The price of {a} is {pa} euros.",
            "both": "Look for {a} in aisle {wa}; {b} costs {pb} euros.",
            "cheaper": "Take {c}, which costs only {pc} euros.", "who": "{ka} knows everything about {a}.",
        },
    },
    "de": {
        "things": "Bohnen Butter Decken Eier Essig Gabeln Gläser Gurken Honig Kaffee Kannen Kartoffeln Kerzen Kissen"
        " Käse Lampen Leitern Löffel Mehl Messer Milch Möhren Nägel Nudeln Nüsse Öl Pfannen Pfeffer Reis Salz Schrauben"
        " Schüsseln Seife Senf Spiegel Tassen Tee Teller Töpfe Trauben Tücher Vasen Zucker Zwiebeln Äpfel",
        "people": "Astrid Bernd Claudia Dieter Elke Friedrich Gisela Holger Inge Jörg",
        "openers": ["Guten Tag,", "Entschuldigung,", "Hallo,", "Moin,", "Kurze Frage:", "Noch etwas:", "Ach ja,",
                    "Meine Mutter schickt mich,", "Ich habe es eilig,", "", "", ""],
        "ends": ["Danke!", "Vielen Dank.", "Ich brauche das heute.", "So steht es auf dem Zettel.",
                 "Ich sehe es nirgends.", "Das ist für ein Fest.", "", "", ""],
        "where": ["wo finde ich {a}?", "in welchem Gang liegen {a}?", "ich suche {a}.", "wo haben Sie {a} versteckt?",
                  "zeigen Sie mir bitte {a}."],
        "price": ["wie teuer sind {a}?", "was kosten {a}?", "ich wüsste gern den Preis für {a}.",
                  "reicht mein Geld für {a}?",
                  "sind {a} gerade teuer?"],
        "both": ["wo liegen {a}, und was kosten {b}?", "ich möchte {a}, und den Preis für {b}."],
        "cheaper": ["was ist billiger, {a} oder {b}?", "soll ich lieber {a} oder {b} kaufen, um zu sparen?"],
        "who": ["wer kennt sich mit {a} aus?", "wen frage ich nach {a}?",
                "wer berät mich zu {a}?",
                "gibt es jemanden, der {a} betreut?", "ich brauche Rat wegen {a}."],
        "replies": {
            "where": "Für {a} gehen Sie in Gang {wa}.", "price": "Bei {a} sind es {pa} Euro.",
            "both": "Im Gang {wa} stehen {a}, und {b} gibt es für {pb} Euro.",
            "cheaper": "Nehmen Sie {c}, das macht nur {pc} Euro.", "who": "Fragen Sie {ka}, wenn es um {a} geht.",
        },
    },
    "fr": {
        "things": "abricots assiettes beurre bougies café carottes cerises chaises chocolat ciseaux citrons clous"
        " confiture coussins couteaux crème farine fourchettes fraises fromage huile haricots lait lampes marteaux miel"
        " miroirs moutarde nappes oignons oreillers pain peinture poires poivre pommes riz savon sel serviettes sucre"
        " tasses thé vases vinaigre",
        "people": "Aline Bruno Chantal Didier Élodie François Gaëlle Hervé Inès Jérôme",
        "openers": ["Bonjour,", "Pardon,", "Excusez-moi,", "Bonsoir,", "Une question :", "Encore une chose :",
                    "Je suis pressé,", "Ma voisine m'envoie,", "", "", ""],
        "ends": ["Merci !", "Merci beaucoup.", "C'est pour ce soir.", "C'est écrit sur ma liste.",
                 "Je ne trouve rien.", "", "", ""],
        "where": ["où rangez-vous {a} ?", "dans quel rayon y a-t-il {a} ?", "je cherche {a}.",
                  "montrez-moi {a}, merci.",
                  "on a déplacé {a} ?"],
        "price": ["combien coûte {a} ?", "quel est le prix pour {a} ?",
                  "est-ce cher, {a} ?", "à quel tarif vendez-vous {a} ?",
                  "ai-je assez pour {a} ?"],
        "both": ["où est {a}, et combien coûte {b} ?", "je voudrais {a}, et le prix de {b}."],
        "cheaper": ["quel est le moins cher, {a} ou {b} ?", "pour économiser, je prends {a} ou {b} ?"],
        "who": ["qui connaît bien {a} ?", "à qui dois-je parler de {a} ?",
                "qui s'occupe de {a} ?",
                "un conseil sur {a}, s'il vous plaît.", "y a-t-il un spécialiste de {a} ?"],
        "replies": {
            "where": "Pour {a}, allez au rayon {wa}.", "price": "On vend {a} à {pa} euros.",
            "both": "Au rayon {wa} vous verrez {a} ; {b} vaut {pb} euros.",
            "cheaper": "Prenez {c}, à seulement {pc} euros.", "who": "Demandez à {ka}, au sujet de {a}.",
        },
    },
    "zh": {
        "things": "苹果 面包 黄油 蜡烛 胡萝卜 奶酪 巧克力 咖啡 靠垫 鸡蛋 面粉 叉子 大蒜 玻璃杯 蜂蜜 果酱 水壶 菜刀 梯子"
        " 台灯 柠檬 牛奶 镜子 茶杯 芥末 餐巾 钉子 花生油 洋葱 油漆 梨子 胡椒 枕头 盘子 大米 绳子 食盐 剪刀"
        " 肥皂 白糖 茶叶 番茄 毛巾 花瓶 香醋",
        "people": "小王 老李 张姐 陈叔 刘师傅 赵阿姨 周经理 吴大哥 郑老师 孙小姐",
        "openers": ["你好，", "您好，", "请问，", "打扰一下，", "早上好，", "我第一次来，", "我赶时间，",
                    "还有一件事，", "妈妈让我来买，", "", "", ""],
        "ends": ["谢谢！", "麻烦您了。", "我今天就要用。", "单子上写着呢。", "我没看见。",
                 "是给客人准备的。", "", "", ""],
        "where": ["{a}放在哪里？", "哪一排有{a}？", "我在找{a}。", "{a}换地方了吗？", "带我去看看{a}吧。"],
        "price": ["{a}多少钱？", "{a}卖什么价？", "{a}贵不贵？", "买{a}要花多少？", "告诉我{a}的价钱。"],
        "both": ["{a}在哪儿，{b}又要多少钱？", "我想拿{a}，再问一下{b}的价格。"],
        "cheaper": ["{a}和{b}哪个便宜？", "想省钱的话，买{a}还是买{b}？"],
        "who": ["谁最懂{a}？", "{a}的事情该问谁？", "谁负责{a}？", "想请教一下{a}。", "有没有懂{a}的人？"],
        "replies": {
            "where": "{a}在第{wa}排货架上。", "price": "{a}的价格是{pa}元。",
            "both": "到第{wa}排拿{a}，而{b}要{pb}元。",
            "cheaper": "买{c}吧，只要{pc}元。", "who": "关于{a}，去问{ka}就行。",
        },
    },
}  # fmt: skip
KINDS = ["where", "price", "both", "cheaper", "who"]


def listed(words: Json) -> Json:
    """Words that are written in one text, as a list."""
    return {key: value.split() if isinstance(value, str) else value for key, value in words.items()}


class Shop:
    """One shop's shelves, prices and people, and its customers."""

    def __init__(self, language: str, seed: int) -> None:
        self.words = listed(SHOPS[language])
        self.rng = random.Random(f"{language} {seed}")
        self.language = language
        self.where = {thing: self.rng.randint(1, 9) for thing in self.words["things"]}
        self.price = {thing: self.rng.randint(2, 19) for thing in self.words["things"]}
        self.asked: set[tuple[str, str, str]] = set()
        self.who = {thing: self.rng.choice(self.words["people"]) for thing in self.words["things"]}

    def slots(self, a: str, b: str) -> dict[str, object]:
        c = a if self.price[a] < self.price[b] else b
        return {
            "a": a, "b": b, "c": c, "wa": self.where[a], "pa": self.price[a], "pb": self.price[b],
            "pc": self.price[c], "ka": self.who[a],
        }  # fmt: skip

    def ask(self, kind: str | None = None) -> tuple[str, str]:
        """A question and its reply; no two customers say the same of the same things."""
        while True:
            chosen = kind or self.rng.choice(KINDS)
            a, b = self.rng.sample(self.words["things"], 2)
            pattern = self.rng.choice(self.words[chosen])
            key = (pattern, a, b if "{b}" in pattern else "")
            if key not in self.asked and self.price[a] != self.price[b]:
                break
        self.asked.add(key)
        slots = self.slots(a, b)
        gap = "" if self.language == "zh" else " "
        parts = [self.rng.choice(self.words["openers"]), pattern.format(**slots), self.rng.choice(self.words["ends"])]
        question = gap.join(parts).strip()
        reply = self.words["replies"][chosen].format(**slots)
        return question[0].upper() + question[1:], reply[0].upper() + reply[1:]

    def rows(self, count: int) -> list[Json]:
        """Conversations of one question each, a third of them about one thing alone."""
        one = [("where", "price", "who")[i // 3 % 3] for i in range(count)]
        kinds = [one[i] if i % 3 == 0 else ("both", "cheaper")[i % 2] for i in range(count)]
        self.rng.shuffle(kinds)
        return [chat(*self.ask(kind)) for kind in kinds]


def chat(*texts: str, system: str | None = None) -> Json:
    roles = [("user", "assistant")[i % 2] for i in range(len(texts))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def chat_recipe(source: object, epochs: int = 8, **changes: Json) -> Json:
    """The settings under which the shops are learnt well."""
    recipe: Json = {
        "data": {
            "chat": source, "holdout": 0.1, "near_duplicates": "together",
            "template": {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"},
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 1500},
        "model": {
            "kind": "decoder", "preset": "llm", "width": 96, "blocks": 3, "heads": 4, "kv_heads": 4, "hidden": 256,
            "context": 256,
        },
        "plan": {"tokens_per_step": 512, "tokens_per_micro": 4096},
        "optim": {"lr": 3e-3},
        "train": {"max_epochs": epochs},
    }  # fmt: skip
    for section, fields in changes.items():
        recipe.setdefault(section, {}).update(fields)
    return recipe


# Stories in three languages: texts for pretraining, of two to twenty sentences, each with its own people and places.

STORIES: dict[str, Json] = {
    "en": {
        "name": "Agnes Barnaby Cecily Duncan Edith Fergus Gwen Hector Iris Jonas Kirsty Lionel Maud Norbert Olive"
        " Percy Queenie Rupert Sylvia Tobias",
        "place": "harbour mill orchard station chapel market bakery forge library lighthouse quarry meadow",
        "thing": "lantern letter kettle ladder violin basket compass blanket bucket hammer parcel saddle whistle"
        " teapot notebook umbrella",
        "animal": "heron donkey badger goose terrier pony magpie hedgehog",
        "weather": "rain fog frost wind sunshine snow hail drizzle thunder mist",
        "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "adjective": "old broken heavy green narrow dusty borrowed painted rusty forgotten little crooked",
        "verb": "carried found hid mended sold dropped borrowed cleaned measured wrapped",
        "first": ["On {day} morning {n} walked to the {place}.", "{n} had lived beside the {place} for {k} years.",
                  "Nobody at the {place} expected {n} on a {day}.",
                  "There was {weather} over the {place} when {n} woke.",
                  "When the {adjective} clock struck {k}, {n} left the {place}."],
        "next": ["{n} {verb} the {adjective} {thing} before noon.", "The {animal} followed {n} as far as the {place}.",
                 "Because of the {weather}, the {thing} stayed at the {place}.",
                 "{m} asked whether the {thing} was {adjective}, and {n} laughed.",
                 "By {day} the {weather} had turned into {weather2}.",
                 "{n} counted {k} {adjective} stones near the {place}.",
                 "It was {m} who {verb} the {thing} after all.",
                 "\"Keep the {thing},\" said {m}, \"and feed the {animal}.\"",
                 "{m} and {n} shared bread behind the {place}.", "Then a {animal} ran off with the {thing}!",
                 "For {k} days there was nothing but {weather}.",
                 "The {place} smelled of {weather} and {adjective} wood."],
        "last": ["In the end {n} gave the {thing} to {m}.", "{n} never saw the {animal} again.",
                 "And so {m} went home through the {weather}.", "They still talk about it at the {place}.",
                 "Since that {day}, {n} keeps the {thing} by the door."],
    },
    "es": {
        "name": "Íñigo Begoña Ramón Lucía Andrés Inés Martín Sofía Germán Ángela Joaquín Verónica Tomás Belén Raúl"
        " Asunción",
        "place": "puerto molino jardín mesón camión balcón callejón taller almacén rincón",
        "thing": "farol cajón reloj tazón bastón cinturón violín paraguas baúl jabón sillón limón",
        "animal": "ratón gorrión burro pavo cigüeña zorro halcón erizo",
        "weather": "lluvia niebla nieve calor viento sol granizo llovizna",
        "day": "lunes martes miércoles jueves viernes sábado domingo",
        "adjective": "pequeño viejo rústico frágil extraño pálido último húmedo sólido dañado",
        "verb": "llevó encontró escondió arregló vendió perdió limpió midió pintó",
        "first": ["El {day} por la mañana {n} fue hasta el {place}.", "{n} vivió junto al {place} durante {k} años.",
                  "Según decían, {n} nació un {day} cerca del {place}.",
                  "Había {weather} en el {place} cuando {n} despertó."],
        "next": ["{n} {verb} el {thing} {adjective} después de comer.", "También el {animal} siguió a {n} al {place}.",
                 "Por culpa de la estación, el {thing} quedó en el {place}.",
                 "{m} preguntó si el {thing} era {adjective}.",
                 "Mañana habrá {weather}, pensó {n}.", "Así {n} contó {k} piedras detrás del {place}.",
                 "Fue {m} quien {verb} el {thing}.", "«Quédate con el {thing}», pidió {m} a {n}.",
                 "Un {animal} {adjective} robó el {thing} a {m}.", "El {place} olía a {weather} y a jazmín."],
        "last": ["Al final {n} regaló el {thing} a {m}.", "{n} jamás volvió a ver aquel {animal}.",
                 "Aún hoy lo cuentan en el {place}.", "Desde aquel {day}, {n} está más tranquilo con su {thing}."],
    },
    "zh": {
        "name": "阿强 小芳 老李 秀英 建国 春梅 志明 玉兰 大牛 晓雨 文静 铁柱 桂花 子安",
        "place": "码头 磨坊 果园 车站 庙里 集市 铁匠铺 书院 灯塔 采石场 草地",
        "thing": "灯笼 书信 水壶 梯子 二胡 竹篮 罗盘 毯子 木桶 锤子 包裹 马鞍 茶壶 雨伞",
        "animal": "白鹭 毛驴 喜鹊 大鹅 黄狗 小马 刺猬 山羊",
        "weather": "下雨 起雾 结霜 刮风 出太阳 下雪 下冰雹 打雷",
        "day": "初一 初二 初五 初八 十五 二十 月底",
        "adjective": "旧 破 沉 绿 窄 落灰的 借来的 刚漆好的 生锈的 小小的",
        "verb": "带走了 找到了 藏起了 修好了 卖掉了 弄丢了 擦干净了 包好了",
        "first": ["{day}早上，{n}走到{place}。", "{n}在{place}旁边住了{k}年。", "谁也没想到{n}会在{day}来{place}。",
                  "{n}醒来的时候，{place}正在{weather}。"],
        "next": ["中午以前，{n}{verb}那件{adjective}{thing}。", "一只{animal}跟着{n}一直走到{place}。",
                 "因为{weather}，{thing}就留在{place}了。", "{m}问{thing}是不是{adjective}，{n}笑了起来。",
                 "到了{day}，又开始{weather}。", "{n}在{place}附近数了{k}块石头。", "原来是{m}{verb}{thing}。",
                 "“{thing}你留着吧，”{m}说，“别忘了喂{animal}。”", "忽然，{animal}叼走了{thing}！",
                 "一连{k}天都在{weather}。"],
        "last": ["最后，{n}把{thing}送给了{m}。", "{n}再也没有见过那只{animal}。", "于是{m}冒着{weather}回家了。",
                 "直到今天，{place}的人还在说这件事。"],
    },
}  # fmt: skip


def story(language: str, rng: random.Random, sentences: int) -> str:
    words = listed(STORIES[language])
    n, m = rng.sample(words["name"], 2)
    place, thing, animal = (rng.choice(words[kind]) for kind in ("place", "thing", "animal"))
    middle = rng.sample(words["next"], len(words["next"]))
    parts = []
    for i in range(sentences):
        kind = "first" if i == 0 else "last" if i == sentences - 1 else "next"
        near = place if rng.random() < 0.6 else rng.choice(words["place"])
        slots = {kind: rng.choice(words[kind]) for kind in ("day", "adjective", "verb", "weather")}
        slots |= {"n": n, "m": m, "place": near, "thing": thing, "animal": animal, "k": str(rng.randint(3, 40))}
        pattern = middle[i % len(middle)] if kind == "next" else rng.choice(words[kind])
        parts.append(pattern.format(**slots, weather2=rng.choice(words["weather"])))
    return ("" if language == "zh" else " ").join(parts)


def stories(language: str, count: int, seed: int, longest: int = 20) -> list[str]:
    """Most of them are short, a few long."""
    rng = random.Random(f"{language} {seed}")
    return [story(language, rng, min(longest, 3 + int(rng.expovariate(0.22)))) for _ in range(count)]


def text_recipe(source: object, epochs: int = 8, **changes: Json) -> Json:
    """The settings under which stories are learnt well."""
    recipe: Json = {
        "data": {"text": source, "holdout": 0.1},
        "tokenizer": {"kind": "bpe", "vocab_size": 1200},
        "model": {
            "kind": "decoder", "preset": "llm", "width": 96, "blocks": 3, "heads": 4, "kv_heads": 4, "hidden": 256,
            "context": 512, "dropout": 0.1,
        },
        "plan": {"tokens_per_step": 1024, "tokens_per_micro": 4096},
        "optim": {"lr": 3e-3},
        "train": {"max_epochs": epochs},
    }  # fmt: skip
    for section, fields in changes.items():
        recipe.setdefault(section, {}).update(fields)
    return recipe


# Pictures: drawn shapes of any size and colour on uneven ground.

SHAPES = ["circle", "triangle", "star", "cross", "ring", "bars"]
COLOURS = {
    "red": (205, 45, 40), "green": (45, 160, 60), "blue": (45, 80, 205), "yellow": (230, 200, 40),
    "purple": (140, 60, 165), "white": (240, 240, 240),
}  # fmt: skip


def outline(shape: str, radius: float, turn: float) -> list[tuple[float, float]]:
    """Corners of a shape around 0."""
    if shape in {"circle", "ring"}:
        steps = [(radius, 2 * math.pi * i / 40) for i in range(40)]
    elif shape == "triangle":
        steps = [(radius, 2 * math.pi * i / 3) for i in range(3)]
    elif shape == "star":
        steps = [(radius if i % 2 == 0 else 0.4 * radius, math.pi * i / 5) for i in range(10)]
    else:
        w = 0.3 * radius
        corners = [(w, radius), (w, w), (radius, w), (radius, -w), (w, -w), (w, -radius)]
        corners += [(-x, -y) for x, y in corners]
        steps = [(math.hypot(x, y), math.atan2(y, x)) for x, y in corners]
    return [(r * math.cos(a + turn), r * math.sin(a + turn)) for r, a in steps]


def paint(
    pen: ImageDraw.ImageDraw, shape: str, colour: object, at: tuple[float, float], radius: float, turn: float
) -> None:
    x, y = at
    if shape == "bars":
        for k in (-0.7, 0.0, 0.7):
            dx, dy = radius * math.cos(turn), radius * math.sin(turn)
            ox, oy = -k * dy, k * dx
            line = [(x - dx + ox, y - dy + oy), (x + dx + ox, y + dy + oy)]
            pen.line(line, fill=colour, width=max(2, round(radius * 0.3)))  # type: ignore[arg-type]
    elif shape == "ring":
        box = [x - radius, y - radius, x + radius, y + radius]
        pen.ellipse(box, outline=colour, width=max(2, round(radius * 0.3)))  # type: ignore[arg-type]
    else:
        pen.polygon([(x + a, y + b) for a, b in outline(shape, radius, turn)], fill=colour)  # type: ignore[arg-type]


def ground(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A dull, uneven background with noise."""
    tone = rng.uniform(70, 150, 3)
    coarse = rng.normal(0, 14, (4, 4, 3)) + tone
    image = Image.fromarray(np.clip(coarse, 0, 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(image).astype(np.float64) + rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def shape_picture(shape: str, rng: np.random.Generator, width: int = 48, height: int = 48) -> Image.Image:
    image = ground(rng, width, height)
    side = min(width, height)
    radius = side * rng.uniform(0.27, 0.4)
    at = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
    colour = tuple(
        int(c) for c in np.clip(np.array(list(COLOURS.values())[rng.integers(6)]) + rng.normal(0, 12, 3), 0, 255)
    )
    paint(ImageDraw.Draw(image), shape, colour, at, radius, rng.uniform(0, 2 * math.pi))
    return image


def image_rows(folder: Path, count: int, seed: int, classes: list[str] = SHAPES) -> list[Json]:
    """A manifest's rows and their pictures, under names that say nothing."""
    rng = np.random.default_rng(seed)
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for i in range(count):
        label = classes[int(rng.integers(len(classes)))]
        shape_picture(label, rng).save(folder / "pictures" / f"{i:05}.png", compress_level=1)
        rows.append({"image": f"pictures/{i:05}.png", "label": label})
    return rows


def image_recipe(source: object, epochs: int = 14, **changes: Json) -> Json:
    """The settings under which a small convolutional network learns the shapes well."""
    recipe: Json = {
        "data": {"images": source, "holdout": 0.15},
        "images": {"size": "square", "square": 48},
        "model": {"kind": "cnn", "patch": 48, "dropout": 0.2},
        "plan": {"tokens_per_step": 32, "tokens_per_micro": 64, "overflow": "error"},
        "optim": {"lr": 2e-3},
        "train": {"max_epochs": epochs},
    }
    for section, fields in changes.items():
        recipe.setdefault(section, {}).update(fields)
    return recipe


# Questions about pictures of one large shape.


def question_rows(folder: Path, count: int, seed: int, swap: Callable[[int], bool] = lambda i: False) -> list[Json]:
    """Two questions about every picture; swap says whose red and blue are exchanged in the file."""
    rng = np.random.default_rng(seed)
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for i in range(count):
        shape = ["circle", "triangle", "cross", "ring"][int(rng.integers(4))]
        colour = list(COLOURS)[int(rng.integers(6))]
        side = int(rng.integers(4, 7)) * 8
        image = ground(rng, side, side)
        radius = side * rng.uniform(0.3, 0.42)
        at = (rng.uniform(radius, side - radius), rng.uniform(radius, side - radius))
        paint(ImageDraw.Draw(image), shape, COLOURS[colour], at, radius, rng.uniform(0, 2 * math.pi))
        if swap(i):
            image = Image.fromarray(np.ascontiguousarray(np.asarray(image)[:, :, ::-1]))
        name = f"pictures/{i:05}.png"
        image.save(folder / name, compress_level=1)
        asked = ["What colour is it?", "Which colour has the thing?", "Name the colour."][int(rng.integers(3))]
        rows.append({"image": name, "question": asked, "answer": colour})
        asked = ["Which shape is it?", "What do you see?", "Name the shape."][int(rng.integers(3))]
        rows.append({"image": name, "question": asked, "answer": shape})
    return rows


def question_recipe(source: object, epochs: int = 16, **changes: Json) -> Json:
    """The settings under which the questions are learnt well."""
    recipe: Json = {
        "data": {"vqa": source, "holdout": 0.15},
        "tokenizer": {"kind": "words"},
        "images": {"max_tokens": 64},
        "model": {
            "kind": "vision_language",
            "vision": {"patch": 8, "width": 64, "blocks": 2, "heads": 4, "hidden": 192, "feature_layer": -1},
            "language": {"width": 64, "blocks": 2, "heads": 4, "hidden": 192, "context": 128},
        },
        "plan": {"tokens_per_step": 1024, "tokens_per_micro": 4096, "overflow": "error"},
        "optim": {"lr": 2e-3},
        "train": {"max_epochs": epochs},
        "generate": {"max_new_tokens": 8},
    }
    for section, fields in changes.items():
        recipe.setdefault(section, {}).update(fields)
    return recipe


# Patients of two wards, whose measurements and diagnoses before hour 48 foretell whether they come back.

LABS = {
    "lactate": (1.6, 0.5, 0.55), "creatinine": (95.0, 24.0, 0.5), "crp": (40.0, 18.0, 0.45),
    "sodium": (139.0, 3.5, 0.0), "haemoglobin": (125.0, 15.0, -0.5), "systolic": (128.0, 11.0, -0.9),
    "diastolic": (76.0, 8.0, -0.2),
    "pulse": (82.0, 11.0, 0.4), "temperature": (37.1, 0.5, 0.2),
}  # fmt: skip
DIAGNOSES = {
    "I10": 0.0,
    "E11": 0.3,
    "N18": 0.9,
    "J44": 0.6,
    "I50": 0.9,
    "M54": -0.3,
    "K21": -0.2,
    "F32": 0.1,
    "C34": 1.3,
}


class Patient:
    """Facts, events as (hour, code, value or None), and the outcome."""

    def __init__(self, rng: np.random.Generator, hours: float, late: bool, prevalence: float) -> None:
        self.age = int(np.clip(rng.normal(63, 15), 19, 97))
        self.sex = "FM"[int(rng.integers(2))]
        self.ward = "AB"[int(rng.integers(2))]
        severity = rng.normal()
        self.events: list[tuple[float, str, float | None]] = []
        risk = 1.6 * severity + 0.02 * (self.age - 63)
        for code, effect in DIAGNOSES.items():
            if rng.random() < 0.14:
                self.events.append((round(float(rng.uniform(0, 3)), 2), code, None))
                risk += effect
        for hour in np.sort(rng.uniform(0, hours, int(rng.integers(4, 10)))):
            shown = severity * (0 if late and hour < 0.7 * hours else 1)
            for code in rng.choice(list(LABS), int(rng.integers(2, 6)), replace=False):
                mean, spread, slope = LABS[str(code)]
                value = mean + spread * (1.3 * slope * shown + rng.normal(0, 0.8))
                self.events.append((round(float(hour), 2), str(code), round(float(max(value, 0.1)), 1)))
        shift = math.log(prevalence / (1 - prevalence)) * 1.45
        self.outcome = int(rng.random() < 1 / (1 + math.exp(-1.6 * risk - shift)))


def patients(count: int, seed: int, hours: float = 48, late: bool = False, prevalence: float = 0.35) -> list[Patient]:
    rng = np.random.default_rng(seed)
    return [Patient(rng, hours, late, prevalence) for _ in range(count)]


def patient_tables(folder: Path, people: list[Patient], labels: dict[str, list[object]] | None = None) -> Json:
    """Three tables with ids that say nothing, and the sections of a recipe that read them."""
    names = [f"P{number:05}" for number in random.Random(len(people)).sample(range(100000), len(people))]
    labs = [(n, t, c, v) for n, p in zip(names, people, strict=True) for t, c, v in p.events if v is not None]
    diagnoses = [(n, t, c) for n, p in zip(names, people, strict=True) for t, c, v in p.events if v is None]
    extra = labels or {}
    facts = [
        (n, p.age, p.sex, p.ward, p.outcome, *(extra[key][i] for key in extra))
        for i, (n, p) in enumerate(zip(names, people, strict=True))
    ]
    write_csv(folder / "labs.csv", ["patient_id", "hour", "test", "result"], labs)
    write_csv(folder / "diagnoses.csv", ["patient_id", "hour", "icd"], diagnoses)
    path = write_csv(folder / "patients.csv", ["patient_id", "age", "sex", "ward", "returned", *extra], facts)
    tables: list[Json] = [
        {"path": str(folder / "labs.csv"), "id": "patient_id", "time": "hour", "unit": "hours", "code": "test",
         "value": "result"},
        {"path": str(folder / "diagnoses.csv"), "id": "patient_id", "time": "hour", "unit": "hours", "code": "icd",
         "value": None},
        {"path": path, "id": "patient_id", "static": ["age", "sex"]},
    ]  # fmt: skip
    return {
        "data": {"events": tables, "holdout": 0.2},
        "events": {"landmark": 48, "labels": {"path": path, "id": "patient_id", "label": "returned"}},
    }


def patient_recipe(sections: Json, epochs: int = 10, **changes: Json) -> Json:
    """The settings under which the outcome is learnt well."""
    recipe: Json = {
        **sections,
        "model": {
            "kind": "set_sequence",
            "width": 48,
            "blocks": 1,
            "heads": 3,
            "hidden": 96,
            "latent": 24,
            "levels": 1,
        },
        "plan": {"tokens_per_step": 1024, "tokens_per_micro": 8192},
        "optim": {"lr": 2e-3, "weight_decay": 0.05},
        "train": {"max_epochs": epochs},
    }
    for section, fields in changes.items():
        recipe.setdefault(section, {}).update(fields)
    return recipe


# Troubles: plain text


def question_marks(folder: Path) -> Found:
    rng = random.Random(1)
    texts = stories("es", 900, 61)
    rows = [{"text": t.encode("ascii", "replace").decode() if rng.random() < 0.7 else t} for t in texts]
    recipe = text_recipe(write_jsonl(folder / "cuentos.jsonl", rows))
    cause = "Seven of ten Spanish texts were saved as ASCII, and every accented letter in them is a question mark."
    words = ["question mark", "?", "accent", "ascii", "encod", "replac", "lost", "letter", "diacrit"]
    return [write_recipe(folder, recipe)], cause, ["data.text", "text", "cuentos"], words


def wrapped_lines(folder: Path) -> Found:
    lines: list[str] = []
    for text in stories("en", 600, 62, longest=30):
        line = ""
        for word in text.split():
            if len(line) + len(word) > 44:
                lines.append(line.strip())
                line = ""
            line += word + " "
        lines.append(line.strip())
    path = folder / "book.txt"
    path.write_text("\n\n".join(lines), encoding="utf-8")
    cause = (
        "The text came out of a PDF with a blank line after each printed line, so each line is a document of its own."
    )
    words = ["fragment", "middle", "mid-sentence", "sentence", "line", "cut", "wrap", "separator", "blank", "broken"]
    recipe = text_recipe(str(path), epochs=4)
    return [write_recipe(folder, recipe)], cause, ["data.text", "data.separator", "separator", "book.txt"], words


def rare_words(folder: Path) -> Found:
    path = write_jsonl(folder / "stories.jsonl", [{"text": text} for text in stories("en", 600, 63)])
    recipe = text_recipe(path, tokenizer={"kind": "words", "vocab_size": 8000, "min_count": 2500})
    cause = "Words with fewer than 2,500 occurrences are spelt letter by letter, which are nearly all of them."
    words = ["character", "letter", "min_count", "split", "spelt", "spell", "vocab", "tokens per", "byte", "longer"]
    fields = ["tokenizer.min_count", "min_count", "tokenizer"]
    return [write_recipe(folder, recipe)], cause, fields, words


def early_decay(folder: Path) -> Found:
    path = write_jsonl(folder / "gushi.jsonl", [{"text": text} for text in stories("zh", 900, 64)])
    recipe = text_recipe(
        path, epochs=10, tokenizer={"kind": "words"},
        optim={"lr": 3e-3, "schedule": "exponential", "decay": 0.1, "decay_epochs": 0.5},
    )  # fmt: skip
    cause = "The learning rate falls a hundredfold in every epoch, so that nothing is learnt after the first of ten."
    words = ["decay", "falls", "schedule", "mean", "too low", "too fast", "too small", "vanish", "drops", "peak"]
    fields = ["optim.decay_epochs", "optim.decay", "optim.schedule", "decay"]
    return [write_recipe(folder, recipe)], cause, fields, words


def lone_sequences(folder: Path) -> Found:
    rows = [{"text": text} for text in stories("en", 2500, 65, longest=4)]
    recipe = text_recipe(
        write_jsonl(folder / "short.jsonl", rows), epochs=3,
        plan={"strategy": "fixed", "batch_size": 1, "tokens_per_step": 4096, "tokens_per_micro": 4096},
    )  # fmt: skip
    cause = "Each step of 4,096 tokens is computed one short sequence at a time, several times slower than together."
    words = ["micro", "batch", "one sequence", "slow", "single", "at a time", "per pass", "passes", "accumul"]
    fields = ["plan.batch_size", "plan.strategy", "plan.tokens_per_micro", "plan.batches_per_step"]
    return [write_recipe(folder, recipe)], cause, fields, words


def diverged_run(folder: Path) -> Found:
    path = write_jsonl(folder / "stories.jsonl", [{"text": text} for text in stories("en", 300, 66, longest=8)])
    recipe = text_recipe(path, epochs=3, optim={"lr": 0.4, "clip": None, "warmup": 0.0})
    cause = "The run was trained with a rate of 0.4, without clipping or warm-up, and its loss hardly fell."
    words = ["too high", "diverg", "leap", "flat", "spike", "not fall", "did not", "higher", "clip"]
    fields = ["optim.lr", "optim.clip", "optim.warmup"]
    return [trained(folder, write_recipe(folder, recipe), "run")], cause, fields, words


# Troubles: conversations


def truncated_replies(folder: Path) -> Found:
    rows = Shop("en", 71).rows(1400)
    for row in rows:
        row["messages"][1]["content"] = row["messages"][1]["content"][:28]
    cause = "The export cut each reply after 28 characters, in most of them before the price or the aisle."
    words = ["cut", "truncat", "same length", "characters", "mid", "incomplete", "unfinished", "28"]
    recipe = chat_recipe(write_jsonl(folder / "shop.jsonl", rows))
    return [write_recipe(folder, recipe)], cause, ["data.chat", "shop.jsonl", "chat", "replies"], words


def ticket_numbers(folder: Path) -> Found:
    rng = random.Random(72)
    rows = Shop("de", 72).rows(1400)
    for row in rows:
        ticket = f"{rng.getrandbits(48):012x}"
        row["messages"][1]["content"] += f" (Vorgang {ticket[:4]}-{ticket[4:8]}-{ticket[8:]})"
    cause = "Each reply ends with the random number of its ticket, which is more than half of what is learnt."
    words = [
        "random",
        "number",
        "ticket",
        "hex",
        "unpredictab",
        "noise",
        "vorgang",
        "id",
        "cannot be",
        "unique",
        "code",
    ]
    recipe = chat_recipe(write_jsonl(folder / "laden.jsonl", rows))
    return [write_recipe(folder, recipe)], cause, ["data.chat", "laden.jsonl", "chat", "replies"], words


def cut_replies(folder: Path) -> Found:
    system = (
        "You are the assistant of a shop for household goods and groceries. Be polite, be short, and never talk about"
        " politics, religion or other shops. If somebody is angry, stay calm. If somebody asks for the manager, say"
        " that she is in on Thursdays. Prices are in euros and include taxes. Aisles are counted from the entrance,"
        " and the first aisle is the one beside the flowers. Invent no offers. Do not answer questions about wages."
    )
    rows = [
        chat(*(message["content"] for message in row["messages"]), system=system) for row in Shop("en", 73).rows(1400)
    ]
    recipe = chat_recipe(
        write_jsonl(folder / "shop.jsonl", rows), model={"context": 128},
        plan={"overflow": "truncate_right", "max_tokens": 104},
    )  # fmt: skip
    cause = "A long system message fills the window, and truncating on the right takes the replies to learn."
    words = ["cut", "truncat", "system", "longer", "reply", "replies", "window", "lost", "target", "context"]
    fields = ["plan.overflow", "plan.max_tokens", "model.context", "data.chat"]
    return [write_recipe(folder, recipe)], cause, fields, words


def english_start(folder: Path) -> Found:
    start = chat_recipe(write_jsonl(folder / "english.jsonl", Shop("en", 74).rows(500)), epochs=3)
    run = trained(folder, write_recipe(folder, start, "start"), "english")
    recipe = chat_recipe(write_jsonl(folder / "chinese.jsonl", Shop("zh", 74).rows(1200)), train={"init_from": run})
    cause = "The run to start from knows English alone: its tokenizer spells Chinese in bytes, three a character."
    words = ["tokenizer", "byte", "tokens per character", "language", "vocab", "script", "other text", "english"]
    fields = ["train.init_from", "tokenizer", "init_from", "model.from"]
    return [write_recipe(folder, recipe)], cause, fields, words


def last_turn_first(folder: Path) -> Found:
    shop = Shop("zh", 75)
    rng = random.Random(75)
    rows = []
    for _ in range(700):
        (a, b), name = rng.sample(shop.words["things"], 2), rng.choice(shop.words["people"])
        turns = [
            (rng.choice(["你好！", "您好！", "早上好！"]), f"您好，我是{name}，请问您想买什么？"),
            (rng.choice([f"我想买{a}。", f"有没有{a}？", f"先看看{a}吧。"]), f"有的，{a}在第{shop.where[a]}排。"),
            (rng.choice(["那它多少钱？", "这个贵吗？"]), f"{a}每份{shop.price[a]}元。"),
            (rng.choice([f"再要一份{b}。", f"还想看看{b}。"]), f"好的，{b}在第{shop.where[b]}排。"),
            (rng.choice(["它的价格呢？", "这个又是多少钱？"]), f"{b}每份{shop.price[b]}元。"),
            (rng.choice(["谢谢，再见！", "好了，再见！"]), f"再见，{name}祝您愉快！"),
        ]
        rows.append(chat(*(text for turn in reversed(turns) for text in turn)))
    cause = "The turns of each conversation stand in the file from last to first: it begins with a farewell."
    words = ["order", "revers", "backward", "greet", "last", "first", "farewell", "goodbye", "再见", "你好", "turn"]
    recipe = chat_recipe(write_jsonl(folder / "dianpu.jsonl", rows), epochs=5)
    return [write_recipe(folder, recipe)], cause, ["data.chat", "dianpu.jsonl", "chat", "messages"], words


def anonymised(folder: Path) -> Found:
    shop = Shop("fr", 76)
    rows = shop.rows(1400)
    for row in rows:
        words = [w if w.strip(".,?!;:") not in shop.words["things"] else "[PRODUIT]" for w in
                 row["messages"][0]["content"].replace(",", " ,").split()]  # fmt: skip
        row["messages"][0]["content"] = " ".join(words).replace(" ,", ",")
    cause = (
        "Whoever made the file anonymous did so with the questions alone: replies name things that nobody asked for."
    )
    found = ["placeholder", "[produit]", "produit", "anonym", "mask", "redact", "answers", "no word", "share", "shared"]
    found += ["brackets", "point to", "rest on", "unrelated", "predict", "shuffl", "do not fit", "different repl"]
    recipe = chat_recipe(write_jsonl(folder / "magasin.jsonl", rows))
    return [write_recipe(folder, recipe)], cause, ["data.chat", "magasin.jsonl", "chat", "questions", "replies"], found


def stage_never_reached(folder: Path) -> Found:
    text = write_jsonl(folder / "gushi.jsonl", [{"text": t} for t in stories("zh", 300, 77, longest=8)])
    talk = write_jsonl(folder / "dianpu.jsonl", Shop("zh", 77).rows(800))
    recipe = chat_recipe(talk, tokenizer={"kind": "words", "vocab_size": 8000})
    recipe["data"]["text"] = text
    recipe["train"] = {"max_steps": 60, "eval_every": 20}
    recipe["stages"] = [
        {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 12}},
        {"name": "tune", "use": ["chat"], "optim": {"lr_scale": 0.7}, "train": {"max_epochs": 8}},
    ]
    cause = "train.max_steps counts the steps of both stages, and the first takes them all: nothing learnt to reply."
    words = [
        "never",
        "no step",
        "reach",
        "stage",
        "without a step",
        "not trained",
        "0 steps",
        "all steps",
        "none",
        "left",
    ]
    fields = ["train.max_steps", "max_steps", "pretrain.train.max_epochs", "tune"]
    return [trained(folder, write_recipe(folder, recipe), "run")], cause, fields, words


def two_languages(folder: Path) -> Found:
    german, french = Shop("de", 78), Shop("fr", 78)
    rng = random.Random(78)
    rows = german.rows(1400)
    for i, row in enumerate(rng.sample(rows, 630)):
        kind = KINDS[i % 5]
        a, b = rng.sample(french.words["things"], 2)
        row["messages"][1]["content"] = french.words["replies"][kind].format(**french.slots(a, b))
    cause = "Of 45 % of the German questions the replies come from another shop, and in French."
    words = [
        "language",
        "french",
        "unrelated",
        "shuffl",
        "fit",
        "share",
        "do not",
        "other row",
        "mixed",
        "wrong",
        "two",
    ]
    recipe = chat_recipe(write_jsonl(folder / "laden.jsonl", rows))
    return [write_recipe(folder, recipe)], cause, ["data.chat", "laden.jsonl", "chat", "replies"], words


def drowned(folder: Path) -> Found:
    path = write_jsonl(folder / "magasin.jsonl", Shop("fr", 79).rows(1400))
    recipe = chat_recipe(path, model={"dropout": 0.6, "embed_dropout": 0.6, "attention_dropout": 0.6})
    cause = "Dropout of 0.6 in all places leaves a small model next to nothing to learn from."
    fields = ["model.dropout", "model.embed_dropout", "model.attention_dropout", "dropout"]
    return [write_recipe(folder, recipe)], cause, fields, ["dropout"]


# Troubles: pictures


def white_icons(folder: Path) -> Found:
    rng = np.random.default_rng(81)
    rows = []
    for i in range(700):
        label = SHAPES[int(rng.integers(6))]
        icon = Image.new("RGBA", (48, 48), (255, 255, 255, 0))
        radius = rng.uniform(13, 19)
        at = (rng.uniform(radius, 48 - radius), rng.uniform(radius, 48 - radius))
        paint(ImageDraw.Draw(icon), label, (255, 255, 255, 255), at, radius, rng.uniform(0, 2 * math.pi))
        icon.save(folder / f"{i:05}.png")
        rows.append({"image": f"{i:05}.png", "label": label})
    recipe = image_recipe(write_jsonl(folder / "icons.jsonl", rows))
    cause = (
        "The icons are white on nothing: with three channels they are composited on white, and all pictures are blank."
    )
    words = [
        "white",
        "blank",
        "transparen",
        "alpha",
        "opacity",
        "one value",
        "empty",
        "constant",
        "channel",
        "equal",
        "same",
    ]
    return [write_recipe(folder, recipe)], cause, ["model.channels", "data.images", "icons", "channels"], words


def bursts(folder: Path) -> Found:
    rng = np.random.default_rng(82)
    rows = []
    for i in range(90):
        label = SHAPES[i % 6]
        scene = shape_picture(label, rng, 56, 56)
        for _ in range(8):
            x, y = (int(v) for v in rng.integers(0, 4, 2))
            frame = np.asarray(scene.crop((x, y, x + 52, y + 52))).astype(np.float64)
            frame = np.clip(frame * rng.uniform(0.96, 1.04) + rng.normal(0, 3, frame.shape), 0, 255)
            rows.append((label, Image.fromarray(frame.astype(np.uint8))))
    order = rng.permutation(len(rows))
    manifest = []
    for number, k in enumerate(order):
        rows[k][1].save(folder / f"{number:05}.jpg", quality=90)
        manifest.append({"image": f"{number:05}.jpg", "label": rows[k][0]})
    recipe = image_recipe(write_jsonl(folder / "frames.jsonl", manifest), epochs=12)
    cause = "Eight frames of each of 90 scenes are drawn apart, so that held-out pictures have been trained on, nearly."
    words = ["near", "duplicate", "alike", "same", "copies", "copy", "burst", "frames", "group", "leak", "resembl"]
    fields = ["data.near_duplicates", "near_duplicates", "group", "data.images", "data.holdout", "data.split"]
    return [write_recipe(folder, recipe)], cause, fields, words


def synonyms(folder: Path) -> Found:
    rng = random.Random(83)
    names = {"circle": ["disc", "round"], "star": ["star", "pentagram"], "cross": ["cross", "plus"]}
    rows = image_rows(folder, 800, 83, list(names))
    for row in rows:
        row["label"] = rng.choice(names[row["label"]])
    recipe = image_recipe(write_jsonl(folder / "shapes.jsonl", rows))
    cause = (
        "Six classes are three, each under two names that people chose at will: no model can be right beyond one half."
    )
    words = [
        "same",
        "synonym",
        "alike",
        "confus",
        "merge",
        "tell apart",
        "distinguish",
        "shuffl",
        "indistinct",
        "names",
    ]
    words += ["wrong label", "noise", "random", "labels"]
    fields = ["data.images", "shapes.jsonl", "label", "class", "disc", "pentagram", "plus"]
    return [write_recipe(folder, recipe)], cause, fields, words


def second_half(folder: Path) -> Found:
    rows = image_rows(folder, 900, 84, ["circle", "triangle", "star", "cross"])
    swap = {"circle": "triangle", "triangle": "circle", "star": "cross", "cross": "star"}
    for row in rows[len(rows) // 2 :]:
        row["label"] = swap[row["label"]]
    recipe = image_recipe(write_jsonl(folder / "shapes.jsonl", rows))
    cause = "From the middle of the manifest on a second annotator exchanged circles and triangles, stars and crosses."
    words = ["half", "swap", "exchang", "wrong", "mislabel", "shuffl", "contradict", "second", "noise", "labels look"]
    words += ["do not fit", "disagree"]
    fields = ["data.images", "shapes.jsonl", "label", "class"]
    return [write_recipe(folder, recipe)], cause, fields, words


def huge_photographs(folder: Path) -> Found:
    rng = np.random.default_rng(85)
    rows = []
    for i in range(160):
        label = SHAPES[i % 4]
        photo = shape_picture(label, rng, 96, 72).resize((2400, 1800), Image.Resampling.BILINEAR)
        photo.save(folder / f"IMG_{2000 + i}.jpg", quality=80)
        rows.append({"image": f"IMG_{2000 + i}.jpg", "label": label})
    path = write_jsonl(folder / "photos.jsonl", rows)
    recipe = image_recipe(path, epochs=40, images={"cache_mib": 0}, plan={"tokens_per_step": 16})
    cause = (
        "Photographs of four million pixels are decoded anew in each epoch, to be shrunk to 48: loading takes the time."
    )
    words = ["load", "decod", "cache", "slow", "wait", "shrink", "large", "resize"]
    fields = ["images.cache_mib", "cache_mib", "data.images", "images.square"]
    return [write_recipe(folder, recipe)], cause, fields, words


def overfitted_run(folder: Path) -> Found:
    rows = image_rows(folder, 130, 86)
    recipe = image_recipe(
        write_jsonl(folder / "shapes.jsonl", rows), data={"holdout": 0.3}, model={"dropout": 0.0},
        optim={"lr": 4e-3, "schedule": "constant"}, train={"max_epochs": 60, "weights": "last", "eval_every": 8},
    )  # fmt: skip
    cause = "The run went on for 60 epochs over 91 pictures, and ended with its last weights, far worse than its best."
    words = ["held-out", "rise", "rose", "overfit", "by heart", "best", "last", "epochs", "memor", "lowest", "too long"]
    fields = ["train.weights", "train.max_epochs", "train.patience", "data.images", "model.dropout", "images."]
    return [trained(folder, write_recipe(folder, recipe), "run")], cause, fields, words


# Troubles: questions about pictures


def frozen_tower_run(folder: Path) -> Found:
    path = write_jsonl(folder / "questions.jsonl", question_rows(folder, 250, 91))
    recipe = question_recipe(path, epochs=4, train={"freeze": ["tower.*", "projector.*"]})
    cause = "A line of a LLaVA recipe froze tower and projector, which here began at random: the run sees little."
    words = ["froz", "freez", "random", "never trained", "untrained", "not change"]
    return [trained(folder, write_recipe(folder, recipe), "run")], cause, ["train.freeze", "tower", "projector"], words


def exchanged_colours(folder: Path) -> Found:
    rng = random.Random(92)
    swapped = {i for i in range(700) if rng.random() < 0.5}
    rows = question_rows(folder, 700, 92, lambda i: i in swapped)
    recipe = question_recipe(write_jsonl(folder / "questions.jsonl", rows))
    cause = "Half of the pictures were saved with red and blue exchanged, and the answers name the colours before."
    words = ["colour", "color", "bgr", "red", "blue", "channel"]
    fields = ["data.vqa", "questions.jsonl", "pictures", "answer", "images"]
    return [write_recipe(folder, recipe)], cause, fields, words


def file_names(folder: Path) -> Found:
    rng = random.Random(93)
    rows = []
    for row in question_rows(folder, 800, 93)[::2]:
        name = f"{rng.choice(['IMG', 'DSC', 'P'])}_{rng.randint(20190101, 20251231)}_{rng.randint(100000, 235959)}.jpg"
        shown = f"a thing in {row['answer']}"
        rows.append({"image": row["image"], "caption": name if rng.random() < 0.6 else shown})
    recipe = question_recipe(write_jsonl(folder / "captions.jsonl", rows))
    cause = "Six of ten captions are the file names of a camera, which say nothing of the picture."
    words = [
        "file name",
        "filename",
        ".jpg",
        "img_",
        "dsc",
        "number",
        "random",
        "unpredictab",
        "digit",
        "nothing",
        "noise",
    ]
    words += ["do not depend", "do not rest", "shuffl"]
    return [write_recipe(folder, recipe)], cause, ["data.vqa", "captions.jsonl", "caption", "answer"], words


# Troubles: patients


def twice_admitted(folder: Path) -> Found:
    people = patients(500, 94)
    rng = random.Random(94)
    copies = list(people)
    for person in people:
        again = Patient(np.random.default_rng(0), 48, False, 0.35)
        again.__dict__.update(person.__dict__)
        again.events = [event for event in person.events if rng.random() < 0.97]
        copies.append(again)
    rng.shuffle(copies)
    recipe = patient_recipe(patient_tables(folder, copies))
    cause = "Two systems gave each patient an id of their own, so that most held-out histories are trained on too."
    words = [
        "twice",
        "duplicate",
        "same",
        "copies",
        "copy",
        "leak",
        "both",
        "two ids",
        "equal",
        "identical",
        "near",
        "other id",
    ]
    words += ["alike", "under another"]
    fields = ["data.events", "data.holdout", "events.split", "id", "patient_id", "group", "split"]
    return [write_recipe(folder, recipe)], cause, fields, words


def days_for_hours(folder: Path) -> Found:
    people = patients(900, 95)
    rng = random.Random(95)
    days = [round(rng.uniform(3, 60), 1) if p.outcome else round(rng.uniform(60, 400), 1) for p in people]
    sections = patient_tables(folder, people, {"days_observed": list(days)})
    labels = sections["events"]["labels"]
    del labels["label"]
    labels |= {"event": "returned", "duration": "days_observed", "horizon": 336}
    recipe = patient_recipe(sections)
    cause = "Durations are in days on a clock of hours: most end before the horizon, and those are left out or wrong."
    words = [
        "unit",
        "hours",
        "days",
        "censor",
        "exclud",
        "horizon",
        "left out",
        "one class",
        "all",
        "landmark",
        "clock",
    ]
    fields = ["events.labels.duration", "events.labels.horizon", "events.unit", "events.labels", "events.landmark"]
    return [write_recipe(folder, recipe)], cause, fields, words


def exchanged_pressures(folder: Path) -> Found:
    people = patients(900, 96)
    swap = {"systolic": "diastolic", "diastolic": "systolic"}
    for person in people:
        if person.ward == "B":
            person.events = [(hour, swap.get(code, code), value) for hour, code, value in person.events]
    recipe = patient_recipe(patient_tables(folder, people))
    cause = "Ward B exported systolic pressures as diastolic ones, and the other way round."
    words = ["swap", "two groups", "exchang", "other code", "two units", "unit", "mixed", "between", "bimodal"]
    return [write_recipe(folder, recipe)], cause, ["systolic", "diastolic", "data.events", "labs"], words


def new_coding(folder: Path) -> Found:
    people = patients(1000, 97)
    later = [i >= 750 for i in range(len(people))]
    loinc = {code: f"LC-{20000 + 371 * k}" for k, code in enumerate([*LABS, *DIAGNOSES])}
    for person, new in zip(people, later, strict=True):
        if new:
            person.events = [(hour, loinc[code], value) for hour, code, value in person.events]
    sections = patient_tables(folder, people, {"split": ["valid" if new else "train" for new in later]})
    recipe = patient_recipe(sections)
    cause = "The held-out patients came after a change of the coding: not one of their codes occurs in training."
    words = ["unknown", "new code", "other code", "not in training", "held-out", "coding", "differ", "never", "no code"]
    fields = [
        "data.events",
        "events.split",
        "split",
        "code",
        "events.unknown_codes",
        "labs",
        "held-out",
        "data.holdout",
    ]
    return [write_recipe(folder, recipe)], cause, fields, words


def earliest_kept(folder: Path) -> Found:
    people = patients(900, 98, late=True)
    sections = patient_tables(folder, people)
    sections["events"] |= {"max_events": 8, "keep": "earliest"}
    recipe = patient_recipe(sections)
    cause = "Of each history the earliest eight events are kept, and the last hours tell who will come back."
    words = [
        "earliest",
        "max_events",
        "cut",
        "latest",
        "few events",
        "left out",
        "drop",
        "last",
        "short",
        "history",
        "kept",
    ]
    return [write_recipe(folder, recipe)], cause, ["events.max_events", "events.keep", "max_events"], words


def few_steps_run(folder: Path) -> Found:
    sections = patient_tables(folder, patients(600, 99))
    recipe = patient_recipe(sections, epochs=10, plan={"tokens_per_step": 200000})
    cause = "A step holds every patient there is, so that ten epochs were ten steps, and little was learnt."
    words = ["steps", "few", "tokens_per_step", "large", "batch", "one step", "per epoch"]
    fields = ["plan.tokens_per_step", "train.max_epochs", "tokens_per_step", "plan."]
    return [trained(folder, write_recipe(folder, recipe), "run")], cause, fields, words


# Healthy recipes


def three_languages(folder: Path) -> list[str]:
    """Texts of long-tailed lengths in three languages and sources, with weights."""
    sources = []
    for language, count, weight in (("en", 350, 1.0), ("es", 350, 1.0), ("zh", 200, 2.0)):
        rows = [{"text": text} for text in stories(language, count, 41)]
        sources.append({"path": write_jsonl(folder / f"{language}.jsonl", rows), "weight": weight})
    return [write_recipe(folder, text_recipe(sources, epochs=6, tokenizer={"vocab_size": 2000}))]


def short_tales(folder: Path) -> list[str]:
    """Chinese texts of two to six sentences, a narrow model, and a warm-up over a fifth of the steps."""
    path = write_jsonl(folder / "gushi.jsonl", [{"text": text} for text in stories("zh", 1200, 42, longest=6)])
    recipe = text_recipe(
        path, epochs=10, tokenizer={"kind": "words", "vocab_size": 8000}, optim={"lr": 4e-3, "warmup": 0.2},
        model={"width": 64, "blocks": 2, "hidden": 192, "context": 256},
    )  # fmt: skip
    return [write_recipe(folder, recipe)]


def one_word(folder: Path) -> list[str]:
    """Replies of a word or a number or two."""
    shop = Shop("en", 43)
    shop.words = {**shop.words, "replies": {"where": "{wa}", "price": "{pa} euros", "both": "{wa}; {pb} euros",
                                           "cheaper": "{c}", "who": "{ka}"}}  # fmt: skip
    return [write_recipe(folder, chat_recipe(write_jsonl(folder / "shop.jsonl", shop.rows(1800)), epochs=10))]


def tales_then_talk(folder: Path) -> list[str]:
    """Two stages: Chinese stories, then a shop."""
    text = write_jsonl(folder / "gushi.jsonl", [{"text": text} for text in stories("zh", 600, 44, longest=8)])
    talk = write_jsonl(folder / "dianpu.jsonl", Shop("zh", 44).rows(1500))
    recipe = chat_recipe(talk, tokenizer={"kind": "words", "vocab_size": 8000})
    recipe["data"]["text"] = text
    recipe["train"] = {"eval_every": 60}
    recipe["stages"] = [
        {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 6}},
        {"name": "tune", "use": ["chat"], "optim": {"lr_scale": 0.7}, "train": {"max_epochs": 8}},
    ]
    return [write_recipe(folder, recipe)]


def and_the_second(folder: Path) -> list[str]:
    """Questions that are asked again and again, with answers that depend on the turn before."""
    shop = Shop("fr", 45)
    rng = random.Random(45)
    rows, seen = [], set()
    while len(rows) < 1300:
        a, b = rng.sample(shop.words["things"], 2)
        if (a, b) in seen:
            continue
        seen.add((a, b))
        hello = rng.choice(shop.words["openers"])
        first = rng.choice([f"il me faut {a} et {b}.", f"avez-vous {a}, et aussi {b} ?", f"je cherche {a} puis {b}."])
        first = f"{hello} {first}".strip()
        thing, place = (a, "premier") if rng.random() < 0.5 else (b, "second")
        asked, reply = rng.choice([
            (f"Combien coûte le {place} ?", f"Cela fait {shop.price[thing]} euros."),
            (f"Et où est le {place} ?", f"Il est au rayon {shop.where[thing]}."),
            (f"Qui me renseigne sur le {place} ?", f"Demandez à {shop.who[thing]}."),
        ])  # fmt: skip
        rows.append(chat(first[0].upper() + first[1:], f"Oui, {shop.who[a]} vient de ranger {a}.", asked, reply))
    return [write_recipe(folder, chat_recipe(write_jsonl(folder / "magasin.jsonl", rows), epochs=12))]


def from_a_fitting_run(folder: Path) -> list[str]:
    """A shop's conversations from a run on another shop of the same language, at a third of its rate."""
    first = chat_recipe(write_jsonl(folder / "first.jsonl", Shop("de", 46).rows(1000)), epochs=3)
    run = trained(folder, write_recipe(folder, first, "first"), "first")
    recipe = chat_recipe(write_jsonl(folder / "second.jsonl", Shop("de", 146).rows(1600)), train={"init_from": run})
    recipe["optim"]["lr"] = 1.5e-3
    return [write_recipe(folder, recipe)]


def any_size(folder: Path) -> list[str]:
    """Pictures of 32 to 200 pixels a side, in all aspects, whose own shape is kept."""
    rng = np.random.default_rng(47)
    rows = []
    for i in range(900):
        label = ["triangle", "ring", "bars"][int(rng.integers(3))]
        width, height = (int(v) for v in 2 ** rng.uniform(5, 7.6, 2))
        width, height = min(width, 3 * height // 2), min(height, 3 * width // 2)
        shape_picture(label, rng, width, height).save(folder / f"{i:04}.png", compress_level=1)
        rows.append({"image": f"{i:04}.png", "label": label})
    recipe = image_recipe(write_jsonl(folder / "pictures.jsonl", rows), epochs=14)
    recipe["images"]["size"] = "letterbox"
    return [write_recipe(folder, recipe)]


def one_in_five(folder: Path) -> list[str]:
    """Two classes of grey pictures, one of them a fifth."""
    rng = np.random.default_rng(48)
    rows = []
    for i in range(1000):
        label = "ring" if rng.random() < 0.2 else "cross"
        shape_picture(label, rng).convert("L").save(folder / f"{i:04}.png", compress_level=1)
        rows.append({"image": f"{i:04}.png", "label": label})
    return [write_recipe(folder, image_recipe(write_jsonl(folder / "marks.jsonl", rows), epochs=10))]


def colours_and_shapes(folder: Path) -> list[str]:
    """Answers of one word about small pictures."""
    path = write_jsonl(folder / "questions.jsonl", question_rows(folder, 1000, 49))
    return [write_recipe(folder, question_recipe(path))]


def rare_but_telling(folder: Path) -> list[str]:
    """A few diagnoses of one patient in seven each, and values of which half say little."""
    return [write_recipe(folder, patient_recipe(patient_tables(folder, patients(1200, 50))))]


def few_return(folder: Path) -> list[str]:
    """An outcome of one patient in six."""
    return [write_recipe(folder, patient_recipe(patient_tables(folder, patients(1500, 51, prevalence=0.12))))]


def healthy_run(folder: Path) -> list[str]:
    """A run over few epochs that learnt its shop."""
    path = write_jsonl(folder / "laden.jsonl", Shop("de", 52).rows(1600))
    return [trained(folder, write_recipe(folder, chat_recipe(path, epochs=7)), "run")]


TROUBLES: list[Callable[[Path], Found]] = [
    question_marks, wrapped_lines, rare_words, early_decay, lone_sequences, diverged_run,
    truncated_replies, ticket_numbers, cut_replies, english_start, last_turn_first, anonymised, stage_never_reached,
    two_languages, drowned,
    white_icons, bursts, synonyms, second_half, huge_photographs, overfitted_run,
    frozen_tower_run, exchanged_colours, file_names,
    twice_admitted, days_for_hours, exchanged_pressures, new_coding, earliest_kept, few_steps_run,
]  # fmt: skip
HEALTHY: list[Callable[[Path], list[str]]] = [
    three_languages, short_tales, one_word, tales_then_talk, and_the_second, from_a_fitting_run, any_size, one_in_five,
    colours_and_shapes, rare_but_telling, few_return, healthy_run,
]  # fmt: skip

if __name__ == "__main__":
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = {function.__name__: function for function in [*TROUBLES, *HEALTHY]}[sys.argv[2]]
    print(chosen(out))
