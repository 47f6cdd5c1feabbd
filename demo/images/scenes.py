"""Small pictures of shapes, and what can be said and asked of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1]))

from dice import Dice

SIDE = 32  # pixels of a picture
CELL = SIDE // 2
PLACES = ("top left", "top right", "bottom left", "bottom right")
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (214, 40, 40), "green": (46, 160, 67), "blue": (45, 95, 210), "yellow": (240, 200, 30),
    "purple": (140, 60, 180), "white": (245, 245, 245),
}  # fmt: skip
NUMBERS = ("no", "one", "two", "three", "four")


@dataclass(frozen=True)
class Thing:
    """A shape in a quarter of a picture."""

    place: str
    shape: str
    colour: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


Scene = tuple[Thing, ...]


def draw_scene(dice: Dice) -> Scene:
    """One to four things in different quarters, in reading order."""
    places = dice.sample(PLACES, dice.between(1, 4))
    return tuple(
        Thing(place, dice.pick(SHAPES), dice.pick(tuple(COLOURS)))
        for place in PLACES
        if place in places
    )


def paint(scene: Scene, dice: Dice) -> Image.Image:
    """Paints a scene, each thing of another size and a little out of its quarter's middle."""
    grey = dice.between(20, 90)
    scale = 4  # painted larger, so that edges are smooth
    image = Image.new("RGB", (SIDE * scale, SIDE * scale), (grey, grey, grey))
    canvas = ImageDraw.Draw(image)
    for thing in scene:
        number = PLACES.index(thing.place)
        radius = dice.between(4, 6) * scale
        x, y = (
            (CELL * side + CELL // 2 + dice.between(-1, 1)) * scale
            for side in (number % 2, number // 2)
        )
        _paint_shape(canvas, thing.shape, x, y, radius, COLOURS[thing.colour])
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def _paint_shape(
    canvas: ImageDraw.ImageDraw, shape: str, x: int, y: int, radius: int, colour: tuple[int, ...]
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        canvas.ellipse(box, colour)
    elif shape == "square":
        canvas.rectangle(box, colour)
    elif shape == "triangle":
        canvas.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], colour)
    else:
        third = radius // 3
        canvas.rectangle((x - third, box[1], x + third, box[3]), colour)
        canvas.rectangle((box[0], y - third, box[2], y + third), colour)


def captions(scene: Scene) -> list[str]:
    """What the base model reads of a picture: descriptions, never a question."""
    return [
        "picture: " + ", ".join(f"{thing.place} a {thing}" for thing in scene) + ".",
        "shapes: " + ", ".join(thing.shape for thing in scene) + ".",
        "colours: " + ", ".join(thing.colour for thing in scene) + ".",
        f"number: {NUMBERS[len(scene)]}.",
    ]


def questions(scene: Scene) -> list[tuple[str, str]]:
    """Questions with one right answer of one or two words."""
    at = {thing.place: thing for thing in scene}
    asked = [("How many shapes are there?", NUMBERS[len(scene)])]
    for place in PLACES:
        asked.append((f"What is {place}?", str(at.get(place, "nothing"))))
    for place, thing in at.items():
        asked.append((f"What colour is the shape {place}?", thing.colour))
        asked.append((f"Which shape is {place}?", thing.shape))
    return asked
