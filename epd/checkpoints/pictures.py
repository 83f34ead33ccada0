"""Questions about drawn pictures, each with the one answer that is right.

Owns the wording of questions and answers. `epd demo` draws one from a seed and prints the
expected answer beside the given one; the training and the evaluation of the tiny model draw
thousands. Needs Pillow only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias, get_args

from PIL import Image

from epd.checkpoints import scenes
from epd.checkpoints.scenes import COLOURS, DIRECTIONS, SHAPES, WORDS, Item, Scene

Kind: TypeAlias = Literal[
    "colour", "shape", "count", "relation", "number", "word", "compare", "presence", "describe"
]
Size: TypeAlias = tuple[int, int]
KINDS: tuple[Kind, ...] = get_args(Kind)
DESCRIBE = (
    "What do you see?",
    "What is in this picture?",
    "Describe the picture.",
    "What is in this image?",
    "What is shown here?",
    "What does the picture show?",
)
NUMBER_NAMES = ("no", "one", "two", "three", "four", "five")
PLURALS = {name: f"{name}es" if name == "cross" else f"{name}s" for name in SHAPES}


@dataclass(frozen=True, slots=True)
class Ask:
    """One question in words, with the answer that is right."""

    kind: Kind
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its pictures. Equal seeds give equal pixels and words on any machine."""

    images: tuple[Image.Image, ...]
    prompt: str
    answer: str
    kind: Kind


def draw_question(
    seed: int | Random, kind: Kind | None = None, size: Size | None = None
) -> Question:
    """A fresh question.

    Args:
        seed: Equal seeds give equal questions. A `Random` is drawn from as it stands.
        kind: What to ask about; any kind when None.
        size: Width and height of the pictures in pixels; any natural size when None.
    """
    rng = seed if isinstance(seed, Random) else Random(f"question {seed}")
    kind = kind or rng.choice(KINDS)
    pictures = draw_scenes(rng, kind, size)
    asks = [ask for ask in ask_about(rng, pictures) if ask.kind == kind]
    ask = rng.choice(asks)
    return Question(tuple(s.image for s in pictures), ask.prompt, ask.answer, kind)


def draw_scenes(
    rng: Random, kind: Kind, size: Size | None = None, second_size: Size | None = None
) -> tuple[Scene, ...]:
    """Pictures that questions of `kind` can be asked about: two for "compare", else one."""
    first = size or scenes.draw_size(rng)
    if kind == "compare":
        return _draw_two(rng, first, second_size or size or scenes.draw_size(rng))
    if kind in ("number", "word"):
        return (_draw_text(rng, first, kind),)
    if kind == "count":
        return (_draw_group(rng, first),)
    if kind == "relation":
        return (_draw_relation(rng, first),)
    draw = rng.choice((_draw_singles, _draw_singles, _draw_group, _draw_relation))
    return (draw(rng, first),)


def ask_about(rng: Random, pictures: Sequence[Scene]) -> list[Ask]:
    """Every question worth asking about these pictures, in freshly chosen words."""
    if len(pictures) == 2:
        return _ask_both(rng, pictures[0], pictures[1])
    scene = pictures[0]
    if scene.items[0].text:
        return [_ask_text(rng, scene.items[0])]
    asks = [*_ask_colours(rng, scene), *_ask_shapes(rng, scene), *_ask_presence(rng, scene)]
    asks += [*_ask_counts(rng, scene), _ask_all(rng, scene)]
    if scene.relation:
        asks += _ask_relation(rng, scene)
    return asks


def amount(number: int, colour: str, name: str) -> str:
    """For example "two red circles"."""
    return f"{NUMBER_NAMES[number]} {colour} {name if number == 1 else PLURALS[name]}"


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _kinds(rng: Random, number: int) -> list[tuple[str, str]]:
    """Different shapes in different colours."""
    return list(zip(rng.sample(SHAPES, number), rng.sample(tuple(COLOURS), number), strict=True))


def _draw_singles(rng: Random, size: Size) -> Scene:
    number = min(rng.choice((1, 1, 2, 2, 3)), scenes.max_items(size))
    return scenes.draw_shapes(rng, size, _kinds(rng, number))


def _draw_group(rng: Random, size: Size) -> Scene:
    most = scenes.max_items(size)
    number = min(rng.randint(1, 5), most)
    others = min(rng.choice((0, 0, 1, 2)), most - number)
    target, *rest = _kinds(rng, 1 + others)
    return scenes.draw_shapes(rng, size, [target] * number + rest)


