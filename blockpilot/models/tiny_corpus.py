"""The corpus of the embedded pair: families of conversations that differ in how predictable they are.

Knows how to write prompts and answers from a random generator; knows nothing of tokenizers or models.
Every family is a function ``rng -> (prompt, answer)``. Their answers range from nearly deterministic
(counting, copying) to mostly free (prose), because the best block size of a prompt follows from how
long a drafter can foresee the answer.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

NAMES = (
    "Ada Ben Cara Dan Ella Finn Grace Hugo Iris Jack Kira Leo Mia Noah Olga Paul Quinn Rosa Sam Tara "
    "Uma Victor Wendy Yara Zane Amir Bella Carl Dora Emil"
).split()
SURNAMES = "Adler Brown Cohen Diaz Evans Fox Gray Hill Ito Jones Klein Lopez Moore Nolan Ortiz Park".split()
CITIES = "Oslo Paris Lima Cairo Delhi Quito Sofia Tokyo Dublin Boston Madrid Vienna Zurich Nairobi Havana".split()
JOBS = "engineer teacher nurse painter baker pilot farmer lawyer writer plumber chemist singer tailor".split()
HOBBIES = "chess tennis reading hiking cooking sailing fishing dancing painting cycling knitting rowing".split()
FRUITS = "apples pears plums lemons melons grapes figs cherries limes dates mangos peaches".split()
THINGS = (
    "lamp river stone window garden basket mirror ladder bottle pencil candle bridge kettle blanket "
    "hammer feather marble ribbon saddle teapot violin wagon anchor button compass drum engine flute"
).split()
ANIMALS = "fox owl hare bear otter crow deer mole wolf frog goat swan badger hedgehog".split()
PLACES = "forest harbor village valley market tower meadow island castle station library mill".split()
COLORS = "red blue green black white silver golden purple brown orange".split()


def _sample(rng: random.Random, words: Sequence[str], low: int, high: int) -> list[str]:
    return rng.sample(words, rng.randint(low, high))


def addition(rng: random.Random) -> tuple[str, str]:
    """Column addition: fixed wording, digits that must be computed."""
    a, b = rng.randint(100, 99999), rng.randint(100, 99999)
    prompt = rng.choice(["Add {a} and {b} column by column.", "Work out {a} + {b} step by step."]).format(a=a, b=b)
    lines, carry = [], 0
    columns = ["Ones", "Tens", "Hundreds", "Thousands", "Ten thousands"]
    for index in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**index % 10, b // 10**index % 10
        total = x + y + carry
        lines.append(f"{columns[index]}: {x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}.")
        carry = total // 10
    if carry:
        lines.append(f"Last carry: write {carry}.")
    lines.append(f"The sum of {a} and {b} is {a + b}.")
    return prompt, "\n".join(lines)


def word_problem(rng: random.Random) -> tuple[str, str]:
    """A story sum: sentences that restate the prompt between small calculations."""
    name, other = rng.sample(NAMES, 2)
    fruit, place = rng.choice(FRUITS), rng.choice(PLACES)
    start, bags, each = rng.randint(5, 40), rng.randint(2, 9), rng.randint(2, 9)
    given = rng.randint(1, start)
    prompt = (
        f"{name} has {start} {fruit}. At the {place} {name} buys {bags} bags with {each} {fruit} in each bag, "
        f"then gives {given} {fruit} to {other}. How many {fruit} does {name} have now?"
    )
    bought = bags * each
    answer = (
        f"{name} starts with {start} {fruit}.\n"
        f"{bags} bags with {each} {fruit} in each bag make {bags} * {each} = {bought} {fruit}.\n"
        f"After the {place} there are {start} + {bought} = {start + bought} {fruit}.\n"
        f"{name} gives {given} to {other}, so {start + bought} - {given} = {start + bought - given} {fruit} are left.\n"
        f"Answer: {start + bought - given}"
    )
    return prompt, answer


_TESTS = {
    "even": ("{x} % 2 == 0", "even"),
    "odd": ("{x} % 2 == 1", "odd"),
    "positive": ("{x} > 0", "positive"),
    "negative": ("{x} < 0", "negative"),
    "large": ("{x} > limit", "larger than the limit"),
    "small": ("{x} < limit", "smaller than the limit"),
}
_REDUCTIONS = {
    "sum": ("Return the sum of", "total", "0", "total += {x}"),
    "count": ("Count", "count", "0", "count += 1"),
    "collect": ("Return a list of", "result", "[]", "result.append({x})"),
    "product": ("Return the product of", "product", "1", "product *= {x}"),
    "square": ("Return the squares of", "squares", "[]", "squares.append({x} * {x})"),
}


def function(rng: random.Random) -> tuple[str, str]:
    """A small Python function with a docstring: rigid syntax, few free choices."""
    reduction, test = rng.choice(list(_REDUCTIONS)), rng.choice(list(_TESTS))
    noun = rng.choice(["numbers", "values", "items", "scores", "prices", "weights", "ages", "points", "marks", "sizes"])
    item = noun[:-1]
    verb, variable, start, step = _REDUCTIONS[reduction]
    condition, words = _TESTS[test]
    argument = f"{noun}, limit" if "limit" in condition else noun
    name = f"{reduction}_{test}_{noun}"
    phrase = f"{verb[0].lower()}{verb[1:]} the {noun} that are {words}"
    prompt = rng.choice(["Write a Python function to {p}.", "Please write Python code to {p}."]).format(p=phrase)
    numbers = [rng.randint(-20, 60) for _ in range(rng.randint(3, 5))]
    prompt += f" Show a call with {numbers}."
    tail = f"{numbers}, {rng.randint(5, 20)}" if "limit" in condition else f"{numbers}"
    answer = (
        f"```python\ndef {name}({argument}):\n"
        f'    """{verb} the {noun} that are {words}."""\n'
        f"    {variable} = {start}\n"
        f"    for {item} in {noun}:\n"
        f"        if {condition.format(x=item)}:\n"
        f"            {step.format(x=item)}\n"
        f"    return {variable}\n\n"
        f"print({name}({tail}))\n```"
    )
    return prompt, answer


def json_record(rng: random.Random) -> tuple[str, str]:
    """A JSON record from a description: structure is free, the values are copied."""
    first, last, city, job = rng.choice(NAMES), rng.choice(SURNAMES), rng.choice(CITIES), rng.choice(JOBS)
    age, hobbies = rng.randint(18, 89), _sample(rng, HOBBIES, 1, 4)
    member = rng.random() < 0.5
    prompt = (
        f"Make a JSON record. {first} {last} is a {job} from {city}, {age} years old, "
        f"{'a member' if member else 'not a member'}, and likes {', '.join(hobbies)}."
    )
    record: dict[str, object] = {
        "first_name": first,
        "last_name": last,
        "age": age,
        "job": job,
        "address": {"city": city},
        "hobbies": hobbies,
        "member": member,
    }
    return prompt, json.dumps(record, indent=2)


def list_task(rng: random.Random) -> tuple[str, str]:
    """Copy, reverse, sort or number a list."""
    words = _sample(rng, THINGS + FRUITS + ANIMALS, 14, 24)
    task = rng.choice(["copy", "reverse", "sort", "number"])
    listed = ", ".join(words)
    prompt = {
        "copy": f"Repeat this list exactly: {listed}.",
        "reverse": f"Write this list in reverse order: {listed}.",
        "sort": f"Sort this list by the alphabet: {listed}.",
        "number": f"Number the items of this list: {listed}.",
    }[task]
    if task == "number":
        return prompt, "\n".join(f"{index}. {word}" for index, word in enumerate(words, 1))
    ordered = {"copy": words, "reverse": words[::-1], "sort": sorted(words)}[task]
    heading = {"copy": "The list again", "reverse": "Reversed", "sort": "Sorted"}[task]
    return prompt, f"{heading}: {', '.join(ordered)}.\nThere are {len(words)} items in the list."


def counting(rng: random.Random) -> tuple[str, str]:
    """An arithmetic progression: nearly deterministic once begun."""
    start, step, size = rng.randint(0, 99), rng.randint(1, 12), rng.randint(12, 30)
    numbers = [start + step * index for index in range(size)]
    prompt = f"Count from {numbers[0]} to {numbers[-1]} in steps of {step}."
    return prompt, f"Counting in steps of {step}: {', '.join(map(str, numbers))}. That is {size} numbers."


def table(rng: random.Random) -> tuple[str, str]:
    """A Markdown table from sentences: long copied rows with fixed separators."""
    people = _sample(rng, NAMES, 3, 6)
    rows = [(name, rng.choice(CITIES), rng.choice(JOBS), rng.randint(18, 89)) for name in people]
    described = " ".join(f"{name}, {age}, works as a {job} in {city}." for name, city, job, age in rows)
    prompt = f"Put these people in a Markdown table. {described}"
    lines = ["| name | age | job | city |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {age} | {job} | {city} |" for name, city, job, age in rows]
    return prompt, "\n".join(lines)


def recipe(rng: random.Random) -> tuple[str, str]:
    """Numbered cooking steps: fixed frames around ingredients from the prompt."""
    dish = rng.choice(["soup", "salad", "pie", "stew", "cake", "jam", "curry", "bread"])
    main, second = rng.sample([*FRUITS, "carrots", "onions", "beans", "nuts", "herbs", "mushrooms", "potatoes"], 2)
    people, minutes = rng.randint(2, 9), rng.randint(2, 12) * 5
    prompt = f"How do I make {dish} with {main} and {second} for {people} people? I have {minutes} minutes."
    prepare = rng.choice(["Wash and chop", "Peel and slice", "Rinse and dice"])
    heat = rng.choice(["a large pot", "a wide pan", "the oven"])
    season = rng.choice(["salt and pepper", "a little sugar", "fresh lemon juice", "a pinch of cinnamon"])
    answer = (
        f"Here is a simple {dish} for {people} people:\n"
        f"1. {prepare} {people * 2} {main} and {people} {second}.\n"
        f"2. Heat {heat} and add the {main} first.\n"
        f"3. After {minutes // 5} minutes add the {second} and stir well.\n"
        f"4. Season with {season}.\n"
        f"5. Cook for {minutes - minutes // 5} more minutes and serve the {dish} warm."
    )
    return prompt, answer


def story(rng: random.Random) -> tuple[str, str]:
    """Free prose: a grammar with many choices, so that little can be foreseen."""
    animal, thing, place = rng.choice(ANIMALS), rng.choice(THINGS), rng.choice(PLACES)
    color, name = rng.choice(COLORS), rng.choice(NAMES)
    prompt = rng.choice(
        [
            "Write a short story about a {c} {a}, a {t} and the {p}.",
            "Tell me a tale of a {c} {a} who finds a {t} at the {p}.",
        ]
    ).format(c=color, a=animal, t=thing, p=place)
    openings = [
        f"Once upon a time a {color} {animal} lived near the {place}.",
        f"Long ago, at the edge of the {place}, there was a {color} {animal}.",
        f"Nobody at the {place} had ever seen a {color} {animal} before {name} came.",
        f"The {place} was quiet when the {color} {animal} woke up.",
    ]
    feelings = ["happy", "afraid", "curious", "tired", "proud", "lonely", "calm", "hungry"]
    times = ["One morning", "That night", "Later that day", "In the spring", "After the rain", "Before dawn"]
    acts = [
        f"found a {rng.choice(COLORS)} {thing} under a {rng.choice(['tree', 'bench', 'wall', 'cart'])}",
        f"heard {rng.choice(NAMES)} {rng.choice(['singing', 'calling', 'laughing', 'crying'])} "
        f"by the {rng.choice(PLACES)}",
        f"met a {rng.choice(ANIMALS)} who wanted the {thing}",
        f"carried the {thing} to the {rng.choice(PLACES)}",
        f"dreamed of the {rng.choice(COLORS)} {rng.choice(THINGS)}",
        f"hid the {thing} behind the {rng.choice(THINGS)}",
    ]
    middle = [
        f"{rng.choice(times)} the {animal} {act} and felt {rng.choice(feelings)}."
        for act in rng.sample(acts, rng.randint(3, 5))
    ]
    endings = [
        f"In the end the {animal} gave the {thing} to {name}, and both were {rng.choice(feelings)}.",
        f"From that day on the {animal} kept the {thing} safe.",
        f"And so the {place} was never {rng.choice(['quiet', 'dark', 'empty', 'cold'])} again.",
        f"{name} still tells this story to every {rng.choice(ANIMALS)} at the {place}.",
    ]
    return prompt, " ".join([rng.choice(openings), *middle, rng.choice(endings)])


FAMILIES: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "addition": addition,
    "word_problem": word_problem,
    "function": function,
    "json_record": json_record,
    "list_task": list_task,
    "counting": counting,
    "table": table,
    "recipe": recipe,
    "story": story,
}
_SHARES = {"addition": 3, "word_problem": 2, "function": 2, "json_record": 2, "list_task": 3, "counting": 1.5,
           "table": 2, "recipe": 2, "story": 4}  # fmt: skip
TWO_TURN_SHARE = 0.06


@dataclass(frozen=True)
class Conversation:
    """User turns and the corpus's answer to each; ``family`` is that of the last turn."""

    family: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]


def split_of(prompt: str) -> str:
    """``test``, ``train`` or ``build`` (target and drafter training), by a hash of the prompt: never two of them."""
    bucket = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest(), "big") % 100
    return "test" if bucket < 6 else "train" if bucket < 26 else "build"


def _turn(rng: random.Random, family: str, split: str) -> tuple[str, str]:
    while True:
        prompt, answer = FAMILIES[family](rng)
        if split_of(prompt) == split:
            return prompt, answer


def conversations(seed: int, split: str) -> Iterator[Conversation]:
    """Endless conversations whose every turn belongs to ``split``; no turn list comes twice."""
    rng = random.Random(f"{seed}/{split}")
    seen: set[tuple[str, ...]] = set()
    names, weights = list(_SHARES), list(_SHARES.values())
    while True:
        families = rng.choices(names, weights, k=2 if rng.random() < TWO_TURN_SHARE else 1)
        turns, answers = zip(*(_turn(rng, family, split) for family in families), strict=True)
        if turns not in seen:
            seen.add(turns)
            yield Conversation(families[-1], turns, answers)
