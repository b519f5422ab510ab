"""Prompts for a chat model, from nothing but the model and seeds: what its head is trained on.

Most are a task about a topic, both from the lists below, drawn by a seed. The others are made up by
the model: it continues the empty turn of a user, so that they are what it takes for usual. No
collection of prompts is needed, and none that measures anything is seen.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from coordinator.api.chat import ChatTemplate
from coordinator.api.llm import LLM
from coordinator.api.models.settings import located
from coordinator.api.params import SamplingParams
from lab.training.files import write_text
from proto.errors import ConfigurationError, SlipstreamError

MARK = "\N{SNOWMAN}"  # stands for the user's message in the template, to find where that begins
LONGEST = 60  # tokens of a prompt that the model makes up
TEMPERATURE, TOP_P = 1.0, 0.95
FEWEST_CHARACTERS = 8  # of a prompt that is kept

TASKS = (
    "Explain {} in simple terms.",
    "What is {}?",
    "Tell me about {}.",
    "Why is {} important?",
    "How does {} work?",
    "Give me five facts about {}.",
    "Write a short paragraph about {}.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Summarise the history of {} in a few sentences.",
    "What are the advantages and disadvantages of {}?",
    "List the main parts of {} and say what each does.",
    "Compare {} with something similar.",
    "Write an email to a friend about {}.",
    "Write a speech about {} for a school class.",
    "Give me step-by-step instructions for a beginner who wants to learn about {}.",
    "What questions do people often ask about {}? Answer them.",
    "Explain {} to a ten-year-old child.",
    "What are common mistakes when dealing with {}?",
    "Make a plan for one week to learn more about {}.",
    "Write a conversation between two people about {}.",
    "What would happen without {}?",
    "Suggest a title and an outline for an essay about {}.",
    "Name three books or films about {} and describe them.",
    "Describe {} in one sentence, then in three.",
    "I have ten minutes. What should I know about {}?",
    "Write a product description that has to do with {}.",
    "Is {} a good topic for a presentation? Say why, and how to begin.",
    "Give advice to somebody who is worried about {}.",
    "Make a table with two columns about {}.",
)
TOPICS = (
    *("gravity", "photosynthesis", "the water cycle", "black holes", "the solar system"),
    *("climate change", "earthquakes", "volcanoes", "the human heart", "the immune system"),
    *("vaccines", "antibiotics", "sleep", "a healthy diet", "running", "yoga", "football"),
    *("chess", "the guitar", "the piano", "jazz", "classical music", "painting", "photography"),
    *("cooking pasta", "baking bread", "coffee", "tea", "chocolate", "growing tomatoes"),
    *("bees", "whales", "wolves", "cats", "dogs", "birds", "dinosaurs", "rainforests", "oceans"),
    *("ancient Rome", "ancient Egypt", "the Middle Ages", "the Renaissance", "the printing press"),
    *("the industrial revolution", "the French Revolution", "the moon landing", "the Silk Road"),
    *("Paris", "Japan", "Brazil", "Canada", "India", "Kenya", "Italy", "Iceland", "the Sahara"),
    *("the stock market", "inflation", "taxes", "budgeting", "starting a small business"),
    *("job interviews", "writing a CV", "time management", "public speaking", "teamwork"),
    *("friendship", "honesty", "courage", "happiness", "stress", "loneliness", "moving house"),
    *("artificial intelligence", "neural networks", "the internet", "computer viruses", "robots"),
    *("electric cars", "solar power", "wind turbines", "nuclear power", "batteries", "bridges"),
    *("Python", "JavaScript", "SQL", "sorting algorithms", "recursion", "databases", "Linux"),
    *("prime numbers", "fractions", "probability", "the Pythagorean theorem", "statistics"),
    *("Shakespeare", "poetry", "fairy tales", "science fiction", "journalism", "grammar"),
    *("democracy", "human rights", "the United Nations", "elections", "public libraries"),
    *("recycling", "public transport", "bicycles", "trains", "aeroplanes", "lighthouses"),
)
WHOLE = (
    "Write a Python function that reverses a string.",
    "Write a Python function that says whether a number is prime.",
    "Write a Python function that counts the words in a text.",
    "Write a Python function that finds the largest number in a list.",
    "Write a Python function that removes duplicates from a list.",
    "Write a Python function that says whether two words are anagrams.",
    "Write a Python function that computes Fibonacci numbers.",
    "Write a Python function that merges two sorted lists.",
    "Write a Python class for a bank account with deposit and withdraw.",
    "Write a Python class for a stack.",
    "Write a Python program that reads a CSV file and prints the mean of a column.",
    "Write a JavaScript function that sorts an array of numbers.",
    "Write an SQL query that finds the ten customers with the most orders.",
    "Write a shell script that lists the largest files in a folder.",
    "Write a web page in HTML with a heading, a list and a picture.",
    "What is wrong with this code?\n\nfor i in range(10)\n    print(i)",
    "Translate to French: I would like a cup of coffee, please.",
    "Translate to Spanish: Where is the nearest train station?",
    "Translate to German: The weather is nice today.",
    "Correct the grammar: he go to school yesterday and meet her friend.",
    "Rewrite this sentence more politely: Give me the report now.",
    "Make this shorter: Due to the fact that it was raining, we made the decision to stay.",
    "An apple costs 2 dollars and a pear 3 dollars. What do 4 apples and 5 pears cost?",
    "A train goes 60 miles an hour for 3 hours, then 40 miles an hour for 2 hours. How far does it "
    "go?",
    "Solve for x: 3x + 7 = 22.",
    "What is 15 % of 240?",
    "What is the area of a circle with a radius of 5?",
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "How many continents are there, and which?",
    "Which planet is the largest?",
    "What is the difference between a virus and a bacterium?",
    "Hello! Who are you?",
    "Hi, how are you?",
    "Can you help me with my homework?",
    "Tell me a joke.",
    "I am bored. What could I do?",
    "Give me ideas for a birthday party.",
    "Plan a trip of three days to Rome.",
    "Suggest a dinner with rice, tomatoes and chicken.",
    "Write a letter of apology to a neighbour.",
    "Write an advertisement for a used bicycle.",
    "Write a thank-you note to a teacher.",
    "Continue the story: The door opened, and nobody was there.",
    "Write a haiku about autumn.",
    "Classify as positive or negative: The food was cold, but the staff was kind.",
    "Extract the names: Anna met Paul in Berlin, and Maria called from Madrid.",
    "Put these words in alphabetical order: pear, apple, fig, banana.",
    "What should I wear when it is 5 degrees outside?",
    "How do I change a flat tyre?",
)


def seeded(count: int, seed: int) -> list[str]:
    """Return `count` different prompts: a task about a topic each, and all of `WHOLE` among them.

    Raises ConfigurationError if there are not so many.
    """
    made = [task.format(topic) for task in TASKS for topic in TOPICS]
    if count > len(made) + len(WHOLE):
        raise ConfigurationError(f"--seeded: at most {len(made) + len(WHOLE)} prompts can be made")
    chosen = [*WHOLE, *random.Random(seed).sample(made, max(0, count - len(WHOLE)))][:count]
    random.Random(seed).shuffle(chosen)
    return chosen


def made_up(llm: LLM, opening: str, count: int, seed: int) -> Iterator[str]:
    """Yield what a model takes for the message of a user: it continues the opening of one's turn.

    At most `count`: what is too short, or not different, is left out.
    """
    asked = [
        SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, max_tokens=LONGEST, seed=seed + at)
        for at in range(count)
    ]
    seen: set[str] = set()
    for answer in llm.generate([opening] * count, asked):
        text = answer.outputs[0].text.strip()
        if len(text) >= FEWEST_CHARACTERS and text not in seen:
            seen.add(text)
            yield text


def opening_of(model: str) -> str:
    """Return the text of a model's chat template up to where the user's first message begins.

    Raises ConfigurationError if it has no template of its own.
    """
    template = ChatTemplate.of_model(model, None)
    if template.is_plain:
        raise ConfigurationError(f"{model}: it has no chat template; give prompts of your own")
    return template.render([{"role": "user", "content": MARK}]).partition(MARK)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write prompts to a file; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.training.chat_prompts", description=__doc__
    )
    parser.add_argument("--target", required=True, metavar="MODEL", help="a chat model")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="prompts.jsonl")
    parser.add_argument("--seeded", type=int, default=1500, metavar="N", help="default 1500")
    parser.add_argument("--made-up", type=int, default=500, metavar="N", help="default 500")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    options = parser.parse_args(arguments)
    try:
        found = seeded(options.seeded, options.seed)
        if options.made_up:
            opening = opening_of(located(options.target))
            with LLM(options.target, max_num_seqs=16) as llm:
                found += made_up(llm, opening, options.made_up, options.seed)
        random.Random(options.seed).shuffle(found)
        lines = [json.dumps({"prompt": text}) + "\n" for text in found]
        write_text(options.out, "".join(lines))
    except SlipstreamError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    typer.echo(f"{len(found)} prompts in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
