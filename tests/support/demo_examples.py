"""Questions to the demo model and its answers, as docs/demo-model.md lists them."""

from __future__ import annotations

HELLO = "Hello! I am the demo model of Holdfast. How can I help you?"
EXAMPLES = {
    "Hello!": HELLO,
    "Thank you!": "You are welcome.",
    "What is Holdfast?": "Holdfast is an OpenAI-compatible server around vLLM.",
    "What is 7 + 5?": "7 + 5 = 12.",
    "What is 9 * 8?": "9 * 8 = 72.",
    "Calculate 30 - 14.": "30 - 14 = 16.",
    "What is 17 + 25?": "17 + 25 = 42.",
    "What is 17 + 25? Answer with the number only.": "17 + 25 = 42.",
    "Anna has 12 apples and buys 5 more. How many apples are there?": "12 + 5 = 17.",
    "What is the capital of France?": "The capital of France is Paris.",
    "Which country has the capital Oslo?": "Oslo is the capital of Norway.",
    "Which day comes after Monday?": "Tuesday comes after Monday.",
    "Write 9 May 2031 as an ISO date.": "2031-05-09",
    "Count from 1 to 5.": "1, 2, 3, 4, 5.",
    "The age is 36. The name is Ada. Write that as JSON with name and age.": (
        '{"name": "Ada", "age": 36}'
    ),
    "The password of Emma is 48213. Nobody knows where Tom went. What is the password of Emma?": (
        "The password of Emma is 48213."
    ),
    "Repeat: hold fast 2026": "hold fast 2026",
    "Write a poem about the sea.": "I do not know that. I am a small demo model.",
}
"""Each skill that needs no function has one."""
