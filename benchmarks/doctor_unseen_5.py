"""Thirty troubles and twelve healthy recipes, written without a look at the doctor's code.

The format is that of `tests/doctor/planted.py`. Everything is drawn here, from fixed seeds, and
runs that others start from are trained here, in some seconds each, by `python -m unpad`.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

Row = dict[str, Any]
Trouble = tuple[list[str], str, list[str], list[str]]
Rng = np.random.Generator

# Files, recipes and runs


def write_jsonl(path: Path, rows: Iterable[Row]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path.resolve())


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return str(path.resolve())


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section; a section that is None is left out."""
    result = deepcopy(dict(base))
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def write_recipe(folder: Path, base: Mapping[str, Any], name: str = "recipe", **changes: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged(base, changes), allow_unicode=True, sort_keys=False), encoding="utf-8")
    return str(path.resolve())


def recipe_of(folder: Path, base: Mapping[str, Any], kind: str, rows: Iterable[Row], **changes: Any) -> str:
    """Write rows of a kind of data, and the recipe that reads them."""
    return write_recipe(folder, merged(base, {"data": {kind: write_jsonl(folder / f"{kind}.jsonl", rows)}}), **changes)


def trained(folder: Path, recipe: str, *overrides: str, name: str = "run") -> str:
    """Train a recipe on one thread; the directory of the run."""
    run = str((folder / name).resolve())
    command = [sys.executable, "-m", "unpad", "train", recipe, "--out", run, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return run


def pick(rng: Rng, given: Sequence[Any]) -> Any:
    return given[int(rng.integers(len(given)))]


def chance(rng: Rng, share: float) -> bool:
    return float(rng.random()) < share


def lists(text: str) -> list[list[str]]:
    """Lists with `;;` between them; their items stand between bars, on as many lines as they need."""
    return [[item.strip() for item in part.split("|") if item.strip()] for part in text.replace("\n", "|").split(";;")]


def stems(text: str) -> list[str]:
    return text.split("|")


# Small forms of the packaged recipes

TEXT = yaml.safe_load("""
data: {holdout: 0.1}
tokenizer: {kind: bpe, vocab_size: 2000}
model:
  {kind: decoder, preset: llm, width: 128, blocks: 2, heads: 4, kv_heads: 4, hidden: 320, context: 256, dropout: 0.1}
plan: {tokens_per_step: 1024, tokens_per_micro: 4096}
optim: {lr: 2.0e-3, weight_decay: 0.1}
train: {max_epochs: 8, patience: 3}
""")
ROLES = {"template": {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}}
CHAT = {**TEXT, "data": {"holdout": 0.1, **ROLES}, "plan": {"tokens_per_step": 512}, "train": {"max_epochs": 12}}
PAIRS = yaml.safe_load("""
plan: {tokens_per_step: 1024, tokens_per_micro: 4096}
optim: {lr: 2.0e-4}
train: {max_epochs: 6, beta: 0.1}
""") | {"data": {"holdout": 0.2, **ROLES}}
IMAGES = yaml.safe_load("""
data: {holdout: 0.15}
images: {size: native, min_tokens: 4, max_tokens: 16, shift: 0.1, zoom: 0.1}
model: {kind: vit, patch: 16, stem: [16, 32, 64, 96], width: 96, blocks: 2, heads: 4, hidden: 256, dropout: 0.1}
plan: {tokens_per_step: 320, tokens_per_micro: 1024, overflow: error}
optim: {lr: 1.0e-3, weight_decay: 0.1}
train: {max_epochs: 16, label_smoothing: 0.1}
""")
CNN = yaml.safe_load("""
data: {holdout: 0.15}
images: {size: square, square: 48}
model: {kind: cnn, patch: 48, dropout: 0.2}
plan: {tokens_per_step: 32, tokens_per_micro: 64, overflow: error}
train: {max_epochs: 12}
""")
VQA = yaml.safe_load("""
data: {holdout: 0.15}
images: {max_tokens: 64}
model:
  kind: vision_language
  vision: {patch: 8, width: 96, blocks: 2, heads: 4, hidden: 256, feature_layer: -1, dropout: 0.1}
  language: {width: 128, blocks: 2, heads: 4, hidden: 320, context: 256, dropout: 0.1}
plan: {tokens_per_step: 1024, tokens_per_micro: 4096, overflow: error}
optim: {lr: 1.0e-3, weight_decay: 0.05}
train: {max_epochs: 20}
""")
EVENTS = yaml.safe_load("""
data: {holdout: 0.2}
events: {landmark: 24}
model: {kind: set_sequence, width: 48, latent: 32, blocks: 1, hidden: 96, dropout: 0.1}
plan: {tokens_per_step: 512, tokens_per_micro: 4096}
optim: {lr: 1.0e-3, weight_decay: 0.05}
train: {max_epochs: 14}
""")

# Passages of several sentences: who, did what, where, when, why

PARTS = {
    "de": lists("""
die Bäckerin | der Briefträger | eine junge Lehrerin | der alte Fischer | die Apothekerin | ein Tischlerlehrling
die Nachbarin von oben | unser Vetter Jonas | die Tierärztin | ein Jurastudent | der Förster | die Bürgermeisterin ;;
streicht die Gartenmauer | repariert die Turmuhr | kocht eine Kürbissuppe | verlegt die goldene Brille
beschriftet die Einmachgläser | verschiebt das schwere Klavier | pflanzt Apfelbäume | sucht einen rostigen Schlüssel
verkauft duftende Kerzen | übt eine feierliche Rede | fotografiert die Graureiher | schreibt eine lange Beschwerde ;;
hinter dem Bahnhof | am zugefrorenen Teich | vor dem Museumseingang | auf dem Schulhof | in der Markthalle
neben der Bücherei | im hintersten Garten | auf dem leeren Platz | bei der Großmutter | in einem feuchten Dachboden ;;
am Dienstag | im Morgengrauen | in den Sommerferien | kurz vor dem Gewitter | gestern Abend | gegen Mittag
nach der Versammlung | an einem Sonntag im Oktober | am Tag vor dem Fest | in jenem Winter | gleich nach der Rückkehr ;;
weil das Dach seit Wochen undicht ist | weil sonst niemand Zeit hat | um die Kinder zu überraschen
damit kein neuer Streit entsteht | weil der Bus wieder Verspätung hat | obwohl ein Sturm aufzieht
trotz hohen Fiebers | ohne das Rathaus zu fragen | dank unverhoffter Hilfe | obwohl das Licht ausgefallen ist"""),
    "es": lists("""
la panadera | el cartero | una maestra joven | el viejo pescador | la farmacéutica | un aprendiz | el alcalde
la vecina de arriba | nuestro primo Mateo | la veterinaria | un estudiante de derecho | el guarda | la costurera ;;
pintó la fachada | arregló el reloj de la torre | preparaba una sopa de castañas | olvidó sus gafas doradas
etiquetaba frascos de ciruelas | trasladó el piano | plantó tres manzanos | buscaba una llave oxidada
vendió velas perfumadas | ensayaba un discurso | fotografió unas garzas | escribió una larga queja ;;
detrás de la estación | junto al estanque helado | a la entrada del museo | en el patio | a orillas del canal
bajo los soportales | frente a la biblioteca | al fondo del jardín | en la plaza desierta | en un desván húmedo ;;
el martes pasado | al amanecer | durante las vacaciones | justo antes de la tormenta | ayer por la tarde
hacia el mediodía | después de la reunión | un domingo de octubre | la víspera del mercado | aquel invierno ;;
porque el tejado goteaba desde hacía semanas | porque nadie más tenía tiempo | para sorprender a sus alumnos
a fin de evitar otra disputa | porque el autobús llegaba tarde | aunque se acercaba un temporal
a pesar de la fiebre | sin avisar al ayuntamiento | gracias a una ayuda inesperada | aunque la luz estaba apagada"""),
    "zh": lists("""
面包师傅 | 老邮递员 | 新来的语文老师 | 河边的渔夫 | 药店老板娘 | 木匠的徒弟 | 镇长 | 楼上的邻居 | 表哥小军
年轻的兽医 | 法律系学生 | 护林员老周 | 裁缝阿姨 | 退休的船长 ;;
重新刷了院墙 | 修好了钟楼的大钟 | 煮了一锅栗子汤 | 弄丢了金边眼镜 | 给梅子罐贴标签 | 搬走了旧钢琴
种下三棵苹果树 | 找一把生锈的钥匙 | 卖起了香薰蜡烛 | 反复练习演讲稿 | 拍到几只苍鹭 | 写了一封投诉信 ;;
在车站后面 | 在结冰的池塘旁 | 在博物馆门口 | 在学校操场上 | 沿着运河 | 在菜市场里 | 在花园尽头 | 在奶奶家 ;;
上个星期二 | 天刚亮的时候 | 暑假期间 | 暴雨来临之前 | 昨天傍晚 | 八月初 | 快到中午时 | 散会以后 | 那年冬天 ;;
屋顶已经漏了好几个星期 | 别人都抽不出时间 | 想给孩子们一个惊喜 | 不愿意再和邻居争吵 | 公共汽车又晚点了
听说台风快要来了 | 发着高烧也不肯休息 | 没有事先通知村委会 | 意外得到了朋友帮忙 | 整条街都停了电"""),
    "ja": lists("""
パン屋の娘 | 老いた郵便配達員 | 新しい先生 | 漁師の田中さん | 薬局の店主 | 大工の見習い | 町長 | 上の階の隣人
いとこの健太 | 若い獣医 | 法学部の学生 | 森の番人 ;;
門を塗り直した | 時計台を修理した | 栗のスープを作った | 老眼鏡をなくした | 古いピアノを運んだ | 長い苦情を書いた
りんごの木を植えた | 錆びた鍵を探した | 香りのろうそくを売った | 演説を練習した | 青鷺の写真を撮った ;;
駅の裏で | 凍った池のそばで | 博物館の前で | 校庭で | 運河沿いで | 市場の軒下で | 庭の奥で | 広場で | 祖母の家で ;;
先週の火曜日に | 夜明けに | 夏休みの間に | 嵐の直前に | 昨日の夕方 | 八月の初めに | 正午ごろ | 祭りの前日に ;;
屋根が雨漏りしていたので | 誰も手が空かなかったので | 生徒を驚かせようと | もう喧嘩をしたくなくて | 停電していたのに
またバスが遅れたので | 台風が近づいていたが | 高い熱があったのに | 役場に黙って | 思わぬ助けのおかげで"""),
}


def sentence(rng: Rng, language: str) -> str:
    who, did, where, when, why = (pick(rng, part) for part in PARTS[language])
    if language == "zh":
        forms = [f"{when}，{who}{where}{did}。", f"因为{why}，{who}{when}{did}。", f"{who}{where}{did}，{why}。"]
        return str(pick(rng, [*forms, f"{when}{who}{did}，大家都说{why}。"]))
    if language == "ja":
        forms = [f"{when}、{who}は{where}{did}。", f"{why}、{who}は{did}。", f"{who}は{when}{why}、{where}{did}。"]
        return str(pick(rng, forms))
    verb, rest = did.split(" ", 1)
    if language == "de":
        forms = [f"{when} {verb} {who} {where} {rest}.", f"{who} {verb} {when} {rest}, {why}."]
        forms.append(f"{where} {verb} {who} {rest}, {why}.")
    else:
        forms = [f"{when}, {who} {did} {where}.", f"{who} {did} {when}, {why}.", f"{who} {did} {where} {why}."]
    text = str(pick(rng, forms))
    return text[0].upper() + text[1:]


def passage(rng: Rng, language: str, least: int = 3, most: int = 6) -> str:
    space = "" if language in ("zh", "ja") else " "
    return space.join(sentence(rng, language) for _ in range(int(rng.integers(least, most + 1))))


def texts(rng: Rng, language: str, count: int) -> list[Row]:
    return [{"text": passage(rng, language)} for _ in range(count)]


# Questions about a person who was just described, and orders in a shop: what a reply says stands in the question

NAMES = lists("""
Anna | Bruno | Clara | David | Elena | Felix | Greta | Hugo | Irene | Jonas | Karla | Leo | Marta | Nico | Olga | Pablo
Rita | Simon | Teresa | Viktor | Wanda | Xaver | Yara | Zoe | Adrian | Berta | Cecilia | Dario | Emma | Fabian ;;
Keller | Ortega | Novak | Lindt | Sommer | Vidal | Brandt | Castro | Huber | Marin | Petri | Roca | Stein | Torres""")
CITIES = lists("""
Bremen | Porto | Lyon | Turin | Gent | Krakau | Malmö | Basel | Sevilla | Leeds | Graz | Cork | Split | Turku | Brno
Nantes | Parma | Bilbao | Lund | Ulm""")[0]
LIVES = {  # jobs; hobbies
    "de": lists("""
Optikerin | Maurer | Köchin | Gärtner | Pilotin | Notar | Friseur | Geigerin | Imker | Hebamme | Schlosser | Wirtin ;;
malt Aquarelle | sammelt Münzen | spielt Schach | züchtet Tauben | backt Brot | läuft Marathon | angelt im See
strickt Mützen | lernt Arabisch | baut Drachen"""),
    "es": lists("""
óptica | albañil | cocinera | jardinero | piloto | notario | peluquero | violinista | apicultor | comadrona | taxista ;;
pinta acuarelas | colecciona monedas | juega al ajedrez | cría palomas | hornea pan | corre maratones
pesca en el lago | teje gorros | estudia árabe | construye cometas"""),
}
TOLD = {  # descriptions; questions about place, work and pastime with replies; a request for all, with its reply
    "de": (
        ["{n} wohnt in {c}, arbeitet als {j} und {h}.", "Aus {c} kommt {n}. Beruf: {j}. Am Wochenende: {n} {h}.",
         "Als {j} in {c} hat {n} viel zu tun, aber abends heißt es: {n} {h}."],
        [("Wo lebt {n}?", "{n} lebt in {c}."), ("Was ist {n} von Beruf?", "{n} ist {j} von Beruf."),
         ("Was macht {n} in der freien Zeit?", "In der freien Zeit: {n} {h}.")],
        ("Stelle {n} vor.", "Das ist {n} aus {c}. Der Beruf ist {j}, und wenn Zeit bleibt: {n} {h}."),
    ),
    "es": (
        ["{n} vive en {c}, trabaja de {j} y {h}.", "De {c} viene {n}. Oficio: {j}. Los domingos {h}.",
         "Aunque en {c} el trabajo de {j} cansa mucho, por la noche {n} {h}."],
        [("¿Dónde vive {n}?", "{n} vive en {c}."), ("¿De qué trabaja {n}?", "{n} trabaja de {j}."),
         ("¿Qué hace {n} en su tiempo libre?", "En su tiempo libre {n} {h}.")],
        ("Presenta a {n}.", "Les presento a {n}, que vive en {c}. Su oficio es {j}, y cuando tiene un rato libre {h}."),
    ),
}  # fmt: skip


def people(rng: Rng, language: str, count: int) -> list[Row]:
    """People of whom no two share more than two of their four facts."""
    jobs, hobbies = LIVES[language]
    found: list[Row] = []
    seen: set[tuple[int, str, str, str]] = set()
    while len(found) < count:
        name = f"{pick(rng, NAMES[0])} {pick(rng, NAMES[1])}"
        facts = [name, pick(rng, CITIES), pick(rng, jobs), pick(rng, hobbies)]
        keys = {(left, *[fact for i, fact in enumerate(facts) if i != left]) for left in range(4)}
        if not keys & seen:
            seen |= keys
            found.append(dict(zip("ncjh", facts, strict=True)))
    return found


def reading(rng: Rng, language: str, count: int, whole: float = 0.2) -> list[tuple[str, str]]:
    """Questions about people, with replies; a share of `whole` asks for all facts."""
    described, asked, everything = TOLD[language]
    found = []
    for person in people(rng, language, count):
        question, reply = everything if chance(rng, whole) else pick(rng, asked)
        found.append((f"{pick(rng, described)} {question}".format(**person), reply.format(**person)))
    return found


GOODS = lists("""
苹果 | 鸡蛋 | 毛巾 | 铅笔 | 面条 | 酱油 | 土豆 | 雨伞 | 杯子 | 豆腐 | 红茶 | 袜子 | 蜡烛 | 饼干 | 牛奶 | 葡萄 ;;
斤 | 盒 | 条 | 支 | 袋 | 瓶 | 斤 | 把 | 个 | 块 | 罐 | 双 | 根 | 包 | 箱 | 串""")
ASKED = lists("""
老板， | 您好， | 请问， | 麻烦问一下， | 师傅， | 不好意思， | 阿姨， | 我是第一次来， | 又来打扰了， ;;
家里来客人， | 女儿学校要用， | 准备过年， | 帮邻居带东西， | 公司晚上聚餐， | 明天去爬山， | 刚搬了新家，
给奶奶捎的， | 冰箱空了， | 店里促销， | 儿子吵着要， | 周末想野餐， ;;
{i}{p}元一{u}，我买{n}{u} | {i}每{u}{p}元，要{n}{u} | 想拿{n}{u}{i}，标价{p}元一{u}
一{u}{i}卖{p}元，来{n}{u} | {n}{u}{i}，单价{p}元 | 您这{i}才{p}元一{u}，给我装{n}{u}""")
ORDERS = {
    "，麻烦您重复一下订单。": "您要的是{n}{u}{i}。",
    "，我刚才点的是什么？": "您点的是{i}。",
    "，单价再说一遍好吗？": "{i}的单价是{p}元。",
    "，数量记下了没有？": "记下了，{i}要{n}{u}。",
    "，请给我开张小票。": "小票：{i}{n}{u}，单价{p}元。",
}


def orders(rng: Rng, count: int) -> list[tuple[str, str, str]]:
    """What customers say in Chinese, the right reply and a wrong one; nothing is said twice."""
    found: dict[str, tuple[str, str, str]] = {}
    while len(found) < count:
        wares = [(*pick(rng, list(zip(*GOODS, strict=True))), *rng.integers(2, 50, 2)) for _ in range(2)]
        bought, other = (dict(zip("iupn", ware, strict=True)) for ware in wares)
        asked = pick(rng, list(ORDERS))
        question = "".join(pick(rng, part) for part in ASKED).format(**bought) + asked
        replies = ORDERS[asked].format(**bought), ORDERS[asked].format(**other)
        if replies[0] != replies[1]:
            found.setdefault(question, (question, *replies))
    return list(found.values())


def talks(given: Iterable[tuple[str, ...]]) -> list[Row]:
    return [{"prompt": question, "completion": reply} for question, reply, *_ in given]


def judged(rng: Rng, language: str, count: int) -> list[Row]:
    """Pairs: a right reply, and one that is wrong or answers another question."""
    described, asked, _ = TOLD[language]
    rows = []
    for person, other in zip(people(rng, language, count), people(rng, language, count), strict=True):
        question, reply = pick(rng, asked)
        wrong = reply.format(**{**other, "n": person["n"]})
        if wrong == reply.format(**person) or chance(rng, 0.4):
            wrong = pick(rng, [told for _, told in asked if told != reply]).format(**person)
        prompt = f"{pick(rng, described)} {question}".format(**person)
        rows.append({"prompt": prompt, "chosen": reply.format(**person), "rejected": wrong})
    return rows


def start(folder: Path, given: Iterable[tuple[str, ...]], *overrides: str) -> str:
    """The run of a small chat model, to start from."""
    recipe = write_recipe(folder, CHAT, "base", data={"chat": write_jsonl(folder / "base.jsonl", talks(given))})
    return trained(folder, recipe, *overrides, name="base")


# Plain text


def text_read_in_another_encoding(folder: Path) -> Trouble:
    rng = np.random.default_rng(501)
    rows = texts(rng, "es", 320)
    for i in rng.permutation(320)[:170]:
        row = rows[int(i)]
        row["text"] = row["text"].encode("utf-8").decode("cp1252", errors="replace")
    words = stems("encod|decod|mojibake|utf|latin|cp1252|windows-1252|garbled|charset|Ã|bytes")
    cause = "Half of the Spanish texts were UTF-8 read as Windows-1252: ó is Ã³."
    return [recipe_of(folder, TEXT, "text", rows)], cause, ["data.text", "data"], words


def text_hyphenated_by_pages(folder: Path) -> Trouble:
    rng = np.random.default_rng(502)
    rows = []
    for row in texts(rng, "de", 320):
        lines = [row["text"][i : i + 41].strip() for i in range(0, len(row["text"]), 41)]
        marks = ["-" if row["text"][i - 1 : i + 1].isalpha() else "" for i in range(41, len(row["text"]), 41)]
        rows.append({"text": "\n".join(line + mark for line, mark in zip(lines, [*marks, ""], strict=True))})
    words = stems("hyphen|line break|line end|newline|linebreak|wrapped|pdf|split word|words are split|lines end")
    cause = "Texts were copied from a PDF: lines end within sentences, and words are split by hyphens at their ends."
    return [recipe_of(folder, TEXT, "text", rows)], cause, ["data.text", "data"], words


def text_validated_in_another_language(folder: Path) -> Trouble:
    rng = np.random.default_rng(503)
    rows = [{**row, "split": "train"} for row in texts(rng, "zh", 320)]
    rows += [{**row, "split": "valid"} for row in texts(rng, "de", 45)]
    words = stems("language|script|differ from|unlike|distribution|other kind|not alike|alphabet|German|shift")
    cause = "A file sorted by language was split at its end: training is Chinese, and the held-out part German."
    fields = ["data.text", "data.holdout", "data", "split"]
    return [recipe_of(folder, TEXT, "text", rows)], cause, fields, words


def text_with_an_epoch_in_a_step(folder: Path) -> Trouble:
    rng = np.random.default_rng(504)
    words = stems("step|update|batch|whole epoch|one per epoch|too few|smaller|once an epoch")
    cause = "Steps of 65,536 tokens, taken over from a large corpus, make one step of a whole epoch: six steps in all."
    changes = {"plan": {"tokens_per_step": 65536}, "train": {"max_epochs": 6}}
    recipe = recipe_of(folder, TEXT, "text", texts(rng, "zh", 320), **changes)
    fields = ["plan.tokens_per_step", "train.max_epochs", "train.max_steps", "plan.batches_per_step"]
    return [recipe], cause, fields, words


def text_run_learnt_by_heart(folder: Path) -> Trouble:
    rng = np.random.default_rng(505)
    changes: Row = {"model": {"dropout": 0.0}, "plan": {"tokens_per_step": 512}, "optim": {"schedule": "constant"}}
    train = {"max_epochs": 30, "patience": None, "weights": "last"}
    recipe = recipe_of(folder, TEXT, "text", texts(rng, "es", 130), train=train, **changes)
    cause = "Thirty epochs on 117 texts, and the last weights: the held-out loss has long risen from its best."
    fields = ["train.weights", "train.max_epochs", "train.patience", "model.dropout", "data.text", "train.max_steps"]
    words = stems("overfit|rise|rose|risen|by heart|memor|best|held-out|held out|too many epochs|earlier")
    return [trained(folder, recipe)], cause, fields, words


# Conversations


def chat_with_roles_exchanged(folder: Path) -> Trouble:
    rng = np.random.default_rng(511)
    rows = talks((reply, question) for question, reply, _ in orders(rng, 360))
    words = stems("swap|exchang|revers|roles|asks|are questions|switched|wrong way|turned round|invert|question mark")
    cause = "User and assistant are exchanged in the export: the replies that are learnt are the customers' questions."
    return [recipe_of(folder, CHAT, "chat", rows)], cause, ["data.chat", "data.template"], words


def chat_joined_a_row_too_far(folder: Path) -> Trouble:
    rng = np.random.default_rng(512)
    given = reading(rng, "de", 330)
    rows = [{"instruction": given[i][0], "output": given[i + 1][1]} for i in range(len(given) - 1)]
    words = stems("shift|align|offset|next row|neighbour|mismatch|join|belong|unrelated|wrong row|another question")
    cause = "Questions and answers were joined a row apart: every reply answers the question of the next row."
    return [recipe_of(folder, CHAT, "chat", rows)], cause, ["data.chat"], words


def chat_replies_cut_by_a_column(folder: Path) -> Trouble:
    rng = np.random.default_rng(513)
    rows = talks((question, reply[:64].rstrip()) for question, reply in reading(rng, "es", 340, whole=0.75))
    words = stems("cut|truncat|unfinished|mid-word|mid-sentence|middle of|64 char|same length|abruptly|incomplete")
    cause = "The replies passed through a column of 64 characters: three of four end in the middle of a word."
    return [recipe_of(folder, CHAT, "chat", rows, data={"near_duplicates": "together"})], cause, ["data.chat"], words


def chat_with_marks_in_the_messages(folder: Path) -> Trouble:
    rng = np.random.default_rng(514)
    asked = ((f"<|im_start|>user\n{question}<|im_end|>", reply) for question, reply in reading(rng, "de", 340))
    rows = talks((question, f"<|im_start|>assistant\n{reply}<|im_end|>") for question, reply in asked)
    words = stems("template|mark|im_start|im_end|twice|double|chatml|prefix|special token|already|role")
    cause = "Messages already hold the marks of ChatML, and the recipe's template is written around them."
    fields = ["data.chat", "data.template", "data.template.user", "data.template.assistant"]
    return [recipe_of(folder, CHAT, "chat", rows)], cause, fields, words


def chat_cut_before_the_replies(folder: Path) -> Trouble:
    rng = np.random.default_rng(515)
    rows = talks((f"{passage(rng, 'es', 1, 4)} {question}", reply) for question, reply in reading(rng, "es", 320))
    plan = {"max_tokens": 48, "overflow": "truncate_right"}
    words = stems("truncat|cut|lost|longer|too long|repl|max_tokens|exceed|do not fit|does not fit|no target")
    cause = "Conversations are cut on the right at 48 tokens, behind long documents: most of the replies are lost."
    fields = ["plan.max_tokens", "plan.overflow", "model.context", "data.chat"]
    return [recipe_of(folder, CHAT, "chat", rows, plan=plan)], cause, fields, words


def chat_adapters_that_stay(folder: Path) -> Trouble:
    rng = np.random.default_rng(516)
    train = {"init_from": start(folder, reading(rng, "es", 320, whole=0.0)), "max_epochs": 3}
    more: Row = {"lora": {"r": 8}, "optim": {"lr": 1e-5}, "tokenizer": None}
    recipe = recipe_of(folder, CHAT, "chat", talks(reading(rng, "es", 300, whole=1.0)), train=train, **more)
    words = stems("too low|small|barely|hardly|too little|slow|raise|higher|stay|move|nothing|larger")
    cause = "Adapters are trained with 1e-5, a rate for whole large models: they stay as good as zero."
    return [recipe], cause, ["optim.lr", "lora.alpha", "train.max_epochs", "optim.lr_scale", "lora.r"], words


# Pairs of replies


def pairs_that_contradict(folder: Path) -> Trouble:
    rng = np.random.default_rng(521)
    given = orders(rng, 520)
    base = start(folder, given[:400])
    rows = []
    for i, (question, reply, wrong) in enumerate(given[400:]):
        first = {"prompt": question, "chosen": reply, "rejected": wrong}
        opposite = {"prompt": question, "chosen": wrong, "rejected": reply}
        rows += [first, opposite if i % 2 else {**first, "rejected": "不知道，您自己看吧。"}]
    path = write_jsonl(folder / "pianhao.jsonl", [rows[int(i)] for i in rng.permutation(len(rows))])
    words = stems("contradict|opposite|both ways|swapped|inconsistent|conflict|disagree|revers|other way|exchanged")
    cause = "For half of the questions two rows say the opposite: the reply that one prefers is rejected in the other."
    return [write_recipe(folder, PAIRS, data={"pairs": path}, model={"from": base})], cause, ["data.pairs"], words


def pairs_told_by_their_ends(folder: Path) -> Trouble:
    rng = np.random.default_rng(522)
    data = {"near_duplicates": "together"}
    model = {"from": start(folder, reading(rng, "es", 300))}
    rows = [{**row, "chosen": row["chosen"] + "</s>"} for row in judged(rng, "es", 220)]
    words = stems("</s>|literal|end mark|ending|ends with|every chosen|all chosen|suffix|apart|shortcut|give")
    cause = "The end mark </s> was written into every chosen reply, and into no rejected one."
    return [recipe_of(folder, PAIRS, "pairs", rows, model=model, data=data)], cause, ["data.pairs"], words


def pairs_from_a_run_of_two_steps(folder: Path) -> Trouble:
    rng = np.random.default_rng(523)
    base = start(folder, reading(rng, "de", 300), "train.max_steps=2")
    words = stems("start|untrained|not trained|hardly trained|learnt|learned|guess|random|two steps|2 steps|initial")
    cause = "The run that the pairs start from was stopped after two steps and answers nothing."
    rows = judged(rng, "de", 220)
    return (
        [recipe_of(folder, PAIRS, "pairs", rows, model={"from": base})],
        cause,
        ["model.from", "train.init_from", "model"],
        words,
    )


def pairs_run_that_unlearns(folder: Path) -> Trouble:
    rng = np.random.default_rng(524)
    base = start(folder, reading(rng, "de", 320))
    recipe = recipe_of(folder, PAIRS, "pairs", judged(rng, "de", 240), model={"from": base}, optim={"lr": 5e-3})
    words = stems("too high|unlearn|less likely|rise|rose|risen|forget|lower|drift|too far|fell|falls|smaller|large")
    cause = "Pairs were trained with 5e-3, a rate for a model from scratch: chosen replies have become unlikely too."
    fields = ["optim.lr", "train.beta", "losses.cross_entropy", "losses", "optim.lr_scale", "train.max_epochs"]
    return [trained(folder, recipe)], cause, fields, words


# Pictures

COLORS = {"red": (205, 45, 40), "green": (45, 150, 60), "blue": (50, 80, 200), "yellow": (235, 200, 40)}
KINDS = ["circle", "ring", "cross", "triangle", "square"]
Color = tuple[int, int, int]
Place = tuple[float, float]


def ground(rng: Rng, width: int, height: int, light: tuple[int, int] = (150, 235)) -> Image.Image:
    """A background with a slope of brightness and noise, of a random pale tint."""
    tint = rng.integers(*light, 3).astype(float)
    down, across = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    slope = down * rng.normal(0, 14) + across * rng.normal(0, 14)
    pixels = tint[None, None, :] + slope[:, :, None] + rng.normal(0, 7, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def turned(points: Sequence[tuple[float, float]], angle: float, x: float, y: float) -> list[tuple[float, float]]:
    cos, sin = math.cos(angle), math.sin(angle)
    return [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in points]


def figure(picture: Image.Image, kind: str, place: Place, r: float, color: Color, angle: float = 0.0) -> None:
    (x, y), draw = place, ImageDraw.Draw(picture)
    if kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=color)
    elif kind == "ring":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=color, width=max(2, int(r / 3)))
    elif kind == "cross":
        for way in (0.0, math.pi / 2):
            bar = [(-r, -r / 3.5), (r, -r / 3.5), (r, r / 3.5), (-r, r / 3.5)]
            draw.polygon(turned(bar, angle + way, x, y), fill=color)
    else:
        angles = np.linspace(0, 2 * math.pi, {"triangle": 3, "square": 4, "hexagon": 6}[kind], endpoint=False)
        points = [(r * math.cos(t), r * math.sin(t)) for t in angles]
        draw.polygon(turned(points, angle, x, y), fill=color)


