"""Prompts whose lengths hit every boundary of blocks and chunks."""

from __future__ import annotations

from pathlib import Path

import tokenizers

TEXT = """The lighthouse keeper had a brass telescope, a cat called Admiral and a long list of ships he had never seen
twice. Every evening he climbed one hundred and ninety-nine steps, lit the lamp and wrote the weather into a book:
wind from the north-west, sea moderate, two sails on the horizon. In winter the letters came once a month, and he
answered each of them on the day it arrived, because the boat would not wait. He wrote about the birds, the price of
oil, the crack in the third window and the sound that the tower made in a storm, like an organ with a single pipe.
When the engineers came to replace him with a clock and a battery, they found the book, forty years of it, and
nobody on the mainland could say what to do with so much weather. A museum took it in the end. Visitors turn the
pages slowly; some of them look for the day on which they were born. The entry is always there, in the same small
hand, and it always says what the sea was like. Prime numbers have fascinated people since antiquity. Euclid proved
that there are infinitely many of them by assuming a complete list and building a number that none of them divides.
To bake bread, mix five hundred grams of flour with three hundred and fifty grams of water, ten grams of salt and a
little yeast, and let the dough rest overnight. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) +
fibonacci(n - 2). The mitochondria are the power plants of the cell, and the heart beats about one hundred thousand
times a day. Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. """

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about rain.",
    "How many legs does a spider have?",
    "Explain gravity to a child.",
    "What is 12 times 12?",
    "Who wrote Hamlet?",
    "List the planets of the solar system.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Tell me a joke about cats.",
    "What is the boiling point of water?",
    "Summarise the story of Cinderella.",
    "How do airplanes fly?",
)

# Between the boundaries, over several chunks of 48, and over several chunks of 512.
OTHER_LENGTHS = (5, 12, 24, 40, 56, 80, 110, 128, 150, 200, 300, 530, 700)


def boundary_lengths(block_size: int) -> list[int]:
    """1 .. 3 blocks + 1: both ends, and the tokens just before, on and after each block boundary."""
    near = [k * block_size + d for k in (1, 2, 3) for d in (-1, 0, 1)]
    return sorted({1, 2, 3, block_size // 2, *near})


def make_prompts(model_dir: Path) -> list[list[int]]:
    """At least 40 different prompts: boundary lengths of blocks of 16 and 32, several long ones, chat questions."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT * 3, add_special_tokens=False).ids
    lengths = sorted({*boundary_lengths(16), *boundary_lengths(32), *OTHER_LENGTHS})
    prompts = [ids[7 * i : 7 * i + length] for i, length in enumerate(lengths)]
    for question in QUESTIONS:
        chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer.encode(chat, add_special_tokens=False).ids)
    return prompts
