"""Prompts for a chat model, from nothing but the model and seeds: what its head is trained on.

Most are tasks with places for topics, people, sentences and the like, all from the lists below and
drawn by a seed. The others are made up by the model: it continues the empty turn of a user, so that
they are what it takes for usual. No collection of prompts is needed, and none that measures
anything is seen.
"""

import argparse
import json
import random
import re
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
LONGEST = 100  # tokens of a prompt that the model makes up; longer ones are left out
TEMPERATURE, TOP_P = 0.8, 0.95  # at 1 many of SmolLM2's prompts are no requests
FEWEST_CHARACTERS = 8  # of a prompt that is kept

# In braces: a list of `FILLINGS`, of which each place takes another entry.
TASKS = {
    "about a topic": (
        *("Explain {topic} in simple terms.", "What is {topic}?", "Tell me about {topic}."),
        *(
            "Why is {topic} important?",
            "How does {topic} work?",
            "Give me five facts about {topic}.",
        ),
        *("Write a short paragraph about {topic}.", "Summarise the history of {topic} briefly."),
        "What are the advantages and disadvantages of {topic}?",
        "List the main parts of {topic} and say what each does.",
        "What questions do people often ask about {topic}? Answer them.",
        *("Explain {topic} to a ten-year-old child.", "What would happen without {topic}?"),
        *(
            "What are common mistakes when dealing with {topic}?",
            "Who discovered or began {topic}?",
        ),
        *("Describe {topic} in one sentence, then in three.", "When did {topic} begin?"),
        "I have ten minutes. What should I know about {topic}?",
        "Name three books or films about {topic} and describe them.",
        "Is {topic} a good subject for a talk? Say why, and how to begin.",
        *("Make a table with two columns about {topic}.", "What is the future of {topic}?"),
        *(
            "Give me an example of {topic} from daily life.",
            "Ask me three questions about {topic}.",
        ),
    ),
    "two topics": (
        *("Compare {topic} and {topic}.", "What do {topic} and {topic} have in common?"),
        "Which is harder to learn about, {topic} or {topic}, and why?",
        "Write a dialogue between somebody who loves {topic} and somebody who prefers {topic}.",
        "Would you rather spend a day with {topic} or with {topic}? Give reasons.",
    ),
    "advice": (
        *("How do I {action}?", "What do I need to {action}?", "Is it hard to {action}?"),
        *("I tried to {action} and failed. What now?", "Give me tips to {action}."),
        *(
            "Make a checklist for somebody who wants to {action}.",
            "How long does it take to {action}?",
        ),
        "My {person} wants to {action}. How can I help?",
        "Make a plan for {number} days to {action}.",
        "I have {number} dollars and want to {action}. What should I do first?",
        "My {thing} {trouble}. What may be the reason?",
        "My {thing} {trouble}. What should I try before I call somebody?",
        "What should I look for when I buy a {thing}?",
        "How do I clean and care for a {thing}?",
        "My {person} is {feeling}. What can I say?",
        "I feel {feeling} because of my {person}. What should I do?",
    ),
    "writing": (
        *(
            "Write a short story about a {person} who finds a {thing}.",
            "Write a poem about {topic}.",
        ),
        "Write the beginning of a {genre} that takes place in {place}.",
        "Write the last paragraph of a {genre} about a {person} and a {thing}.",
        "Continue the story: The {person} opened the door and saw a {thing}.",
        "Describe {place} on a {feeling} morning.",
        "Write a dialogue between a {person} and a {person} in {place}.",
        "Write an email to my {person}: I have to {action} and cannot come on Friday.",
        "Write a polite letter of complaint about a {thing} that {trouble}.",
        "Write a letter to thank my {person} for a {thing}.",
        "Write an advertisement for a {thing}.",
        "Write a product description of a {thing}, with three points.",
        "Write an invitation to a party in {place}.",
        *(
            "Write a haiku about a {thing}.",
            "Write a riddle about a {thing}.",
            "Write a song about {place}.",
        ),
        "Write a speech of one minute for a {person} who wants to {action}.",
        "Suggest a title and an outline for an essay about {topic}.",
        "Give me {number} names for a shop that sells a {thing} to every {person}.",
    ),
    "sentences": (
        "Translate into {language}: {sentence}",
        "How do I say this in {language}? {sentence}",
        *("Rewrite this more politely: {sentence}", "Make this shorter: {sentence} {sentence}"),
        *("Rewrite this in the past tense: {sentence}", "Turn this into a question: {sentence}"),
        "Is this sentence positive, negative or neutral? {sentence}",
        "List the nouns in this text: {sentence} {sentence}",
        "What happened, and what may happen next? {sentence} {sentence}",
        "Correct the mistakes, if there are any: {sentence}",
        "Summarise in a few words: {sentence} {sentence} {sentence}",
        "Who or what is this text about? {sentence} {sentence}",
    ),
    "code": (
        "Write a {code} function that {does}.",
        "Write a {code} program that {does}, with comments.",
        "How would you test a {code} function that {does}?",
        "Explain step by step how a {code} function that {does} works.",
        "Write a {code} function that {does}, then one that {does}.",
        "What can go wrong in a function that {does}?",
        "Write a class in {code} that stands for a {thing}.",
        "What is the difference between {code} and {code}?",
    ),
    "numbers": (
        "A {thing} costs {number} dollars. What do {number} of them cost?",
        "What is {number} plus {number}, and what is {number} times {number}?",
        "What is {number} percent of {number}?",
        "A {person} has {number} coins, gives away {number} and gets {number}. How many are left?",
        "I drive {number} miles an hour for {number} hours. How far do I come?",
        "Share {number} apples among {number} children. What is left over?",
        "Put these numbers in order: {number}, {number}, {number}, {number}.",
        "I have {number} minutes for {number} tasks. How should I divide my time?",
    ),
    "role": (
        "You are a {person}. Introduce yourself.",
        "You are a {person} in {place}. What do you see?",
        "Pretend to be a {thing} and tell me about your day.",
        "Interview a {person} about {topic}: three questions and answers.",
        "What would a {person} say about {topic}?",
        "Play a {person}, and I am your customer. Begin.",
    ),
}
TOPICS = (
    *("gravity", "photosynthesis", "the water cycle", "black holes", "the solar system"),
    *("climate change", "earthquakes", "volcanoes", "the human heart", "the immune system"),
    *("vaccines", "antibiotics", "sleep", "a healthy diet", "running", "yoga", "football"),
    *("chess", "the guitar", "the piano", "jazz", "classical music", "painting", "photography"),
    *("cooking pasta", "coffee", "tea", "chocolate", "growing tomatoes"),
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
    *("recycling", "public transport", "bicycles", "trains", "aeroplanes", "harbours"),
)
FILLINGS = {
    "topic": TOPICS,
    "action": (
        *("learn a language", "learn to swim", "paint a wall", "plant a tree", "write a novel"),
        *(
            "save money",
            "sleep better",
            "eat less sugar",
            "read more",
            "run five miles",
            "meditate",
        ),
        *("make friends in a new town", "find a job", "change my job", "prepare for an exam"),
        *("cook for eight people", "make soup", "bake a cake", "roast vegetables", "grow herbs"),
        *(
            "repair a bicycle",
            "clean an oven",
            "pack for a journey",
            "plan a wedding",
            "move abroad",
        ),
        *("adopt a dog", "train a puppy", "take better photos", "learn the guitar", "sing better"),
        *("give a talk", "write a letter", "keep a diary", "start a blog", "build a website"),
        *("learn to program", "back up a computer", "protect a password", "sort old photos"),
        *(
            "buy a used car",
            "save energy at home",
            "reduce waste",
            "remove a stain",
            "iron a shirt",
        ),
        *("climb a mountain", "go camping", "learn chess", "play tennis", "organise a garage"),
        *("apologise to a friend", "ask for a raise", "say no", "stop worrying", "wake up early"),
    ),
    "person": (
        *(
            "teacher",
            "doctor",
            "nurse",
            "farmer",
            "sailor",
            "pilot",
            "baker",
            "carpenter",
            "lawyer",
        ),
        *(
            "judge",
            "detective",
            "scientist",
            "astronaut",
            "king",
            "queen",
            "robot",
            "ghost",
            "child",
        ),
        *("grandmother", "grandfather", "sister", "brother", "father", "mother", "daughter", "son"),
        *(
            "neighbour",
            "friend",
            "colleague",
            "manager",
            "customer",
            "student",
            "musician",
            "painter",
        ),
        *(
            "writer",
            "librarian",
            "gardener",
            "tailor",
            "taxi driver",
            "tourist",
            "athlete",
            "coach",
        ),
    ),
    "place": (
        *("a small village", "a big city", "a train station", "a desert", "a forest at night"),
        *("an old castle", "a space station", "a hospital", "a library", "a market", "an island"),
        *(
            "a ship in a storm",
            "a mountain hut",
            "a school",
            "a kitchen",
            "an empty theatre",
            "a cave",
        ),
        *("a garden", "a museum", "a prison", "an airport", "a farm", "a factory", "a quiet beach"),
    ),
    "thing": (
        *(
            "lamp",
            "clock",
            "bicycle",
            "car",
            "boat",
            "guitar",
            "piano",
            "radio",
            "telephone",
            "laptop",
        ),
        *(
            "printer",
            "washing machine",
            "fridge",
            "oven",
            "kettle",
            "knife",
            "chair",
            "table",
            "bed",
        ),
        *("mirror", "window", "door", "key", "ring", "book", "map", "letter", "painting", "camera"),
        *(
            "umbrella",
            "coat",
            "pair of shoes",
            "suitcase",
            "tent",
            "ball",
            "kite",
            "candle",
            "vase",
        ),
        *(
            "garden hose",
            "lawn mower",
            "ladder",
            "hammer",
            "drill",
            "heater",
            "fan",
            "plant",
            "dog",
        ),
        *("cat", "horse", "parrot", "fish tank", "drone", "watch", "pen", "notebook", "backpack"),
    ),
    "trouble": (
        *(
            "does not start",
            "makes a strange noise",
            "smells bad",
            "is too loud",
            "stopped working",
        ),
        *(
            "is too slow",
            "leaks",
            "broke yesterday",
            "is always cold",
            "gets too hot",
            "is missing",
        ),
        *("came without instructions", "has a scratch", "does not fit", "is not what I ordered"),
    ),
    "feeling": (
        *("tired", "nervous", "angry", "sad", "lonely", "bored", "proud", "jealous", "confused"),
        *("happy", "stressed", "disappointed", "homesick", "shy", "excited", "worried", "cold"),
    ),
    "genre": (
        *("fairy tale", "love story", "ghost story", "science fiction story", "western", "comedy"),
        *("thriller", "letter from the future", "diary", "fable", "play", "legend", "news report"),
    ),
    "language": ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Latin"),
    "sentence": (
        *(
            "The train was late again.",
            "She lost her keys on the way home.",
            "It may rain tomorrow.",
        ),
        *("We bought three tickets for the concert.", "The soup was cold, but the bread was good."),
        *(
            "He has worked here for ten years.",
            "Nobody answered the phone.",
            "The lights went out.",
        ),
        *(
            "They painted the house blue.",
            "My cousin is going to be a doctor.",
            "Give me the report.",
        ),
        *("The children played in the snow all day.", "I would like a table for two, please."),
        *(
            "The meeting was moved to Thursday.",
            "Her new song is a success.",
            "The bridge is closed.",
        ),
        *(
            "A small dog barked at the postman.",
            "He forgot his umbrella and got wet.",
            "I am hungry.",
        ),
        *(
            "The museum is free on Sundays.",
            "She speaks four languages.",
            "The river is very deep.",
        ),
        *(
            "Our neighbours have moved to Canada.",
            "The film was too long.",
            "He repaired the old clock.",
        ),
        *("The price of oil rose by five percent.", "The team won its last three games."),
        *("Scientists found a new kind of frog.", "The mayor opened a park near the station."),
        *("Please send us your answer by Monday.", "The plane landed safely in heavy fog."),
    ),
    "code": (*("Python",) * 4, "JavaScript", "Java", "C", "SQL", "HTML", "Bash", "Rust", "Go"),
    "does": (
        *("reverses a string", "says whether a number is prime", "counts the words of a text"),
        *("finds the largest number of a list", "removes duplicates from a list", "sorts a list"),
        *("says whether two words are anagrams", "computes Fibonacci numbers", "adds two matrices"),
        *("merges two sorted lists", "reads a file line by line", "writes numbers to a file"),
        *("converts Celsius to Fahrenheit", "computes the mean of some numbers", "rolls a dice"),
        *("checks a password", "searches a list", "draws a triangle of stars", "counts vowels"),
        *(
            "computes a factorial",
            "parses a date",
            "downloads a page",
            "sends an email",
            "plays a quiz",
        ),
        *(
            "shuffles cards",
            "keeps a list of tasks",
            "finds files by their names",
            "prints a calendar",
        ),
        *("computes interest", "checks whether brackets match", "turns text into upper case"),
        *("groups orders by customer", "flattens a nested list", "waits for a key", "logs errors"),
    ),
    "number": tuple(str(number) for number in (*range(2, 31), 40, 45, 50, 60, 75, 100, 120, 200)),
}
PLACE = re.compile(r"{(\w+)}")

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
    """Return `count` different prompts: all of `WHOLE`, and tasks with their places filled.

    Each kind of task comes as often, and within it each task.
    """
    draw = random.Random(seed)
    kinds = list(TASKS.values())
    found = dict.fromkeys(WHOLE[:count])
    number = 0
    while len(found) < count:
        tasks = kinds[number % len(kinds)]
        found[filled(draw.choice(tasks), draw)] = None
        number += 1
    chosen = list(found)
    draw.shuffle(chosen)
    return chosen


def filled(task: str, draw: random.Random) -> str:
    """Return a task with an entry of its list at each place, no entry twice."""
    used: set[str] = set()

    def entry(place: re.Match[str]) -> str:
        left = [one for one in FILLINGS[place[1]] if one not in used]
        chosen = draw.choice(left)
        used.add(chosen)
        return chosen

    return with_articles(PLACE.sub(entry, task))


def with_articles(text: str) -> str:
    """Return the text with "an" for "a" before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeio]|u(?!s))", r"\1n ", text)


def made_up(llm: LLM, opening: str, count: int, seed: int) -> Iterator[str]:
    """Yield what a model takes for the message of a user: it continues the opening of one's turn.

    At most `count`: what is too short or too long, or not different, is left out.
    """
    asked = [
        SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, max_tokens=LONGEST, seed=seed + at)
        for at in range(count)
    ]
    seen: set[str] = set()
    for answer in llm.generate([opening] * count, asked):
        text, ended = answer.outputs[0].text.strip(), answer.outputs[0].finish_reason == "stop"
        if ended and len(text) >= FEWEST_CHARACTERS and text not in seen:
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