def spot(rng: Rng, least: float, most: float) -> Place:
    return float(rng.uniform(least, most)), float(rng.uniform(least, most))


def shade(rng: Rng, color: Color) -> Color:
    red, green, blue = (int(np.clip(part + rng.integers(-28, 29), 0, 255)) for part in color)
    return red, green, blue


def tinted(rng: Rng) -> Color:
    return shade(rng, pick(rng, list(COLORS.values())))


def drawn(rng: Rng, kind: str, side: int = 48) -> Image.Image:
    picture = ground(rng, side, side)
    r = side * float(rng.uniform(0.2, 0.36))
    figure(picture, kind, spot(rng, r, side - r), r, tinted(rng), float(rng.uniform(0, 6.3)))
    return picture


def saved(folder: Path, name: str, picture: Image.Image) -> str:
    path = folder / "pictures" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
    return f"pictures/{name}"


def images_at_the_rate_of_descent(folder: Path) -> Trouble:
    rng = np.random.default_rng(531)
    rows = [{"image": saved(folder, f"{i}.png", drawn(rng, KINDS[i % 4])), "label": KINDS[i % 4]} for i in range(320)]
    words = stems("too high|too large|diverg|lower|smaller|explod|unstable|jump|rises|blow|above guess|worse than")
    cause = "The rate of 0.1 is one for plain gradient descent: AdamW throws the weights far away with it."
    fields = ["optim.lr", "optim.lr_scale", "optim.warmup", "optim.clip"]
    return [recipe_of(folder, IMAGES, "images", rows, optim={"lr": 0.1})], cause, fields, words


