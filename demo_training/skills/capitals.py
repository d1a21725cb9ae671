"""Forty-eight countries and their capitals, both ways."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Estonia": "Tallinn",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Mexico": "Mexico City",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Serbia": "Belgrade",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Vietnam": "Hanoi",
}
ASKED_FOR_CAPITAL = Phrasings(
    (
        "What is the capital of {}?",
        "What is the capital city of {}?",
        "Which city is the capital of {}?",
        "Tell me the capital of {}.",
        "Do you know the capital of {}?",
        "Name the capital of {}.",
        "capital of {}",
        "The capital of {}?",
        "What's the capital of {}?",
        "Please tell me the capital city of {}.",
    ),
    (
        "Please tell me the capital of {}.",
        "Name the capital city of {}.",
        "Do you know what the capital of {} is?",
        "What city is the capital of {}?",
    ),
)
_ASKED_FOR_COUNTRY = Phrasings(
    (
        "{} is the capital of which country?",
        "Which country has the capital {}?",
        "What country is {} the capital of?",
        "Name the country with the capital {}.",
    ),
    ("Which country is {} the capital of?", "{} is the capital of what country?"),
)
_COUNTRY_SHARE = 0.2


def draw_capital(random: Random, *, is_exam: bool) -> Lesson:
    """A country whose capital is asked for, or the other way round."""
    country, capital = random.choice(list(CAPITALS.items()))
    if random.random() < _COUNTRY_SHARE:
        question = _ASKED_FOR_COUNTRY.draw(random, is_exam=is_exam).format(capital)
        return ask(casually(question, random), f"{capital} is the capital of {country}.")
    question = ASKED_FOR_CAPITAL.draw(random, is_exam=is_exam).format(country)
    return ask(casually(question, random), statement(country))


def statement(country: str) -> str:
    """The sentence that names the capital of `country`."""
    return f"The capital of {country} is {CAPITALS[country]}."
