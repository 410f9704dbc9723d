#!/usr/bin/env python3
"""Writes prompts.json: prompts of Gemma 3 270M, and what llama.cpp makes of them greedily.

    store_texts.py gemma-3-270m-q4_k_m.gguf

Needs llama-cpp-python and numpy. Prompts of many lengths: short ones, some that are not ASCII, one that ends just before the
sliding window of 512 positions is full, so that the answer crosses it, and two that are longer than it.
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy

# Lewis Carroll, Alice's Adventures in Wonderland (1865).
STORY = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or \
twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use \
of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether \
the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White \
Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to \
itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought to have \
wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of its \
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind that she had \
never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran \
across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that Alice had not a \
moment to think about stopping herself before she found herself falling down a very deep well.

Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look about her and to \
wonder what was going to happen next. First, she tried to look down and make out what she was coming to, but it was too dark to \
see anything; then she looked at the sides of the well, and noticed that they were filled with cupboards and book-shelves; here \
and there she saw maps and pictures hung upon pegs. She took down a jar from one of the shelves as she passed; it was labelled \
"ORANGE MARMALADE", but to her great disappointment it was empty: she did not like to drop the jar for fear of killing \
somebody underneath, so managed to put it into one of the cupboards as she fell past it."""

# A text, and how many of its tokens are the prompt.
TEXTS = [
    ("The capital of France is", None),
    ("\u65e5\u672c\u306e\u9996\u90fd\u306f\u6771\u4eac\u3067\u3001", None),
    (
        "Die gr\u00f6\u00dfte Stadt \u00d6sterreichs hei\u00dft Wien, und die gr\u00f6\u00dfte Stadt der Schweiz hei\u00dft",
        None,
    ),
    ("\U0001f600 \u2192 smile, \U0001f622 \u2192 cry, \U0001f621 \u2192", None),
    ("def factorial(n):\n    if n == 0:\n        return 1\n    return n *", None),
    (STORY, 505),
    (STORY, 527),
    (", ".join(map(str, range(1, 200))), 590),
]
GENERATED = 24


def main():
    model = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_batch=1024, n_threads=2, verbose=False)
    found = []
    for text, length in TEXTS:
        prompt = model.tokenize(text.encode(), add_bos=True)[:length]
        assert length is None or len(prompt) == length, f"{len(prompt)} tokens"
        model.reset()
        model.eval(prompt)
        greedy = []
        for _ in range(GENERATED):
            logits = numpy.ctypeslib.as_array(
                ctypes.cast(llama_cpp.llama_get_logits(model.ctx), ctypes.POINTER(ctypes.c_float)), (model.n_vocab(),)
            )
            greedy.append(int(logits.argmax()))
            model.eval(greedy[-1:])
        shown = model.detokenize(prompt[1:])[-40:] + b" ->" + model.detokenize(greedy)
        print(len(prompt), repr(shown.decode(errors="replace")), file=sys.stderr)
        found.append({"prompt": prompt, "greedy": greedy})
    what = f"Prompts, and what llama.cpp ({llama_cpp.__version__} of llama-cpp-python) says greedily; made by store_texts.py."
    stored = {"what": what, "models": {"gemma-3-270m-q4_k_m": {"texts": found}}}
    text = json.dumps(stored, indent=2)
    # A list of numbers on a line.
    lines, inside = [], False
    for line in text.splitlines():
        bare = line.strip()
        if inside:
            lines[-1] += bare if bare[0] == "]" else bare + " "
            inside = bare[0] != "]"
            lines[-1] = lines[-1].replace(" ]", "]")
        else:
            lines.append(line)
            inside = bare in ('"prompt": [', '"greedy": [')
    Path(__file__).with_name("prompts.json").write_text("\n".join(lines) + "\n")


main()