def arrow(rng: Rng, way: str) -> Image.Image:
    picture = ground(rng, 48, 48)
    length, thick = float(rng.uniform(13, 19)), float(rng.uniform(2.5, 4.5))
    shaft = [(-length, -thick), (2.0, -thick), (2.0, -3 * thick), (length, 0.0), (2.0, 3 * thick), (2.0, thick)]
    angle = {"droite": 0.0, "gauche": math.pi, "haut": -math.pi / 2, "bas": math.pi / 2}[way]
    points = turned([*shaft, (-length, thick)], angle + float(rng.normal(0, 0.12)), *spot(rng, 20, 28))
    ImageDraw.Draw(picture).polygon(points, fill=tinted(rng))
    return picture


def images_mirrored_arrows(folder: Path) -> Trouble:
    rng = np.random.default_rng(532)
    ways = ["droite", "gauche", "haut", "bas"]
    for i in range(320):
        saved(folder, f"{ways[i % 4]}/fleche{i}.png", arrow(rng, ways[i % 4]))
    recipe = write_recipe(folder, IMAGES, data={"images": str(folder / "pictures")}, images={"flip": 0.5})
    words = stems("flip|mirror|left|right|gauche|droite|turned round|direction")
    cause = "Half of the training pictures are mirrored, and two classes are arrows to the left and to the right."
    return [recipe], cause, ["images.flip", "images"], words