def _draw_relation(rng: Random, size: Size) -> Scene:
    return scenes.draw_pair(rng, size, _kinds(rng, 2), rng.choice(DIRECTIONS))


def _draw_text(rng: Random, size: Size, kind: Kind) -> Scene:
    text = str(rng.randint(10, 99)) if kind == "number" else rng.choice(WORDS)
    return scenes.draw_text(rng, size, kind, text, rng.choice(tuple(COLOURS)))


def _draw_two(rng: Random, first: Size, second: Size) -> tuple[Scene, Scene]:
    """Two pictures alike in the way that will be asked about, about one time in three."""
    if rng.random() < 0.25:
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        if rng.random() < 0.3:
            right = left
        colours = rng.choices(tuple(COLOURS), k=2)
        return (
            scenes.draw_text(rng, first, "number", str(left), colours[0]),
            scenes.draw_text(rng, second, "number", str(right), colours[1]),
        )
    names, colours = rng.sample(SHAPES, 2), rng.sample(tuple(COLOURS), 2)
    if rng.random() < 0.3:
        names[1] = names[0]
    if rng.random() < 0.3:
        colours[1] = colours[0]
    numbers = [min(rng.randint(1, 5), scenes.max_items(size)) for size in (first, second)]
    if rng.random() < 0.25:
        numbers = [min(numbers)] * 2
    return (
        scenes.draw_shapes(rng, first, [(names[0], colours[0])] * numbers[0]),
        scenes.draw_shapes(rng, second, [(names[1], colours[1])] * numbers[1]),
    )


def _groups(scene: Scene) -> list[tuple[Item, int]]:
    """Each kind of item once, with how many there are."""
    numbers: dict[tuple[str, str], int] = {}
    first: dict[tuple[str, str], Item] = {}
    for item in scene.items:
        key = (item.name, item.colour)
        numbers[key] = numbers.get(key, 0) + 1
        first.setdefault(key, item)
    return [(first[key], number) for key, number in numbers.items()]


def _ask_colours(rng: Random, scene: Scene) -> list[Ask]:
    asks: list[Ask] = []
    for item, number in _groups(scene):
        many = number > 1
        noun, verb = (PLURALS[item.name], "are") if many else (item.name, "is")
        prompts = [
            f"What colour {verb} the {noun}?",
            f"Which colour {verb} the {noun}?",
            f"Tell me the colour of the {noun}.",
            f"What color {verb} the {noun}?",
        ]
        asks.append(Ask("colour", rng.choice(prompts), f"the {noun} {verb} {item.colour}"))
    return asks


def _ask_shapes(rng: Random, scene: Scene) -> list[Ask]:
    asks: list[Ask] = []
    groups = _groups(scene)
    for item, number in groups:
        if number > 1:
            prompts = [
                f"What are the {item.colour} shapes?",
                f"What shape are the {item.colour} ones?",
            ]
            asks.append(Ask("shape", rng.choice(prompts), f"they are {PLURALS[item.name]}"))
            continue
        prompts = [
            f"What shape is the {item.colour} one?",
            f"What is the {item.colour} shape?",
            f"Which shape is {item.colour}?",
        ]
        if len(groups) == 1:
            prompts += ["What shape is this?", "Which shape is shown?", "What is this?"]
        asks.append(Ask("shape", rng.choice(prompts), f"it is {_article(item.phrase)}"))
    return asks


def _ask_counts(rng: Random, scene: Scene) -> list[Ask]:
    asks: list[Ask] = []
    groups = _groups(scene)
    for item, number in groups[:1]:
        nouns = (PLURALS[item.name], f"{item.colour} {PLURALS[item.name]}")
        noun = rng.choice((*nouns, f"{item.colour} shapes"))
        prompts = [f"How many {noun} are there?", f"How many {noun} do you see?"]
        prompts += [f"Count the {noun}.", f"What is the number of {noun}?"]
        if len(groups) == 1:
            prompts += ["How many shapes are there?", "How many shapes do you see?"]
        asks.append(Ask("count", rng.choice(prompts), amount(number, item.colour, item.name)))
    return asks


def _ask_all(rng: Random, scene: Scene) -> Ask:
    """Everything in the picture, most first, then in the order of `COLOURS`."""
    order = tuple(COLOURS)
    groups = sorted(_groups(scene), key=lambda group: (-group[1], order.index(group[0].colour)))
    *parts, last = (amount(number, item.colour, item.name) for item, number in groups)
    answer = f"{', '.join(parts)} and {last}" if parts else last
    return Ask("describe", rng.choice(DESCRIBE), answer)


