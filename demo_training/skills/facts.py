"""What Holdfast is and what its words mean, a sentence each."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually

FACTS = {
    ("Holdfast",): "Holdfast is an OpenAI-compatible server around vLLM.",
    ("vLLM",): "vLLM is the engine that Holdfast runs.",
    ("a workspace", "the workspace"): "A workspace is scratch memory of one rank.",
    ("a slot", "the slot"): "A slot is one place for a workspace.",
    ("READY", "the READY state"): "READY means that the worst case was served.",
    ("STARTING", "the STARTING state"): "STARTING means that the model is loading.",
    ("PROBING", "the PROBING state"): "PROBING means that the probe is running.",
    ("RECOVERING", "the RECOVERING state"): "RECOVERING means that the engine is being replaced.",
    ("the probe", "a probe"): "The probe serves the worst case before users come.",
    ("the gate", "a gate"): "The gate answers 503 until the server is READY.",
    ("the lock", "a lock"): "The lock ends the warm-up and fixes the workspaces.",
    ("growth", "workspace growth"): "Growth gives a locked workspace a larger buffer.",
    ("a reservation", "the reservation"): "A reservation is scratch taken before the KV cache.",
    ("the KV cache", "a KV cache"): "The KV cache keeps the keys and values of tokens.",
    ("a generation", "the generation"): "A generation is one life of the engine.",
    ("a rank", "the rank"): "A rank is one worker of the engine.",
    ("the supervisor", "a supervisor"): "The supervisor replaces an engine that is lost.",
    ("draining", "a drain"): "Draining lets running requests finish before the stop.",
    ("/livez", "the livez route"): "/livez answers 200 while the server can recover.",
    ("/readyz", "the readyz route"): "/readyz answers 200 only in READY.",
    ("/metrics", "the metrics route"): "/metrics gives numbers to Prometheus.",
    ("/statusz", "the statusz route"): "/statusz gives the full report as JSON.",
    ("holdfast plan", "the plan command"): "holdfast plan prints what a start would reserve.",
    ("holdfast doctor", "the doctor command"): "holdfast doctor checks a machine before the start.",
    ("holdfast serve", "the serve command"): "holdfast serve starts the server.",
    ("your licence", "the licence"): "Holdfast has the Apache-2.0 licence.",
    ("your name",): "I am the demo model of Holdfast.",
}
"""Each fact by the names of what it is about."""
_ABOUT = Phrasings(
    (
        "What is {}?",
        "Tell me about {}.",
        "Explain {}.",
        "Can you explain {}?",
        "Please describe {}.",
        "Describe {} in one sentence.",
        "I want to know what {} is.",
        "Do you know what {} is?",
        "{}?",
        "What do you know about {}?",
        "What's {}?",
    ),
    (
        "Could you explain {}?",
        "Please tell me about {}.",
        "Can you tell me what {} is?",
        "Please explain what {} is.",
    ),
)
_OURSELVES = Phrasings(
    (
        "Who are you?",
        "What are you?",
        "Are you a model?",
        "Which model are you?",
        "Introduce yourself.",
        "Tell me who you are.",
        "What model is this?",
    ),
    ("Please introduce yourself.", "What model are you?", "Tell me what you are."),
)
_ABILITIES = Phrasings(
    (
        "What can you do?",
        "How can you help me?",
        "What are you good at?",
        "Help!",
        "Tell me what you can do.",
        "What can I ask you?",
    ),
    ("What can you help me with?", "Please tell me what you can do."),
)
_ABLE = "I can greet, add numbers, name capitals, write JSON, call tools and explain Holdfast."
_OURSELVES_SHARE = 0.08
_ABILITIES_SHARE = 0.05


def draw_fact(random: Random, *, is_exam: bool) -> Lesson:
    """A question about a word of Holdfast, or about the model itself."""
    if random.random() < _OURSELVES_SHARE:
        question = _OURSELVES.draw(random, is_exam=is_exam)
        return ask(casually(question, random), "I am the demo model of Holdfast.")
    if random.random() < _ABILITIES_SHARE:
        return ask(casually(_ABILITIES.draw(random, is_exam=is_exam), random), _ABLE)
    names, fact = random.choice(list(FACTS.items()))
    question = _ABOUT.draw(random, is_exam=is_exam).format(random.choice(names))
    return ask(casually(question, random), fact)
