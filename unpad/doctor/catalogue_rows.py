"""The words of findings on rows: files, joins, classes, sides of the split, tables and pictures; see `catalogue.py`."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """The words of a finding."""

    reason: str
    advice: str
    reason_zh: str
    advice_zh: str


OF_ROWS: dict[str, Entry] = {
    "leaking_code": Entry(
        "{number:.0%} of the patients with {code} have label {target}: {covered:.0%} of all with this label, and "
        "{others:.1%} of the others. It may be the outcome itself.",
        "leave it out of the events, or predict before it: events.landmark; a loss near 0 is no success here",
        "有 {code} 的病人中 {number:.0%} 的标签是 {target}：占该标签病人的 {covered:.0%}，而其他病人中只有"
        " {others:.1%}。它可能就是结局本身。",
        "从事件中去掉它，或用 events.landmark 在它之前预测；这时损失接近 0 并不说明学会了",
    ),
    "one_set": Entry(
        "events.window={number:g} makes {sets:.1f} sets of the {events:.0f} events of a patient, at the median: "
        "events "
        "of one window are a single set without an order of time, so that whether a value rises or falls is lost.",
        "leave events.window out, or set it to a small part of a history",
        "events.window={number:g} 把每位病人的 {events:.0f} 个事件（中位数）并成 {sets:.1f} 个集合："
        "一个窗口内的事件没有先后，数值上升还是下降就丢失了。",
        "去掉 events.window，或设为病程的一小部分",
    ),
    "leaking_value": Entry(
        "The value of {code} alone tells the label of {sequences:,} patients, AUROC {number:.3f}: it may be written "
        "after the outcome.",
        "leave it out of the events and of `static`, or predict before it: events.landmark",
        "单凭 {code} 的数值就能分出 {sequences:,} 个病人的标签，AUROC 为 {number:.3f}：它可能是结局之后才写入的。",
        "从事件和 `static` 中去掉它，或用 events.landmark 在它之前预测",
    ),
    "leaking_course": Entry(
        "{what} alone tells the label, AUROC {number:.3f}: {first:.4g} at the median with label {other}, and "
        "{second:.4g} with label {target}. How much is written, and until when, follows from the outcome: it leaks, or "
        "the two classes were exported in different ways.",
        "read both classes in the same way, and only up to a landmark before the outcome: events.landmark",
        "仅凭{what}就能分出标签，AUROC 为 {number:.3f}：中位数在标签 {other} 是 {first:.4g}，"
        "在标签 {target} 是 {second:.4g}。"
        "记录多少、记录到何时取决于结局：这是泄漏，或两类的导出方式不同。",
        "两类用同样方式读取，并且只读到结局之前的预测时点：events.landmark",
    ),
    "far_landmark": Entry(
        "The landmark, {landmark:g}, is {gap:.3g} days after the last event of a patient, {number:.0f} times the "
        "length "
        "of the histories, {span:.3g} days: it looks given in another unit, and outcomes of that time are long "
        "known.",
        "give events.landmark in events.unit, within the histories",
        "预测时点 {landmark:g} 在病人最后一个事件之后 {gap:.3g} 天，是病程长度（{span:.3g} 天）的 {number:.0f} 倍："
        "像是用了别的单位，那时结局早已知道。",
        "用 events.unit 的单位给出 events.landmark，并落在病程之内",
    ),
    "no_history": Entry(
        "{number:.0%} of {sequences:,} patients have no event with a time up to the landmark; {late:,} events are "
        "after it.",
        "compare events.landmark with the times in the files: both count from the same day, in events.unit",
        "{sequences:,} 个病人中有 {number:.0%} 在预测时点之前没有任何带时间的事件；之后的事件有 {late:,} 个。",
        "把 events.landmark 与文件里的时间对照：两者应从同一天算起，单位为 events.unit",
    ),
    "long_history": Entry(
        "{number:.1%} of {sequences:,} patients have events more than a lifetime before the landmark, up to "
        "{years:,.0f} years.",
        "look at `unit` of the tables (minutes read as days?) and at placeholders such as 1900-01-01",
        "{sequences:,} 个病人中有 {number:.1%} 的事件比预测时点早一辈子以上，最早 {years:,.0f} 年。",
        "检查各表的 `unit`（分钟当成了天？）以及 1900-01-01 之类的占位日期",
    ),
    "read_as": Entry(
        "The text is garbled: UTF-8 was read in the encoding {encoding}. in {number:.0%} of the rows "
        "its bytes are UTF-8 again, such as {shown!r} at {where}.",
        "write the file again from its source, read as UTF-8; do not train on garbled characters",
        "文本是乱码：UTF-8 被当作 {encoding} 读取。用它编码回去，{number:.0%} 的行又是 UTF-8，例如 {where} 的"
        " {shown!r}。",
        "从源文件以 UTF-8 重新写出；不要用乱码训练",
    ),
    "bytes_as_letters": Entry(
        "The text is garbled: {number:.0%} of its characters stand in runs of accented letters, as bytes of another "
        "encoding do that were read as Latin-1; such as {shown!r} at {where}.",
        "find the encoding of the source (GB18030, Shift-JIS, KOI8-R ...), and write the file again as UTF-8",
        "文本是乱码：{number:.0%} 的字符是连续的带符号字母，像是把别的编码的字节当成了 Latin-1；例如 {where} 的"
        " {shown!r}。",
        "找出源文件的编码（GB18030、Shift-JIS、KOI8-R 等），再以 UTF-8 写出",
    ),
    "replaced": Entry(
        "{number:.1%} of the characters are U+FFFD, which stands for bytes that were lost when the text was decoded; "
        "such as {shown!r} at {where}.",
        "decode the source in its own encoding, and write the file again as UTF-8",
        "{number:.1%} 的字符是 U+FFFD，即解码时丢失的字节；例如 {where} 的 {shown!r}。",
        "用源文件自己的编码解码，再以 UTF-8 写出",
    ),
    "no_text": Entry(
        "{number:.0%} of the rows are no text but {why}, such as {shown!r} at {where}.",
        "look at the field, column or separator that the text is taken from: {{path: FILE, field: NAME}} names "
        "it, and "
        "JSON lines end in .jsonl",
        "{number:.0%} 的行不是正文，而是{why}，例如 {where} 的 {shown!r}。",
        "检查正文取自哪个字段、列或分隔符：用 {{path: FILE, field: NAME}} 指定；JSON 行文件应以 .jsonl 结尾",
    ),
    "unread_text": Entry(
        "The field {read!r} is read, with {words:.1f} words a row, such as {shown!r}; {other!r} of the same rows has "
        "{number:.0f} and is not read, such as {beside!r}: the text may be there.",
        "name the field that holds the text: {{path: FILE, field: {other}}}",
        "读取的是字段 {read!r}，每行 {words:.1f} 个词，例如 {shown!r}；同一行的 {other!r} 有 {number:.0f} 个词"
        "却没有读，例如 {beside!r}：正文可能在那里。",
        "指定存放正文的字段：{{path: FILE, field: {other}}}",
    ),
    "no_order": Entry(
        "The order of characters says nothing: packed, the text takes {number:.0%} of the room of the same "
        "characters "
        "shuffled; such as {shown!r} at {where}. It is no language, or was scrambled.",
        "look at the field that the text is taken from, and at how it was decoded, unpacked or shuffled",
        "字符的顺序没有规律：压缩后的大小是打乱后的 {number:.0%}；例如 {where} 的 {shown!r}。它不是语言，或被打乱了。",
        "检查正文取自哪个字段，以及它是如何解码、解压或打乱的",
    ),
    "unseen": Entry(
        "{number:.1%} of the characters are control characters or marks without width, mostly {shown}: the model "
        "learns to write them.",
        "take them out of the files",
        "{number:.1%} 的字符是控制字符或零宽字符，最多的是 {shown}：模型会学着写它们。",
        "从文件中去掉它们",
    ),
    "decomposed": Entry(
        "Accents stand behind their letters as characters of their own ({number:.1%} of all), such as in {shown!r}: "
        "the same word is written in two ways (Unicode NFD), and as other tokens than elsewhere.",
        "compose them: unicodedata.normalize('NFC', text)",
        "重音等符号作为单独的字符写在字母之后（占 {number:.1%}），例如 {shown!r}：同一个词有两种写法（Unicode NFD），"
        "词元也与别处不同。",
        "合成它们：unicodedata.normalize('NFC', text)",
    ),
    "markup": Entry(
        "{number:.0%} of the characters are {kind}, such as {shown!r}: the model learns markup in place of text.",
        "take the plain text out before training; keep markup only where the model is to write it",
        "{number:.0%} 的字符是{kind}，例如 {shown!r}：模型学的是标记而不是正文。",
        "训练前取出纯文本；只有要让模型写标记时才保留",
    ),
    "escaped": Entry(
        "{number:.1%} of the characters are {kind}, such as '{shown}' at {where}: the text was encoded for "
        "another program, and not decoded.",
        "decode it before training: json.loads, urllib.parse.unquote or base64.b64decode, as it was made",
        "{number:.1%} 的字符是{kind}，例如 {where} 处的“{shown}”：文本为别的程序编码过，却没有解码。",
        "训练前先解码：按它的来源用 json.loads、urllib.parse.unquote 或 base64.b64decode",
    ),
    "lost_letters": Entry(
        "{number:.0%} of the rows have question marks inside words or in their place, such as '{shown}' at "
        "{where}, and no letters "
        "beyond "
        "ASCII: accents and other characters were replaced by '?' when the text was encoded. They are lost.",
        "write the file again from its source as UTF-8, without errors='replace' and without an ASCII column",
        "{number:.0%} 的行在词中间或整个词的位置有问号，例如 {where} 处的“{shown}”，而没有 ASCII 以外的字母："
        "带重音的字符在编码时被替换成了“?”，已经丢失。",
        "从源文件以 UTF-8 重新写出，不要用 errors='replace' 或 ASCII 列",
    ),
    "word_pieces": Entry(
        "{number:.0%} of the rows hold the pieces of another tokenizer (subwords, as @@, ## or a low line mark "
        "them), "
        "such as '{shown}' at {where}: the model learns to write tokens and their marks in place of words.",
        "join the pieces to words again (detokenize), or take the text from before it was tokenized",
        "{number:.0%} 的行里是别的分词器的子词（带 @@、## 或 ▁ 记号），例如 {where} 处的“{shown}”：模型学到的是"
        "记号而不是词。",
        "把子词还原成词，或使用分词之前的文本",
    ),
    "misread": Entry(
        "{number:.0%} of the rows have digits or signs inside words, such as '{shown}' at {where}: letters were "
        "misread "
        "when pages were scanned (OCR), or replaced.",
        "take the text from another source, or correct it; do not train on misread words",
        "{number:.0%} 的行在词中间有数字或符号，例如 {where} 处的“{shown}”："
        "扫描识别（OCR）认错了字母，或字母被替换了。",
        "换用别的来源或先校正；不要用认错的词训练",
    ),
    "masked_words": Entry(
        "{number:.0%} of the rows have masks, empty slots or unknown tokens in place of words, such as '{shown}' "
        "at {where}: the "
        "words are lost (replaced), and the model learns to write the placeholder.",
        "take the text from before words were masked, fill the slots, or leave these rows out",
        "{number:.0%} 的行中词被掩码、未填的占位或未知记号代替，例如 {where} 处的“{shown}”："
        "词已丢失，模型会学着写占位符。",
        "使用掩码之前的文本，填上占位，或去掉这些行",
    ),
    "marks_apart": Entry(
        "{number:.0%} of the rows have blanks before commas and full stops, such as '{shown}' at {where}: the "
        "text was "
        "tokenized by another program, and its punctuation was not joined again.",
        "detokenize the text, or take it from before it was split",
        "{number:.0%} 的行在逗号和句号前有空格，例如 {where} 处的“{shown}”：文本被别的程序切分过，标点没有还原。",
        "还原标点，或使用切分之前的文本",
    ),
    "hyphens": Entry(
        "{number:.0%} of the rows have words that a hyphen divides at the end of a line, such as '{shown}' at "
        "{where}: "
        "the line breaks of a printed page or PDF are still in the text.",
        "join the divided words and the lines of a paragraph before training",
        "{number:.0%} 的行里有在行末用连字符断开的词，例如 {where} 处的“{shown}”：印刷页面或 PDF 的换行还留在文本中。",
        "训练前把断开的词和一段中的各行连起来",
    ),
    "padded_text": Entry(
        "{number:.0%} of the rows end in one sign again and again, such as '{shown}' at {where}: they were filled up "
        "(padded) to a length, and the padding is learnt as text.",
        "cut the padding off: plan.strategy=pack needs none, and batches pad by themselves",
        "{number:.0%} 的行以同一记号的不断重复结尾，例如 {where} 处的“{shown}”：它们被填充到某个长度，填充被当"
        "成了文本。",
        "去掉填充：plan.strategy=pack 不需要它，批次会自己填充",
    ),
    "row_numbers": Entry(
        "Rows or lines begin with a number that rises through the whole file ({number:.0%} of them), such as "
        "'{shown}' "
        "at {where}: it is the number (id, index) of the row, and the model learns to count.",
        "take the number out of the text, and name the column of the text: data.text.field",
        "行首的数字在整个文件中递增（{number:.0%}），例如 {where} 处的“{shown}”：那是行号（编号），模型学到的是数数。",
        "从正文中去掉编号，并指定正文所在的列：data.text.field",
    ),
    "grown_rows": Entry(
        "{number:.0%} of the rows are the beginning of another row, such as '{shown}' at {where}: versions "
        "(prefixes) "
        "of one text, or a conversation exported after each of its turns. What they share is learnt again and again.",
        "keep the longest row of each; a conversation learns all of its replies at once",
        "{number:.0%} 的行是另一行的开头（前缀），例如 {where} 处的“{shown}”：同一文本的多个版本，或每一轮都导"
        "出一次的对话。"
        "共有的部分会被反复学习。",
        "每组只留最长的一行；一段对话会同时学习其中所有回复",
    ),
    "changed_words": Entry(
        "{how} (a measure of {number:.2f}), such as '{shown}' at {where}: the model learns what nobody writes.",
        "look at the program that wrote the rows: at how it splits, joins, sorts or reverses words",
        "{how}（指标 {number:.2f}），例如 {where} 处的“{shown}”：模型学到的是没有人会写的文字。",
        "检查写出这些行的程序：它怎样切分、连接、排序或颠倒词语",
    ),
    "no_value": Entry(
        "{number:.0%} of {part} is the sign of an empty cell, such as '{shown}' at {where}: missing "
        "values were written as text.",
        "leave rows without a value out: in pandas dropna() before astype(str)",
        "{part}中有 {number:.0%} 是空单元格的记号，例如 {where} 处的“{shown}”：缺失值被写成了文字。",
        "去掉没有值的行：在 pandas 中先 dropna() 再 astype(str)",
    ),
    "other_marks": Entry(
        "{number:.0%} of the rows hold roles or special tokens of another program's chat format as text, such as "
        "'{shown}' at {where}: the template is applied a second time.",
        "take the marks out, and give messages with roles; data.template writes the prefixes of roles itself",
        "{number:.0%} 的行含有别的程序的对话格式标记或角色名，例如 {where} 处的“{shown}”：模板被套用了两次。",
        "去掉这些标记，只给出带角色的消息；角色前缀由 data.template 写出",
    ),
    "said_twice": Entry(
        "{number:.0%} of the texts say the same thing twice, one half repeats the other, or again and again, "
        "such as '{shown}' at {where}.",
        "look for a field that was joined to itself, such as a title that is the text",
        "{number:.0%} 的文本把同样的内容说了两遍或多遍，例如后一半重复前一半，例如 {where} 处的“{shown}”。",
        "查找和自身拼接的字段，例如标题就是正文",
    ),
    "swapped_roles": Entry(
        "{number:.0%} of the replies ask something, such as {shown!r}, and {asked:.0%} of the messages of users: the "
        "roles look swapped.",
        "exchange user and assistant in the files, or the fields that hold them",
        "{number:.0%} 的回复在提问，例如 {shown!r}，而用户消息中只有 {asked:.0%} 在提问：角色看起来反了。",
        "在文件中交换 user 和 assistant，或交换对应的字段",
    ),
    "roles_alike": Entry(
        "The roles of user and assistant look swapped: {why}, {different:,} of them; such as {shown!r}.",
        "exchange user and assistant in the files, or the fields that hold them",
        "user 与 assistant 两个角色像是反了：{why}（{different:,} 种），例如 {shown!r}。",
        "在文件中交换 user 和 assistant，或交换对应的字段",
    ),
    "given_before": Entry(
        "{number:.0%} of the conversations hold their own reply in a system or user message before it, such as "
        "{answer!r} in {question!r}, and {others:.0%} that of another: the answer is given away, and the model only "
        "learns to copy it.",
        "take the answer out of the system message or question; a low loss is no success here",
        "{number:.0%} 的对话在回答之前的 system 或用户消息里已写着自己的回答，例如 {question!r} 里的 {answer!r}，"
        "写着别的回答的占 {others:.0%}：模型只会照抄。",
        "从 system 消息或问题中去掉答案；这时损失低并不说明学会了",
    ),
    "repeats_question": Entry(
        "{number:.0%} of the replies repeat their whole question, such as {question!r} in {shown!r}: the model "
        "learns "
        "to say the prompt again before it answers.",
        "keep only what comes after the prompt: programs that generate text often return the prompt as well",
        "{number:.0%} 的回复重复了整个问题，例如 {shown!r} 里有 {question!r}：模型会学着先把问题再说一遍。",
        "只保留提示之后的部分：生成程序常把提示也一起返回",
    ),
    "slipped": Entry(
        "The replies belong to other questions: from {first} to {last} the one {distance} rows {way} matches "
        "better than the own ({number:.1f} standard errors). The column of replies has slipped.",
        "join questions and replies by a key, not by the number of the row, or shift one column back by {distance}",
        "回答与问题错位：从 {first} 到 {last}，{way} {distance} 行的回答比本行的更相配（{number:.1f} 个标准误）。"
        "回答这一列滑动了。",
        "用键而不是行号来连接问题和回答，或把其中一列移回 {distance} 行",
    ),
    "other_replies": Entry(
        "{num} questions ({number:.0%}) match the reply of another row and not their own: '{question}' at {where}"
        " that at {other}, '{reply}'. Replies were joined to wrong rows, or shuffled.",
        "join questions and replies by a key, not by the order of rows",
        "{num} 个问题（{number:.0%}）与别行的回答相配，而不是自己的：{where} 处的“{question}”对应 {other} 处的"
        "“{reply}”。回答接错了行，或被打乱了。",
        "用键而不是行的顺序来连接问题和回答",
    ),
    "pictures_apart": Entry(
        "Answers name colours that their pictures do not show more than other pictures do ({number:.1f} standard "
        "errors "
        "over {rows:,} rows; the best order of the same pictures has {best:.0f}), such as '{answer}' at {where}: "
        "pictures were shuffled, or sorted apart from the questions, and belong to other rows.",
        "join the pictures to the questions by a key, not by their place in a list",
        "答案中的颜色在自己的图像里并不比在别的图像里更多（{rows:,} 行，{number:.1f} 个标准误；"
        "同样的图像最好的排列有 {best:.0f}），例如 {where} 的“{answer}”：图像被打乱或单独排过序，属于别的行。",
        "按键而不是按列表中的位置把图像和问题对应起来",
    ),
    "slipped_pictures": Entry(
        "The pictures belong to other questions: from {first} to {last} the picture {distance} rows {way} "
        "matches the answer better than the own ({number:.1f} standard errors). The column of images has slipped.",
        "join pictures and questions by a key, not by the number of the row, or shift one column back by {distance}",
        "图像与问题错位：从 {first} 到 {last}，{way} {distance} 行的图像比本行的更符合答案（{number:.1f} 个标准误"
        "）。图像这一列滑动了。",
        "用键而不是行号来连接图像和问题，或把其中一列移回 {distance} 行",
    ),
    "exchanged": Entry(
        "The two replies of a pair differ in one way, {kind}, but of {pairs} pairs {number:.0%} are on one side "
        "of it and the rest on the other: chosen and rejected look exchanged (swapped) in a part of the rows, so "
        "that there is nothing to prefer.",
        "look at how chosen and rejected were named, such as by the side of a screen; put the better reply into chosen",
        "每对中的两个回答只有一种差别（{kind}），但 {pairs} 对中有 {number:.0%} 在一边，其余在另一边：部分行的"
        " chosen 与 rejected 似乎互换了，没有可学的偏好。",
        "检查 chosen 和 rejected 是怎样命名的，例如按屏幕左右；把更好的回答放进 chosen",
    ),
    "both_ways": Entry(
        "{number:.0%} of the pairs contradict another pair: the chosen reply is the rejected one there, such as '"
        "{shown}' at {where}. Chosen and rejected look swapped in a part of the rows.",
        "keep one verdict for each two replies, such as that of most people; look for pairs that were written "
        "both ways",
        "{number:.0%} 的偏好对与另一对矛盾：这里选中的回答在那里被拒绝，例如 {where} 处的“{shown}”。部分行的"
        " chosen 与 rejected 似乎互换了。",
        "每两个回答只保留一个判断，例如多数人的；查找正反都写了的偏好对",
    ),
    "given_answer": Entry(
        "{number:.0%} of the questions hold their own answer, such as {answer!r} in {question!r}, and {others:.0%} "
        "that "
        "of another: the model only has to copy it.",
        "take the answer out of the question; a low loss is no success here",
        "{number:.0%} 的问题里已经写着自己的答案，例如 {question!r} 里的 {answer!r}；写着别的问题的答案的只有 "
        "{others:.0%}："
        "模型照抄即可。",
        "从问题中去掉答案；这时损失低并不说明学会了",
    ),
    "lost_pictures": Entry(
        "{number:.0%} of the questions are without a picture, such as '{question}' at {where}, and others ask the same "
        "about one: their pictures are missing, and the answers cannot be seen.",
        "look at the join of questions and images, and at empty cells of `image`; or leave these rows out",
        "{number:.0%} 的问题没有图像，例如 {where} 的“{question}”，而同样的问题在别处有图像：图像丢失了，看不出答案。",
        "检查问题与图像的连接和空的 `image` 单元格；或去掉这些行",
    ),
    "clashing_labels": Entry(
        "{number:.0%} of {sequences:,} training inputs are equal to one with another label or answer, such as "
        "{where}: "
        "no model can tell them apart.",
        "look at how labels are matched with rows, and at what makes the inputs alike",
        "{sequences:,} 个训练输入中有 {number:.0%} 与标签或答案不同的另一个完全相同，例如 {where}：任何模型都分不开。",
        "检查标签与样本的对应关系，以及输入为何相同",
    ),
    "wrapped_lines": Entry(
        "{number:.0%} of the rows are lines that end in the middle of a sentence, which the next row goes on with: "
        "'{shown}' at {where}, then '{next}'. A text that was wrapped at about {width:.0f} characters was cut at "
        "every "
        "line break (newline), and each line is a document.",
        "set data.separator=auto, which cuts at blank lines, or join the lines of a paragraph before training",
        "{number:.0%} 的行在句子中间断开，由下一行接着：{where} 的“{shown}”，然后是“{next}”。"
        "原文按约 {width:.0f} 个字符折行，却在每个换行处被切开，每一行都成了一篇文档。",
        "设置 data.separator=auto（按空行切分），或在训练前把一段的各行连起来",
    ),
    "cut_alike": Entry(
        "{number:.0%} of the texts are cut after exactly {most:,} {unit}, the largest length there is, and end "
        "without "
        "a mark, such as {shown!r} at {where}.",
        "look for a limit of a column or of an export, such as VARCHAR({most}), and export them again without it",
        "{number:.0%} 的文本正好在 {most:,} {unit}处被截断，这是出现的最大长度，结尾没有标点，例如 {where} 的 "
        "{shown!r}。",
        "检查数据库列或导出程序的长度上限，例如 VARCHAR({most})，去掉后重新导出",
    ),
    "same_reply": Entry(
        "{number:.0%} of {sequences:,} conversations have the same reply, {target!r}, to different questions, beside "
        "others that differ: the model learns to say it to everything.",
        "take these rows out of the files, or all but a few, if it is an excuse or an error message",
        "{sequences:,} 段对话中有 {number:.0%} 对不同的问题给出同一回答 {target!r}，"
        "其余回答各不相同：模型会学着对什么都这样说。",
        "如果它是推托或错误信息，请从文件中去掉这些行，或只留少数",
    ),
    "same_pair": Entry(
        "{number:.0%} of the pairs have the same reply on both sides (identical but for blanks, marks or "
        "capitals), such "
        "as '{shown}' at {where}: there is nothing to prefer.",
        "leave these pairs out",
        "{number:.0%} 的偏好对两边是同一个回答（只差空格、标点或大小写），例如 {where} 处的“{shown}”：没有可比较的。",
        "去掉这些偏好对",
    ),
    "reply_elsewhere": Entry(
        "The {side} replies fit the prompts of other rows and not their own ({number:.1f} standard errors), such as "
        "'{shown}' at {where}, while those of the other side fit theirs: they were shuffled, or joined to the "
        "wrong rows, "
        "and the model only learns which reply is about the question.",
        "join both replies to the prompt by a key",
        "{side}回答与别的行的提示相配，与自己的提示不配（{number:.1f} 个标准误），例如 {where} 的“{shown}”，"
        "而另一边的回答与自己的提示相配：它们被打乱或接错了行，模型只会学哪个回答与问题有关。",
        "按键把两个回答接到提示上",
    ),
    "untrained_reference": Entry(
        "Stage {stage} learns preferences from weights drawn at random ({number:.0f} of 1): neither model.from nor "
        "train.init_from names a run, and no stage before it learns to answer. It would compare with an untrained "
        "reference.",
        "set model.from=RUN, a run that has learnt to answer, or put a stage of conversations first",
        "阶段 {stage} 从随机权重开始学偏好（{number:.0f}/1）：没有 model.from 或 train.init_from，前面也没有学回"
        "答的阶段。"
        "它比较的参考模型没有训练过。",
        "设置 model.from=RUN（已学会回答的一次训练），或在前面加一个学对话的阶段",
    ),
    "one_rejected": Entry(
        "{number:.0%} of the pairs have one and the same {side} reply, '{shown}': the model only has to know it again.",
        "give replies that differ, or leave most of these pairs out",
        "{number:.0%} 的偏好对有同一个{side}回答“{shown}”：模型只要认出它就行。",
        "换成各不相同的回答，或去掉大部分这样的对",
    ),
    "told_apart": Entry(
        "{number:.0%} of the {side} replies differ from the other ones by a marker alone, {kind}: '{mark}', such "
        "as in "
        "'{shown}'. The model learns to write it, and need not read what is said.",
        "take the marker, rating or template out of the replies, and write both sides of a pair in one form",
        "{number:.0%} 的{side}回答仅凭一个记号就能与另一个区分，{kind}：“{mark}”，例如“{shown}”。"
        "模型只学会写它，不必理会内容。",
        "从回答中去掉这个记号、评分或模板，一对回答的两边用同样的形式书写",
    ),
    "told_by_length": Entry(
        "{number:.0%} of the {side} replies are longer than the other one, {times:.1f} times in the middle one: "
        "length "
        "alone tells the pairs apart, and the model may learn nothing else.",
        "if length is not what is preferred, add pairs in which the other reply is the longer one",
        "{number:.0%} 的{side}回答比另一个长，中位数为 {times:.1f} 倍：仅凭长度就能区分，模型可能只学到这一点。",
        "如果偏好的不是长度，请加入长度相反的偏好对",
    ),
    "beta": Entry(
        "train.beta of stage {stage} is {number:g}: the model {which}.",
        "set {field}=0.1",
        "阶段 {stage} 的 train.beta 是 {number:g}：模型{which}。",
        "设置 {field}=0.1",
    ),
    "held_out_unlike": Entry(
        "Held-out texts are unlike the training ones: they share {number:.0%} of their tokens, and parts of training "
        "as large share {usual:.0%}; such as {where}. Their loss says nothing about what is learnt: another "
        "language or source is held out.",
        "hold out rows of the same source: check their splits in the files, or leave those out and set "
        "data.holdout=0.1",
        "留出的文本与训练文本不同：两者的词元分布只有 {number:.0%} 重合，而同样大小的训练部分之间有 "
        "{usual:.0%}；例如 {where}。"
        "留出的是另一种语言或来源，其损失不能说明学到了什么。",
        "从同一来源留出：检查文件里的 split，或去掉它们并设 data.holdout=0.1",
    ),
    "other_classes": Entry(
        "Held-out rows have other classes than those to train on: {unseen:.0%} of them are of a class that is "
        "not in training, {lacking} classes are not held out, and {number:.0%} would have to change class for "
        "equal shares.",
        "shuffle rows before they are split, and split every class; data.holdout does both for rows without a split",
        "验证数据与训练数据的类别不同：其中 {unseen:.0%} 属于训练中没有的类，{lacking} 个类没有留出，要使比例相同"
        "需改动 {number:.0%}。",
        "划分前先打乱，并按类划分；没有 split 的行由 data.holdout 这样划分",
    ),
    "sides_apart": Entry(
        "Held-out rows differ from those to train on: {property} is {there:.3g} on average there and {here:.3g} "
        "in training, {number:.1f} deviations apart. The two were prepared differently, or come from other "
        "sources.",
        "prepare both sides with the same program, and split after that; or let data.holdout split",
        "验证数据与训练数据不同：{property}平均为 {there:.3g}，训练中为 {here:.3g}，相差 {number:.1f} 个标准差。"
        "两边的处理方式或来源不同。",
        "用同一程序处理两边，然后再划分；或让 data.holdout 划分",
    ),
    "two_answers": Entry(
        "{number:.0%} of the questions occur again with another answer: {question!r} has {first!r} and {second!r}, "
        "which "
        "contradict each other.",
        "keep one answer of each question, or say in the question what tells them apart",
        "{number:.0%} 的问题重复出现而答案不同：{question!r} 的答案有 {first!r} 和 {second!r}，互相矛盾。",
        "每个问题只留一个答案，或在问题中写明区别",
    ),
    "spelt_twice": Entry(
        "{classes} classes, answers or codes have several spellings, such as '{first}' and '{second}', in {number:.0%} "
        "of the rows: what is the same counts as different.",
        "write each of them in one way: the same capitals, blanks and marks",
        "{classes} 个类别、答案或编码有几种写法，例如“{first}”和“{second}”，占 {number:.0%} 的行：相同的被当作不同的。",
        "每个都统一写法：大小写、空格和标点一致",
    ),
    "lone_classes": Entry(
        "{number:.0%} of the pictures are of a class with one or two pictures, such as '{shown}': {classes} "
        "classes, as if names of files or ids were the labels.",
        "name the column of the class as label; a class needs tens of pictures",
        "{number:.0%} 的图像所属的类只有一两张，例如“{shown}”：共 {classes} 个类，像是把文件名或编号当成了标签。",
        "把类别那一列命名为 label；每类需要几十张图像",
    ),
    "lost_aspect": Entry(
        "{property} alone tells the class of {number:.0%} of the pictures, and images.size={size} brings all of "
        "them to "
        "one size: the model does not see the width and height (proportion, aspect) that the classes differ in.",
        "set images.size=native, or letterbox, which keeps the aspect",
        "{property}本身就能说出 {number:.0%} 图像的类别，而 images.size={size} 把所有图像变成同一大小："
        "模型看不到区分各类的宽高（比例）。",
        "设置 images.size=native，或保留比例的 letterbox",
    ),
    "shortcut": Entry(
        "{property} alone tells the class of {number:.0%} of the pictures: with {shown} it is '{target}'. The "
        "model may learn that shortcut in place of what pictures show.",
        "save the pictures of all classes in one way: one format, one size, one program",
        "{property}本身就能说出 {number:.0%} 图像的类别：{shown} 就是“{target}”。模型可能学这条捷径，而不学图像内容。",
        "所有类别的图像用同一方式保存：同一格式、同一大小、同一程序",
    ),
    "marked_region": Entry(
        "A small region of the pictures, near {place}, alone tells {number:.0%} of the classes in training; {where}. "
        "It looks like a mark, border or watermark of the class. The model may learn that shortcut "
        "in place of what pictures show.",
        "crop or paint over this region, or take the pictures from before they were marked",
        "仅凭图像中{place}附近的一小块，就能说出训练图像 {number:.0%} 的类别；{where}。"
        "那里像是有按类别画上的记号、边框或水印。模型可能学这条捷径，而不学图像内容。",
        "裁去或盖住这一块，或使用加记号之前的图像",
    ),
    "without_picture": Entry(
        "{number:.0%} of the answers follow from the words of their question alone: '{question}' always has '"
        "{answer}'. Nobody needs the picture, and the model may ignore it.",
        "ask the same question about pictures that have different answers",
        "{number:.0%} 的答案只由问题本身决定：“{question}”总是“{answer}”。不需要看图，模型会忽略图像。",
        "对答案不同的图像问同一个问题",
    ),
    "common_part": Entry(
        "{number:.0%} of what is learnt is a part that nearly all rows share at their {place}, {characters} "
        "characters: "
        "{shown!r}. The loss looks low for it.",
        "take this boilerplate (a header, footer or prefix) out of the files; in conversations it belongs into a "
        "system message",
        "学习的内容中有 {number:.0%} 是几乎所有行{place}共有的 {characters} 个字符：{shown!r}。损失会因此显得低。",
        "从文件中去掉这段页眉、前缀或结尾；对话可把它放进 system 消息",
    ),
    "dates_as_values": Entry(
        "The values of {code} are dates, not measurements: their mean, {mean:.6g}, is a time since 1970. Codes like "
        "it: "
        "{codes}, with {number:.0%} of all values.",
        "name the column as `time`, or leave it out of the values of data.events",
        "{code} 的数值是日期而不是测量值：均值 {mean:.6g} 是 1970 年以来的时间。这样的编码有 {codes} 种，占全部数值的"
        " {number:.0%}。",
        "把这一列设为 `time`，或不要放进 data.events 的数值",
    ),
    "id_value": Entry(
        "{code} is another one for each patient ({number:.0%} of them): an id, a name or a number of the list, among "
        "the features (static facts). It says nothing of other patients, and a model overfits patients "
        "with it.",
        "leave the column out of `static` and of the events",
        "{code} 对每个病人都不同（{number:.0%}）：特征（static）里混进了编号、姓名或序号。"
        "它对别的病人没有意义，模型会借它死记病人。",
        "从 `static` 和事件中去掉这一列",
    ),
    "row_value": Entry(
        "The values of all tests are whole numbers, each another one ({number:.0%} of the events): they are numbers "
        "(ids) of rows or samples, and no results.",
        "name the column of results in data.events.value",
        "所有检验的数值都是互不相同的整数（占事件的 {number:.0%}）：它们是行号或样本编号，不是结果。",
        "用 data.events.value 指定结果所在的列",
    ),
    "times_as_values": Entry(
        "The values of {number:.0%} of the codes, such as {code}, are the times of their events: the column of "
        "times is "
        "read as that of values.",
        "name the column of the measurements as data.events.value",
        "{number:.0%} 的编码（例如 {code}）的数值就是事件的时间：时间列被当成了数值列。",
        "用 data.events.value 指定测量值所在的列",
    ),
    "one_value": Entry(
        "{number:.0%} of {sequences:,} patients have the same value in all of their tests: the column of values "
        "is one "
        "of the patient (such as the age or weight), or was filled by a join.",
        "name the column of the measurements as data.events.value",
        "{sequences:,} 位病人中有 {number:.0%} 的各种检查数值完全相同：数值列其实是病人的属性（如年龄、体重），或"
        "由连接填充。",
        "用 data.events.value 指定测量值所在的列",
    ),
    "events_twice": Entry(
        "{number:.0%} of the events with a value are there twice, the copy always {hours:g} hours later: two "
        "exports, or "
        "two time zones, were joined, and duplicates are only found at equal times.",
        "take the copies out of the tables",
        "{number:.0%} 的带值事件出现两次，副本总是晚 {hours:g} 小时：合并了两次导出或两个时区，而重复只在时间相同"
        "时才会去掉。",
        "从表中去掉副本",
    ),
    "no_values": Entry(
        "{number:.0%} of the events have no value, though the recipe names {column!r} as their column: it is empty.",
        "look at that column, and at its decimal sign; data.events.value names another one",
        "{number:.0%} 的事件没有数值，尽管配方指定了列 {column!r}：它是空的。",
        "检查这一列及其小数点；可用 data.events.value 指定别的列",
    ),
    "equal_values": Entry(
        "All values of {code} are {mean:.6g}, or differ by less than single precision tells apart: they say nothing. "
        "Codes like it: {codes}, with {number:.0%} of all values.",
        "look at the column that data.events takes the values from",
        "{code} 的数值都是 {mean:.6g}，或者差别小于单精度能分辨的程度：没有信息。这样的编码有 {codes} 种，占全部"
        "数值的"
        " {number:.0%}。",
        "检查 data.events 取数值的那一列",
    ),
    "two_scales": Entry(
        "The values of {code} are in two groups with nothing between them, around {first:.4g} and around "
        "{second:.4g}, {number:.0%} in the smaller one: two units or two tests share a column. Codes like it: "
        "{codes}.",
        "convert the values to one unit, or give the two tests codes of their own",
        "{code} 的数值分为两群，分别在 {first:.4g} 和 {second:.4g} 附近，中间没有值，较小的一群占 {number:.0%}："
        "一列里混了两种单位或两种检查。这样的代码有 {codes} 个。",
        "把数值换算成同一单位，或给两种检查各自的代码",
    ),
    "stand_in": Entry(
        "{number:.0%} of the values of {code} are exactly {value:.6g}, far from all others: it looks like a "
        "placeholder (sentinel) for a missing value. Codes like it: {codes}.",
        "leave the cell empty where there is no value",
        "{code} 的数值有 {number:.0%} 恰好是 {value:.6g}，远离其他值：像是缺失值的占位符。这样的代码有 {codes} 个。",
        "没有值时让单元格空着",
    ),
    "floored": Entry(
        "{field}={number:g} is more than the spread of {codes} codes, such as {code}: their values look nearly "
        "equal to the model.",
        "set {field}=0.001",
        "{field}={number:g} 大于 {codes} 个代码（例如 {code}）的离散程度：它们的数值对模型来说几乎相等。",
        "设置 {field}=0.001",
    ),
    "one_time": Entry(
        "{number:.0%} of {sequences:,} patients with several events have all of them at one time: there is no course "
        "to "
        "learn from.",
        "look at the time column of the tables and its unit: dates without a day, or years read as days?",
        "{sequences:,} 个有多个事件的病人中有 {number:.0%} 的事件全在同一时刻：没有病程可学。",
        "检查各表的时间列及其单位：日期是否缺少日，或把年当成了天？",
    ),
    "unknown_codes": Entry(
        "{number:.0%} of the events have codes that the model does not know; it knows {codes}.",
        "lower events.min_count, or map codes to coarser ones",
        "{number:.0%} 的事件的编码模型不认识；它认识的只有 {codes} 种。",
        "调低 events.min_count，或把编码归并成更粗的",
    ),
    "beyond_follow_up": Entry(
        "{number:.0%} of {sequences:,} patients are left out, censored before the horizon of {horizon:g} {unit}: "
        "they "
        "were not observed for so long. {positive:.0%} of the others have the outcome, as survivors are left out "
        "most.",
        "set events.labels.horizon to a time for which most were followed; events.labels.censored=keep keeps them "
        "without a label",
        "{sequences:,} 位病人中有 {number:.0%} 在 {horizon:g} {unit} 的预测期之前失访（删失）而被略去：观察时间没"
        "有那么长。"
        "剩下的人中 {positive:.0%} 有结局，因为被略去的多是存活者。",
        "把 events.labels.horizon 设为多数人随访到的时间；events.labels.censored=keep 会保留他们但没有标签",
    ),
    "late_landmark": Entry(
        "{number:.0%} of {sequences:,} patients are left out, as their observation ended before the landmark "
        "({landmark}).",
        "compare events.landmark with events.labels.duration: both in events.unit, and counted from the same day",
        "{sequences:,} 位病人中有 {number:.0%} 因为观察在预测时点（{landmark}）之前结束而被略去。",
        "对照 events.landmark 与 events.labels.duration：两者单位同为 events.unit，并从同一天算起",
    ),
    "map_reversed": Entry(
        "events.labels.map gives '{bad}' the label 0 and '{good}' the label 1 in the column {column!r}: the map "
        "looks "
        "the wrong way round (reversed). Label 1 means that the outcome came.",
        "swap them: events.labels.map={{{bad}: 1, {good}: 0}}",
        "events.labels.map 在列 {column!r} 中把“{bad}”设为 0、“{good}”设为 1：看来反了。标签 1 表示结局发生。",
        "交换它们：events.labels.map={{{bad}: 1, {good}: 0}}",
    ),
    "event_is_censoring": Entry(
        "events.labels.event reads the column {column!r}, whose name says that observation ended without the "
        "outcome: "
        "event is to be 1 for those with the outcome, so labels are the wrong way round (reversed).",
        "name the column of the outcome, or exchange 0 and 1",
        "events.labels.event 读取的列 {column!r}，从名称看表示没有发生结局：event 应为 1 表示结局发生，标签因此反了。",
        "改为结局所在的列，或互换 0 和 1",
    ),
    "lost_patients": Entry(
        "{number:.0%} of {sequences:,} patients are left out or have no label ({why}): tables may not match by "
        "their ids.",
        "compare the ids of the tables: blanks, leading zeros, and numbers read as text",
        "{sequences:,} 位病人中有 {number:.0%} 被略去或没有标签（{why}）：各表的 id 可能对不上。",
        "比较各表的 id：空格、前导零、被读成文字的数字",
    ),
    "many_bad": Entry(
        "{number:.0%} of {rows:,} rows are bad and left out (quarantined): data.max_bad lets them pass in silence.",
        "see what is wrong with them: unpad data check FILE --kind {kind}; then lower data.max_bad",
        "{rows:,} 行中有 {number:.0%} 有错而被略去（隔离）：data.max_bad 让它们悄悄通过。",
        "查看原因：unpad data check FILE --kind {kind}；然后调低 data.max_bad",
    ),
    "constant_labels": Entry(
        "{number:.1%} of {sequences:,} sequences have the same target, {target}: there is nothing to tell apart.",
        "look at the labels or answers in the files, and at the field that names them",
        "{sequences:,} 个样本中有 {number:.1%} 目标相同，都是 {target}：没有可以区分的东西。",
        "检查文件里的标签或答案，以及指定它们的字段",
    ),
    "constant_inputs": Entry(
        "{number:.0%} of {sequences:,} inputs hold one value throughout, such as {where}: there is nothing to "
        "see in them.",
        "look at the files, and at how they are decoded",
        "{sequences:,} 个输入中有 {number:.0%} 从头到尾是同一个值，例如 {where}：里面没有信息。",
        "检查这些文件，以及它们的解码方式",
    ),
    "one_patch": Entry(
        "{number:.0%} of the pictures are one patch: the model sees each as one vector, and nothing of its parts; "
        "{lost:.0%} were shrunk to it from three times the pixels or more.",
        "change {field}; a patch has {patch} pixels a side, and a picture should have 16 patches or more",
        "{number:.0%} 的图像只有一个图块：模型把每张图看成一个向量，看不到其中的部分；"
        "{lost:.0%} 是从三倍以上的像素缩小而成。",
        "修改 {field}；图块边长为 {patch} 像素，一张图最好有 16 个以上图块",
    ),
    "picture_scale": Entry(
        "The numbers of pictures are {number:.3g} in size after images.mean and images.std, and spread by "
        "{spread:.3g}: "
        "models expect about 1.",
        "set images.std and images.mean to those of colours from 0 to 1, such as 0.5 each",
        "经过 images.mean 和 images.std 之后，图像数值的大小是 {number:.3g}，离散程度 {spread:.3g}：模型期望约为 1。",
        "把 images.std 和 images.mean 设为 0 到 1 的颜色的统计值，例如都是 0.5",
    ),
    "shrunk": Entry(
        "{number:.0%} of the pictures are shrunk to {patches:.0f} patches, {kept:.1%} of their pixels: hardly "
        "any detail "
        "is left to see.",
        "raise {field}; a picture should have 16 patches or more",
        "{number:.0%} 的图像被缩小到 {patches:.0f} 个图块，只剩 {kept:.1%} 的像素：几乎看不到细节。",
        "调大 {field}；一张图最好有 16 个以上图块",
    ),
    "lost_colour": Entry(
        "Colours alone tell the class of {number:.0%} of the pictures, grey copies of {grey:.0%}, and images.color="
        "{strength:g} changes hue and saturation of training pictures at random: what the classes differ in is lost.",
        "set images.color=0",
        "仅凭颜色就能说出 {number:.0%} 图像的类别，灰度副本只有 {grey:.0%}，而 images.color={strength:g} 随机改变"
        "训练图像的"
        "色相和饱和度：各类的区别就丢失了。",
        "设置 images.color=0",
    ),
    "augmentation": Entry(
        "{field} is {number:g}: little is left of what training is to see.",
        "set {field}={usual:.2g}",
        "{field} 为 {number:g}：训练时原来的内容所剩无几。",
        "设置 {field}={usual:.2g}",
    ),
    "values_in_codes": Entry(
        "{number:.0%} of the events have codes with a number in them, such as '{first}' and '{second}': {codes:,} "
        "codes of {names} names, each seldom. They look like values glued to codes, and no model knows which of them "
        "are near.",
        "split the column: the name into the code, the number into the column of data.events.value",
        "{number:.0%} 的事件的编码里带着数字，例如“{first}”和“{second}”：{names} 个名称有 {codes:,} 种编码，"
        "每种都很少。像是把数值粘在了编码上，模型无法知道哪些彼此接近。",
        "拆开这一列：名称作编码，数字放进 data.events.value 指定的列",
    ),
    "rare_codes": Entry(
        "{number:.0%} of the events have codes that are unique to one patient, {codes:,} of {all_codes:,} "
        "different codes: "
        "nothing of them holds for others.",
        "take numbers and names of rows out of the code column, map codes to coarser ones, or set events.min_count=5",
        "{number:.0%} 的事件用的编码只出现在一个病人身上（{all_codes:,} 种编码中的 {codes:,} 种）：对别的病人没有用。",
        "去掉编码列中的流水号和名称，把编码归并成更粗的，或设 events.min_count=5",
    ),
    "far_values": Entry(
        "{far:,} values of {code} are {times:,.0f} times as far from the median as all others, and make its standard "
        "deviation {number:,.0f} times as large: the others look equal. Codes like it: {codes}.",
        "look for another unit or placeholders such as 9999 among them; convert or empty these cells",
        "{code} 有 {far:,} 个数值离中位数的距离是其余的 {times:,.0f} 倍，使标准差变成 {number:,.0f} 倍：其余数值"
        "看起来"
        "都一样。这样的编码有 {codes} 种。",
        "检查其中是否混有别的单位或 9999 之类的占位值；换算或清空这些单元格",
    ),
    "unknown_tokens": Entry(
        "{number:.1%} of the characters are lost to unknown tokens, such as {common}: the tokenizer cannot spell "
        "this text.",
        "use tokenizer.kind=bpe with tokenizer.path=null, which learns from your text, or a file made from text like "
        "it",
        "{number:.1%} 的字符成了未知词元，例如 {common}：这个分词器无法表示这些文本。",
        "用 tokenizer.kind=bpe 或 words，它们从你的文本学词表；或换用同类文本训练的分词器文件",
    ),
    "other_tokenizer": Entry(
        "The tokenizer takes {per_character:.2f} tokens for a character, {number:.1f} times as many as one made "
        "from this text; {unused:.0%} of its vocabulary never occurs.",
        "set tokenizer.kind=bpe and tokenizer.path=null, or name a file made from text of this language",
        "这个分词器每个字符要用 {per_character:.2f} 个词元，是用这些文本训练的分词器的 {number:.1f} 倍；词表有"
        " {unused:.0%} 从未出现。",
        "设置 tokenizer.kind=bpe 和 tokenizer.path=null，或使用由同一种语言的文本训练的分词器文件",
    ),
    "words_too_rare": Entry(
        "tokenizer.min_count={least} splits all words with fewer occurrences into characters: "
        "{per_character:.2f} tokens "
        "for a character, {number:.1f} times as many as of a tokenizer made from this text.",
        "set tokenizer.min_count=1",
        "tokenizer.min_count={least} 把出现次数更少的词都拆成字符：每个字符 {per_character:.2f} 个词元，"
        "是用这些文本训练的分词器的 {number:.1f} 倍。",
        "设置 tokenizer.min_count=1",
    ),
    "double_marks": Entry(
        "{number:.0%} of the sequences have {mark} twice at the {place}.",
        "BOS and EOS are added once by the encoder: take them out of the texts or the template",
        "{number:.0%} 的序列在{place}有两个 {mark}。",
        "编码时已经各加一次 BOS 和 EOS：从文本或模板中去掉它们",
    ),
    "small_vocabulary": Entry(
        "A vocabulary of {size} takes {per_character:.2f} tokens for a character, {number:.1f} times as many as one "
        "of a usual size: sequences are that much longer.",
        "raise tokenizer.vocab_size, such as to 4000",
        "{size} 的词表每个字符要用 {per_character:.2f} 个词元，是常用大小的 {number:.1f} 倍：序列也长那么多。",
        "调大 tokenizer.vocab_size，例如 4000",
    ),
    "same_rows": Entry(
        "{number:.0%} of {sequences:,} held-out {unit} looked at are also trained on, such as {where}: the same "
        "content "
        "twice, as identical copies (duplicates) under another id or row. The held-out loss is too good.",
        "take the copies out of one part; or leave out `split` and let data.holdout divide the rows",
        "看过的 {sequences:,} 个验证样本（{unit}）中有 {number:.0%} 也在训练集里，例如 {where}："
        "相同内容以另一个编号或另一行出现了两次。验证损失好得不真实。",
        "从其中一边删掉副本；或者不写 split，由 data.holdout 来划分",
    ),
    "near_rows": Entry(
        "{number:.0%} of {sequences:,} held-out rows are near-duplicates of training rows, such as {where}: the "
        "held-out loss is too good.",
        "set data.near_duplicates=together, give rows that belong together a `group`, or take one of each pair out",
        "{sequences:,} 个验证样本中有 {number:.0%} 只是训练样本稍加改动，例如 {where}：验证损失好得不真实。",
        "设置 data.near_duplicates=together，或从文件中删掉其中一个",
    ),
    "repeats": Entry(
        "{number:.0%} of {sequences:,} training rows repeat an earlier one; {where} occurs {times} times.",
        "keep one copy of each row; to train on some more often, give their source a weight",
        "{sequences:,} 个训练样本中有 {number:.0%} 与前面的完全相同；{where} 出现了 {times} 次。",
        "每行只留一份；要多训练某些数据，可给来源设 weight",
    ),
    "few_held_out": Entry(
        "{number:.0f} rows with {targets} targets are held out (none measure nothing) beside {trained:,} to "
        "train on: their loss is chance, and "
        "it chooses the weights that are kept, or the end of training.",
        "raise data.holdout, such as to 0.1, so that tens of rows are held out",
        "只留出了 {number:.0f} 行（{targets} 个目标），而训练有 {trained:,} 行：它们的损失是偶然的，却用来选择保"
        "留的权重或"
        "决定何时停止。",
        "调大 data.holdout，例如 0.1，使验证有几十行",
    ),
    "held_out": Entry(
        "{number:.0%} of the rows are held out, and {trained:,} are left to train on.",
        "lower data.holdout, such as to 0.05, or look at `split` in the rows",
        "{number:.0%} 的行留作验证，只剩 {trained:,} 行用于训练。",
        "调小 data.holdout，例如 0.05，或检查行中的 `split`",
    ),
    "split_talks": Entry(
        "{number:.0%} of the conversations are longer than {most} tokens and are split: the reply, or a part of "
        "it, is "
        "learnt in a window that does not hold its question.",
        "raise {field}, or set plan.overflow=drop; truncate_left keeps the end of the question and the reply",
        "{number:.0%} 的对话长于 {most} 个词元而被切开：回复或其一部分所在的窗口里没有它的问题。",
        "调大 {field}，或设 plan.overflow=drop；truncate_left 会保留问题的末尾和回复",
    ),
    "cut_short": Entry(
        "Sequences of {whole:,.0f} {unit} on average are cut to {number:,.1f}; {lost:.0%} of what there is is "
        "left out.",
        "raise {field}",
        "平均长 {whole:,.0f} 的序列（单位 {unit}）被截成 {number:,.1f}；{lost:.0%} 的内容没有用上。",
        "调大 {field}",
    ),
    "too_often": Entry(
        "An epoch repeats each row of {where} {times:.0f} times, by its weight: they have {number:.0%} of all "
        "targets, and "
        "are overfit.",
        "lower {field}, or give that source more rows",
        "按 weight，一轮把 {where} 的每一行重复 {times:.0f} 遍：它们占全部目标的 {number:.0%}，只会被死记。",
        "调低 {field}，或给这个来源更多的行",
    ),
    "swallowed": Entry(
        "{where} has {number:.2%} of the targets of an epoch, the other sources have all the rest.",
        "raise its weight, or lower that of the others: {field}",
        "一轮的目标中，{where} 只占 {number:.2%}，其余全是别的来源。",
        "调高它的权重，或调低其他来源的权重：{field}",
    ),
    "unused": Entry(
        "No stage uses data.{kind}: what it holds is never trained on ({number:.0f} such).",
        "name it in the use of a stage, or leave it out",
        "没有阶段使用 data.{kind}：其中的内容从不参与训练（共 {number:.0f} 种）。",
        "在某个阶段的 use 中写上它，或去掉它",
    ),
    "no_prefix": Entry(
        "data.template.assistant is empty, and so is data.template.separator: nothing says where a message of "
        "the user, "
        "'{shown}', ends and the reply begins ({number:.0%} of the conversations).",
        "give data.template.assistant a prefix of its own",
        "data.template.assistant 为空，data.template.separator 也为空：看不出用户消息（“{shown}”）到哪里结束、"
        "回复从哪里开始（占 {number:.0%} 的对话）。",
        "给 data.template.assistant 一个前缀",
    ),
    "one_role": Entry(
        "Messages of users and of the assistant begin alike, with '{shown}' ({number:.0%} of the conversations): "
        "nothing says who speaks.",
        "give data.template.user and data.template.assistant prefixes of their own",
        "用户和助手的消息开头相同，都是“{shown}”（占 {number:.0%} 的对话）：看不出谁在说话。",
        "给 data.template.user 和 data.template.assistant 各自的前缀",
    ),
    "grown": Entry(
        "plan.grow lets a step grow to {number:,.0f} tokens, and an epoch has {tokens:,}: its later epochs are a "
        "step or two each.",
        "lower {field}: the largest step should be a small part of an epoch",
        "plan.grow 让一步增大到 {number:,.0f} 个词元，而一轮只有 {tokens:,} 个：后面每轮只有一两步。",
        "调低 {field}：最大的一步应只是一轮的一小部分",
    ),
    "not_held_out": Entry(
        "Nothing tells how good the model is on new data, though a share of {number:.0%} is to be held out: {what}.",
        "add rows, or declare a split; plain text: look at data.separator, which ends a document",
        "没有数据说明模型在新数据上的好坏，尽管要留出 {number:.0%}：{what}。",
        "增加行，或声明 split；纯文本请检查结束文档的 data.separator",
    ),
    "overlap": Entry(
        "With plan.stride={stride} windows overlap so much that an epoch learns each token {number:.0f} times.",
        "leave {field} out, or set it to half of the window",
        "plan.stride={stride} 使窗口大量重叠，一轮中每个词元要学 {number:.0f} 次。",
        "去掉 {field}，或设为窗口的一半",
    ),
}