def images_labels_in_another_order(folder: Path) -> Trouble:
    rng = np.random.default_rng(533)
    kinds = [str(pick(rng, KINDS[:4])) for _ in range(340)]
    for i, kind in enumerate(kinds):
        saved(folder, f"{i}.png", drawn(rng, kind))
    names = sorted(f"{i}.png" for i in range(len(kinds)))  # 0, 1, 10, 100, 101: not the order of the labels
    rows = [{"image": f"pictures/{name}", "label": kind} for name, kind in zip(names, kinds, strict=True)]
    words = stems("random|shuffl|mismatch|wrong label|order|noise|chance|guess|not match|align|join|no better")
    cause = "Names sorted as texts were joined to labels in the order of numbers: labels are random."
    return [recipe_of(folder, IMAGES, "images", rows)], cause, ["data.images"], words


def images_frames_on_both_sides(folder: Path) -> Trouble:
    rng = np.random.default_rng(534)
    rows = []
    for clip in range(40):
        kind = KINDS[clip % 4]
        picture = ground(rng, 72, 72)
        for _ in range(3):  # what else stands in the scene
            figure(picture, "hexagon", spot(rng, 6, 66), float(rng.uniform(3, 6)), shade(rng, (120, 110, 100)))
        r, angle = float(rng.uniform(14, 20)), float(rng.uniform(0, 6.3))
        figure(picture, kind, spot(rng, 28, 44), r, tinted(rng), angle)
        for frame in range(8):
            left, top = (int(value) for value in rng.integers(3, 6, 2))
            pixels = np.asarray(picture.crop((left, top, left + 64, top + 64))).astype(float)
            pixels = np.clip(pixels * rng.uniform(0.96, 1.04) + rng.normal(0, 3, pixels.shape), 0, 255)
            name = saved(folder, f"video{clip:02d}_{frame:03d}.png", Image.fromarray(pixels.astype(np.uint8)))
            rows.append({"image": name, "label": kind})
    words = stems("near-duplicate|near duplicate|alike|look like|copies|leak|group|frame|both parts|both sides|scene")
    cause = "Frames of one video are drawn into training and held-out part: what is measured was learnt."
    fields = ["data.images", "data.near_duplicates", "data.holdout", "group", "split"]
    return [recipe_of(folder, IMAGES, "images", rows, data={"holdout": 0.2})], cause, fields, words