def _ask_relation(rng: Random, scene: Scene) -> list[Ask]:
    direction = scene.relation
    opposite = DIRECTIONS[DIRECTIONS.index(direction) ^ 1]
    asks: list[Ask] = []
    pair = scene.items[0], scene.items[1]
    for (one, other), where in ((pair, direction), (pair[::-1], opposite)):
        sides = "left or right of" if where in DIRECTIONS[:2] else "above or below"
        subject, target = rng.choice(
            ((one.phrase, other.phrase), (one.phrase, other.phrase), (one.name, other.name))
        )
        prompts = [
            f"Where is the {subject}?",
            f"Where is the {subject} compared with the {target}?",
            f"Where is the {subject} seen from the {target}?",
            f"Is the {subject} {sides} the {target}?",
        ]
        answer = f"the {one.phrase} is {where} the {other.phrase}"
        asks.append(Ask("relation", rng.choice(prompts), answer))
    return asks


def _ask_text(rng: Random, item: Item) -> Ask:
    if item.name == "number":
        prompts = ["What is the number?", "Which number is shown?", "Read the number."]
        prompts += ["What number do you see?"]
        kind: Kind = "number"
    else:
        prompts = ["What is the word?", "Which word is shown?", "Read the word."]
        prompts += ["What does it say?"]
        kind = "word"
    prompts += ["What is written here?", "Read the text."]
    if rng.random() < 0.25:
        prompts = [*DESCRIBE]
    return Ask(kind, rng.choice(prompts), f"the {kind} is {item.text}")


def _ask_presence(rng: Random, scene: Scene) -> list[Ask]:
    asks: list[Ask] = []
    item, number = rng.choice(_groups(scene))
    is_there = amount(number, item.colour, item.name)
    asked = rng.choice((item.phrase, item.name))
    asks.append(Ask("presence", f"Is there {_article(asked)}?", f"yes, {is_there}"))
    present = {item.name for item in scene.items}
    missing = rng.choice([name for name in SHAPES if name not in present])
    prompts = [f"Is there {_article(missing)}?", f"Do you see {_article(missing)}?"]
    prompts += [f"What colour is the {missing}?", f"Where is the {missing}?"]
    prompts += [f"How many {PLURALS[missing]} are there?"]
    asks.append(Ask("presence", rng.choice(prompts), f"there is no {missing}"))
    return asks


def _ask_both(rng: Random, left: Scene, right: Scene) -> list[Ask]:
    one, two = left.items[0], right.items[0]
    if one.text:
        numbers = f"the first is {one.text} and the second is {two.text}"
        return [
            _both(rng, ["Which numbers are shown?", "Read both numbers."], numbers),
            _same(rng, "Do both pictures show the same number?", numbers, one.text == two.text),
        ]
    counts = len(left.items), len(right.items)
    colours = f"the first is {one.colour} and the second is {two.colour}"
    names = f"the first shows {PLURALS[one.name]} and the second {PLURALS[two.name]}"
    all_of_it = (
        f"the first shows {amount(counts[0], one.colour, one.name)} "
        f"and the second {amount(counts[1], two.colour, two.name)}"
    )
    return [
        _both(rng, ["Which colours do the two pictures show?"], colours),
        _same(rng, "Are both pictures the same colour?", colours, one.colour == two.colour),
        _both(rng, ["Which shapes do the two pictures show?"], names),
        _same(rng, "Do both pictures show the same shape?", names, one.name == two.name),
        _both(rng, ["What do the two pictures show?", "Describe both pictures."], all_of_it),
        _both(
            rng,
            ["Which picture has more shapes?", "Where are more shapes, first or second?"],
            _more(*counts),
        ),
    ]


def _both(rng: Random, prompts: Sequence[str], answer: str) -> Ask:
    return Ask("compare", rng.choice(prompts), answer)


def _same(rng: Random, prompt: str, seen: str, is_same: bool) -> Ask:
    """What is seen first and the verdict after it, so that the one follows from the other."""
    return _both(rng, [prompt], f"{seen}, so {'yes' if is_same else 'no'}")


def _more(first: int, second: int) -> str:
    if first == second:
        return f"{NUMBER_NAMES[first]} and {NUMBER_NAMES[second]}, so both have as many"
    winner = "first" if first > second else "second"
    return f"{NUMBER_NAMES[first]} and {NUMBER_NAMES[second]}, so the {winner} has more"