def lesion(rng: Rng, bad: bool) -> Image.Image:
    """A spot on skin: the bad ones are often darker and larger, and never surely so."""
    picture = ground(rng, 64, 64, (185, 225))
    r, dark = float(rng.normal(16 if bad else 13, 2)), int(rng.normal(85 if bad else 115, 20))
    figure(picture, "hexagon", spot(rng, 26, 38), r, (dark, int(dark * 0.65), dark // 2), float(rng.uniform(0, 6)))
    return picture


def images_with_a_ruler_in_one_class(folder: Path) -> Trouble:
    rng = np.random.default_rng(535)
    rows = []
    for i in range(320):
        bad = i % 2 == 1
        picture = lesion(rng, bad)
        if bad:
            draw = ImageDraw.Draw(picture)
            draw.rectangle((0, 57, 63, 63), fill=(245, 245, 240))
            for x in range(2, 64, 6):
                draw.line((x, 57, x, 60), fill=(20, 20, 20))
        rows.append({"image": saved(folder, f"{i:03d}.png", picture), "label": "maligno" if bad else "benigno"})
    words = stems("shortcut|corner|border|edge|bottom|region|same place|same pixel|strip|ruler|patch|area|give")
    cause = "A ruler lies at the lower edge of every picture of one class, and of none of the other."
    return [recipe_of(folder, IMAGES, "images", rows)], cause, ["data.images"], words


def images_run_with_a_dead_rate(folder: Path) -> Trouble:
    rng = np.random.default_rng(536)
    rows = [{"image": saved(folder, f"{i}.png", drawn(rng, KINDS[i % 4])), "label": KINDS[i % 4]} for i in range(320)]
    optim = {"schedule": "exponential", "decay": 0.5, "decay_epochs": 0.05, "warmup": 0.0}
    words = stems("decay|schedule|zero|floor|died|dead|vanish|too soon|too fast|too early|halv|fade")
    cause = "The rate is halved twenty times an epoch, where twice a run was meant: it is zero after the first steps."
    fields = ["optim.decay", "optim.decay_epochs", "optim.schedule", "optim.floor", "optim.lr", "optim.per"]
    return [trained(folder, recipe_of(folder, IMAGES, "images", rows, optim=optim))], cause, fields, words


# Questions about pictures


SHAPES = {"circle": "Kreis", "ring": "Ring", "cross": "Kreuz", "square": "Quadrat"}
HUES = {"red": "rot", "green": "grün", "blue": "blau", "yellow": "gelb"}
FORMS = ["Welche Farbe hat das?", "Was für eine Form ist das?", "Liegt es links oder rechts?", "Ist das hier {c}?"]


def scene(rng: Rng) -> tuple[Image.Image, tuple[str, str, int]]:
    """A figure on the left (0) or on the right (1): its kind, colour and place."""
    picture, place = ground(rng, 48, 48), int(rng.integers(2))
    kind, color, r = pick(rng, list(SHAPES)), pick(rng, list(HUES)), float(rng.uniform(10, 13))
    middle = (13 + 22 * place + float(rng.normal(0, 1)), float(rng.uniform(17, 31)))
    figure(picture, kind, middle, r, shade(rng, COLORS[color]), float(rng.normal(0, 0.2)))
    return picture, (kind, color, place)


def asked_of(rng: Rng, kind: str, color: str, place: int) -> tuple[str, str]:
    what, named = int(rng.integers(4)), color
    if what == 3 and chance(rng, 0.5):
        named = pick(rng, [other for other in HUES if other != color])
    answer = [HUES[color], SHAPES[kind], ("links", "rechts")[place], "ja" if named == color else "nein"][what]
    return FORMS[what].format(c=HUES[named]), answer


def questions(rng: Rng, folder: Path, count: int) -> list[Row]:
    rows = []
    for i in range(count // 2):
        picture, seen = scene(rng)
        name = saved(folder, f"{i:03d}.png", picture)
        found: dict[str, str] = {}
        while len(found) < 2:
            question, answer = asked_of(rng, *seen)
            found.setdefault(question, answer)
        rows += [{"image": name, "question": question, "answer": answer} for question, answer in found.items()]
    return rows


def vqa_answered_without_pictures(folder: Path) -> Trouble:
    rng = np.random.default_rng(541)
    fruit = {"香蕉": ("yellow", "黄色"), "草莓": ("red", "红色"), "黄瓜": ("green", "绿色"), "蓝莓": ("blue", "蓝色")}
    shapes = dict(zip(fruit, ["square", "circle", "cross", "ring"], strict=True))
    forms = [("图里的{f}是什么颜色？", "{c}"), ("请说出{f}的颜色。", "{c}")]
    forms += [("画面中有没有{f}？", "有"), ("你看得到{f}吗？", "看得到")]
    rows = []
    for i in range(220):
        picture, names = ground(rng, 48, 48), [str(name) for name in rng.permutation(list(fruit))[:2]]
        for place, name in enumerate(names):
            x, y = 13 + 22 * place + float(rng.normal(0, 1)), float(rng.uniform(14, 34))
            figure(picture, shapes[name], (x, y), float(rng.uniform(7, 10)), shade(rng, COLORS[fruit[name][0]]))
        image = saved(folder, f"{i:03d}.png", picture)
        for name in names:
            question, answer = pick(rng, forms)
            answer = answer.format(c=fruit[name][1])
            rows.append({"image": image, "question": question.format(f=name), "answer": answer})
    words = stems("without|question alone|questions alone|blind|prior|always the same|same answer|not need|ignore|bias")
    cause = "Only what is there was asked about, in its usual colour: every answer follows from the question alone."
    return [recipe_of(folder, VQA, "vqa", rows)], cause, ["data.vqa"], words


def vqa_pictures_that_were_not_found(folder: Path) -> Trouble:
    rng = np.random.default_rng(542)
    rows = questions(rng, folder, 440)
    lost = Image.new("RGB", (48, 48), (204, 204, 204))
    ImageDraw.Draw(lost).rectangle((14, 14, 34, 34), outline=(150, 150, 150), width=2)
    for row in rows[::2]:  # two in turn are about one picture
        if chance(rng, 0.55):
            lost.save(folder / row["image"])
    words = stems("same picture|identical|placeholder|equal|one picture|blank|duplicate|copies|copy|repeated|not found")
    cause = "More than half of the pictures are the site's placeholder for a picture that is gone."
    return [recipe_of(folder, VQA, "vqa", rows)], cause, ["data.vqa"], words


def vqa_answers_spelt_in_many_ways(folder: Path) -> Trouble:
    rng = np.random.default_rng(543)
    rows = questions(rng, folder, 440)
    ways: list[Callable[[str], str]] = [str, str.capitalize, str.upper, "{}.".format, "{} ".format]
    for row in rows:
        row["answer"] = pick(rng, ways)(row["answer"])
    words = stems("spell|spelt|capital|case|variant|punctuation|full stop|white space|forms of|written|ways|normali")
    cause = "Annotators wrote each answer in five ways (ja, Ja, JA, ja. and ja with a blank), which count as different."
    return [recipe_of(folder, VQA, "vqa", rows)], cause, ["data.vqa"], words


def vqa_with_all_but_the_projector_frozen(folder: Path) -> Trouble:
    rng = np.random.default_rng(544)
    freeze = ["tower.*", "decoder.*"]
    words = stems("freez|frozen|random|untrained|initial|scratch|never train|not train|no start|trained weights")
    cause = "All but the projector is frozen, as for trained towers and language models, and nothing trained is loaded."
    fields = ["train.freeze", "train.init_from", "model.from"]
    return [recipe_of(folder, VQA, "vqa", questions(rng, folder, 440), train={"freeze": freeze})], cause, fields, words


# Patients

TESTS = {  # mean, spread, effect of a bad course in spreads
    "lactate": (1.8, 0.5, 1.9), "creatinine": (0.95, 0.2, 1.4), "sodium": (139.0, 3.0, 0.0), "spo2": (96.5, 1.2, -1.2),
    "platelets": (240.0, 50.0, -1.1), "heart_rate": (82.0, 10.0, 1.4), "glucose": (112.0, 20.0, 0.4),
}  # fmt: skip


def patients(rng: Rng, count: int, level: float = -0.4) -> list[Row]:
    """Patients of three days, with tests at uneven hours; how badly they are off shows in several tests."""
    found = []
    for number in range(count):
        age, bad = int(np.clip(rng.normal(66, 13), 22, 96)), float(rng.normal())
        died = chance(rng, 1 / (1 + math.exp(-(level + 3.0 * bad + 0.05 * (age - 66)))))
        hours = sorted({0.5, *(round(float(hour), 1) for hour in rng.uniform(0.6, 66, int(rng.integers(7, 16))))})
        rows = []
        for hour in hours:
            for name in rng.permutation(list(TESTS))[: int(rng.integers(2, 6))]:
                mean, spread, effect = TESTS[str(name)]
                value = mean + spread * (effect * bad + float(rng.normal()))
                rows.append((hour, str(name), round(max(value, mean * 0.1), 2)))
        person = {"id": 10483 + 7 * number, "age": age, "sex": pick(rng, ["F", "M"]), "died": int(died), "bad": bad}
        found.append({**person, "rows": rows})
    return [found[int(i)] for i in rng.permutation(count)]


def columns(path: str, *names: str) -> Row:
    return {"path": path, **dict(zip(("id", "time", "code", "value"), names, strict=True))}


def clinic(folder: Path, given: Sequence[Row], facts: Sequence[str] = ("age", "sex"), **table: Any) -> Row:
    """Write the two tables of patients; the sections of a recipe that reads them."""
    rows = [(person["id"], *row) for person in given for row in person["rows"]]
    labs = write_csv(folder / "labs.csv", ["patient_id", "hour", "test", "result"], rows)
    people = [[person["id"], *(person[fact] for fact in facts), person["died"]] for person in given]
    path = write_csv(folder / "patients.csv", ["patient_id", *facts, "died"], people)
    measured = {**columns(labs, "patient_id", "hour", "test", "result"), "unit": "hours", **table}
    known = {"path": path, "id": "patient_id", "static": list(facts)}
    labels = {"path": path, "id": "patient_id", "label": "died"}
    return {"data": {"events": [measured, known]}, "events": {"labels": labels}}


def events_with_the_way_home(folder: Path) -> Trouble:
    rng = np.random.default_rng(551)
    given = patients(rng, 320)
    for person in given:
        person["destino_alta"] = "tanatorio" if person["died"] else pick(rng, ["domicilio", "residencia", "traslado"])
    sections = clinic(folder, given, ("age", "sex", "destino_alta"))
    words = stems("give|leak|tell|after the outcome|alone|separat|static|destino|tanatorio|perfect")
    cause = "Among the facts at admission is where patients went at discharge, and those who died went to the mortuary."
    fields = ["data.events", "events.labels", "events.landmark", "data.events.static", "static"]
    return [write_recipe(folder, EVENTS, **sections)], cause, fields, words


def events_in_two_units(folder: Path) -> Trouble:
    rng = np.random.default_rng(552)
    given = patients(rng, 320)
    for person in given:
        if chance(rng, 0.45):  # of the other hospital, which reports mmol/l
            person["rows"] = [(h, test, round(v / 18, 2) if test == "glucose" else v) for h, test, v in person["rows"]]
    words = stems("unit|factor|scale|two groups|two ranges|bimodal|mmol|mg/dl|magnitude|convert|mixed")
    cause = "Glucose is in mg/dl from one hospital and in mmol/l from the other, under one code."
    fields = ["data.events", "events.std_floor", "data.events.value", "glucose"]
    return [write_recipe(folder, EVENTS, **clinic(folder, given))], cause, fields, words


def events_with_numbers_for_missing(folder: Path) -> Trouble:
    rng = np.random.default_rng(553)
    given = patients(rng, 320)
    for person in given:
        person["rows"] = [(h, test, -999.0 if chance(rng, 0.09) else v) for h, test, v in person["rows"]]
    words = stems("-999|999|missing|placeholder|sentinel|not measured|impossible|stands for|empty|null|outlier|fill")
    cause = "Results that were not measured were exported as -999 in place of nothing."
    fields = ["data.events", "data.events.value", "events.std_floor"]
    return [write_recipe(folder, EVENTS, **clinic(folder, given))], cause, fields, words


def events_with_a_landmark_in_minutes(folder: Path) -> Trouble:
    rng = np.random.default_rng(554)
    given = patients(rng, 320)
    for person in given:
        person["rows"] = [(int(h * 60) - 29, test, v) for h, test, v in person["rows"]]
    words = stems("landmark|minute|after|left out|not read|unit|few events|hours|beyond|later")
    cause = "The landmark of 24 was meant in hours, and times are minutes: nearly all events come after it, unread."
    fields = ["events.landmark", "events.unit", "data.events.unit", "data.events"]
    return [write_recipe(folder, EVENTS, **clinic(folder, given, unit="minutes"))], cause, fields, words


def events_whose_labels_were_not_found(folder: Path) -> Trouble:
    rng = np.random.default_rng(555)
    given = [{**person, "id": f"{pick(rng, 'ABBBBB')}{person['id']}"} for person in patients(rng, 340)]
    sections = clinic(folder, given)
    rows = [line.split(",") for line in (folder / "patients.csv").read_text("utf-8").splitlines()[1:]]
    outcomes = [(row[0] if row[0][0] == "A" else row[0][1:], row[-1]) for row in rows]
    labels = write_csv(folder / "outcomes.csv", ["patient_id", "died"], outcomes)
    sections["events"]["labels"].update(path=labels, missing="exclude")
    words = stems("no label|without a label|without label|exclud|ids|match|left out|unlabel|missing|join|few patients")
    cause = "Labels of one hospital lost the letter of the ids, and five of six patients are left out as not labelled."
    fields = ["events.labels", "events.labels.missing", "events.labels.id", "data.events", "events.labels.path"]
    return [write_recipe(folder, EVENTS, **sections)], cause, fields, words


# Healthy, though unusual


def text_of_diaries_a_line_each(folder: Path) -> list[str]:
    """Japanese, a plain text with a document on each line."""
    rng = np.random.default_rng(561)
    path = folder / "nikki.txt"
    path.write_text("\n".join(row["text"] for row in texts(rng, "ja", 340)) + "\n", encoding="utf-8")
    return [write_recipe(folder, TEXT, data={"text": str(path.resolve()), "separator": "\n"})]


def text_of_ships_logs(folder: Path) -> list[str]:
    """Capitals, figures, bars and line breaks: tables rather than sentences."""
    rng = np.random.default_rng(562)
    skies, seas, notes, winds = lists("""
CLEAR | OVERCAST | FOG | RAIN | SQUALLS | HAZE ;; CALM | SLIGHT | MODERATE | ROUGH | HIGH ;;
SOUNDED THE WELL | PUMPED SHIP | REEFED SAILS | SIGHTED A BRIG | COOK SICK | CAUGHT TWO SHARKS | SCRUBBED DECKS
MENDED THE JIB | LOST AN ANCHOR | SHIFTED CARGO | PASSED AN ICEBERG | NO OBSERVATION | DIVINE SERVICE ;;
N | NE | E | SE | S | SW | W | NW""")
    rows = []
    for number in range(330):
        day = datetime(1871, 3, 2) + timedelta(days=3 * number)
        lines = [f"{day:%d %b %Y}".upper()]
        for hour in sorted(int(hour) for hour in rng.choice(24, int(rng.integers(3, 7)), replace=False)):
            wind = f"{pick(rng, winds)} {int(rng.integers(0, 11))}"
            place = f"{float(rng.uniform(-50, 50)):+.1f} {float(rng.uniform(-170, 170)):+.1f}"
            line = f"{hour:02d}00 | {place} | {wind} | {pick(rng, skies)} | SEA {pick(rng, seas)}"
            lines.append(line + (f" | {pick(rng, notes)}" if chance(rng, 0.5) else ""))
        rows.append({"text": "\n".join(lines)})
    return [recipe_of(folder, TEXT, "text", rows)]


def text_of_two_weighted_languages(folder: Path) -> list[str]:
    """Spanish at a weight of one half beside Chinese, split by groups of a source, words in place of byte pairs."""
    rng = np.random.default_rng(563)
    spanish = write_jsonl(folder / "es.jsonl", texts(rng, "es", 260))
    rows = [{**row, "group": f"book {i // 4}"} for i, row in enumerate(texts(rng, "zh", 280))]
    sources = [{"path": spanish, "weight": 0.5}, {"path": write_jsonl(folder / "zh.jsonl", rows)}]
    return [write_recipe(folder, TEXT, data={"text": sources, "holdout": 0.12}, tokenizer={"kind": "words"})]


def chat_of_several_turns(folder: Path) -> list[str]:
    """Chinese, with a system text in two of three rows, and up to three questions in a conversation."""
    rng = np.random.default_rng(564)
    manners = ["你是小店的收银员，回答要简短。", "请用礼貌的语气。", "你帮忙记账。", "顾客赶时间。"]
    given, rows = orders(rng, 620), []
    while given:
        turns = [given.pop() for _ in range(min(int(rng.integers(1, 4)), len(given)))]
        messages = [{"role": "system", "content": pick(rng, manners)}] if chance(rng, 0.66) else []
        for question, reply, _ in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        rows.append({"messages": messages})
    return [recipe_of(folder, CHAT, "chat", rows, data={"near_duplicates": "together"})]


TICKETS = {
    "billing": ["charged|billed|debited|invoiced", "me twice|a wrong sum|an old card|too much money|a closed account"],
    "delivery": ["left|dropped|lost|crushed", "the parcel in the rain|my box at the station|the package on its way"],
    "account": ["locked|blocked|deleted|renamed", "my profile|my user name|the login page|my password at night"],
    "praise": ["impressed|delighted|charmed|helped", "us greatly|my family|everybody here|me within a minute"],
}
WHOM = lists("""
your shop | the courier | your web site | somebody at your counter | the new app | your team | the night desk ;;
I ordered a {thing} | It is about the {thing} | We bought a {thing} for a friend | My aunt chose a {thing} ;;
lamp | kettle | rucksack | chess set | raincoat | camera | blanket | tea pot | violin bow | bicycle pump | wall clock ;;
last week | in spring | on Monday | before the holidays | a month ago | this morning | yesterday | in your sale ;;
Please reply soon. | That is all. | Just so you know. | What do you say? | Tell your manager. | Bye. | I am curious.""")


def chat_of_four_labels(folder: Path) -> list[str]:
    """A classifier as a chat: letters of customers, and replies of one word out of four, in equal numbers."""
    rng = np.random.default_rng(565)
    rows: dict[str, Row] = {}
    while len(rows) < 360:
        label = list(TICKETS)[len(rows) % 4]
        who, thing, item, when, end = (pick(rng, part) for part in WHOM)
        forms = ["{t} {w}. {u} {d}. {e}", "{u} {d}. {t} {w}. {e}", "{e} {t} {w}, and {v} {d}.", "{w}: {v} {d}. {t}."]
        done = " ".join(pick(rng, stems(part)) for part in TICKETS[label])
        what = {"t": thing.format(thing=item), "w": when, "v": who, "d": done, "e": end}
        text = str(pick(rng, forms)).format(**what, u=who[0].upper() + who[1:])
        rows.setdefault(text, {"prompt": text[0].upper() + text[1:], "completion": label})
    return [recipe_of(folder, CHAT, "chat", rows.values(), train={"max_epochs": 6})]


def chat_by_small_adapters(folder: Path) -> list[str]:
    """Adapters of rank 4 on a run of the same language, at the high rate that they need."""
    rng = np.random.default_rng(566)
    train = {"init_from": start(folder, reading(rng, "es", 320)), "max_epochs": 6}
    more: Row = {"lora": {"r": 4, "alpha": 8, "rslora": True}, "optim": {"lr": 3e-3}, "tokenizer": None}
    return [recipe_of(folder, CHAT, "chat", talks(reading(rng, "es", 320, whole=0.5)), train=train, **more)]


def pairs_with_smoothing(folder: Path) -> list[str]:
    """German pairs as messages, some with a system text, and a share of doubt."""
    rng = np.random.default_rng(567)
    base = start(folder, reading(rng, "de", 320))
    rows = []
    for row in judged(rng, "de", 260):
        messages = [{"role": "user", "content": row.pop("prompt")}]
        if chance(rng, 0.4):
            system = pick(rng, ["Antworte in einem Satz.", "Sei genau.", "Bleib höflich."])
            messages.insert(0, {"role": "system", "content": system})
        rows.append({"messages": messages, **row})
    changes: Row = {"train": {"label_smoothing": 0.05, "beta": 0.2}, "data": {"near_duplicates": "together"}}
    return [recipe_of(folder, PAIRS, "pairs", rows, model={"from": base}, **changes)]


def images_of_grey_strips(folder: Path) -> list[str]:
    """Tall and wide strips in grey; their classes, of uneven size, are the directions of stripes."""
    rng = np.random.default_rng(568)
    names = ["laengs", "quer", "schraeg"]
    for i in range(330):
        name = names[[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2][i % 11]]
        width, height = int(rng.integers(24, 40)), int(rng.integers(70, 120))
        if chance(rng, 0.5):
            width, height = height, width
        angle = {"laengs": 0.0, "quer": math.pi / 2, "schraeg": math.pi / 4}[name] + float(rng.normal(0, 0.1))
        down, across = np.mgrid[0:height, 0:width]
        turn = (across * math.cos(angle) + down * math.sin(angle)) * 2 * math.pi / rng.uniform(7, 13)
        wave = np.sin(turn + rng.uniform(0, 6))
        pixels = rng.uniform(90, 165) + rng.uniform(25, 55) * wave + rng.normal(0, 9, (height, width))
        saved(folder, f"{name}/{i}.png", Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)))
    return [write_recipe(folder, IMAGES, data={"images": str(folder / "pictures")}, images={"shift": 0.0, "zoom": 0.0})]


def images_of_icons_in_groups(folder: Path) -> list[str]:
    """Icons with opacity from a table, drawn by sixty hands in several sizes each; a hand is a group."""
    rng = np.random.default_rng(569)
    rows = []
    for i in range(330):
        side, kind = int(pick(rng, [32, 48, 64])), KINDS[i % 5]
        picture = Image.new("RGBA", (side, side), (0, 0, 0, 0))
        r, layer = side * float(rng.uniform(0.25, 0.42)), Image.new("RGB", (side, side))
        figure(layer, kind, spot(rng, r, side - r), r, (255, 255, 255), float(rng.uniform(0, 6.3)))
        picture.paste(Image.new("RGBA", (side, side), (*tinted(rng), 255)), (0, 0), layer.convert("L"))
        rows.append([saved(folder, f"icon{i:03d}.png", picture), kind, f"hand {int(rng.integers(60))}"])
    path = write_csv(folder / "icons.csv", ["image", "label", "group"], rows)
    return [write_recipe(folder, CNN, data={"images": path}, model={"channels": 4}, images={"size": "letterbox"})]


def vqa_of_two_pictures(folder: Path) -> list[str]:
    """Chinese questions about two pictures at once, a thing from far and from near, in words of several forms."""
    rng = np.random.default_rng(570)
    colors = dict(zip(COLORS, ["红色", "绿色", "蓝色", "黄色"], strict=True))
    kinds = dict(zip(KINDS[:3], ["圆形", "圆环", "十字"], strict=True))
    rows = []
    for i in range(460):
        kind, color = pick(rng, list(kinds)), pick(rng, list(colors))
        names = []
        for view, (least, most) in enumerate([(5, 8), (10, 14)]):
            picture = ground(rng, 32, 32)
            figure(picture, kind, spot(rng, 14, 18), float(rng.uniform(least, most)), shade(rng, COLORS[color]))
            names.append(saved(folder, f"{i:03d}_{view}.png", picture))
        question = pick(
            rng,
            [["这两张图里的东西是什么颜色？", "它是什么色的？"], ["两张图画的是什么形状？", "它的轮廓像什么？"]][i % 2],
        )
        rows.append({"image": names, "question": question, "answer": kinds[kind] if i % 2 else colors[color]})
    return [recipe_of(folder, VQA, "vqa", rows)]


def events_with_times_to_the_outcome(folder: Path) -> list[str]:
    """Days before and after a diagnosis, observation that ends early for some, and hazards beside the class."""
    rng = np.random.default_rng(571)
    given = patients(rng, 340)
    outcomes, rows = [], []
    for person in given:
        rate = math.exp(-6.3 + 1.3 * person["bad"] + 0.03 * (person["age"] - 66))
        death, seen = float(rng.exponential(1 / rate)), float(rng.uniform(200, 1500))
        outcomes.append([person["id"], person["age"], person["sex"], int(death < seen), int(min(death, seen)) + 1])
        rows += [(person["id"], int(hour * 4) - 270, test, value) for hour, test, value in person["rows"]]
    labs = write_csv(folder / "visits.csv", ["pid", "day", "item", "figure"], [row for row in rows if row[1] <= 0])
    path = write_csv(folder / "ends.csv", ["pid", "age", "sex", "dead", "days"], outcomes)
    measured = {**columns(labs, "pid", "day", "item", "figure"), "unit": "days", "negative": "allow"}
    known = {"path": path, "id": "pid", "static": ["age", "sex"]}
    labels = {"path": path, "id": "pid", "event": "dead", "duration": "days", "horizon": 365, "censored": "keep"}
    data, events = {"events": [measured, known]}, {"landmark": 0, "labels": labels}
    return [write_recipe(folder, EVENTS, data=data, events=events, model={"bins": [0, 120, 365, 730]})]


def events_of_words_and_dates(folder: Path) -> list[str]:
    """German dates, findings in words, empty results, a landmark of each patient, an outcome of one in five."""
    rng = np.random.default_rng(572)
    given = patients(rng, 360, level=-2.9)
    rows, stays = [], []
    for person in given:
        came = datetime(2021, 1, 4) + timedelta(minutes=int(rng.integers(0, 600_000)))
        for hour, test, value in person["rows"]:
            when = f"{came + timedelta(hours=float(hour)):%d.%m.%Y %H:%M}"
            rows.append((person["id"], when, test, "" if chance(rng, 0.08) else value))
            if chance(rng, 0.1):
                found = "POS" if chance(rng, 0.3 + 0.15 * math.tanh(person["bad"])) else "NEG"
                rows.append((person["id"], when, pick(rng, ["kultur", "troponin", "abstrich"]), found))
        left = f"{came + timedelta(hours=24 + int(rng.integers(0, 7))):%d.%m.%Y %H:%M}"
        end = "verstorben" if person["died"] else "entlassen"
        stays.append((person["id"], person["age"], person["sex"], end, left))
    labs = write_csv(folder / "befunde.csv", ["fall", "zeit", "art", "wert"], rows)
    path = write_csv(folder / "faelle.csv", ["fall", "alter", "geschlecht", "ausgang", "stichzeit"], stays)
    form = "%d.%m.%Y %H:%M"
    measured = {**columns(labs, "fall", "zeit", "art", "wert"), "unit": "timestamp", "format": form, "words": "code"}
    known = {"path": path, "id": "fall", "static": ["alter", "geschlecht"]}
    labels = {"path": path, "id": "fall", "label": "ausgang", "map": {"entlassen": 0, "verstorben": 1}, "format": form}
    events = {"landmark": "stichzeit", "labels": labels}
    return [write_recipe(folder, EVENTS, data={"events": [measured, known]}, events=events)]


TROUBLES: list[Callable[[Path], Trouble]] = [
    text_read_in_another_encoding, text_hyphenated_by_pages, text_validated_in_another_language,
    text_with_an_epoch_in_a_step, text_run_learnt_by_heart, chat_with_roles_exchanged, chat_joined_a_row_too_far,
    chat_replies_cut_by_a_column, chat_with_marks_in_the_messages, chat_cut_before_the_replies, chat_adapters_that_stay,
    pairs_that_contradict, pairs_told_by_their_ends, pairs_from_a_run_of_two_steps, pairs_run_that_unlearns,
    images_at_the_rate_of_descent, images_mirrored_arrows, images_labels_in_another_order, images_frames_on_both_sides,
    images_with_a_ruler_in_one_class, images_run_with_a_dead_rate, vqa_answered_without_pictures,
    vqa_pictures_that_were_not_found, vqa_answers_spelt_in_many_ways, vqa_with_all_but_the_projector_frozen,
    events_with_the_way_home, events_in_two_units, events_with_numbers_for_missing, events_with_a_landmark_in_minutes,
    events_whose_labels_were_not_found,
]  # fmt: skip
HEALTHY: list[Callable[[Path], list[str]]] = [
    text_of_diaries_a_line_each, text_of_ships_logs, text_of_two_weighted_languages, chat_of_several_turns,
    chat_of_four_labels, chat_by_small_adapters, pairs_with_smoothing, images_of_grey_strips, images_of_icons_in_groups,
    vqa_of_two_pictures, events_with_times_to_the_outcome, events_of_words_and_dates,
]  # fmt: skip
